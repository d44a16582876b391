"""`callboard restart-engine`: has a running server replace its engine, and waits until the new one serves.

Of several models all engines are replaced, or that of the one that is named.
"""

import argparse
import os
import signal
import sys
import time
from typing import Any

from protocol.client.locate import ask_house
from protocol.endpoints import ServerRecord, find_server
from protocol.errors import CallboardError
from protocol.messages import ModelOrder
from server.cli_http import health

PATIENCE = 600.0  # seconds a large model may take to load
POLL = 0.2  # seconds


def restart_engine(args: argparse.Namespace) -> int:
    """Replace the engine. 0 once the new one serves, 1 when it doesn't come."""
    try:
        server = find_server(args.name)
        if server.models:
            return _restart_models(server, args.model or "")
        if args.model and args.model != server.model:
            print(f"callboard: {server.name} serves {server.model}, not {args.model}", file=sys.stderr)
            return 1
        before = _engine(server.http)
        os.kill(server.pid, signal.SIGUSR1)
    except (CallboardError, OSError) as error:
        print(f"callboard: {error}", file=sys.stderr)
        return 1
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        time.sleep(POLL)
        try:
            engine = _engine(server.http)
        except OSError:
            break
        if engine.get("state") == "ready" and engine.get("epoch") != before.get("epoch"):
            print(f"the engine of {server.name} was replaced: pid {engine['pid']}, epoch {engine['epoch']}")
            return 0
    print(f"callboard: the server {server.name} has no new engine; see its log", file=sys.stderr)
    return 1


def _restart_models(server: ServerRecord, model: str) -> int:
    answer = ask_house(server.models, ModelOrder(1, "restart", model), PATIENCE)
    if answer.code:
        print(f"callboard: {answer.message}", file=sys.stderr)
        return 1
    replaced = ", ".join(state.name for state in answer.models)
    print(f"engines of {server.name} that were replaced: {replaced or 'none, for no model is loaded'}")
    return 0


def _engine(url: str) -> dict[str, Any]:
    """What the server's health says of its engine. Raises OSError when it doesn't answer."""
    return next((actor for actor in health(url)["actors"] if actor["name"] == "engine"), {})
