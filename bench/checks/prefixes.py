"""Checks of the prefix cache with an engine: time to first token, sharing, hits, costs, the same tokens."""

import asyncio
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import uvloop

from bench.checks.report import Report
from bench.harness import RunningServer
from bench.load.outcome import Outcome
from bench.load.plan import FIRST_PLAIN_ID
from bench.load.summary import percentile
from bench.mlx_child import MlxChild
from protocol import AsyncClient, Client

PLAIN_MARGIN = 1e-4  # of the magnitude: closer than this, two scores are a tie
TIES = 0.02  # of the streams may end in a tie
DROP = "import os,sys\nfor p in sys.argv[1:]:\n f=os.open(p,0);os.fdatasync(f);os.posix_fadvise(f,0,0,4);os.close(f)"


def ids_of(count: int, seed: object) -> list[int]:
    """Random ids that any of our models has."""
    return random.Random(f"prefixes {seed}").choices(range(FIRST_PLAIN_ID, 10_000), k=count)


@contextmanager
def cache_folder() -> Iterator[Path]:
    """A folder for one check's SSD cache."""
    folder = Path(tempfile.mkdtemp(prefix="cb-prefix-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def first_token(client: Client, ids: Sequence[int]) -> tuple[float, int]:
    """Seconds to the first token of a request of one, and how many prompt tokens were found."""
    began = time.perf_counter()
    stream = client.generate(ids=ids, max_tokens=1, temperature=0, ignore_eos=True, return_ids=True, return_text=False)
    for _ in stream:
        took = time.perf_counter() - began
    assert stream.end is not None
    return took, stream.end.usage.cached_tokens


def drop_pages(folder: Path) -> None:
    """Have the system forget what it keeps of the files below `folder`."""
    files = [str(path) for path in folder.rglob("*.safetensors")]
    subprocess.run([sys.executable, "-c", DROP, *files], check=True)


def ttft(
    report: Report, model: str | Path, tokens: int, *, bars: tuple[float, float] | None, rounds: int = 3
) -> dict[str, float]:
    """Time to first token of one prompt: cold, from memory, and from the SSD after a restart."""
    ids = ids_of(tokens, "ttft") + ids_of(20, 0)
    with cache_folder() as folder:
        arguments = ("--ssd-cache-dir", str(folder / "prefix"))
        with RunningServer(model, *arguments, ready_seconds=300) as server, Client(endpoint=server.endpoint) as client:
            first_token(client, ids_of(300, "warms up"))
            cold, found = first_token(client, ids)
            report.expect(found == 0, "the first is a miss", found)
            memory = [first_token(client, ids[:tokens] + ids_of(20, round_)) for round_ in range(1, rounds + 1)]
            server.terminate()
            code = server.wait(60)
        report.expect(code == 0, "the server stops in good order", code)
        ssd = []
        for round_ in range(rounds):
            drop_pages(folder)
            with (
                RunningServer(model, *arguments, ready_seconds=300) as server,
                Client(endpoint=server.endpoint) as client,
            ):
                first_token(client, ids_of(300, f"warms up {round_}"))
                ssd.append(first_token(client, ids[:tokens] + ids_of(20, 100 + round_)))
    whole = tokens // 256 * 256
    report.expect(all(found == whole for _, found in [*memory, *ssd]), f"hits find {whole} tokens", (memory, ssd))
    seconds = {
        "cold": cold,
        "memory": statistics.median(took for took, _ in memory),
        "ssd": statistics.median(took for took, _ in ssd),
    }
    report.measured(f"ttft_seconds_{tokens}_tokens", {name: round(value, 4) for name, value in seconds.items()})
    shares = {name: round(seconds[name] / cold, 4) for name in ("memory", "ssd")}
    report.measured(f"part_of_cold_{tokens}_tokens", shares)
    if bars is not None:
        report.expect(shares["memory"] <= bars[0], f"from memory at most {bars[0]:.0%} of cold", shares)
        report.expect(shares["ssd"] <= bars[1], f"from the SSD after a restart at most {bars[1]:.0%} of cold", shares)
    return seconds


def restore(report: Report, model: Path, *, tokens: int, rounds: int, bar: float | None) -> dict[str, Any]:
    """Bandwidth from the SSD into a request's caches against plain reads of the same files into fresh buffers."""
    with MlxChild("bench.prefix_engine") as child:
        result: dict[str, Any] = child.ask(["restore", str(model), tokens, rounds], seconds=500)
    speeds = {name: statistics.median(values) for name, values in result["megabytes_per_second"].items()}
    report.measured("read", {"blocks": result["blocks"], "megabytes": result["megabytes"]})
    report.measured("megabytes_per_second", result["megabytes_per_second"])
    part = speeds["restore"] / speeds["plain_1_thread"]
    report.measured("restore_to_plain", round(part, 3))
    report.measured("restore_to_plain_on_two_threads", round(speeds["restore"] / speeds["plain_2_threads"], 3))
    if bar is not None:
        report.expect(part >= bar, f"at least {bar:.0%} of plain reading", round(part, 3))
    return result


def cost(report: Report, model: Path, *, rows: int, tokens: int, budget: int, rounds: int, held: bool = True) -> None:
    """Committing takes at most 1 % of the engine's thread, and the whole work at most 3 % more time."""
    with MlxChild("bench.prefix_engine") as child:
        result = child.ask(["cost", str(model), rows, tokens, budget, rounds], seconds=500)
    for name, value in result.items():
        report.measured(name, value)
    if held:
        report.expect(result["committing_share"] <= 0.01, "committing takes at most 1 %", result["committing_share"])
        report.expect(result["minima_ratio"] <= 1.03, "the minima differ by at most 3 %", result["minima_ratio"])
    else:
        report.expect(result["committing_share"] <= 0.1, "committing takes little", result["committing_share"])


def _settled(server: RunningServer) -> dict[str, Any]:
    """Figures of the prefix cache when all of them have come: an idle engine tells them with its next answer to the
    supervisor, twice a second."""
    server.wait_idle()
    figures: list[dict[str, Any]] = []
    while len(figures) < 2 or figures[-1] != figures[-2]:
        time.sleep(1.2)
        figures.append(server.health()["prefix_cache"])
    return figures[-1]


def users_at_once(server: RunningServer, *, users: int, tokens: int, salted: bool = False) -> dict[str, Any]:
    """What so many users with one prefix of `tokens` find, and what that takes; `salted` ones may share nothing."""
    stem = ids_of(tokens, f"shared {salted}")

    async def ask() -> list[int]:
        async with AsyncClient(endpoint=server.endpoint) as client:
            streams = [
                client.generate(
                    ids=stem + ids_of(30, user), max_tokens=8, temperature=0, ignore_eos=True,
                    return_ids=True, return_text=False, cache_salt=f"user {user}" if salted else "",
                )
                for user in range(users)
            ]  # fmt: skip
            for stream in streams:
                async for _ in stream:
                    pass
            return [stream.end.usage.cached_tokens for stream in streams if stream.end is not None]

    before = _settled(server)
    engine = psutil.Process(server.pids()["engine"])
    idle = engine.memory_info().rss
    with _peak(engine) as peak:
        found = uvloop.run(ask())
    after = _settled(server)
    return {
        "cached_tokens": sorted(found),
        "computed_tokens": after["computed_tokens"] - before["computed_tokens"],
        "pool_bytes": after["memory_bytes"] - before["memory_bytes"],
        "blocks": after["memory_blocks"] - before["memory_blocks"],
        "engine_mib": {"idle": idle >> 20, "peak": peak[0] >> 20},
    }


def shared(report: Report, server: RunningServer, *, users: int, tokens: int) -> dict[str, Any]:
    """Users that arrive at once with one prefix: it is computed once and held once."""
    seen = users_at_once(server, users=users, tokens=tokens)
    found, computed, held = seen["cached_tokens"], seen["computed_tokens"], seen["pool_bytes"]
    once = tokens // 256
    copies = round(held / max(seen["blocks"], 1) * once * users)
    report.measured("cached_tokens", found)
    report.measured("computed_tokens", computed)
    report.measured("pool_bytes", held)
    report.measured("bytes_of_as_many_copies", copies)
    report.measured("engine_memory_mib", seen["engine_mib"])
    whole = once * 256
    report.expect(found == [0] + [whole] * (users - 1), "one misses, all others find the whole prefix", found)
    most = tokens + users * (30 + tokens % 256)
    report.expect(computed <= most, f"the prefix is computed once: at most {most} tokens", computed)
    report.expect(held <= 0.2 * copies, "the pool holds it once", (held, copies))
    return seen


@contextmanager
def _peak(process: psutil.Process) -> Iterator[list[int]]:
    """The largest resident size that is seen meanwhile."""
    over = threading.Event()
    peak = [0]

    def watch() -> None:
        while not over.wait(0.02):
            peak[0] = max(peak[0], process.memory_info().rss)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()


def hits(report: Report, server: RunningServer) -> None:
    """MISS, HIT, MISS, HIT in `cached_tokens`; and a repeat hits while the first still generates."""
    first, other, third = (ids_of(700, name) for name in ("first", "other", "third"))
    with Client(endpoint=server.endpoint) as client:
        found = [first_token(client, ids)[1] for ids in (first, first, other, first)]
        report.expect(found == [0, 512, 0, 512], "MISS, HIT, MISS, HIT", found)
        running = client.generate(ids=third, max_tokens=4000, temperature=0, ignore_eos=True)
        next(iter(running))
        again = first_token(client, third)[1]
        report.expect(running.end is None, "the first still generates")
        report.expect(again == 512, "an immediate repeat hits", again)
        running.cancel()


def chat(report: Report, server: RunningServer, *, turns: int, tokens: int) -> list[dict[str, Any]]:
    """A chat of so many turns: each finds what the ones before left, answers included."""
    ids = ids_of(tokens, "chat")
    rows = []
    with Client(endpoint=server.endpoint) as client:
        for turn in range(turns):
            began = time.perf_counter()
            stream = client.generate(
                ids=ids, max_tokens=100, temperature=0, ignore_eos=True, return_ids=True, return_text=False
            )
            answer: list[int] = []
            took = 0.0
            for delta in stream:
                took = took or time.perf_counter() - began
                answer += delta.ids
            assert stream.end is not None
            rows.append({"prompt": len(ids), "cached": stream.end.usage.cached_tokens, "ttft": round(took, 4)})
            ids = ids + answer + ids_of(60, f"chat {turn}")
    report.measured("chat", rows)
    missed = [row for row in rows[1:] if row["cached"] < (row["prompt"] - 61) // 256 * 256 - 256]
    report.expect(not missed, "each turn finds what the last ones left", missed)
    return rows


def itl(report: Report, model: Path, *, streams: int, tokens: int, target_ms: float, rounds: int, held: bool) -> None:
    """ITL of running streams while a long prefix comes from the SSD."""
    with cache_folder() as folder:
        arguments = ("--ssd-cache-dir", str(folder / "prefix"), "--decode-stall-target-ms", str(target_ms))
        long = [ids_of(tokens, f"long {round_}") for round_ in range(rounds)]
        with RunningServer(model, *arguments) as server, Client(endpoint=server.endpoint) as client:
            for ids in long:
                first_token(client, ids)
            server.terminate()
            server.wait(60)
        drop_pages(folder)
        with RunningServer(model, *arguments) as server:
            gaps, found, took = uvloop.run(_beside(server.endpoint, streams, long))
    p99 = percentile(sorted(gaps), 99) * 1000
    report.measured("cached_tokens", found)
    report.measured("ttft_seconds", [round(seconds, 3) for seconds in took])
    report.measured("itl_milliseconds", {p: round(percentile(sorted(gaps), p) * 1000, 1) for p in (50, 95, 99, 100)})
    report.expect(min(found) >= tokens // 256 * 256 - 256, "the prefixes come from the SSD", found)
    if held:
        report.expect(p99 <= 2 * target_ms, f"ITL p99 at most {2 * target_ms:g} ms", round(p99, 1))


async def _beside(
    endpoint: str, streams: int, long: Sequence[Sequence[int]]
) -> tuple[list[float], list[int], list[float]]:
    outcomes = [Outcome(index) for index in range(streams)]
    over = asyncio.Event()
    async with AsyncClient(endpoint=endpoint) as client:

        async def read(outcome: Outcome) -> None:
            ids = ids_of(40, outcome.index)
            stream = client.generate(ids=ids, max_tokens=60_000, temperature=0, ignore_eos=True)
            async for _ in stream:
                outcome.token()
                if over.is_set():
                    stream.cancel()

        tasks = [asyncio.create_task(read(outcome)) for outcome in outcomes]
        while any(outcome.arrivals < 8 for outcome in outcomes):
            if any(task.done() for task in tasks):
                raise RuntimeError("a stream ended before the measurement")
            await asyncio.sleep(0.01)
        gaps: list[float] = []
        found: list[int] = []
        took: list[float] = []
        for ids in long:
            marks = [len(outcome.gaps) for outcome in outcomes]
            began = time.perf_counter()
            stream = client.generate(ids=ids, max_tokens=1, temperature=0, ignore_eos=True)
            async for _ in stream:
                pass
            took.append(time.perf_counter() - began)
            assert stream.end is not None
            found.append(stream.end.usage.cached_tokens)
            gaps += [gap for outcome, mark in zip(outcomes, marks, strict=True) for gap in outcome.gaps[mark:]]
        over.set()
        await asyncio.gather(*tasks)
    return gaps, found, took


def same(
    report: Report,
    kinds: Sequence[tuple[str, int | None]],
    *,
    lengths: Sequence[int],
    others: int,
    longest: int = 460,
) -> None:
    """The same tokens in every way, for every kind of cache; differences only where scores tie."""
    with MlxChild("bench.prefix_engine") as child:
        for kind, window in kinds:
            result = child.ask(["same", kind, window, list(lengths), others, longest], seconds=580)
            name = f"{Path(kind).name}{'' if window is None else f' in windows of {window}'}"
            margin = max(PLAIN_MARGIN, 10 * result["chunking"] if "quantized" in name else 0.0)
            ties = sum(len(found) for found in result["ways"].values())
            wrong = {way: bad for way, found in result["ways"].items() if (bad := [f for f in found if f[3] >= margin])}
            report.measured(name, {"cached_tokens": result["cached_tokens"], "ties": ties, "margin": margin})
            report.expect(not wrong, f"{name}: the same tokens", wrong)
            most = TIES * result["requests"] * len(result["ways"])
            report.expect(ties <= most, f"{name}: ties in at most {TIES:.0%} of the streams", ties)
            missed = {way: count for way, count in result["cached_tokens"].items() if count < _least(way, result)}
            report.expect(not missed, f"{name}: what was computed before is found", (missed, result["findable"]))


def _least(way: str, result: dict[str, Any]) -> float:
    """Tokens that have to be found: all that memory and SSD have; half where the ways themselves compute the rest."""
    if way.startswith("cold"):
        return 0
    complete = way.startswith(("from memory", "from the SSD"))
    return float(result["findable"]) * (1 if complete else 0.5)
