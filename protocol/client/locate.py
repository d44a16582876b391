"""`Locator`: where a client has to connect, the first time and after each loss: at the streamer of its model.

With several models the house is asked to load it, which may take a while. Used by `Client` and `AsyncClient`, on the
thread that connects.
"""

import os
import time
from collections.abc import Callable
from itertools import count
from typing import NamedTuple

import zmq

from protocol.client.connection import Connection
from protocol.codec import CodecError, encode, model_answer_codec
from protocol.endpoints import HOUSE_SOCKET, find_endpoint, find_server, find_successor, is_alive
from protocol.errors import LOADING, MODEL_NOT_FOUND, SERVER_LOST, RequestRejected, ServerLost, ServerNotFound
from protocol.messages import ModelAnswer, ModelCard, ModelOrder
from protocol.sockets import connect_dealer

LOAD_WAIT = 120.0  # seconds that a client waits for its model to be loaded
SLICE = 0.2  # seconds between two looks at whether the server lives and we are still wanted


class Locator:
    """Finds the server `name`, or the one at `endpoint` (see `protocol.endpoints.find_endpoint`), and of its models the
    one called `model` (None: the first)."""

    def __init__(self, name: str | None, endpoint: str | None, model: str | None, load_wait: float) -> None:
        self._name = name
        self._endpoint = endpoint
        self._model = model
        self._load_wait = load_wait
        self._house: _House | None = None
        self._found = ""
        self._closed = False

    @property
    def of_several(self) -> bool:
        """Whether the server found has several models, which come and go."""
        return self._house is not None

    def connect(self, connect: Callable[[str], Connection]) -> tuple[Connection, str]:
        """Make the first connection, by `connect`; also what requests have to name as their model.

        Raises ServerNotFound, and RequestRejected when the model can't be had.
        """
        until = time.monotonic() + self._load_wait
        while True:
            self._house = self._find_house()
            self._found = self._load(self._house) if self._house else find_endpoint(self._name, self._endpoint)
            try:
                connection = connect(self._found)
                break
            except ServerNotFound:  # of several models this one may have been unloaded again just now
                if self._house is None or time.monotonic() > until:
                    raise
        try:
            return connection, self._named(connection.welcome.models)
        except RequestRejected:
            connection.close()
            raise

    def find_again(self) -> str:
        """The endpoint to connect to after a loss. Raises ServerNotFound and RequestRejected."""
        if self._house is None:
            return find_successor(self._found, self._name)
        if not self._house.is_there():
            if self._name is None:
                raise ServerNotFound("server_not_found", "the server is gone")
            self._house = self._find_house()
            if self._house is None:  # one of a single model has its name now
                return find_server(self._name).endpoint
        return self._load(self._house)

    def close(self) -> None:
        """End a search that goes on, from any thread."""
        self._closed = True

    def _named(self, cards: list[ModelCard]) -> str:
        """What requests have to name as their model, by the cards of the server: an adapter, or "".

        Raises RequestRejected when a server of one model has another one.
        """
        if not self._model:
            return ""
        known = {card.name: card for of_base in cards for card in of_base.all()}
        if self._model in known:
            return self._model if known[self._model].parent else ""
        if self._house is None:
            raise RequestRejected(
                MODEL_NOT_FOUND, f"there is no model {self._model!r}; there are {', '.join(known)}", param="model"
            )
        return ""  # an alias, which the house knows

    def _find_house(self) -> "_House | None":
        endpoint = self._endpoint or (os.environ.get("CALLBOARD_ENDPOINT") if self._name is None else None)
        if not endpoint:
            record = find_server(self._name)
            return _House(record.models, record.pid) if record.models else None
        return _House(endpoint) if os.path.basename(endpoint) == HOUSE_SOCKET else None

    def _load(self, house: "_House") -> str:
        until = time.monotonic() + self._load_wait
        with zmq.Context[zmq.Socket[bytes]]() as context:
            socket = connect_dealer(context, house.endpoint)
            try:
                socket.send(encode(ModelOrder(next(_rids), "load", self._model or "")), zmq.NOBLOCK)
                while not socket.poll(int(SLICE * 1000)):
                    if self._closed or not house.is_there():
                        raise ServerNotFound("server_not_found", "the server is gone")
                    if time.monotonic() >= until:
                        text = f"the model {self._model or 'named first'} was not loaded within {self._load_wait:g} s"
                        raise RequestRejected(LOADING, text, param="model", retry_after=1.0)
                return _endpoint_of(model_answer_codec.decode(socket.recv()))
            except (zmq.ZMQError, CodecError) as error:
                raise ServerLost(SERVER_LOST, f"the server does not tell of its models: {error}") from None
            finally:
                socket.close(linger=0)


class _House(NamedTuple):
    """Where orders about several models go, and the process there, where that is known."""

    endpoint: str
    pid: int | None = None

    def is_there(self) -> bool:
        path = self.endpoint.removeprefix("ipc://")
        return os.path.exists(path) and (self.pid is None or is_alive(self.pid))


_rids = count(1)


def _endpoint_of(answer: ModelAnswer) -> str:
    if answer.code:
        raise RequestRejected(answer.code, answer.message, param="model", retry_after=answer.retry_after)
    return answer.endpoint


def ask_house(models: str, order: ModelOrder, seconds: float) -> ModelAnswer:
    """Send one order to the house at `models` and wait for its answer. Raises ServerLost when none comes."""
    with zmq.Context[zmq.Socket[bytes]]() as context:
        socket = connect_dealer(context, models)
        try:
            socket.send(encode(order), zmq.NOBLOCK)
            if not socket.poll(int(seconds * 1000)):
                raise ServerLost(SERVER_LOST, f"the server did not answer within {seconds:g} s")
            return model_answer_codec.decode(socket.recv())
        except (zmq.ZMQError, CodecError) as error:
            raise ServerLost(SERVER_LOST, f"the server does not tell of its models: {error}") from None
        finally:
            socket.close(linger=0)
