"""Check of what a replaced engine computes: blocks that the index listed when the engine was killed are restored."""

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

import numpy as np
import uvloop

from bench.ask import get
from bench.checks.crowds import reached
from bench.checks.report import Report
from bench.faults.streams import Asked, Stream, compare, running, undisturbed
from bench.harness import RunningServer
from cache_store.directory import CacheDirectory
from cache_store.index import Index
from cache_store.keys import BLOCK_SIZE, chain_keys
from protocol import AsyncClient

LEEWAY = 16  # tokens of a stream that were on their way to its client at the kill


def listed_blocks(folder: Path) -> set[bytes]:
    """Keys of all blocks in the index of an SSD cache, whosever they are."""
    index = Index(CacheDirectory(folder))
    with contextlib.closing(index), index.read() as transaction:
        return {name[32:] for name, _ in transaction.records()}


def restored(report: Report, server: RunningServer, model: Path, *, streams: int, tokens: int) -> None:
    """The engine is killed under streams with long prompts: they go on with the blocks that the index lists, and
    nothing but the rest is computed."""
    requests = [Asked(index, tokens, ids=300 + 50 * (index % 28)) for index in range(streams)]
    got, at_kill, listed, engine = uvloop.run(_restored(server, requests))
    errors = [stream.error for stream in got if stream.error]
    report.expect(not errors, f"{streams} of {streams} complete", errors[:5])
    wanted = hits = most = 0
    for stream, had in zip(got, at_kill, strict=True):
        ids = np.array(stream.asked.ids + stream.ids, np.uint32)
        blocks = 0
        for key in chain_keys(ids):
            if key not in listed:
                break
            blocks += 1
        length = len(stream.asked.ids) + had
        wanted += BLOCK_SIZE * blocks
        hits += min(BLOCK_SIZE * blocks, length - 1)
        most += max(length + LEEWAY - BLOCK_SIZE * blocks, 1)
    found, computed = engine["memory_tokens"] + engine["ssd_tokens"], engine["computed_tokens"]
    report.measured("streams", streams)
    report.measured("tokens_in_blocks_that_the_index_listed", wanted)
    report.measured("tokens_the_next_engine_found_on_the_ssd", engine["ssd_tokens"])
    report.measured("tokens_it_found_in_memory", engine["memory_tokens"])
    report.measured("tokens_it_computed", computed)
    report.measured("tokens_it_would_have_computed_without", sum(len(s.asked.ids) for s in got) + sum(at_kill))
    report.expect(wanted > BLOCK_SIZE * streams, "most blocks were on the SSD", wanted)
    report.expect(found >= hits, "every block that the index listed was found", [found, hits])
    report.expect(computed <= most, "nothing but the rest was computed", [computed, most])
    compare(report, model, "resumed from blocks", uvloop.run(undisturbed(server.endpoint, requests)), got)


async def _restored(
    server: RunningServer, requests: list[Asked]
) -> tuple[list[Stream], list[int], set[bytes], dict[str, int]]:
    streams = [Stream(asked) for asked in requests]
    async with AsyncClient(endpoint=server.endpoint) as client:
        tasks = [asyncio.create_task(stream.over_zmq(client)) for stream in streams]
        async with running(tasks):
            await reached(lambda: all(stream.times for stream in streams), 90, "every stream has had tokens")
            await reached(lambda: _prefix(server)["ssd_bytes"] > 0, 30, "blocks are on the SSD")
            pid = (await asyncio.to_thread(server.pids))["engine"]
            os.kill(pid, signal.SIGSTOP)  # what the index lists stays as it is
            listed = await asyncio.to_thread(listed_blocks, server.home / "prefix")
            await asyncio.sleep(0.2)  # what it had sent is here
            at_kill = [len(stream.ids) for stream in streams]
            os.kill(pid, signal.SIGKILL)
            killed = time.monotonic()
            await reached(lambda: all(s.ended or s.times[-1] > killed for s in streams), 90, "every stream goes on")
            await asyncio.sleep(1.0)  # the engine's figures come with a probe
            engine = await asyncio.to_thread(_prefix, server)
            await asyncio.wait_for(asyncio.gather(*tasks), 200)
    return streams, at_kill, listed, engine


def _prefix(server: RunningServer) -> dict[str, int]:
    figures: dict[str, int] = get(f"{server.url}/health").body["prefix_cache"]
    return figures
