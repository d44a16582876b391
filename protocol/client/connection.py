"""One connection to a server: a DEALER socket on a thread of its own.

The thread hands every message that arrives to `on_message`, pings each second and notices a server that is gone. So a
program that is busy, or reads slowly, is never taken for dead. After a loss it connects to the server's successor: what
is queued meanwhile waits for it. `Client` and `AsyncClient` are built on it.

Messages are sent on the caller's thread where that can be done at once, which spares waking another one; the socket is
used under a lock, and the thread waits for its descriptor, not for the socket itself.
"""

import math
import os
import socket as stdlib_socket
import threading
import time
from collections import deque
from collections.abc import Callable

import zmq

from protocol.codec import CodecError, encode, server_codec
from protocol.errors import (
    PROTOCOL_MISMATCH,
    SERVER_LOST,
    CallboardError,
    ServerLost,
    ServerNotFound,
)
from protocol.keys import ClientKeys
from protocol.messages import (
    PROTOCOL_VERSION,
    Cancel,
    ClientMessage,
    Credit,
    Hello,
    Ping,
    Pong,
    Refused,
    ServerMessage,
    Welcome,
)
from protocol.sockets import connect_dealer

PING_INTERVAL = 1.0  # seconds
SILENCE_LIMIT = 3.0  # seconds without a word from the server until it counts as lost
CONNECT_TIMEOUT = 5.0  # seconds that the first connection may take
GREETING_TIMEOUT = 1.0  # seconds until a successor that doesn't answer is looked for anew
LONGEST_PAUSE = 60.0  # seconds
RECONNECT_PAUSE = 0.2  # seconds between two looks for the server's successor


class Connection:
    """Owns the socket and the thread. Thread-safe: `send` and `close` may be called from anywhere.

    `on_message` and `on_lost` are called on the connection's thread and must not block. `on_lost` is called once for
    each server that was lost: all that was under way is over then. With a `reconnect` time, in seconds, a successor is
    looked for that long, by `find`, which returns its endpoint or raises ServerNotFound; when there is none `on_lost`
    is called a last time, and the connection is of no use, as it is after the first loss without such a time. With
    `on_demand` it is looked for once there is something to ask it.
    """

    def __init__(
        self,
        endpoint: str,
        on_message: Callable[[ServerMessage], None],
        on_lost: Callable[[CallboardError], None],
        *,
        name: str = "",
        connect_timeout: float = CONNECT_TIMEOUT,
        find: Callable[[], str] | None = None,
        reconnect: float = 0.0,
        on_demand: bool = False,
        keys: ClientKeys | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.lost: CallboardError | None = None
        self._on_message = on_message
        self._on_lost = on_lost
        self._name = name or f"pid {os.getpid()}"
        self._find = find or (lambda: endpoint)
        self._reconnect = reconnect
        self._on_demand = on_demand
        self._wanted = False  # something was sent that wants an answer
        self._keys = keys
        self._outbox: deque[bytes] = deque()
        self._dealer: zmq.Socket[bytes] | None = None  # once the server has answered
        self._using = threading.Lock()  # the socket, on whatever thread
        self._wake_out, self._wake_in = stdlib_socket.socketpair()
        self._wake_out.setblocking(False)
        self._wake_in.setblocking(False)
        self._closing = False
        self._welcome: Welcome | None = None
        self._welcomed = threading.Event()
        self._incarnation: int | None = None  # of the server at the other end, once it has answered
        self._cut: CallboardError | None = None  # why the present socket is of no use any more
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._thread = threading.Thread(target=self._run, name="callboard-client", daemon=True)
        self._thread.start()
        if not self._welcomed.wait(connect_timeout):
            self.close()
            text = f"no server answered at {endpoint} within {connect_timeout:g} s"
            if endpoint.startswith("tcp://"):
                text += "; it may not know this client's key" if keys else "; it may want keys (see `callboard keys`)"
            raise ServerNotFound("server_not_found", text)
        if self._welcome is None:
            self.close()
            assert self.lost is not None
            raise self.lost

    @property
    def welcome(self) -> Welcome:
        """The server's answer to our hello."""
        assert self._welcome is not None
        return self._welcome

    def send(self, message: ClientMessage) -> None:
        """Queue a message for the server.

        Raises CodecError when it has no wire form and ServerLost when the connection is lost for good.
        """
        frame = encode(message)
        if self.lost is not None:
            raise self.lost
        if self._closing:
            raise ServerLost(SERVER_LOST, "the client is closed")
        if not isinstance(message, Cancel | Credit):
            self._wanted = True
        if not self._send_now(frame):
            self._outbox.append(frame)
            self._wake()

    def _send_now(self, frame: bytes) -> bool:
        """Send on this thread; False when it has to be queued: there is no server, or something waits before it."""
        with self._using:
            if self._dealer is None or self._outbox:
                return False
            try:
                self._dealer.send(frame, zmq.NOBLOCK)
                readable = self._readable(self._dealer)
            except zmq.ZMQError:
                return False
        if readable:
            self._wake()  # sending may have used up the descriptor's sign that something came
        return True

    @staticmethod
    def _readable(dealer: "zmq.Socket[bytes]") -> bool:
        return bool(int(dealer.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    @property
    def is_over(self) -> bool:
        """Whether nothing can be sent any more: it is closed, or lost for good."""
        return self._closing or self.lost is not None

    def close(self) -> None:
        """Send what is queued, then end the thread. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)

    def _wake(self) -> None:
        try:
            self._wake_in.send(b"\0")
        except (BlockingIOError, OSError):
            pass  # the pipe is full, so the thread is awake anyway, or it has ended

    # All below runs on the connection's thread.

    def _run(self) -> None:
        try:
            served = self._serve_one(self.endpoint)
            while served and self._welcome is not None and self._may_reconnect():
                if self._on_demand:
                    self._pause(math.inf, until_wanted=True)
                until = time.monotonic() + self._reconnect
                while not (served := self._serve_successor()) and not self._closing and time.monotonic() < until:
                    self._pause(RECONNECT_PAUSE)
        finally:
            self._give_up()
            self._context.destroy(linger=500)
            self._wake_out.close()
            self._wake_in.close()

    def _may_reconnect(self) -> bool:
        return self._reconnect > 0 and not self._closing and isinstance(self._cut, ServerLost)

    def _serve_successor(self) -> bool:
        """Look for the server once; True when it was there, and is lost again."""
        try:
            endpoint = self._find()
        except CallboardError:
            return False
        return self._serve_one(endpoint, GREETING_TIMEOUT)

    def _serve_one(self, endpoint: str, patience: float = 0.0) -> bool:
        """Serve one socket until it is of no use. Whether a server answered; 0 `patience` waits for that for ever."""
        self._cut = None
        welcome, self._incarnation = self._welcome, None
        dealer = None
        try:
            dealer = connect_dealer(self._context, endpoint, keys=self._keys)
            self._serve(dealer, patience)
        except zmq.ZMQError as error:
            self._lose(ServerLost(SERVER_LOST, f"the connection to {endpoint} failed: {error}"))
        finally:
            with self._using:
                self._dealer = None
            if dealer is not None:
                # What a lost server has not taken would otherwise hold up the next one.
                dealer.close(linger=0 if self._cut else 500)
        if self._incarnation is None and welcome is not None:
            return False  # nothing was sent, so what is queued can wait on
        if self._cut is not None and self._welcome is not None:
            self._wanted = False
            self._outbox.clear()
            if self._may_reconnect():
                self._on_lost(self._cut)
        return True

    def _give_up(self) -> None:
        if self._closing:
            return
        self.lost = self._cut or ServerLost(SERVER_LOST, "the connection has ended")
        self._welcomed.set()
        self._on_lost(self.lost)

    def _pause(self, seconds: float, *, until_wanted: bool = False) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_out.fileno(), zmq.POLLIN)
        until = time.monotonic() + seconds
        while not self._closing and (left := until - time.monotonic()) > 0 and not (until_wanted and self._wanted):
            poller.poll(max(1, int(min(left, LONGEST_PAUSE) * 1000)))
            self._drain_wakeups()

    def _serve(self, dealer: "zmq.Socket[bytes]", patience: float) -> None:
        poller = zmq.Poller()
        poller.register(dealer.FD, zmq.POLLIN)  # which tells of changes only
        poller.register(self._wake_out.fileno(), zmq.POLLIN)
        dealer.send(encode(Hello(PROTOCOL_VERSION, self._name)), zmq.NOBLOCK)
        began = heard = time.monotonic()
        next_ping = heard + PING_INTERVAL
        seq = 0
        while self._cut is None:
            due = next_ping if self._incarnation is None else min(next_ping, heard + SILENCE_LIMIT)
            with self._using:
                waiting = self._readable(dealer)
            if not waiting and poller.poll(max(0, math.ceil((due - time.monotonic()) * 1000))):
                self._drain_wakeups()
            if self._receive(dealer):
                heard = time.monotonic()
            if self._incarnation is not None:
                with self._using:
                    self._send_queued(dealer)
                    self._dealer = dealer
            if self._closing:
                return
            now = time.monotonic()
            if patience and self._incarnation is None and now - began > patience:
                self._lose(ServerLost(SERVER_LOST, "the server did not answer"))
                return
            if now - due > PING_INTERVAL:
                heard = now  # a late turn means this process slept, not the server: ask before judging
            if self._incarnation is not None and now - heard >= SILENCE_LIMIT:
                self._lose(ServerLost(SERVER_LOST, f"the server was silent for {SILENCE_LIMIT:g} s"))
                return
            if now >= next_ping:
                seq += 1
                with self._using:
                    dealer.send(encode(Ping(seq)), zmq.NOBLOCK)
                next_ping = now + PING_INTERVAL

    def _drain_wakeups(self) -> None:
        try:
            while self._wake_out.recv(4096):
                pass
        except BlockingIOError:
            pass

    def _send_queued(self, dealer: "zmq.Socket[bytes]") -> None:
        while self._outbox:
            try:
                dealer.send(self._outbox[0], zmq.NOBLOCK)
            except zmq.Again:
                return  # the server does not read; its silence decides
            self._outbox.popleft()

    def _receive(self, dealer: "zmq.Socket[bytes]") -> bool:
        received = False
        while self._cut is None:
            try:
                with self._using:
                    frame = dealer.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            received = True
            try:
                message = server_codec.decode(frame)
            except CodecError:
                continue  # of a later version
            self._handle(message)
        return received

    def _handle(self, message: ServerMessage) -> None:
        match message:
            case Welcome(incarnation=incarnation):
                if self._incarnation not in (None, incarnation):
                    self._lose(ServerLost(SERVER_LOST, "the server was replaced"))
                    return
                self._welcome, self._incarnation = message, incarnation
                self._welcomed.set()
            case Refused(version=version, message=text):
                if version == PROTOCOL_VERSION:  # it has forgotten us, or never knew us
                    self._lose(ServerLost(SERVER_LOST, f"the server refuses this connection: {text}"))
                else:
                    self._lose(CallboardError(PROTOCOL_MISMATCH, text))
            case Pong(incarnation=incarnation):
                if self._incarnation not in (None, incarnation):
                    self._lose(ServerLost(SERVER_LOST, "the server was replaced"))
            case _:
                self._on_message(message)

    def _lose(self, error: CallboardError) -> None:
        if self._cut is None:
            self._cut = error
