"""Checks of what the engine's death must not change: rows of every kind, at every moment of their lives."""

import asyncio
import json
import os
import random
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from bench.checks.crowds import reached
from bench.checks.report import Report
from bench.faults.inject import RowFault
from bench.faults.streams import running
from bench.harness import RunningServer
from protocol import AsyncClient
from protocol.client.aio import AsyncStream
from protocol.errors import CallboardError
from protocol.messages import Grammar

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"names": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 60}},
    "required": ["names"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}
QUESTION = [{"role": "user", "content": "Name some rivers."}]
FREE = {"ignore_eos": True}
REGEX = Grammar("regex", "([a-f]{3}-[0-9]{2} ){60}")
TRIES = 50
PATIENCE = 150.0  # seconds until all rows must have ended
GRAMMAR_IDS, SIBLING_IDS = [4442, 4443, 4444], [4542, 4543, 4544]

ROWS: dict[str, dict[str, Any]] = {
    "a JSON schema": {"messages": QUESTION, "grammar": Grammar("json", json.dumps(SCHEMA))},
    "a regular expression": {"messages": QUESTION, "grammar": REGEX},
    "a choice of texts": {"messages": QUESTION, "grammar": Grammar("choice", json.dumps(["yes " * 80, "no " * 90]))},
    "a tool call": {"messages": QUESTION, "tools": [TOOL], "tool_choice": "required", "split_reply": True},
    "a tool that may be called": {"messages": QUESTION, "tools": [TOOL], "split_reply": True, **FREE},
    "two choices": {"messages": QUESTION, "n": 2, "cache_salt": "mine", **FREE},
    "log-probabilities": {"messages": QUESTION, "logprobs": 3, **FREE},
    "stop strings": {"messages": QUESTION, "stop": ["\u2603\u2603", "never there"], **FREE},
    "penalties": {"ids": [*range(900, 960)], "repetition_penalty": 1.3, "frequency_penalty": 0.5, **FREE},
    "a bias": {"ids": [*range(900, 960)], "logit_bias": {1000: 4.0, 2000: -100.0}, "min_p": 0.01, **FREE},
    "a long prompt": {"ids": [*range(1000, 1700)], "top_k": 40, "top_p": 0.9, **FREE},
    "a greedy row": {"ids": [*range(900, 1000)], "temperature": 0.0, **FREE},
}


class Got(NamedTuple):
    """One choice: how it ended, its text, its ids, the tokens that log-probabilities came for, its calls' arguments."""

    end: str
    text: str
    ids: list[int]
    told: list[int]
    arguments: str


def row_faults(folder: Path) -> list[RowFault]:
    """Crashes, once each, while a grammar is built and when choices join the first one."""
    return [
        RowFault("crash", GRAMMAR_IDS, "grammar", once=str(folder / "grammar")),
        RowFault("crash", SIBLING_IDS, "siblings", once=str(folder / "siblings")),
    ]


def kinds(report: Report, server: RunningServer, *, tokens: int, kills: int, each: int = 3) -> None:
    """Rows of every kind, `each` of them; the engine is killed `kills` times at random moments."""
    names = [name for name in ROWS for _ in range(each)]
    reference = uvloop.run(_run(server, names, tokens, 0))
    got = uvloop.run(_run(server, names, tokens, kills))
    report.measured("rows", len(names))
    _compare(report, names, reference, got)


def unlucky_moments(report: Report, server: RunningServer, folder: Path, tokens: int) -> None:
    """The engine dies while it builds a grammar, and when choices join: once, and the requests complete."""
    for name, file, row in (
        ("at the building of a grammar", "grammar", {"ids": GRAMMAR_IDS * 9, "grammar": REGEX}),
        ("when choices join", "siblings", {"ids": SIBLING_IDS * 9, "n": 3, **FREE}),
    ):
        for _ in range(TRIES):  # choices join each other only when they come within one turn
            struck = uvloop.run(_run(server, [name], tokens, 0, {name: row}))
            if (folder / file).exists():
                break
        report.expect((folder / file).exists(), f"{name}: the engine died")
        _compare(report, [name], uvloop.run(_run(server, [name], tokens, 0, {name: row})), struck)


def _compare(report: Report, names: Sequence[str], reference: Sequence[list[Got]], got: Sequence[list[Got]]) -> None:
    for name in dict.fromkeys(names):
        pairs = [(r, g) for n, r, g in zip(names, reference, got, strict=True) if n == name]
        ends = [choice.end for _, found in pairs for choice in found]
        report.expect(all(end in ("finished stop", "finished length") for end in ends), f"{name}: it finishes", ends)
        different = [index for index, (wanted, found) in enumerate(pairs) if wanted != found]
        report.expect(not different, f"{name}: the same as undisturbed", different)


async def _run(
    server: RunningServer, names: Sequence[str], tokens: int, kills: int, rows: dict[str, dict[str, Any]] = ROWS
) -> list[list[Got]]:
    draw = random.Random(kills)
    await asyncio.to_thread(server.wait_ready, 60.0)
    async with AsyncClient(endpoint=server.endpoint) as client:
        streams: list[list[AsyncStream]] = []
        for seed, name in enumerate(names):
            options = {"max_tokens": tokens, "temperature": 0.8, "seed": seed, "return_ids": True, **rows[name]}
            streams.append(client.generate_choices(options.pop("n", 1), **options))
        flat = [stream for choices in streams for stream in choices]
        tasks = [asyncio.create_task(_read(stream)) for stream in flat]
        async with running(tasks):
            for _ in range(kills):
                await reached(partial(_more, flat, _count(flat)), 60, "tokens come")
                await asyncio.sleep(draw.uniform(0.0, 0.6))
                os.kill((await asyncio.to_thread(server.pids))["engine"], signal.SIGKILL)
                await asyncio.sleep(0.1)  # what it still sent is no sign of the next engine
            _, late = await asyncio.wait(tasks, timeout=PATIENCE)
            assert not late, f"{len(late)} rows have not ended after {PATIENCE:g} s"
            got = iter([task.result() for task in tasks])
    return [[next(got) for _ in choices] for choices in streams]


def _count(streams: Sequence[AsyncStream]) -> int:
    return sum(stream.tokens for stream in streams)


def _more(streams: Sequence[AsyncStream], tokens: int) -> bool:
    return _count(streams) > tokens


async def _read(stream: AsyncStream) -> Got:
    text, arguments = "", ""
    ids: list[int] = []
    told: list[int] = []
    try:
        async for delta in stream:
            text += delta.text
            ids += delta.ids
            told += [entry.token_id for entry in delta.logprobs]
            arguments += "".join(call.arguments for call in delta.tool_calls)
    except CallboardError as error:
        return Got(f"{error.code}: {error.message}", text, ids, told, arguments)
    assert stream.end is not None
    return Got(f"{stream.end.outcome} {stream.end.reason}", text, ids, told, arguments)
