"""Checks of structured output, and of batches in which every row has options of its own."""

import asyncio
import json
import re
import time
from typing import Any

import jsonschema

from bench.ask import post
from bench.checks.report import Report
from bench.harness import RunningServer
from bench.schemas import UNSUPPORTED, schemas
from protocol import AsyncClient
from protocol.messages import Grammar

AT_ONCE = 25
# A bare FormatChecker takes the `time` of JSON schema's draft 3, which had neither fractions nor zones.
FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER


def schema_outputs(report: Report, server: RunningServer, count: int, max_tokens: int) -> None:
    """Every finished output validates against its schema; schemas that can't be served are refused by name."""
    wanted = schemas(count)

    async def run() -> list[tuple[str, str]]:
        gate = asyncio.Semaphore(AT_ONCE)
        async with AsyncClient(endpoint=server.endpoint) as client:

            async def one(index: int, schema: dict[str, Any]) -> tuple[str, str]:
                grammar = Grammar("json", json.dumps(schema), "schema")
                question = [{"role": "user", "content": f"Make JSON of this schema: {json.dumps(schema)}"}]
                async with gate:
                    stream = client.generate(
                        messages=question, max_tokens=max_tokens, temperature=0.8, seed=index, grammar=grammar
                    )
                    text = await stream.text()
                assert stream.end is not None
                return text, stream.end.reason

            return await asyncio.gather(*(one(index, schema) for index, schema in enumerate(wanted)))

    wrong: list[Any] = []
    finished = 0
    for schema, (text, reason) in zip(wanted, asyncio.run(run()), strict=True):
        if reason != "stop":
            continue
        finished += 1
        try:
            # A format is part of what was asked for where jsonschema knows how to look at it.
            jsonschema.validate(json.loads(text), schema, format_checker=FORMATS)
        except (ValueError, jsonschema.ValidationError) as error:
            wrong.append([schema, text, str(error)[:200]])
    report.measured("finished", [finished, count])
    report.expect(finished >= 0.9 * count, "nearly all outputs come to their end", [finished, count])
    report.expect(not wrong, "every finished output validates", wrong[:3])
    for feature, schema in UNSUPPORTED.items():
        body = {
            "messages": [{"role": "user", "content": "x"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        }
        answer = post(f"{server.url}/v1/chat/completions", body)
        named = (
            answer.status == 400 and feature in answer.error["message"] and "schema" in (answer.error["param"] or "")
        )
        report.expect(named, f"{feature} is refused by name", [answer.status, answer.body])


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
MIXES: list[dict[str, Any]] = [
    {},
    {"logprobs": 5},
    {"logit_bias": {1000: 5.0, 2000: -100.0}},
    {"grammar": Grammar("json", json.dumps(SCHEMA))},
    {"grammar": Grammar("regex", "[a-f]{3}-[0-9]{2}")},
    {"stop": ["e", "zzz"]},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"n": 2},
]


# Texts and reasons of a stream's choices, their tokens, and how many log-probabilities came.
Answer = tuple[list[str], list[str], int, int]


def mixed_options(report: Report, server: RunningServer, streams: int, max_tokens: int, bar: float) -> None:
    """Every row with other options: each is right, and together they are not much slower than as many rows that only
    sample."""
    # As many choices either way: a mix with n counts as often.
    plain, _ = _measured(server, streams + streams // len(MIXES), max_tokens, [{}])
    mixed, together = _measured(server, streams, max_tokens, MIXES)
    wrong = [fault for i, answer in enumerate(together) if (fault := _fault(MIXES[i % len(MIXES)], *answer))]
    report.measured("tokens_per_second_with_temperature_and_seed", round(plain, 1))
    report.measured("tokens_per_second_mixed", round(mixed, 1))
    report.expect(not wrong, "every row is right", wrong[:4])
    report.expect(mixed >= bar * plain, f"mixed rows have {bar:.0%} of the speed", round(mixed / plain, 2))
    # Alone: what a row draws doesn't depend on its batch mates.
    alone = asyncio.run(_texts(server, len(MIXES), max_tokens, MIXES, at_once=1))
    same = [a[0] == b[0] for a, b in zip(alone, together, strict=False)]
    report.expect(all(same), "rows in the batch give what they give alone", same)


async def _texts(
    server: RunningServer, streams: int, max_tokens: int, mixes: list[dict[str, Any]], at_once: int = 1000
) -> list[Answer]:
    """Texts, reasons, tokens and log-probabilities of each stream; choices of one are together."""
    gate = asyncio.Semaphore(at_once)
    async with AsyncClient(endpoint=server.endpoint) as client:

        async def one(index: int) -> Answer:
            mix = {**mixes[index % len(mixes)]}
            n = mix.pop("n", 1)
            free = not mix.keys() & {"grammar", "stop"}
            question = [{"role": "user", "content": f"Tell me about the number {index}."}]
            async with gate:
                choices = client.generate_choices(
                    n,
                    messages=question,
                    seed=index,
                    temperature=0.7,
                    max_tokens=max_tokens,
                    ignore_eos=free,
                    label=f"mix {index}",
                    **mix,
                )
                texts, count = [], 0
                for choice in choices:
                    deltas = [delta async for delta in choice]
                    texts.append("".join(delta.text for delta in deltas))
                    count += sum(len(delta.logprobs) for delta in deltas)
            ends = [choice.end for choice in choices if choice.end is not None]
            return texts, [end.reason for end in ends], sum(end.usage.completion_tokens for end in ends), count

        return await asyncio.gather(*(one(index) for index in range(streams)))


def _measured(
    server: RunningServer, streams: int, max_tokens: int, mixes: list[dict[str, Any]]
) -> tuple[float, list[Answer]]:
    """Tokens per second over all choices, and the answers."""
    began = time.monotonic()
    answers = asyncio.run(_texts(server, streams, max_tokens, mixes))
    seconds = time.monotonic() - began
    return sum(tokens for _, _, tokens, _ in answers) / seconds, answers


def _fault(mix: dict[str, Any], texts: list[str], reasons: list[str], tokens: int, logprobs: int) -> Any:
    """What is wrong with the answers of one stream; None when nothing is."""
    grammar = mix.get("grammar")
    if "logprobs" in mix and logprobs != tokens:
        return "logprobs", logprobs, tokens
    if "n" in mix and (len(texts) != 2 or texts[0] == texts[1]):
        return "n", texts
    if "stop" in mix and any("e" in text for text in texts):
        return "stop", texts
    if grammar is None or reasons != ["stop"]:
        return None
    if grammar.kind == "regex":
        return None if re.fullmatch(grammar.text, texts[0]) else ("regex", texts)
    try:
        jsonschema.validate(json.loads(texts[0]), SCHEMA)
    except (ValueError, jsonschema.ValidationError) as error:
        return "json", texts, str(error)
    return None


def compiling(report: Report, server: RunningServer, tokens: int, factor: float) -> None:
    """One client's large schemas, compiled one after another, don't slow the stream of another."""
    large = {"type": "object", "properties": {f"p{i}": {"type": "string", "maxLength": 2000 + i} for i in range(2500)}}

    async def run(busy: bool) -> float:
        async with AsyncClient(endpoint=server.endpoint) as client:
            compiled = 0

            async def bother() -> None:
                nonlocal compiled
                while True:
                    text = json.dumps({**large, "title": f"{time.monotonic()}"})  # never the same one
                    await client.generate("x", max_tokens=1, grammar=Grammar("json", text)).text()
                    compiled += 1

            task = asyncio.create_task(bother()) if busy else None
            stream = client.generate("Tell me a story.", max_tokens=tokens, temperature=0, ignore_eos=True)
            times = [time.monotonic() async for _ in stream]
            if task is not None:
                task.cancel()
                report.measured("schemas_compiled_meanwhile", compiled)
                report.expect(compiled > 0, "schemas are compiled meanwhile")
            return (times[-1] - times[0]) / (len(times) - 1)

    alone, beside = asyncio.run(run(False)), asyncio.run(run(True))
    report.measured("itl_ms_alone", round(alone * 1000, 2))
    report.measured("itl_ms_beside_compiling", round(beside * 1000, 2))
    report.expect(beside <= factor * alone, f"tokens take less than {factor:g} times as long", round(beside / alone, 2))
