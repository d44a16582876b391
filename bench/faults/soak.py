"""`Soak`: a real server under load for a while, with a fault every few seconds, in rounds.

In a round streams come and go, over HTTP and ZeroMQ, greedy and seeded, from ids and from texts. When it is over, all
that was begun has to have ended, exactly once, with the tokens of an undisturbed run; and no row, process, socket file
or descriptor may be left. Runs on the event loop of the check.
"""

import asyncio
import contextlib
import os
import random
import resource
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import psutil
import zmq

from bench.checks.crowds import reached
from bench.faults.garbage import http_requests, zmq_frames
from bench.faults.inject import Faults
from bench.faults.streams import Asked, Stream, first_difference, running
from bench.harness import RunningServer
from bench.load.over_http import build_request
from protocol import AsyncClient
from protocol.codec import encode
from protocol.endpoints import ServerRecord
from protocol.messages import PROTOCOL_VERSION, Hello
from protocol.sockets import connect_dealer

SAMPLE = 2.0  # seconds between two looks at memory
JUMP = 600.0  # seconds that a clock jumps
SLOW = 0.5  # seconds more for a block on a slow disk
EXCUSED = 6.0  # seconds from a death of the streamer or an HTTP worker in which streams may be lost to it
HANG = 13.0  # seconds more when it only hangs: it is killed after ten
SHARED = {"log", "log.1", "control", "config.json", "lock"}


class Fault(msgspec.Struct, frozen=True):
    """What is done to whom. `front`: clients of the streamer or an HTTP worker may lose streams to it."""

    name: str
    actor: str = ""
    number: int = 0

    @property
    def front(self) -> bool:
        """Whether streams may be lost to it."""
        return self.actor.startswith(("streamer", "http"))


ENGINE_KILLED = Fault("kill", "engine", signal.SIGKILL)
FAULTS = (
    *(ENGINE_KILLED, ENGINE_KILLED, ENGINE_KILLED),
    Fault("stop", "engine", signal.SIGSTOP),
    Fault("replace", "supervisor", signal.SIGUSR1),
    Fault("out of memory", "engine"),
    *(Fault("kill", f"tokenizer{i}", signal.SIGKILL) for i in range(2)),
    Fault("stop", "tokenizer0", signal.SIGSTOP),
    Fault("kill", "http0", signal.SIGKILL),
    Fault("stop", "http0", signal.SIGSTOP),
    Fault("kill", "streamer", signal.SIGKILL),
    Fault("stop", "streamer", signal.SIGSTOP),
    Fault("vanish"),
    Fault("stall"),
    Fault("garbage"),
    Fault("full disk"),
    Fault("slow disk"),
    Fault("clock jump"),
)
SHORT = (
    Fault("full disk"),
    ENGINE_KILLED,
    Fault("slow disk"),
    Fault("kill", "tokenizer0", signal.SIGKILL),
    Fault("replace", "supervisor", signal.SIGUSR1),
    Fault("clock jump"),
    Fault("garbage"),
    Fault("stall"),
    Fault("vanish"),
    Fault("kill", "http0", signal.SIGKILL),
    Fault("kill", "streamer", signal.SIGKILL),
)


class Memory:
    """Resident sizes of all processes of a server over time, by name and pid, in bytes."""

    def __init__(self, server: RunningServer) -> None:
        self._server = server
        self.samples: dict[tuple[str, int], list[tuple[float, int]]] = {}

    async def watch(self) -> None:
        """Sample until cancelled."""
        while True:
            with contextlib.suppress(OSError, psutil.Error):
                for name, pid in (await asyncio.to_thread(self._server.pids)).items():
                    size = psutil.Process(pid).memory_info().rss
                    self.samples.setdefault((name, pid), []).append((time.monotonic(), size))
            await asyncio.sleep(SAMPLE)


class Soak:
    """One run. `finished` counts streams, `lost` those that a front fault excuses, `wrong` lists all that is wrong."""

    def __init__(
        self, server: RunningServer, switches: Faults, reference: Sequence[Stream], streams: int, every: float
    ) -> None:
        self._server = server
        self._switches = switches
        self._reference = reference
        self._streams = streams
        self._every = every
        self._draw = random.Random(streams)
        self._excuses: list[tuple[float, float]] = []
        self._next = 0
        self._stalled: list[asyncio.StreamWriter] = []
        self.memory = Memory(server)
        self.faults: Counter[str] = Counter()
        self.finished = 0
        self.lost = 0
        self.wrong: list[str] = []
        self.different: list[Stream] = []
        self.began = time.monotonic()

    async def run(self, rounds: Sequence[Sequence[Fault]]) -> None:
        """Run these rounds, each with its faults in order."""
        watch = asyncio.create_task(self.memory.watch())
        async with running([watch]):
            for faults in rounds:
                await self._round(faults)

    async def _round(self, faults: Sequence[Fault]) -> None:
        over = asyncio.Event()
        await asyncio.to_thread(self._server.wait_ready, 60.0)  # the streamer may be at another endpoint by now
        async with AsyncClient(endpoint=self._server.endpoint) as client:
            tasks = [asyncio.create_task(self._stream(client, number, over)) for number in range(self._streams)]
            async with running(tasks):
                for fault in faults:
                    await asyncio.sleep(self._every)
                    await self._inflict(fault)
                await asyncio.sleep(self._every)
                self._switches.disk()
                over.set()
                done, late = await asyncio.wait(tasks, timeout=120)
                for task in done:
                    task.result()
                for writer in self._stalled:
                    writer.transport.abort()
                self._stalled.clear()
                if late:
                    self.wrong.append(f"{len(late)} streams have not ended after 120 s")
        await self._look_for_leaks()

    async def _stream(self, client: AsyncClient, number: int, over: asyncio.Event) -> None:
        """One stream after another."""
        while not over.is_set():
            self._next += 1
            model = self._reference[self._next % len(self._reference)]
            stream = Stream(model.asked)
            await (stream.over_http(self._server.url) if number % 2 else stream.over_zmq(client))
            self._judge(model, stream)
            if stream.error:
                await asyncio.sleep(0.2)

    def _judge(self, model: Stream, stream: Stream) -> None:
        index = stream.asked.index
        if stream.ends != 1:
            self.wrong.append(f"request {index} ended {stream.ends} times: {stream.error}")
        if not stream.error:
            self.finished += 1
            if stream.tokens != stream.asked.tokens:
                self.wrong.append(f"request {index} finished with {stream.tokens} tokens")
            if first_difference(model, stream) is not None:
                self.different.append(stream)
        elif any(stream.began < end and stream.ended > begin for begin, end in self._excuses):
            self.lost += 1
        else:
            self.wrong.append(f"request {index} was lost: {stream.error}")

    # Faults.

    async def _inflict(self, fault: Fault) -> None:
        if "disk" in fault.name:
            self._switches.disk(full=fault.name == "full disk", slow=SLOW * (fault.name == "slow disk"))
            self.faults[fault.name] += 1
            return
        if fault.name == "clock jump":
            self._switches.clock_jump(JUMP)
            self.faults[fault.name] += 1
            return
        with contextlib.suppress(OSError):
            pids = await asyncio.to_thread(self._ready_pids)
            if fault.actor and fault.actor not in pids:
                self.faults["skipped: the actor was being replaced"] += 1
                return
            self.faults[f"{fault.name} {fault.actor}".strip()] += 1
            if fault.front:
                now = time.monotonic()
                self._excuses.append((now, now + EXCUSED + (HANG if fault.name == "stop" else 0.0)))
            if fault.number:
                os.kill(pids[fault.actor], fault.number)
            elif fault.name == "out of memory":
                _limit_memory(pids[fault.actor])
            elif fault.name == "vanish":
                await asyncio.gather(*(self._vanish() for _ in range(20)))
            elif fault.name == "stall":
                await asyncio.gather(*(self._stall() for _ in range(4)))
            else:
                await self._send_garbage()

    def _ready_pids(self) -> dict[str, int]:
        health = self._server.health()
        assert self._server.record is not None
        pids = {actor["name"]: actor["pid"] for actor in health["actors"] if actor["state"] == "ready"}
        return pids | {"supervisor": self._server.record.pid}

    async def _vanish(self) -> None:
        stream = Stream(Asked(self._draw.randrange(1000), 2000))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stream.over_http(self._server.url), self._draw.random())

    async def _stall(self) -> None:
        """A client that reads no more than its buffer takes, until the round is over."""
        body = b'{"prompt": [1000, 1001], "max_tokens": 30000, "ignore_eos": true, "stream": true, "logprobs": 5}'
        _, writer = await asyncio.open_connection("127.0.0.1", self._server.port, limit=1024)
        writer.write(build_request(self._server.url, "/v1/completions", body))
        self._stalled.append(writer)

    async def _send_garbage(self) -> None:
        for request in http_requests(self._server.url, 50, seed=self._next):
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
                writer.write(request)
                await asyncio.sleep(0.005)
                writer.transport.abort()
        await asyncio.to_thread(self._send_frames)

    def _send_frames(self) -> None:
        """To every socket in the run directory, the inner ones too."""
        record = (self._server.home / "run" / f"{self._server.name}.json").read_bytes()
        run_dir = Path(msgspec.json.decode(record, type=ServerRecord).run_dir)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        for path in run_dir.iterdir():
            if not path.is_socket():
                continue
            socket = connect_dealer(context, f"ipc://{path}")
            if path.name.startswith("streamer"):
                socket.send(encode(Hello(PROTOCOL_VERSION, "garbage")))
            for frames in zmq_frames(50, seed=self._next):
                socket.send_multipart(frames)
            socket.close(linger=200)
        context.term()

    # Leaks.

    async def _look_for_leaks(self) -> None:
        server = self._server
        try:
            await reached(lambda: server.health()["status"] == "ok" and server.is_idle(), 60, "idle, and all are back")
        except TimeoutError:
            self.wrong.append(f"after a round the server is not idle and healthy: {server.health()}")
            return
        assert server.record is not None
        run_dir = Path(server.record.run_dir)
        actors = server.health()["actors"]
        expected = SHARED | {f"{a['name']}-{a['epoch']}" for a in actors if not a["name"].startswith("http")}
        expected |= {f"engine-{a['epoch']}.trail" for a in actors if a["name"] == "engine"}
        await self._settled(lambda: {path.name for path in run_dir.iterdir()} - expected, "files")
        wanted = {actor["pid"] for actor in actors} | {server.record.pid}
        await self._settled(lambda: {str(p.pid) for p in server.leftover() if p.pid not in wanted}, "processes")
        await self._settled(lambda: {str(server.health()["prefix_cache"]["acquired_blocks"])} - {"0"}, "held blocks")

    async def _settled(self, left_over: Callable[[], set[str]], what: str) -> None:
        try:
            await reached(lambda: not left_over(), 5, what)
        except TimeoutError:
            self.wrong.append(f"{what} are left over: {sorted(left_over())}")


def _limit_memory(pid: int) -> None:
    """Let a process take hardly more memory than it has. Linux alone can do that to another process."""
    if hasattr(resource, "prlimit"):
        size = psutil.Process(pid).memory_info().vms + (1 << 20)
        resource.prlimit(pid, resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))
