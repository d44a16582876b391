"""Stress a Callboard server: hundreds of concurrent streams over HTTP or raw ZeroMQ from one process.

    python bench/stress.py --streams 256                         the only running server, over HTTP
    python bench/stress.py --via zmq --name 8000 --streams 64 --requests 1000
    python bench/stress.py --model DIR --streams 256             starts a server for the run
    python bench/stress.py --arrivals poisson:20 --prompt-lengths lognormal:200:0.8:4000 --aborts 0.2 --html run.html
    python bench/stress.py --via zmq --parity                    every stream against its solo run
    python bench/stress.py --null --streams 1000                 what this process can take, without a model

Prompts are token ids, distinct by a seed; every request runs to exactly the tokens it asks for unless its client is one
that leaves, and token counts are checked against the server's. Exit code 0 when every request completed, and with
--parity was the same as alone.
"""

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import rich.progress
import uvloop
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


from actors.supervisor import raise_file_limit
from bench import null_server
from bench.ask import get
from bench.facts import machine_facts
from bench.harness import RunningServer, StartFailed, exit_on_sigterm
from bench.load import arrivals, lengths
from bench.load.arrivals import CLOSED
from bench.load.driver import Progress, make_load, run_load
from bench.load.outcome import Outcome
from bench.load.page import page
from bench.load.parity import compare_solo, solo_plan
from bench.load.plan import Plan
from bench.load.summary import Summary, rows, summarize, table
from bench.load.timeline import Sample, Timeline
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
    server.add_argument("--null", action="store_true", help="load a server without a model instead")
    server.add_argument("--serve-args", default="", help="options for that server, in one string")
    load = parser.add_argument_group("load")
    load.add_argument("--via", choices=("http", "zmq"), default="http")
    load.add_argument("--streams", type=int, default=256, help="requests at once (default %(default)s)")
    load.add_argument("--requests", type=int, help="requests in all (default: as many as streams)")
    load.add_argument("--arrivals", default=CLOSED, help=f"{arrivals.FORMS} (default %(default)s)")
    load.add_argument("--prompt-tokens", type=int, default=220)
    load.add_argument("--prompt-lengths", default="", help=f"in its place {lengths.FORMS}")
    load.add_argument("--max-tokens", type=int, default=64)
    load.add_argument("--output-lengths", default="", help="in its place, the same forms")
    load.add_argument("--turns", type=int, default=1, help="requests of a chat, each with all that went before")
    load.add_argument("--aborts", type=float, default=0.0, help="share of clients that cancel somewhere")
    load.add_argument("--vanish", type=float, default=0.0, help="share of clients that are gone without a word")
    load.add_argument("--slow", type=float, default=0.0, help="share of clients that read slowly")
    load.add_argument("--cut", type=float, help="give up what is not done after so many seconds")
    load.add_argument("--shared-prefix", type=int, default=0, help="first tokens that all prompts share")
    load.add_argument("--temperature", type=float, default=0.0)
    load.add_argument("--top-p", type=float, default=1.0)
    load.add_argument("--seed", type=int, default=0, help="makes the prompts")
    load.add_argument("--vocab-size", type=int, help="prompts' ids lie below (default: asked, else 10,000)")
    parser.add_argument("--parity", action="store_true", help="then ask each request again, alone, and compare")
    parser.add_argument("--json", type=Path, help="write figures and time line here")
    parser.add_argument("--html", type=Path, help="write a report with plots here")
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
    """The server to load, started for the run when a model, or none, is asked for."""
    if args.null:
        with null_server.running(args.via) as (url, endpoint, pid):
            yield Target(url, endpoint, {"null": pid}, 0)
        return
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
            done = progress.completed + progress.failed + progress.left
            bar.update(task, completed=done, running=progress.running, failed=progress.failed, rate=rate)
            bar.refresh()
            await asyncio.sleep(REFRESH)


class Run(msgspec.Struct, frozen=True):
    """What a run brought."""

    summary: Summary
    outcomes: list[Outcome]
    samples: list[Sample]


async def run(plan: Plan, target: Target, console: Console | None, parity: bool, cut: float | None) -> Run:
    """Run the plan against the target; with a console, show progress on it."""
    progress = Progress(plan)
    health = target.url if "null" not in target.pids else ""
    timeline = Timeline(target.pids, health, lambda: progress.counts)
    async with make_load(plan, url=target.url, endpoint=target.endpoint) as load, timeline.watch():
        display = asyncio.create_task(show(progress, console)) if console is not None else None
        outcomes = await run_load(load, progress, cut)
        if display is not None:
            display.cancel()
            await asyncio.wait([display])
    summary = summarize(plan, outcomes, timeline)
    if parity:
        summary = msgspec.structs.replace(summary, parity=await compared(plan, target, outcomes, console))
    return Run(summary, outcomes, timeline.samples)


async def compared(plan: Plan, target: Target, outcomes: list[Outcome], console: Console | None) -> dict[str, Any]:
    """Ask every request again, alone; how many are the same, and where the others differ."""

    def tell(done: int) -> None:
        if console is not None and not done % 50:
            console.print(f"{done} compared with their solo runs", style="dim")

    solo = solo_plan(plan)
    async with make_load(solo, url=target.url, endpoint=target.endpoint) as load:
        count, differences = await compare_solo(load, plan, outcomes, tell)
    places = [f"request {d.index} at {d.place}: {d.wanted!r} alone, {d.got!r} here" for d in differences]
    return {"compared": count, "different": len(differences), "differences": places}


def plan_of(args: argparse.Namespace, vocab_size: int) -> Plan:
    """The plan that the arguments describe. Raises ValueError."""
    same = (name for name in Plan.__struct_fields__ if hasattr(args, name) and name != "model")  # that is a folder here
    given = {name: getattr(args, name) for name in same} | {"record": args.parity}
    given |= {"requests": args.requests or args.streams, "vocab_size": args.vocab_size or vocab_size or 10_000}
    return Plan(**given)


def write(run: Run, args: argparse.Namespace) -> None:
    """Write the files that were asked for."""
    facts = machine_facts()
    if args.json is not None:
        result = {"result": run.summary, "machine": facts, "timeline": run.samples}
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    if args.html is not None:
        from bench.load.plots import run_plots  # matplotlib takes a second to load

        figures = rows(run.summary)
        asked = [(f"asked: {name}", str(value)) for name, value in msgspec.to_builtins(run.summary.plan).items()]
        args.html.write_text(page("Callboard under load", figures + asked, run_plots(run.outcomes, run.samples), facts))


def main() -> int:
    """Run from the command line; 0 when every request completed, 2 when there was no server to load."""
    args = parse_arguments()
    console = Console(stderr=True)
    exit_on_sigterm()
    raise_file_limit()
    try:
        with open_target(args) as target:
            plan = plan_of(args, target.vocab_size)
            done = uvloop.run(run(plan, target, None if args.quiet else console, args.parity, args.cut))
    except (CallboardError, StartFailed, OSError, ValueError) as error:
        console.print(str(error), style="red", markup=False)
        return 2
    Console().print(table(done.summary))
    write(done, args)
    return 0 if done.summary.failed == 0 and not done.summary.parity.get("different") else 1


if __name__ == "__main__":
    sys.exit(main())
