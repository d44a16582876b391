"""The engine's prefix cache without a server: what committing costs, how fast the SSD fills a row's caches, and whether
all kinds of caches give the same tokens.

`python -m bench.prefix_engine --child` answers requests line by line (`bench.mlx_child`): `["cost", folder, rows,
tokens, budget, rounds]`, `["restore", folder, tokens, rounds]`, `["same", kind, window, lengths, others, longest]`.
"""

import importlib.util
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np

from actors.engine.block_cuts import PackedBlock
from actors.engine.engine import Engine, Outcome
from actors.engine.model import Model, load
from actors.engine.restoring import Phase, Restoring
from actors.engine.scheduler import Limits
from bench.harness import ROOT
from bench.mlx_child import CHILD, answer_for_ever
from bench.ties import gap
from cache_store.keys import BLOCK_SIZE, chain_keys
from cache_store.ssd import SsdStore
from cache_store.store import PrefixStore, Tier
from protocol.ids import pack_ids
from protocol.messages import Submit

Store = PrefixStore[PackedBlock]
MEMORY = 2 << 30
MODEL = b"bench" + bytes(27)
TOKENS = 6  # that are compared


def prompt(length: int, seed: int, vocabulary: int = 512) -> list[int]:
    """Random ids."""
    return random.Random(f"prefix {seed}").choices(range(10, vocabulary), k=length)


def submit(rid: int, ids: Sequence[int], budget: int, temperature: float = 0.0) -> Submit:
    """A request of these ids."""
    return Submit(
        epoch=1,
        streamer=1,
        rid=rid,
        ids=pack_ids(ids),
        prompt_tokens=len(ids),
        budget=budget,
        temperature=temperature,
        top_p=1.0,
        seed=rid,
        ignore_eos=True,
    )


class Run:
    """An engine driven until it is idle. `tokens` and `cached` are by rid."""

    def __init__(self, model: Model, store: Store | None, rows: int = 256) -> None:
        self.engine = Engine(model, Limits(max_num_seqs=rows), store=store)
        self.tokens: dict[int, list[int]] = {}
        self.cached: dict[int, int] = {}

    def take(self, outcome: Outcome) -> None:
        """What a turn brought."""
        for rid, token in zip(outcome.rids, outcome.tokens, strict=True):
            self.tokens.setdefault(rid, []).append(token)
        self.cached.update(zip(outcome.cached, outcome.cached_tokens, strict=True))

    def turn(self) -> None:
        """One turn."""
        self.engine.turn(self.take)
        self.engine.tidy()

    def all(self, requests: Iterable[Submit]) -> dict[int, list[int]]:
        """Tokens of these, all at once."""
        for request in requests:
            self.engine.submit(request)
        while self.engine.busy:
            self.turn()
        return self.tokens


@contextmanager
def ssd_store(directory: Path, memory_bytes: int = MEMORY) -> Iterator[Store]:
    """A store as an engine has it that just started; everything is on the SSD at its end."""
    ssd = SsdStore(directory, write_bytes_per_second=1e12)
    store: Store = PrefixStore(memory_bytes=memory_bytes, ssd=ssd)
    store.set_model(MODEL, "bench")
    while not ssd.ready:
        time.sleep(0.01)
    try:
        yield store
        if not store.flush(120.0):
            raise RuntimeError("blocks were left unwritten")
    finally:
        store.close()


def cost(folder: str, rows: int, tokens: int, budget: int, rounds: int) -> dict[str, Any]:
    """Seconds of the same work with and without a store, in turn, and what part of its time the thread committed."""
    model = load(folder)
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    shares: list[float] = []
    for number in range(rounds + 1):
        for name in sorted(seconds, reverse=bool(number % 2)):
            run = Run(model, PrefixStore(memory_bytes=MEMORY) if name == "with" else None)
            requests = [submit(rid, prompt(tokens, 1000 * number + rid, 9000), budget) for rid in range(rows)]
            began = time.perf_counter()
            run.all(requests)
            if not number:
                continue  # warms up
            took = time.perf_counter() - began
            seconds[name].append(round(took, 4))
            if name == "with":
                shares.append(run.engine.stats.prefix.committing / took)
    best = {name: min(values) for name, values in seconds.items()}
    return {
        "seconds": seconds,
        "committing_share": round(max(shares), 5),
        "minima_ratio": round(best["with"] / best["without"], 4),
    }


def restore(folder: str, tokens: int, rounds: int) -> dict[str, Any]:
    """Bytes per second from the SSD into a row's caches, and of plain reads of the same files; page cache dropped."""
    model = load(folder)
    layout = model.block_layout
    assert layout is not None
    ids = prompt(tokens + 1, 1, 9000)
    with tempfile.TemporaryDirectory(prefix="cb-prefix-", dir=os.environ.get("CALLBOARD_BENCH_DIR")) as folder_:
        directory = Path(folder_)
        with ssd_store(directory) as store:
            Run(model, store).all([submit(0, ids, 1)])
        files = sorted(directory.rglob("*.safetensors"))
        total = sum(file.stat().st_size for file in files)
        keys = chain_keys(np.array(ids, np.uint32))[: tokens // 256]
        found: dict[str, list[float]] = {"plain_1_thread": [], "plain_2_threads": [], "restore": []}
        with ssd_store(directory) as store:
            for _ in range(rounds):
                for threads, name in ((1, "plain_1_thread"), (2, "plain_2_threads")):
                    _drop(files)
                    found[name].append(_plain(files, threads))
                _drop(files)
                began = time.perf_counter()
                row = Restoring(layout, store, keys, [Tier.SSD] * len(keys), None, model.new_caches(), len(ids))
                while row.phase is Phase.BUILDING:
                    mx.eval(row.build(1 << 40))
                    row.built()
                while row.phase is Phase.LOADING:
                    time.sleep(0.0005)
                    row.poll()
                found["restore"].append(time.perf_counter() - began)
                if row.phase is not Phase.KEEPING:
                    raise RuntimeError("the load failed")
                row.finish()
    return {
        "blocks": len(keys),
        "megabytes": round(total / 1e6, 1),
        "megabytes_per_second": {name: [round(total / s / 1e6) for s in times] for name, times in found.items()},
    }


def _drop(files: Sequence[Path]) -> None:
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _plain(files: Sequence[Path], threads: int) -> float:
    def read(file: Path) -> Any:
        buffer = memoryview(bytearray(file.stat().st_size))
        with file.open("rb", buffering=0) as source:
            at = 0
            while count := source.readinto(buffer[at:]):
                at += count
        return buffer

    began = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        kept = list(pool.map(read, files))
    took = time.perf_counter() - began
    del kept
    return took


def same(kind: str, window: int | None, lengths: list[int], others: int, longest: int) -> dict[str, Any]:
    """Prompts of these lengths in every way that their tokens can be come by, against a cold run of each alone. The
    prompts of the `others` have 8 to `longest` tokens.

    `ways` maps each way to the requests that differ: length, temperature, place, and how far the runner-up was behind
    there, relative to the magnitude. `chunking` is how much the logits of a prompt differ between two chunkings.
    `cached_tokens` are what each way found; `findable`, what there is to find once all prompts were computed.
    """
    # Reading pays and rows wait for each other, however slow this machine is: what is found depends on neither.
    with patch.multiple("actors.engine.prefix", worth_loading=lambda *_: True, PATIENCE_S=120.0):
        return _same(_kind_model(kind, window), lengths, others, longest)


def _same(model: Model, lengths: list[int], others: int, longest: int) -> dict[str, Any]:
    whole = prompt(max(lengths), 7)
    asked = [(length, temperature) for length in lengths for temperature in (0.0, 0.8)]
    requests = [submit(rid, whole[:length], TOKENS, temperature) for rid, (length, temperature) in enumerate(asked)]
    cold = {rid: Run(model, None).all([requests[rid]])[rid] for rid in range(len(requests))}
    ways: dict[str, dict[int, list[int]]] = {}
    cached: dict[str, int] = {}
    crowd = [submit(1000 + i, prompt(8 + (longest - 8) * i // others, i), 2 * TOKENS) for i in range(others)]

    def alone(name: str, run: Run) -> None:
        for request in requests:
            run.all([request])
        note(name, run)

    def crowded(name: str, run: Run) -> None:
        run.all([*crowd, *requests])
        note(f"{name}, all at once among {others} others", run)

    def note(name: str, run: Run) -> None:
        ways[name] = {rid: run.tokens[rid] for rid in cold}
        cached[name] = sum(count for rid, count in run.cached.items() if rid in cold)

    crowded("cold", Run(model, None))
    with tempfile.TemporaryDirectory(prefix="cb-prefix-") as folder:
        with ssd_store(Path(folder)) as store:
            alone("while committing", Run(model, store))
            alone("from memory", Run(model, store))
            crowded("from memory", Run(model, store))
        with ssd_store(Path(folder), memory_bytes=0) as store:
            alone("from the SSD after a restart", Run(model, store))
        with ssd_store(Path(folder)) as store:
            crowded("from the SSD after a restart", Run(model, store))
    for retried in (alone, crowded):
        run = Run(model, PrefixStore(memory_bytes=MEMORY))
        _abort(run, requests, crowd if retried is crowded else [])
        retried("from what was aborted", run)
    different: dict[str, list[tuple[int, float, int, float]]] = {name: [] for name in ways}
    for name, tokens in ways.items():
        for rid, (length, temperature) in enumerate(asked):
            if tokens[rid] == cold[rid]:
                continue
            place = next(i for i, (a, b) in enumerate(zip(cold[rid], tokens[rid], strict=True)) if a != b)
            options = {"temperature": temperature, "seed": rid}
            behind = gap(model, whole[:length] + cold[rid][:place], length, options)
            different[name].append((length, temperature, place, behind))
    layout = model.block_layout
    assert layout is not None
    return {
        "requests": len(requests),
        "ways": different,
        "cached_tokens": cached,
        "findable": sum(_findable(length, trims=layout.trims) for length, _ in asked),
        "chunking": _chunking(model, whole),
    }


def _findable(length: int, *, trims: bool) -> int:
    """Tokens of a prompt that a row may begin behind: whole blocks, and never the last token. Caches that can be
    trimmed begin within the last block."""
    whole = length // BLOCK_SIZE * BLOCK_SIZE
    if whole < length:
        return whole
    return length - 1 if trims else whole - BLOCK_SIZE


def _abort(run: Run, requests: Sequence[Submit], crowd: Sequence[Submit]) -> None:
    """Begin these, the ones of the crowd first, and abort them once some of their prompts are computed."""
    for request in [*crowd, *requests]:
        run.engine.submit(request)
    while run.engine.busy and run.engine.stats.prefix.memory_blocks == 0:
        run.turn()
    run.engine.abort([request.rid for request in [*crowd, *requests]])
    while run.engine.busy:
        run.turn()
    run.tokens.clear()
    run.cached.clear()


def _chunking(model: Model, ids: list[int]) -> float:
    """How much the last logits of a prompt differ between forwards of 256 and of 192, relative to the magnitude."""
    last = []
    for size in (256, 192):
        caches = model.new_caches()
        for start in range(0, len(ids), size):
            logits = model.forward(mx.array([ids[start : start + size]], mx.uint32), caches)
            mx.eval(logits)
        last.append(np.array(logits[0, -1].astype(mx.float32)))
    return float(np.abs(last[0] - last[1]).max() / max(1.0, np.abs(last[0]).max()))


def _kind_model(kind: str, window: int | None) -> Model:
    if Path(kind).is_dir():
        return load(kind)
    spec = importlib.util.spec_from_file_location("kinds", ROOT / "tests" / "models" / "kinds.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model: Model = module.kind_model(kind, window)
    return model


def main() -> None:
    """Answer for ever."""
    if sys.argv[1:2] != [CHILD]:
        sys.exit(__doc__)
    tasks: dict[str, Callable[..., Any]] = {"cost": cost, "restore": restore, "same": same}
    answer_for_ever(lambda question: tasks[question[0]](*question[1:]))


if __name__ == "__main__":
    main()
