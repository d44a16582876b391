"""Checks of the prefix cache in trouble: engines killed while they write, a directory that goes while it is used."""

import asyncio
import contextlib
import io
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec
import uvloop

from bench.checks.prefixes import cache_folder, first_token, ids_of
from bench.checks.report import Report
from bench.harness import ROOT, RunningServer, clean_environment, wait_until
from cache_store.directory import CacheDirectory
from protocol import AsyncClient, Client
from server.cli import main as cli


def kills(report: Report, model: Path, *, rounds: int, requests: int = 40) -> None:
    """kill -9 of the engine while it writes: after each restart the same tokens, and directory and index agree."""
    draw = random.Random(11)
    prompts = [ids_of(1500, f"kill {number}") for number in range(4)]

    def tokens(client: Client, ids: Sequence[int]) -> tuple[list[int], int]:
        stream = client.generate(
            ids=ids, max_tokens=8, temperature=0, ignore_eos=True, return_ids=True, return_text=False
        )
        got = [token for delta in stream for token in delta.ids]
        assert stream.end is not None
        return got, stream.end.usage.cached_tokens

    with cache_folder() as folder:
        with RunningServer(model, "--no-prefix-cache") as server, Client(endpoint=server.endpoint) as client:
            wanted = [tokens(client, ids)[0] for ids in prompts]
        found = 0
        wrong = []
        for round_ in range(rounds):
            with RunningServer(model, "--ssd-cache-dir", str(folder / "prefix"), "--ssd-write-mbps", "2") as server:
                timer = threading.Timer(draw.uniform(0.1, 1.5), _kill, [server.pids()["engine"]])
                with contextlib.suppress(Exception), Client(endpoint=server.endpoint) as client:
                    timer.start()
                    for number in range(requests):
                        got, cached = tokens(client, prompts[number % 4])
                        found += cached
                        if got != wanted[number % 4]:
                            wrong.append((round_, number))
                        tokens(client, ids_of(1500, f"kill {round_} {number}"))
                timer.join()
        with (
            RunningServer(model, "--ssd-cache-dir", str(folder / "prefix")) as server,
            Client(endpoint=server.endpoint) as client,
        ):
            last = [tokens(client, ids) for ids in prompts]
        report.measured("tokens_found", found)
        report.measured("tokens_found_at_the_end", [cached for _, cached in last])
        report.expect([got for got, _ in last] == wanted and not wrong, "every answer is that of a cold run", wrong)
        if rounds > 1:  # a single kill may come before anything is written
            report.expect(any(cached for _, cached in last), "what was written is found again")
        command = [sys.executable, "-m", "server.cli", "cache", "verify", "--ssd-cache-dir", str(folder / "prefix")]
        verified = subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True)
        report.measured("verify", verified.stdout.strip().splitlines()[-3:])
        report.expect(verified.returncode == 0, "`callboard cache verify` finds nothing wrong", verified.stdout)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def cache_command(directory: Path, *words: str) -> tuple[int, str]:
    """What `callboard cache` says of a directory, and its exit code."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = cli(["cache", *words, "--ssd-cache-dir", str(directory)])
    return code, said.getvalue()


def written_blocks(directory: Path) -> int:
    """How many blocks the index has."""
    return len(cache_command(directory, "ls", "--lines", "0")[1].splitlines())


def looked_after(report: Report, server: RunningServer, client: Client, directory: Path, ids: list[int]) -> None:
    """`callboard cache` says what a running server has, checks and removes it, and the server goes on."""

    def command(*words: str) -> str:
        code, said = cache_command(directory, *words)
        report.expect(code == 0, f"`callboard cache {' '.join(words)}` finds nothing wrong", said)
        return said

    def blocks() -> int:
        return written_blocks(directory)

    wait_until(lambda: blocks() == server.health()["prefix_cache"]["memory_blocks"], 20.0, "all blocks are written")
    report.expect(str(blocks()) in command("stats").split(), "the statistics count the blocks")
    report.expect("All blocks are right" in command("verify"), "all blocks are right")
    command("prune", "--max-gb", "0")
    report.expect(blocks() == 0, "pruned to nothing")
    found = [first_token(client, ids)[1], first_token(client, ids_of(600, "more of it"))[1]]
    report.expect(found == [1024, 0], "what is in memory stays", found)
    wait_until(lambda: blocks() == 2, 20.0, "new blocks are written")
    command("clear")
    report.expect(blocks() == 0, "cleared")


@contextmanager
def running_streams(endpoint: str, count: int) -> Iterator[list[int]]:
    """So many streams that run meanwhile: how many tokens each has got. Raises what ended one of them."""
    got = [0] * count
    over = threading.Event()

    async def read(client: AsyncClient, number: int) -> None:
        stream = client.generate(ids=ids_of(40, f"runs {number}"), max_tokens=60_000, temperature=0, ignore_eos=True)
        async for delta in stream:
            got[number] += delta.count
            if over.is_set():
                stream.cancel()
        if not over.is_set():
            raise RuntimeError("a stream ended by itself")

    async def read_all() -> None:
        async with AsyncClient(endpoint=endpoint) as client:
            await asyncio.gather(*(read(client, number) for number in range(count)))

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(lambda: uvloop.run(read_all()))
        try:
            wait_until(lambda: reading.done() or all(got), 20.0, "the streams have begun")
            yield got
        finally:
            over.set()
            reading.result(60.0)


def under_streams(report: Report, server: RunningServer, client: Client, directory: Path, ids: list[int]) -> None:
    """While streams run the index is deleted, and then the whole directory: they go on, and requests are served."""

    def goes_on(case: str, seed: str) -> None:
        before = [*got]
        found = [first_token(client, ids)[1], first_token(client, ids_of(1200, seed))[1]]
        report.expect(found == [1024, 0], f"{case}: what is in memory is found, the rest is computed", found)
        wait_until(lambda: all(now > then + 20 for now, then in zip(got, before, strict=True)), 20.0, "tokens come")
        complaints = server.log().count("prefix blocks are not written")
        report.expect(complaints <= 1, f"{case}: the log says it at most once", complaints)

    first_token(client, ids_of(1200, "kept"))
    wait_until(lambda: written_blocks(directory) >= 4, 20.0, "blocks are written")
    with running_streams(server.endpoint, 4) as got:
        there = written_blocks(directory)
        shutil.rmtree(CacheDirectory(directory).index)
        goes_on("the index is gone", "without an index")
        wait_until(lambda: written_blocks(directory) >= there + 4, 20.0, "an index has all blocks, old and new")
        cache_command(directory, "verify")  # says what is wrong if the server has not mended it before
        code, said = cache_command(directory, "verify")
        report.expect(code == 0, "the index is gone: `callboard cache verify` finds nothing wrong afterwards", said)
        shutil.rmtree(directory, ignore_errors=True)
        goes_on("the directory is gone", "without a directory")
    report.expect(server.health()["status"] == "ok", "the server is well")


def trouble(report: Report, model: Path) -> None:
    """The directory is looked after with `callboard cache`, its index and it itself are removed while streams run, and
    two servers share one: streams go on. Warm prompts are found by the first who asks."""
    with cache_folder() as folder:
        arguments = ("--ssd-cache-dir", str(folder / "prefix"))
        text = "A story of a cat and a dog. " * 60
        (folder / "warm.jsonl").write_text(msgspec.json.encode({"prompt": text}).decode())
        warm = ("--warm-prompts", str(folder / "warm.jsonl"))
        with RunningServer(model, *arguments, *warm) as server, Client(endpoint=server.endpoint) as client:
            wait_until(lambda: server.health()["prefix_cache"]["memory_blocks"] > 0 and server.is_idle(), 20.0)
            stream = client.generate(text + "And then", max_tokens=1)
            stream.text()
            assert stream.end is not None
            found_warm = stream.end.usage.cached_tokens
            report.expect(found_warm >= 256, "the first request finds the warm prompt", found_warm)
            ids = ids_of(1200, "trouble")
            first_token(client, ids)
            looked_after(report, server, client, folder / "prefix", ids)
            under_streams(report, server, client, folder / "prefix", ids)
        with RunningServer(model, *arguments) as one, Client(endpoint=one.endpoint) as client:
            first_token(client, ids)
            with RunningServer(model, *arguments, name="two") as two, Client(endpoint=two.endpoint) as other:
                both = [first_token(other, ids_of(1200, "theirs"))[1], first_token(client, ids)[1]]
                report.expect(both == [0, 1024], "two servers share one directory", both)
                two.terminate()
                report.expect(two.wait(60) == 0, "the second stops in good order")
            report.expect(first_token(client, ids)[1] == 1024, "the first goes on")
