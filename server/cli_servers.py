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
from protocol.messages import Figures
from server.cli_cache import age, size

LEAVE_TIME = 60.0  # seconds a server may take to leave beyond what it was given to drain
POLL = 0.1


class ServerLoad(NamedTuple):
    """What `ps` shows of a server besides its record. `memory` is of all its processes, in bytes."""

    figures: Figures | None
    seconds: float
    memory: int


def load_of(record: ServerRecord) -> ServerLoad:
    """Ask a server for its figures; None in their place while it doesn't answer."""
    figures = None
    try:
        with Client(endpoint=record.endpoint, reconnect=0.0) as client:
            figures = client.figures()
    except CallboardError:
        pass
    try:
        process = psutil.Process(record.pid)
        family = [process, *process.children(recursive=True)]
        memory = sum(member.memory_info().rss for member in family)
        return ServerLoad(figures, time.time() - process.create_time(), memory)
    except psutil.Error:
        return ServerLoad(figures, 0.0, 0)


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
    for record in records:
        figures, seconds, memory = load_of(record)
        load = ["-"] * 3
        if figures is not None:
            waiting = sum(count for phase, count in figures.phases.items() if phase != "running")
            load = [str(figures.phases.get("running", 0)), str(waiting), str(figures.counts.generated)]
        table.add_row(record.name, record.model, record.http, str(record.pid), age(seconds), *load, size(memory))
    Console(highlight=False, width=None if sys.stdout.isatty() else 160).print(table)
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
        process.wait(_drain_time(record) + LEAVE_TIME)
    except (psutil.NoSuchProcess, ProcessLookupError):
        pass
    except (psutil.TimeoutExpired, OSError) as error:
        print(f"callboard: {record.name} (pid {record.pid}) did not stop: {error}", file=sys.stderr)
        return 1
    print(f"{record.name} was stopped")
    return 0


def _drain_time(record: ServerRecord) -> float:
    from pathlib import Path

    from actors.config import read_config

    try:
        return read_config(Path(record.run_dir)).drain_timeout
    except (OSError, ValueError):
        return 30.0
