"""`callboard load`, `unload`, `pin` and `unpin`; and the models of a server of several, as `ps` and `top` show them."""

import argparse
import sys
import time
from typing import Any

from rich.table import Table

from protocol.client.locate import ask_house
from protocol.endpoints import ServerRecord, find_server
from protocol.errors import CallboardError
from protocol.messages import ModelOrder, ModelState
from server.cli_cache import age, size

PATIENCE = 600.0  # seconds a large model may take to load, or its streams to end
LOOK_TIME = 3.0  # seconds a house may take to say how its models stand
COLOURS = {"ready": "green", "failed": "red", "loading": "yellow", "waiting": "yellow", "unloading": "yellow"}


def order_model(args: argparse.Namespace) -> int:
    """Carry out one of the commands, and wait until it is done. 0 then, 1 with the cause otherwise."""
    began = time.monotonic()
    try:
        server = find_server(args.name)
        if not server.models:
            text = f"{server.name} serves {server.model} alone; `callboard serve A B` serves several models"
            print(f"callboard: {text}", file=sys.stderr)
            return 1
        order = ModelOrder(1, args.command, args.model, getattr(args, "keep_alive", None))
        answer = ask_house(server.models, order, PATIENCE)
    except CallboardError as error:
        print(f"callboard: {error}", file=sys.stderr)
        return 1
    if answer.code:
        print(f"callboard: {answer.message}", file=sys.stderr)
        return 1
    for held in answer.models:
        pinned = ", pinned" if held.pinned else ""
        print(f"{held.name} is {held.state}{pinned} ({time.monotonic() - began:.1f} s)")
    return 0


def held_models(server: ServerRecord) -> list[ModelState]:
    """How the models of a server of several stand; none for other servers. Raises ServerLost."""
    return ask_house(server.models, ModelOrder(1, "list"), LOOK_TIME).models if server.models else []


def models_table(models: list[ModelState], title: str | None = None) -> Table:
    """A row for each model."""
    table = Table(box=None, pad_edge=False, header_style="bold", title=title, title_justify="left")
    table.add_column("model", overflow="fold")
    table.add_column("state")
    for column in ("memory", "of", "streams", "loads", "leaves in"):
        table.add_column(column, justify="right")
    table.add_column("also called", overflow="fold")
    for held in models:
        loading = f" {held.progress:.0%}" if held.state == "loading" and held.progress else ""
        pinned = ", pinned" if held.pinned else ""
        about = ", ".join([*held.aliases, *held.adapters])
        if held.message and held.state == "failed":
            about = held.message
        row: list[Any] = [held.name, f"[{COLOURS.get(held.state, '') or 'dim'}]{held.state}{loading}[/]{pinned}"]
        row += [size(held.memory) if held.memory else "-", size(held.claim), str(held.streams), str(held.loads)]
        table.add_row(*row, age(held.expires) if held.expires else "-", about)
    return table
