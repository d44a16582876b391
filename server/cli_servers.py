"""`callboard ps` and `callboard stop`: which servers of this user run, and ending them."""

import argparse
import os
import signal
import sys
import time
from typing import NamedTuple

import psutil

from protocol import Client
from protocol.endpoints import ServerRecord, find_server, running_servers
from protocol.errors import CallboardError, ServerNotFound
from protocol.messages import ModelState
from server.cli_cache import age, size
from server.cli_held import held_models, models_table

LEAVE_TIME = 60.0  # seconds a server may take to leave beyond its own `stop_time`
POLL = 0.1


class ServerLoad(NamedTuple):
    """What `ps` shows of a server besides its record. `memory` is of all its processes, in bytes; `counts` are running
    streams, others, and tokens generated, None while it doesn't answer."""

    counts: tuple[int, int, int] | None
    seconds: float
    memory: int
    models: list[ModelState]


def load_of(record: ServerRecord) -> ServerLoad:
    """Ask a server how it stands."""
    counts, models = None, []
    try:
        models = held_models(record)
        endpoints = [held.endpoint for held in models if held.endpoint] if record.models else [record.endpoint]
        found = [_counts(endpoint) for endpoint in endpoints]
        counts = sum(one[0] for one in found), sum(one[1] for one in found), sum(one[2] for one in found)
    except CallboardError:
        pass
    try:
        process = psutil.Process(record.pid)
        family = [process, *process.children(recursive=True)]
        memory = sum(member.memory_info().rss for member in family)
        return ServerLoad(counts, time.time() - process.create_time(), memory, models)
    except psutil.Error:
        return ServerLoad(counts, 0.0, 0, models)


def _counts(endpoint: str) -> tuple[int, int, int]:
    """Running streams, others, and tokens generated, of one model. Raises CallboardError."""
    with Client(endpoint=endpoint, reconnect=0.0) as client:
        figures = client.figures()
    running = figures.phases.get("running", 0)
    return running, sum(figures.phases.values()) - running, figures.counts.generated


def ps() -> int:
    """List the servers. 0 also when there is none."""
    from rich.console import Console
    from rich.table import Table

    records = running_servers()
    if not records:
        print("No server is running; start one with `callboard serve MODEL`.")
        return 0
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("name", "model", "address"):
        table.add_column(column, overflow="fold")
    for column in ("pid", "up", "running", "waiting", "tokens", "memory"):
        table.add_column(column, justify="right")
    tables = [table]
    for record in records:
        counts, seconds, memory, models = load_of(record)
        load = map(str, counts) if counts is not None else ["-"] * 3
        model = f"{len(models)} models" if len(models) > 1 else record.model
        table.add_row(record.name, model, record.http, str(record.pid), age(seconds), *load, size(memory))
        if models:
            tables.append(models_table(models, f"models of {record.name}"))
    Console(highlight=False, width=None if sys.stdout.isatty() else 160).print(*tables, sep="\n\n")
    return 0


def stop(args: argparse.Namespace) -> int:
    """Stop servers and wait until they are gone. 0 when all have left, 1 otherwise."""
    try:
        records = running_servers() if args.all else [find_server(name) for name in args.names or [None]]
    except ServerNotFound as error:
        print(f"callboard: {error}", file=sys.stderr)
        return 1
    return max((_stop(record, args.now) for record in records), default=0)


def _stop(record: ServerRecord, now: bool) -> int:
    try:
        process = psutil.Process(record.pid)
        os.kill(record.pid, signal.SIGTERM)
        if now:
            time.sleep(POLL)  # two signals at once would be taken for one
            os.kill(record.pid, signal.SIGTERM)
        error = _wait_gone(process, record.stop_time + LEAVE_TIME)
    except (psutil.NoSuchProcess, ProcessLookupError):
        error = ""
    except OSError as refused:
        error = str(refused)
    if error:
        print(f"callboard: {record.name} (pid {record.pid}) did not stop: {error}", file=sys.stderr)
        return 1
    print(f"{record.name} was stopped")
    return 0


def _wait_gone(process: psutil.Process, seconds: float) -> str:
    """Wait until it has ended, whether or not its parent has taken note. Returns what is wrong when it has not."""
    until = time.monotonic() + seconds
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > until:
            return f"it still runs after {seconds:g} s"
        time.sleep(POLL)
    return ""
