"""Faults at chosen places, for checks alone: Python loads this file in every process that has its folder on
PYTHONPATH. `BENCH_FAULTS` is JSON of `bench.faults.inject.Faults`; faults of rows and disks act in the engine alone.

- `rows`: what happens to a request whose ids begin with `ids`. `place` says where: at its `prompt`, when it has decoded
  `tokens` tokens (again behind each resume), while its `grammar` is built, or when its `siblings` join it. `how`: the
  engine crashes there or hangs. `once` is a file that is made then, and after which nothing happens any more.
- `disk`: a file of JSON, read at every write of a block: `{"full": true}`, `{"slow": seconds}`.
- `frames`: a file with a byte for each of `ROUTES`; when it is set, the next frame on that way is cut in half, and the
  byte set back.
- `clock`: a file that holds seconds, one float64, by which `time.monotonic` is ahead in every process.
- `silence`: seconds without an answer after which an actor other than the engine counts as hanging; null: as ever.
"""

import errno
import importlib.abc
import importlib.machinery
import json
import mmap
import os
import struct
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

Fault = dict[str, Any]

ROUTES = ("engine streamer", "streamer engine", "tokenizer streamer", "streamer tokenizer")


def _strike(fault: Fault) -> None:
    """Let it happen, on the thread that calls."""
    if fault["once"]:
        try:
            os.close(os.open(fault["once"], os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
    if fault["how"] == "crash":
        os.abort()
    while fault["how"] == "hang":
        time.sleep(1)


def _arm_engine(module: Any, faults: list[Fault]) -> None:
    engine = module.Engine
    submit, turn, join = engine.submit, engine.turn, engine._join_siblings
    struck: dict[int, Fault] = {}

    def watched_submit(self: Any, request: Any) -> None:
        ids = array("I", request.ids).tolist()
        for fault in faults:
            if ids[: len(fault["ids"])] == fault["ids"] and fault["place"] != "grammar":
                struck[request.rid] = fault
        submit(self, request)

    def watched_turn(self: Any, *arguments: Any) -> None:
        for rid, fault in struck.items():
            row = self._requests.get(rid)
            decoded = 0 if row is None else len(row.ids) - row.prompt_tokens + len(row.generated)
            decodes = fault["place"] == "decode" and row is not None and row.generated
            if fault["place"] == "prompt" or (decodes and decoded >= fault["tokens"]):
                _strike(fault)
        turn(self, *arguments)

    def watched_join(self: Any, groups: Any, *arguments: Any) -> Any:
        for group in groups:
            for row in group.rows:
                if self._siblings.of(row.rid) and struck.get(row.rid, {}).get("place") == "siblings":
                    _strike(struck[row.rid])
        return join(self, groups, *arguments)

    engine.submit, engine.turn, engine._join_siblings = watched_submit, watched_turn, watched_join


def _arm_grammars(module: Any, faults: list[Fault]) -> None:
    build = module.Constraints.build

    def watched_build(self: Any, request: Any, *arguments: Any) -> None:
        ids = array("I", request.ids).tolist()
        for fault in faults:
            if ids[: len(fault["ids"])] == fault["ids"]:
                self._builders.submit(_strike, fault)
        build(self, request, *arguments)

    module.Constraints.build = watched_build


def _arm_disk(module: Any, control: Path) -> None:
    write_block = module.write_block

    def watched_write(*arguments: Any) -> Any:
        state = json.loads(control.read_text() or "{}")
        time.sleep(state.get("slow", 0.0))
        if state.get("full"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_block(*arguments)

    module.write_block = watched_write


def _arm_sockets(module: Any, control: str) -> None:
    import zmq

    with open(control, "r+b") as file:
        wanted = mmap.mmap(file.fileno(), len(ROUTES))
    send = module.Socket.send

    def watched_send(self: Any, data: Any, flags: int = 0, *arguments: Any, **options: Any) -> Any:
        if any(wanted[:]) and not flags & zmq.SNDMORE:
            for number, route in enumerate(ROUTES):
                sender, receiver = route.split()
                if not wanted[number] or sender not in sys.orig_argv:
                    continue
                answers = receiver == "streamer" and self.type == zmq.ROUTER
                if answers or (sender == "streamer" and f"/{receiver}".encode() in self.last_endpoint):
                    wanted[number] = 0
                    data = bytes(data)[: len(data) // 2]
        return send(self, data, flags, *arguments, **options)

    module.Socket.send = watched_send


def _arm_supervision(module: Any, silence: float) -> None:
    module.SILENCE_LIMIT = silence


def _set_clock(control: str) -> None:
    with open(control, "rb") as file:
        ahead = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
    true = time.monotonic
    time.monotonic = lambda: true() + float(struct.unpack("<d", ahead[:8])[0])


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules where they are, and arms them once they are loaded."""

    def __init__(self, arms: dict[str, Callable[[Any], None]]) -> None:
        self._arms = arms
        self._loaders: dict[str, Any] = {}

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname not in self._arms:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None:
            self._loaders[fullname] = spec.loader
            spec.loader = self
        return spec

    def create_module(self, spec: Any) -> ModuleType | None:
        module: ModuleType | None = self._loaders[spec.name].create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loaders[module.__name__].exec_module(module)
        self._arms[module.__name__](module)


def _arm(wanted: dict[str, Any]) -> None:
    _set_clock(wanted["clock"])
    arms: dict[str, Callable[[Any], None]] = {"zmq.sugar.socket": lambda module: _arm_sockets(module, wanted["frames"])}
    if wanted["silence"] is not None:
        arms["actors.supervision"] = lambda module: _arm_supervision(module, wanted["silence"])
    if "engine" in sys.orig_argv:
        rows = wanted["rows"]
        building = [fault for fault in rows if fault["place"] == "grammar"]
        arms["actors.engine.engine"] = lambda module: _arm_engine(module, rows)
        arms["actors.engine.constraints"] = lambda module: _arm_grammars(module, building)
        arms["cache_store.publishing"] = lambda module: _arm_disk(module, Path(wanted["disk"]))
    sys.meta_path.insert(0, _Finder(arms))


if os.environ.get("BENCH_FAULTS"):
    _arm(json.loads(os.environ["BENCH_FAULTS"]))
