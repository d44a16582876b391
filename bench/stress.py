"""Stress a Callboard server: N concurrent streams over HTTP or raw ZeroMQ from one process.

    python bench/stress.py --streams 256                         the only running server, over HTTP
    python bench/stress.py --via zmq --name 8000 --streams 64 --requests 1000
    python bench/stress.py --model DIR --streams 256             starts a server for the run

Prompts are token ids of an exact number, distinct by a seed; every request runs to exactly --max-tokens, and token
counts are checked against the server's. Exit code 0 when every request completed.
"""

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import rich.progress
import uvloop
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.ask import get
from bench.facts import machine_facts
from bench.harness import RunningServer, StartFailed, exit_on_sigterm
from bench.load.driver import Progress, make_load, run_load
from bench.load.memory import PeakMemory
from bench.load.plan import Plan
from bench.load.summary import Summary, summarize, table
from protocol import Client
from protocol.endpoints import find_server
from protocol.errors import CallboardError, ServerNotFound

REFRESH = 0.25  # seconds between two looks of the live display


class Target(msgspec.Struct, frozen=True):
    """A server to load: where it is, its processes by name, and its vocabulary's size (0 when not known)."""

    url: str
    endpoint: str
    pids: dict[str, int]
    vocab_size: int


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    server = parser.add_argument_group("server")
    server.add_argument("--name", help="a running server's name; default: the only one that runs")
    server.add_argument("--url", help="address of a server to reach over HTTP, such as http://127.0.0.1:8000")
    server.add_argument("--endpoint", help="ZeroMQ endpoint of a server")
    server.add_argument("--model", help="start a server with this model for the run")
    server.add_argument("--serve-args", default="", help="options for that server, in one string")
    load = parser.add_argument_group("load")
    load.add_argument("--via", choices=("http", "zmq"), default="http")
    load.add_argument("--streams", type=int, default=256, help="requests at once (default %(default)s)")
    load.add_argument("--requests", type=int, help="requests in all (default: as many as streams)")
    load.add_argument("--prompt-tokens", type=int, default=220)
    load.add_argument("--max-tokens", type=int, default=64)
    load.add_argument("--shared-prefix", type=int, default=0, help="first tokens that all prompts share")
    load.add_argument("--temperature", type=float, default=0.0)
    load.add_argument("--top-p", type=float, default=1.0)
    load.add_argument("--seed", type=int, default=0, help="makes the prompts")
    load.add_argument("--vocab-size", type=int, help="prompts' ids lie below (default: asked, else 10,000)")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--quiet", action="store_true", help="no live display")
    return parser.parse_args()


def find_target(args: argparse.Namespace) -> Target:
    """The running server that the arguments name. Raises ServerNotFound, or OSError when it doesn't answer."""
    if args.url or args.endpoint:
        url, endpoint, pids = args.url or "", args.endpoint or "", {}
    else:
        record = find_server(args.name)
        url, endpoint, pids = record.http.rstrip("/"), record.endpoint, {"supervisor": record.pid}
    if args.via == "http" and not url:
        raise ServerNotFound("server_not_found", "--via http needs --url, --name or --model")
    if args.via == "zmq" and not endpoint:
        raise ServerNotFound("server_not_found", "--via zmq needs --endpoint, --name or --model")
    vocab_size = 0
    if endpoint:
        with Client(endpoint=endpoint) as client:
            vocab_size = client.models()[0].vocab_size
    if url:
        pids |= {actor["name"]: actor["pid"] for actor in get(url + "/health").body["actors"]}
    return Target(url, endpoint, pids, vocab_size)


@contextlib.contextmanager
def open_target(args: argparse.Namespace) -> Iterator[Target]:
    """The server to load, started for the run when a model is given."""
    if args.model is None:
        yield find_target(args)
        return
    with RunningServer(args.model, *args.serve_args.split(), name="stress") as server:
        args.url, args.endpoint = server.url, server.endpoint
        target = find_target(args)
        yield msgspec.structs.replace(target, pids=server.pids())


async def show(progress: Progress, console: Console) -> None:
    """Draw the live display until cancelled."""
    columns = (
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TextColumn(
            "{task.fields[running]} running, {task.fields[failed]} failed, {task.fields[rate]:.0f} tokens/s"
        ),
        rich.progress.TimeElapsedColumn(),
    )
    with rich.progress.Progress(*columns, console=console, auto_refresh=False, transient=True) as bar:
        task = bar.add_task("", total=progress.plan.requests, running=0, failed=0, rate=0.0)
        before, then = 0, time.monotonic()
        while True:
            now, arrivals = time.monotonic(), progress.arrivals
            rate = (arrivals - before) / (now - then) if now > then else 0.0
            before, then = arrivals, now
            done = progress.completed + progress.failed
            bar.update(task, completed=done, running=progress.running, failed=progress.failed, rate=rate)
            bar.refresh()
            await asyncio.sleep(REFRESH)


async def run(plan: Plan, target: Target, console: Console | None) -> Summary:
    """Run the plan against the target; with a console, show progress on it."""
    memory = PeakMemory(target.pids)
    progress = Progress(plan)
    async with make_load(plan, url=target.url, endpoint=target.endpoint) as load, memory.watch():
        display = asyncio.create_task(show(progress, console)) if console is not None else None
        outcomes = await run_load(load, progress)
        if display is not None:
            display.cancel()
            await asyncio.wait([display])
    return summarize(plan, outcomes, memory.peaks)


def main() -> int:
    """Run from the command line; 0 when every request completed, 2 when there was no server to load."""
    args = parse_arguments()
    console = Console(stderr=True)
    exit_on_sigterm()
    try:
        with open_target(args) as target:
            plan = Plan(
                via=args.via,
                streams=args.streams,
                requests=args.requests or args.streams,
                prompt_tokens=args.prompt_tokens,
                max_tokens=args.max_tokens,
                shared_prefix=args.shared_prefix,
                seed=args.seed,
                vocab_size=args.vocab_size or target.vocab_size or 10_000,
                temperature=args.temperature,
                top_p=args.top_p,
            )
            summary = uvloop.run(run(plan, target, None if args.quiet else console))
    except (CallboardError, StartFailed, OSError, ValueError) as error:
        console.print(str(error), style="red", markup=False)
        return 2
    Console().print(table(summary))
    if args.json is not None:
        result = {"result": summary, "machine": machine_facts()}
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    return 0 if summary.failed == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
