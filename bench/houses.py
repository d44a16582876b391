"""Servers of several models, for checks and tests."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.ask import get
from bench.harness import RunningServer, callboard


def house_of(models: Mapping[str, str | Path], *arguments: str, **options: Any) -> RunningServer:
    """`callboard serve NAME=MODEL …` for all of `models`; the rest is as for `RunningServer`."""
    named = [f"{name}={model}" for name, model in models.items()]

    def wrap(given: list[str]) -> list[str]:
        return [str(callboard()), "serve", *named, *given]

    return RunningServer("", *arguments, wrap=wrap, **options)


def states(server: RunningServer, **options: Any) -> dict[str, dict[str, Any]]:
    """How each model stands, by its name: what `GET /health` says of them."""
    models = get(f"{server.url}/health", **options).body["models"]
    return {model["name"]: model for model in models}
