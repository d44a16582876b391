"""`callboard restart-engine`: has a running server replace its engine, and waits until the new one serves."""

import argparse
import os
import signal
import sys
import time
from typing import Any

from protocol.endpoints import find_server
from protocol.errors import ServerNotFound
from server.cli_http import health

PATIENCE = 600.0  # seconds a large model may take to load
POLL = 0.2  # seconds


def restart_engine(args: argparse.Namespace) -> int:
    """Replace the engine. 0 once the new one serves, 1 when it doesn't come."""
    try:
        server = find_server(args.name)
        before = _engine(server.http)
        os.kill(server.pid, signal.SIGUSR1)
    except (ServerNotFound, OSError) as error:
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


def _engine(url: str) -> dict[str, Any]:
    """What the server's health says of its engine. Raises OSError when it doesn't answer."""
    return next((actor for actor in health(url)["actors"] if actor["name"] == "engine"), {})
