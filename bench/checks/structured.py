"""Checks of structured output, and of batches in which every row has options of its own."""

import asyncio
import itertools
import json
import re
import statistics
import time
from typing import Any, NamedTuple

import jsonschema

from actors.grammars import IDLE_S
from bench.ask import post
from bench.checks.report import Report
from bench.harness import RunningServer, wait_until
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


ITEM: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
SCHEMA: dict[str, Any] = {"type": "array", "items": ITEM, "minItems": 2, "maxItems": 2}
REGEX = "([a-f]{3}-[0-9]{2} ){4}end"
STOPS = [". ", "zzz"]
NEVER = 2000  # the token whose bias forbids it
MIXES = 64
STALE_S = 1.5  # how old what a server says of its engine may be


def mix(index: int) -> dict[str, Any]:
    """Options of row `index`. No two of 64 rows have the same: half of them have any one, a quarter a JSON schema, a
    regular expression or two choices."""
    options: dict[str, Any] = {}
    if index & 1:
        options["logprobs"] = 5
    if index & 2:
        options["logit_bias"] = {1000: 5.0, NEVER: -100.0}
    if index & 4:
        options["stop"] = STOPS
    if index & 8:
        options |= {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5}
    match index >> 4 & 3:
        case 1:
            options["grammar"] = Grammar("json_line", json.dumps(SCHEMA))
        case 2:
            options["grammar"] = Grammar("regex", REGEX)
        case 3:
            options["n"] = 2
    return options


class Mixed(NamedTuple):
    """The answer of one stream: texts and reasons of its choices, the tokens of each, how many log-probabilities came,
    and which tokens were in any of them."""

    texts: list[str]
    reasons: list[str]
    tokens: list[int]
    logprobs: int
    ids: set[int]


def mixed_options(
    report: Report,
    server: RunningServer,
    which: list[int],
    max_tokens: int,
    bar: float,
    *,
    rounds: int,
    alone: int,
    most_steps: float,
) -> None:
    """Every row with other options: each is right, and together they are not much slower than as many rows that only
    sample, and stay in one batch: they take at most `most_steps` times as many steps.

    `which` are the numbers of the mixes. The rows they are compared with have the same prompts, the same numbers of
    choices and of tokens, and take turns with them for `rounds`; each `alone`-th mix is asked for alone, too.
    """
    mixes = [mix(index) for index in which]
    # Grammars are compiled and the model is warm before anything is measured.
    asyncio.run(_texts(server, which, mixes, [2] * len(mixes)))
    time.sleep(STALE_S)
    server.wait_idle()
    speeds: list[tuple[float, float]] = []
    steps: list[tuple[int, int]] = []
    answers: list[Mixed] = []
    for _ in range(rounds):
        mixed, mixed_steps, answers = _measured(server, which, mixes, [max_tokens] * len(mixes))
        lengths = [max(answer.tokens) for answer in answers]
        sampled = [{"n": options["n"]} if "n" in options else {} for options in mixes]
        plain, plain_steps, _ = _measured(server, which, sampled, lengths)
        speeds.append((mixed, plain))
        steps.append((mixed_steps, plain_steps))
    wrong = [fault for options, answer in zip(mixes, answers, strict=True) if (fault := _fault(options, answer))]
    held = [answer.reasons[0] for options, answer in zip(mixes, answers, strict=True) if "grammar" in options]
    ratio = statistics.median(mixed / plain for mixed, plain in speeds)
    report.measured("rows", sum(options.get("n", 1) for options in mixes))
    report.measured("tokens_per_second_mixed", [round(mixed, 1) for mixed, _ in speeds])
    report.measured("tokens_per_second_with_temperature_and_seed", [round(plain, 1) for _, plain in speeds])
    report.measured("steps_mixed_and_plain", steps)
    more = statistics.median(mixed_steps / plain_steps for mixed_steps, plain_steps in steps)
    report.expect(more <= most_steps, f"rows stay in the batch: at most {most_steps:g} times the steps", round(more, 2))
    report.measured("finished_with_a_grammar", [held.count("stop"), len(held)])
    report.measured("ended_by_a_stop_string", sum(_stopped(o, a) for o, a in zip(mixes, answers, strict=True)))
    report.expect(not wrong, "every row is right", wrong[:4])
    report.expect(ratio >= bar, f"mixed rows have {bar:.0%} of the speed", round(ratio, 2))
    report.measured("of_the_speed", round(ratio, 3))
    # What a row draws depends neither on its batch mates nor on their options.
    chosen = range(0, len(mixes), alone)
    lonely = asyncio.run(
        _texts(server, [which[i] for i in chosen], [mixes[i] for i in chosen], [max_tokens] * len(chosen), at_once=1)
    )
    other = [which[i] for i, answer in zip(chosen, lonely, strict=True) if answer.texts != answers[i].texts]
    report.measured("asked_for_alone", len(chosen))
    report.expect(not other, "rows in the batch give what they give alone", other)


async def _texts(
    server: RunningServer,
    which: list[int],
    mixes: list[dict[str, Any]],
    max_tokens: list[int],
    at_once: int = 1000,
) -> list[Mixed]:
    gate = asyncio.Semaphore(at_once)
    async with AsyncClient(endpoint=server.endpoint) as client:

        async def one(index: int, options: dict[str, Any], most: int) -> Mixed:
            n = options.get("n", 1)
            rest = {name: value for name, value in options.items() if name != "n"}
            question = [{"role": "user", "content": f"Tell me about the number {index}."}]
            async with gate:
                choices = client.generate_choices(
                    n,
                    messages=question,
                    seed=index,
                    temperature=0.7,
                    max_tokens=most,
                    ignore_eos="grammar" not in options,
                    label=f"mix {index}",
                    return_ids=True,
                    **rest,
                )
                texts, count = [], 0
                ids: set[int] = set()
                for choice in choices:
                    deltas = [delta async for delta in choice]
                    texts.append("".join(delta.text for delta in deltas))
                    count += sum(len(delta.logprobs) for delta in deltas)
                    ids.update(*(delta.ids for delta in deltas))
            ends = [choice.end for choice in choices if choice.end is not None]
            return Mixed(texts, [end.reason for end in ends], [end.usage.completion_tokens for end in ends], count, ids)

        return await asyncio.gather(*(one(*row) for row in zip(which, mixes, max_tokens, strict=True)))


def _measured(
    server: RunningServer, which: list[int], mixes: list[dict[str, Any]], max_tokens: list[int]
) -> tuple[float, int, list[Mixed]]:
    """Tokens per second over all choices, the engine's steps, and the answers."""
    before = server.load()
    began = time.monotonic()
    answers = asyncio.run(_texts(server, which, mixes, max_tokens))
    seconds = time.monotonic() - began
    tokens = sum(sum(answer.tokens) for answer in answers)
    # What the engine says of itself comes now and then, and may be of before.
    wait_until(lambda: server.load()["decoded"] >= before["decoded"] + tokens, 30, "the engine has told of all tokens")
    server.wait_idle()
    return tokens / seconds, server.load()["step"] - before["step"], answers


def _stopped(options: dict[str, Any], answer: Mixed) -> int:
    return answer.reasons.count("stop") if "stop" in options and "grammar" not in options else 0


def _fault(options: dict[str, Any], answer: Mixed) -> Any:
    """What is wrong with the answer of one stream; None when nothing is."""
    grammar = options.get("grammar")
    # What a stop string cuts off has none, nor has the end of a text that a grammar holds.
    missing = 4 if "stop" in options else 1 if grammar else 0
    if "logprobs" in options and not 0 <= sum(answer.tokens) - answer.logprobs <= missing * len(answer.texts):
        return "logprobs", answer
    if "logit_bias" in options and (not answer.ids or NEVER in answer.ids):
        return "logit_bias", answer
    if "n" in options and (len(answer.texts) != 2 or answer.texts[0] == answer.texts[1]):
        return "n", answer
    if "stop" in options and any(stop in text for stop in STOPS for text in answer.texts):
        return "stop", answer
    if grammar is None or answer.reasons != ["stop"]:
        return None
    if grammar.kind == "regex":
        return None if re.fullmatch(REGEX, answer.texts[0]) else ("regex", answer)
    try:
        jsonschema.validate(json.loads(answer.texts[0]), SCHEMA)
    except (ValueError, jsonschema.ValidationError) as error:
        return "json", answer, str(error)
    return None


def compiling(report: Report, server: RunningServer, tokens: int, factor: float) -> None:
    """One client's large schemas, compiled one after another, don't slow the stream of another."""
    large = {"type": "object", "properties": {f"p{i}": {"type": "string", "maxLength": 2000 + i} for i in range(2500)}}

    async def run(busy: bool) -> tuple[float, float]:
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
            gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
            return sum(gaps) / len(gaps), max(gaps)

    # What a process prepares for its first grammar it prepares when it has been idle for a while.
    time.sleep(IDLE_S + 2)
    (alone, longest), (beside, longest_beside) = asyncio.run(run(False)), asyncio.run(run(True))
    report.measured("itl_ms_alone", round(alone * 1000, 2))
    report.measured("itl_ms_beside_compiling", round(beside * 1000, 2))
    report.measured("longest_itl_ms_alone_and_beside", [round(longest * 1000), round(longest_beside * 1000)])
    report.expect(beside <= factor * alone, f"tokens take less than {factor:g} times as long", round(beside / alone, 2))
