"""`callboard bench`: how fast a server is — prompts, generation, many streams at once, prefixes.

A client over ZeroMQ with random token ids, so that no text, template or stop token blurs what is measured. The server
is one that runs, or is started for it.
"""

import argparse
import itertools
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from threading import Thread

import msgspec
from rich.console import Console
from rich.table import Table

from protocol import Client
from protocol.endpoints import find_server, running_servers
from protocol.errors import CallboardError
from server.cli_held import held_models


class Speed(msgspec.Struct):
    """Prompt processing: `ttft_ms` of a prompt of so many tokens, and tokens per second."""

    tokens: int
    ttft_ms: float
    per_second: float


class Batch(msgspec.Struct):
    """Generation by so many streams at once; `each` is what one of them gets."""

    streams: int
    per_second: float
    each: float
    itl_ms: float


class Hit(msgspec.Struct):
    """The first token of a prompt that is new, and of the same one again."""

    tokens: int
    cold_ms: float
    hit_ms: float
    cached_tokens: int


class Results(msgspec.Struct):
    """What was measured."""

    model: str
    prompts: list[Speed] = []
    batches: list[Batch] = []
    prefixes: list[Hit] = []


def bench(args: argparse.Namespace) -> int:
    """Measure. 0 when all went well, 1 with the cause otherwise."""
    from server.cli_chat import start_server

    if args.model and args.wanted:
        print("callboard: --model is for a running server; MODEL is served alone", file=sys.stderr)
        return 1
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)
    own: subprocess.Popen[bytes] | None = None
    name = args.name
    try:
        if args.model or (name is None and not running_servers() and not os.environ.get("CALLBOARD_ENDPOINT")):
            name = f"bench-{os.getpid()}"
            own = start_server(args.model or "demo", name, console)
        with Client(name, model=args.wanted) as client:
            if not args.wanted:
                _tell_of_others(name, console)
            results = measure(client, args.wanted, args.prompts, args.batches, args.tokens, console)
    except CallboardError as error:
        print(f"callboard: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 1
    finally:
        if own is not None:
            own.terminate()
            own.wait()
    _show(results, console)
    if args.json is not None:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2) + b"\n")
    return 0


def _tell_of_others(name: str | None, console: Console) -> None:
    """Say so when the server has several models, of which the first is measured."""
    if name is None and os.environ.get("CALLBOARD_ENDPOINT"):
        return
    first, *others = [held.name for held in held_models(find_server(name))] or [""]
    if others:
        console.print(f"Measuring {first}; --model takes another: {', '.join(others)}", markup=False)


def measure(
    client: Client,
    adapter: str | None,
    prompts: Sequence[int],
    batches: Sequence[int],
    tokens: int,
    console: Console,
) -> Results:
    """Everything, one after the other, of the client's model or this adapter of it. Raises CallboardError."""
    [card] = client.models()[:1]
    results = Results(adapter if adapter in card.adapters else card.name)
    draw = random.Random()

    def made(length: int) -> list[int]:
        return [draw.randrange(10, max(card.vocab_size - 10, 11)) for _ in range(length)]

    def first_token(ids: list[int]) -> tuple[float, int]:
        stream = client.generate(ids=ids, max_tokens=1, ignore_eos=True, temperature=0)
        stream.text()
        assert stream.end is not None
        return stream.end.timing.ttft, stream.end.usage.cached_tokens

    fitting = [length for length in prompts if length + tokens < card.context]
    with console.status("warming up …"):
        first_token(made(16))
    for length in fitting:
        with console.status(f"prompt of {length} tokens …"):
            ids = made(length)
            cold, _ = first_token(ids)
            hit, cached = first_token(ids)
        results.prompts.append(Speed(length, round(cold * 1000, 2), round(length / cold, 1)))
        results.prefixes.append(Hit(length, round(cold * 1000, 2), round(hit * 1000, 2), cached))
    for count in batches:
        with console.status(f"{count} streams …"):
            results.batches.append(_batch(client, [made(16) for _ in range(count)], tokens))
    return results


def _batch(client: Client, prompts: list[list[int]], tokens: int) -> Batch:
    streams = [client.generate(ids=ids, max_tokens=tokens, ignore_eos=True, temperature=0) for ids in prompts]
    times: list[list[float]] = [[] for _ in streams]
    faults: list[CallboardError] = []

    def read(number: int) -> None:
        try:
            for _ in streams[number]:
                times[number].append(time.perf_counter())
        except CallboardError as error:
            faults.append(error)

    readers = [Thread(target=read, args=(number,)) for number in range(len(streams))]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    if faults:
        raise faults[0]
    # From when the last stream has begun, so that prompts don't count.
    begin, end = max(of[0] for of in times), max(of[-1] for of in times)
    counted = sum(1 for of in times for at in of if at > begin)
    gaps = [later - earlier for of in times for earlier, later in itertools.pairwise(of)]
    per_second = counted / max(end - begin, 1e-6)
    median = statistics.median(gaps) if gaps else 0.0
    return Batch(len(streams), round(per_second, 1), round(per_second / len(streams), 2), round(median * 1000, 2))


def _show(results: Results, console: Console) -> None:
    console.print(f"[bold]{results.model}[/bold]")
    prompts = _table("prompt tokens", "TTFT ms", "tokens/s", "again ms", "found")
    for speed, hit in zip(results.prompts, results.prefixes, strict=True):
        prompts.add_row(
            f"{speed.tokens}",
            f"{speed.ttft_ms:.1f}",
            f"{speed.per_second:,.0f}",
            f"{hit.hit_ms:.1f}",
            f"{hit.cached_tokens}",
        )
    batches = _table("streams", "tokens/s", "each", "ITL ms")
    for batch in results.batches:
        batches.add_row(f"{batch.streams}", f"{batch.per_second:,.1f}", f"{batch.each:,.1f}", f"{batch.itl_ms:.2f}")
    console.print(prompts)
    console.print()
    console.print(batches)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right")
    return table
