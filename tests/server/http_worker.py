"""`HttpWorker`: the real worker process between a fake supervisor and a fake streamer. A test tool."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec
from fake_router import PATIENCE
from fake_streamer import FakeStreamer
from fake_supervisor import FakeSupervisor, system_state

from protocol.endpoints import ipc_endpoint
from protocol.messages import SystemState
from server.key_file import ApiKey, plain_key
from server.options import HttpOptions


class HttpWorker:
    """One worker of index 0 and epoch 7, listening on a free port of 127.0.0.1. `close` leaves nothing behind."""

    def __init__(self, serving: bool = True, **options: Any) -> None:
        self.run_dir = Path(tempfile.mkdtemp(prefix="cb-", dir="/tmp"))
        self.supervisor = FakeSupervisor(self.run_dir)
        self.streamers: list[FakeStreamer] = []
        self.streamer = self.new_streamer()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        lifeline_out, self._lifeline = os.pipe()
        self._log = open(self.run_dir / "log", "wb+")  # noqa: SIM115  # closed in close()
        keys = [key if isinstance(key, ApiKey) else plain_key(key) for key in options.pop("api_keys", ())]
        settings = HttpOptions(model_name="tiny", api_keys=keys, **options)
        command = [sys.executable, "-P", "-m", "server.worker", "--run", str(self.run_dir)]
        command += ["--index", "0", "--epoch", "7", "--lifeline", str(lifeline_out)]
        command += ["--socket", str(self._listener.fileno()), "--options", msgspec.json.encode(settings).decode()]
        fds = (lifeline_out, self._listener.fileno())
        self.process = subprocess.Popen(command, stderr=self._log, stdin=subprocess.DEVNULL, pass_fds=fds)
        os.close(lifeline_out)
        if settings.tls_cert:
            self.url = self.url.replace("http:", "https:")
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE, verify=False)
        self.supervisor.wait_ready()
        if serving:
            self.serve()

    def new_streamer(self, incarnation: int = 1) -> FakeStreamer:
        """Another streamer incarnation, at an endpoint of its own."""
        streamer = FakeStreamer(ipc_endpoint(self.run_dir, f"streamer-{len(self.streamers)}"), incarnation)
        self.streamers.append(streamer)
        return streamer

    def tell(self, state: SystemState) -> None:
        """Broadcast a state; it is known to the worker on return."""
        self.supervisor.order(state)
        self.supervisor.probe()

    def serve(self, epoch: int = 3) -> None:
        """Say that all is well, and wait until the worker serves."""
        self.tell(system_state("ok", self.streamer.endpoint, epoch))
        self.wait_until(lambda: self.client.get("/ready").status_code == 200)

    def wait_until(self, condition: Any) -> None:
        """Ask until `condition` holds."""
        until = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < until, "what was waited for did not happen"
            time.sleep(0.02)

    def log_lines(self) -> list[dict[str, Any]]:
        """What the worker has logged so far."""
        lines = (self.run_dir / "log").read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def wait_log(self, **fields: Any) -> dict[str, Any]:
        """Wait for a log line with these fields, and return the last one."""
        found: list[dict[str, Any]] = []

        def look() -> bool:
            found[:] = [line for line in self.log_lines() if fields.items() <= line.items()]
            return bool(found)

        self.wait_until(look)
        return found[-1]

    def log_text(self) -> str:
        """All that was written to stderr."""
        return (self.run_dir / "log").read_text()

    def connect(self, receive_buffer: int | None = None) -> socket.socket:
        """A raw connection to the worker."""
        raw = socket.socket()
        if receive_buffer is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        raw.settimeout(PATIENCE)
        raw.connect(("127.0.0.1", self.port))
        return raw

    def drop_lifeline(self) -> None:
        """What a dying supervisor does."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def close(self) -> None:
        """End the process and the fakes. What went wrong inside shows as a traceback in the log."""
        self.client.close()
        self.drop_lifeline()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()
        log = self.log_text()
        self._listener.close()
        self.supervisor.close()
        for streamer in self.streamers:
            streamer.close()
        shutil.rmtree(self.run_dir, ignore_errors=True)
        assert "Traceback" not in log, log


def post(raw: socket.socket, path: str, body: Any, headers: Mapping[str, str] | None = None) -> None:
    """Send one POST over a raw connection."""
    data = json.dumps(body).encode()
    fields = {"host": "127.0.0.1", "content-type": "application/json", "content-length": len(data)} | (headers or {})
    head = f"POST {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    raw.sendall(head.encode() + b"\r\n" + data)


def read_until(raw: socket.socket, mark: bytes) -> bytes:
    """Read from a raw connection until `mark` has come."""
    data = bytearray()
    while data.find(mark, max(0, len(data) - 65536 - len(mark))) < 0:
        piece = raw.recv(65536)
        assert piece, f"the connection ended: {bytes(data)!r}"
        data += piece
    return bytes(data)


def read_answer(raw: socket.socket) -> tuple[int, bytes]:
    """Read one response that says its length: status and body."""
    data = read_until(raw, b"\r\n\r\n")
    head, body = data.split(b"\r\n\r\n", 1)
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    while len(body) < length:
        body += raw.recv(65536)
    return int(head.split()[1]), body


def chat(text: str = "Hi", **fields: Any) -> dict[str, Any]:
    """Body of a chat request."""
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}


def events(text: str) -> list[Any]:
    """The data of each event of an SSE response; the end mark stays text. Comments are left out."""
    found: list[Any] = []
    for block in text.split("\n\n"):
        if block.startswith("data: "):
            data = block.removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
    return found
