"""The HTTP worker process: `python -P -m server.worker --run DIR --index I --epoch E --lifeline FD --socket FD
--options JSON`.

Started by the supervisor only, which owns the listening socket that several workers share. One thread runs the
event loop with uvicorn, the app and the control channel; the client's connection to the streamer has a thread of
its own. Signals are the supervisor's business; a worker ends by a `Stop` order, by SIGKILL, or with its lifeline.
"""

import argparse
import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import structlog
import uvicorn
import zmq

from protocol.control import ControlChannel, hold_lifeline
from protocol.messages import (
    ActorReport,
    Alive,
    Drain,
    ModelAnswer,
    ModelsState,
    Probe,
    Ready,
    StartFailed,
    Stop,
    SupervisorOrder,
    SystemState,
)
from server.app import make_app
from server.backends import Backends
from server.connection import http_connection
from server.house_link import HouseLink
from server.key_file import ApiKey
from server.logs import configure_logs
from server.options import API_KEYS_VARIABLE, HttpOptions
from server.traces import Traces

ROLE = "http"
BACKLOG = 4096
STOP_TIME = 0.8  # seconds that open responses have to end after a `Stop`, before their connections are cut

log = structlog.get_logger()


class HttpServer(uvicorn.Server):
    """uvicorn without signals, which says when it listens."""

    def __init__(self, config: uvicorn.Config, on_listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_listening = on_listening

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals as they are: ignored."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections."""
        await super().startup(sockets)
        self._on_listening()

    def abort_connections(self) -> None:
        """Cut the connections that are left, whatever is still unsent."""
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()


class Worker:
    """One incarnation of an HTTP worker: the server, and the supervisor's orders to it."""

    def __init__(
        self,
        index: int,
        epoch: int,
        control: ControlChannel,
        listener: socket.socket,
        options: HttpOptions,
        run_dir: Path,
    ) -> None:
        self._index = index
        self._epoch = epoch
        self._control = control
        self._listener = listener
        house = HouseLink(self._report) if options.models else None
        names = options.models or [options.model_name]
        self._backends = Backends(names, f"{ROLE}-{index}.{epoch}", house, options.load_wait)
        self._traces = Traces(options.otlp_endpoint, f"{ROLE}-{index}.{epoch}", os.environ) if options.traces else None
        self._server = HttpServer(
            uvicorn.Config(
                make_app(self._backends, options, run_dir / "log", self._traces),
                http=http_connection(options.max_header_bytes, options.idle_timeout, options.body_timeout),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=options.idle_timeout,
                timeout_graceful_shutdown=2,
                ssl_certfile=options.tls_cert or None,
                ssl_keyfile=options.tls_key or None,
            ),
            self._report_ready,
        )

    async def run(self) -> None:
        """Serve until a `Stop` order."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._control.socket.FD, self._serve_control)
        try:
            await self._server.serve([self._listener])
        finally:
            loop.remove_reader(self._control.socket.FD)
            if self._traces is not None:
                self._traces.close()

    def _report_ready(self) -> None:
        self._control.report(Ready(ROLE, self._index, self._epoch, os.getpid()))
        self._serve_control()
        log.info("ready")

    def _report(self, message: ActorReport) -> None:
        self._control.report(message)
        # It may have swallowed the descriptor's sign that an order came, and nothing would be heard any more.
        asyncio.get_running_loop().call_soon(self._serve_control)

    def _serve_control(self) -> None:
        # The socket's descriptor tells of changes only, and sending can swallow one: read until nothing is left,
        # also after what was sent in answer.
        while orders := self._control.orders():
            for order in orders:
                self._obey(order)

    def _obey(self, order: SupervisorOrder) -> None:
        match order:
            case Probe(seq=seq):
                streams = self._backends.in_work
                self._control.report(Alive(ROLE, self._index, self._epoch, seq, streams, http=self._backends.answered))
            case SystemState():
                self._backends.on_state(order)
            case ModelsState():
                self._backends.on_models(order)
            case ModelAnswer():
                self._backends.on_answer(order)
            case Drain():
                self._backends.on_drain()
            case Stop():
                self._backends.on_stop(order)
                self._server.should_exit = True
                asyncio.get_running_loop().call_later(STOP_TIME, self._server.abort_connections)


def _run_loop(worker: Worker) -> None:
    make_loop: Callable[[], asyncio.AbstractEventLoop]
    try:
        import uvloop

        make_loop = uvloop.new_event_loop
    except ImportError:
        make_loop = asyncio.new_event_loop
    loop = make_loop()
    asyncio.set_event_loop(loop)
    loop.run_until_complete(worker.run())


def main() -> int:
    """Run one HTTP worker. Exit code 0 after a `Stop` order, 1 after a failure."""
    parser = argparse.ArgumentParser(prog="python -m server.worker", description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--index", type=int, required=True)
    parser.add_argument("--epoch", type=int, required=True)
    parser.add_argument("--lifeline", type=int, required=True)
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--options", required=True, help="HttpOptions as JSON")
    args = parser.parse_args()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    hold_lifeline(args.lifeline)
    control = ControlChannel(zmq.Context.instance(), args.run, ROLE, args.index, args.epoch)
    code = 0
    try:
        options = msgspec.json.decode(args.options, type=HttpOptions)
        keys = msgspec.json.decode(os.environ.pop(API_KEYS_VARIABLE, "[]"), type=list[ApiKey])
        options = msgspec.structs.replace(options, api_keys=[*options.api_keys, *keys])
        configure_logs(options.log_level, actor=f"{ROLE}{args.index}", pid=os.getpid(), epoch=args.epoch)
        listener = socket.socket(fileno=args.socket)
        listener.setblocking(False)
        _run_loop(Worker(args.index, args.epoch, control, listener, options, args.run))
    except Exception as error:
        log.exception("failed")
        control.report(StartFailed(ROLE, args.index, args.epoch, f"{type(error).__name__}: {error}"))
        code = 1
    control.close()
    zmq.Context.instance().destroy(linger=500)
    return code


if __name__ == "__main__":
    exit_code = main()
    sys.stderr.flush()
    # A thread may still be connecting to a streamer that is gone, and nothing waits for it.
    os._exit(exit_code)
