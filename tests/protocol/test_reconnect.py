"""Clients whose server is replaced: what is lost is said, and the next requests reach the successor."""

import asyncio
import os
import queue
import shutil
import tempfile
import threading
import time
from pathlib import Path

import msgspec
import pytest
import zmq

from protocol import AsyncClient, Client
from protocol.codec import client_codec, encode
from protocol.endpoints import ServerRecord, find_successor, record_path, run_root
from protocol.errors import ServerLost, ServerNotFound
from protocol.messages import Deltas, End, Generate, Hello, ListModels, Models, Ping, Pong, Welcome


class Server:
    """A streamer incarnation that greets, and finishes every stream but those called "held"."""

    def __init__(self, run_dir, number):
        self.endpoint = f"ipc://{run_dir}/streamer-{number}"
        self.number = number
        self.asked = []
        self._over = threading.Event()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(self.endpoint)
        record = ServerRecord("fake", os.getpid(), self.endpoint, "http://x", 1, str(run_dir))
        run_root().mkdir(parents=True, exist_ok=True)
        record_path("fake").write_bytes(msgspec.json.encode(record))
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self):
        while not self._over.is_set():
            if not self._socket.poll(20):
                continue
            peer, frame = self._socket.recv_multipart()
            message = client_codec.decode(frame)
            self.asked.append(message)
            answer = None
            match message:
                case Hello():
                    answer = Welcome(1, self.number, 64)
                case Ping(seq=seq):
                    answer = Pong(seq, self.number)
                case ListModels(ref=ref):
                    answer = Models(ref, [])
                case Generate(ref=ref, label="held"):
                    answer = Deltas([ref], ["a"], [b""], [1])
                case Generate(ref=ref):
                    answer = Deltas([ref], [f"by {self.number}"], [b""], [1], [End(ref, "finished", "stop")])
            if answer is not None:
                self._socket.send_multipart([peer, encode(answer)])

    def close(self):
        self._over.set()
        self._thread.join()
        self._context.destroy(linger=0)
        Path(self.endpoint.removeprefix("ipc://")).unlink(missing_ok=True)


@pytest.fixture
def start():
    """Starts incarnations of one server, each in the other's place."""
    run_dir = Path(tempfile.mkdtemp(prefix="cb-", dir="/tmp"))
    servers = []

    def start():
        servers.append(Server(run_dir, len(servers) + 1))
        return servers[-1]

    yield start
    for server in servers:
        server.close()
    record_path("fake").unlink(missing_ok=True)
    shutil.rmtree(run_dir)


def test_a_client_says_what_is_lost_and_goes_on_with_the_successor(start):
    first = start()
    lost = queue.Queue()
    with Client(endpoint=first.endpoint) as client:
        client.on_lost = lost.put  # on another thread, behind the streams' own errors
        assert client.generate("x").text() == "by 1"
        held = [client.generate("x", label="held"), client.generate("x", label="held")]
        assert next(held[0]).text == "a"
        next(held[1])
        first.close()
        second = start()
        for stream in held:
            with pytest.raises(ServerLost, match="stream held is lost after 1 tokens") as caught:
                stream.text()
            assert caught.value.streams == ("held", "held")
        lost.get(timeout=10)
        assert client.generate("x").text() == "by 2"
        assert client.models() == []
        assert [m.label for m in second.asked if isinstance(m, Generate)] == [""]
        assert lost.empty()


def test_requests_made_while_there_is_no_server_wait_for_it(start):
    first = start()
    with Client(endpoint=first.endpoint) as client:
        held = client.generate("x", label="held")
        next(held)
        first.close()
        with pytest.raises(ServerLost):
            held.text()
        waiting = client.generate("y")
        start()
        assert waiting.text() == "by 2"


def test_a_server_that_stays_away_is_lost_for_good(start):
    first = start()
    with Client(endpoint=first.endpoint, reconnect=0.5) as client:
        held = client.generate("x", label="held")
        next(held)
        first.close()
        with pytest.raises(ServerLost):
            held.text()
        with pytest.raises(ServerLost):
            client.generate("y").text()
        until = time.monotonic() + 5
        while time.monotonic() < until:
            try:
                client.generate("z").cancel()
            except ServerLost:
                return
        raise AssertionError("it never gave up")


def test_the_async_client_reconnects_too(start):
    first = start()

    async def run():
        async with AsyncClient(endpoint=first.endpoint) as client:
            held = client.generate("x", label="held")
            async for delta in held:
                assert delta.text == "a"
                break
            await asyncio.to_thread(first.close)
            await asyncio.to_thread(start)
            with pytest.raises(ServerLost, match="held"):
                await held.text()
            return await client.generate("x").text()

    assert asyncio.run(run()) == "by 2"


def test_the_successor_is_found_by_run_directory(start):
    first = start()
    second = start()
    assert find_successor(first.endpoint) == second.endpoint
    assert find_successor("tcp://127.0.0.1:5555") == "tcp://127.0.0.1:5555"
    with pytest.raises(ServerNotFound):
        find_successor("ipc:///elsewhere/streamer-1")
    assert find_successor("ipc:///elsewhere/streamer-1", "fake") == second.endpoint


def test_the_successor_is_found_under_another_home(start, monkeypatch, tmp_path):
    first = start()
    second = start()
    run_dir = tmp_path / "other" / "run" / "1234abcd"
    run_dir.mkdir(parents=True)
    (record,) = run_root().glob("*.json")
    text = record.read_text().replace(os.path.dirname(second.endpoint.removeprefix("ipc://")), str(run_dir))
    (run_dir.parent / "fake.json").write_text(text)
    monkeypatch.setenv("CALLBOARD_HOME", str(tmp_path / "ours"))
    assert find_successor(f"ipc://{run_dir}/streamer-1") == f"ipc://{run_dir}/{second.endpoint.rpartition('/')[2]}"
    with pytest.raises(ServerNotFound):
        find_successor(first.endpoint)


def test_a_connection_that_nobody_waits_for_any_more_is_closed(start, monkeypatch):
    first = start()
    genuine = AsyncClient._connect
    connected = threading.Event()

    def slowly(client):
        time.sleep(0.3)
        made = genuine(client)
        connected.set()
        return made

    monkeypatch.setattr(AsyncClient, "_connect", slowly)

    def threads():
        return [thread for thread in threading.enumerate() if thread.name == "callboard-client"]

    before = len(threads())

    async def give_up():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(AsyncClient.connect(endpoint=first.endpoint), 0.1)
        await asyncio.to_thread(connected.wait, 10)

    asyncio.run(give_up())
    until = time.monotonic() + 10
    while len(threads()) > before:
        assert time.monotonic() < until
        time.sleep(0.02)
