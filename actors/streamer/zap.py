"""`Doorkeeper`: decides which clients may speak CURVE with the streamer (ZAP, ZeroMQ's RFC 27).

ZeroMQ asks it, over a socket of its own in the streamer's loop, about each connection to an endpoint with keys. The
key file is read again when it has changed, so that clients can be added and taken away while the server runs.
"""

from pathlib import Path

import structlog
import zmq
import zmq.utils.z85

from actors.base import Actor
from protocol.keys import KeysError, ServerKeys, read_server_keys

log = structlog.get_logger()

ENDPOINT = "inproc://zeromq.zap.01"
MAX_REFUSED = 1024  # clients that are logged once each; they try again and again


class Doorkeeper:
    """Answers ZeroMQ's questions from the key file at `path`."""

    def __init__(self, actor: Actor, path: Path) -> None:
        """Raises KeysError."""
        self._path = path
        self.keys: ServerKeys = read_server_keys(path)
        self._read_at = path.stat().st_mtime_ns
        self._actor = actor
        self._refused: set[tuple[bytes, bytes]] = set()
        self._socket = actor.context.socket(zmq.ROUTER)
        self._socket.bind(ENDPOINT)
        actor.add_socket(self._socket, self._answer)

    def close(self) -> None:
        """Answer no more."""
        self._actor.remove_socket(self._socket)

    def _answer(self) -> None:
        while True:
            try:
                peer, empty, version, request, _, address, _, mechanism, *credentials = self._socket.recv_multipart(
                    zmq.NOBLOCK
                )
            except zmq.Again:
                return
            key = zmq.utils.z85.encode(credentials[0]) if mechanism == b"CURVE" else b""
            known = self._known(key)
            if not known and (address, key) not in self._refused and len(self._refused) < MAX_REFUSED:
                self._refused.add((address, key))
                log.warning("a client without a known key was refused", address=address.decode(errors="replace"))
            status, text = (b"200", b"OK") if known else (b"400", b"not a client of this server")
            self._socket.send_multipart([peer, empty, version, request, status, text, b"", b""])

    def _known(self, public: bytes) -> bool:
        try:
            changed = self._path.stat().st_mtime_ns
            if changed != self._read_at:
                self.keys = read_server_keys(self._path)
                self._read_at = changed
        except (OSError, KeysError) as error:
            log.error("the key file can't be read; what was known holds", error=str(error))
        return self.keys.lets_in(public)
