"""Faults at chosen prompts, for checks alone: Python loads this file in every process that has its folder on
PYTHONPATH, and it acts in the engine alone.

`BENCH_FAULTS` is JSON: a list of `[how, ids]`. When a request whose ids begin with `ids` is in the engine, its next
turn crashes (`how` = "crash") or never ends ("hang").
"""

import importlib.abc
import importlib.machinery
import json
import os
import sys
import time
from array import array
from types import ModuleType
from typing import Any

ENGINE = "actors.engine.engine"


def _arm(module: Any, faults: list[tuple[str, list[int]]]) -> None:
    engine = module.Engine
    submit, turn = engine.submit, engine.turn
    armed: list[str] = []

    def watched_submit(self: Any, request: Any) -> None:
        ids = array("I", request.ids).tolist()
        armed.extend(how for how, prefix in faults if ids[: len(prefix)] == prefix)
        submit(self, request)

    def watched_turn(self: Any, *arguments: Any) -> None:
        if "crash" in armed:
            os.abort()
        while "hang" in armed:
            time.sleep(1)
        turn(self, *arguments)

    engine.submit, engine.turn = watched_submit, watched_turn


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the engine's module where it is, and arms it once it is loaded."""

    def __init__(self, faults: list[tuple[str, list[int]]]) -> None:
        self._faults = faults

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != ENGINE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None:
            self._loader: Any = spec.loader
            spec.loader = self
        return spec

    def create_module(self, spec: Any) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _arm(module, self._faults)


if "engine" in sys.orig_argv and os.environ.get("BENCH_FAULTS"):
    sys.meta_path.insert(0, _Finder(json.loads(os.environ["BENCH_FAULTS"])))
