"""Socket set-up: the one place that sets ZeroMQ options.

High-water marks sit far above what admission control lets in, so that reaching one is a fault and never a
normal wait; sends are non-blocking everywhere.
"""

import zmq

from protocol.keys import DOMAIN, ClientKeys, ServerKeys

CLIENT_HWM = 100_000
MAX_MESSAGE = 64 << 20  # bytes; a larger frame ends the connection that sent it


def _prepare(socket: "zmq.Socket[bytes]") -> "zmq.Socket[bytes]":
    socket.linger = 0
    socket.sndhwm = CLIENT_HWM
    socket.rcvhwm = CLIENT_HWM
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
    return socket


def bind_router(context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str) -> "zmq.Socket[bytes]":
    """A ROUTER that raises for unknown peers instead of dropping silently.

    Raises zmq.ZMQError when the endpoint can't be bound.
    """
    socket = _prepare(context.socket(zmq.ROUTER))
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.BACKLOG, 1024)
    socket.bind(endpoint)
    return socket


def bind_tcp(socket: "zmq.Socket[bytes]", address: str, keys: ServerKeys | None) -> None:
    """Have a bound socket listen at `HOST:PORT` too. With `keys` there CURVE alone is spoken, and ZAP decides.

    What was bound before keeps its own ways: an endpoint takes the socket's options as they are when it is bound.
    Raises zmq.ZMQError.
    """
    if address.startswith("["):
        socket.setsockopt(zmq.IPV6, 1)
    if keys is not None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
    socket.bind(f"tcp://{address}")


def connect_dealer(
    context: "zmq.Context[zmq.Socket[bytes]]",
    endpoint: str,
    identity: bytes | None = None,
    keys: ClientKeys | None = None,
) -> "zmq.Socket[bytes]":
    """A DEALER connected to one peer. Without an identity the peer gives it a random one. With `keys` it speaks CURVE.

    Raises zmq.ZMQError.
    """
    socket = _prepare(context.socket(zmq.DEALER))
    if identity is not None:
        socket.identity = identity
    try:
        if endpoint.startswith("tcp://["):
            socket.setsockopt(zmq.IPV6, 1)
        if keys is not None:
            socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server.encode())
            socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
        socket.connect(endpoint)
    except zmq.ZMQError:
        socket.close()
        raise
    return socket
