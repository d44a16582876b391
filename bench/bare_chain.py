"""The bare chain: what three processes and ZeroMQ take by themselves for one small request.

    python bench/bare_chain.py [--requests N]

A client, a relay and a worker stand where client, streamer and engine do: DEALER to ROUTER, DEALER to DEALER, over ipc.
They pass the frames on as they are: no protocol, no scheduling, no sampling. The worker runs the same model on as many
ids, one forward and an argmax, as the engine does for a lone short prompt. What a round trip takes beyond that is the
cost of four hops between processes that a forward has made cold; on an idle machine most of it is waking threads.
"""

import argparse
import statistics
import struct
import sys
import tempfile
import time
from pathlib import Path

import zmq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.mlx_child import CHILD, MlxChild
from protocol.sockets import connect_dealer

IDS = list(range(1000, 1016))
REQUEST_BYTES = 160  # about those of a Generate of 16 ids
REST = 0.003  # seconds between two requests
WARM = 30  # requests before anything is counted
_TOOK = struct.Struct("<d")


def measure(model: Path, requests: int) -> list[float]:
    """Seconds of each round trip beyond the worker's in the model. Raises zmq.Again when an answer takes too long."""
    with (
        tempfile.TemporaryDirectory() as folder,
        MlxChild("bench.bare_chain", "relay", folder),
        MlxChild("bench.bare_chain", "worker", folder, str(model)),
        zmq.Context() as context,
    ):
        socket = connect_dealer(context, _end(folder, "relay"))
        socket.rcvtimeo = 60_000
        beyond = []
        for _ in range(requests + WARM):
            time.sleep(REST)
            began = time.perf_counter()
            socket.send(bytes(REQUEST_BYTES))
            answer = socket.recv()
            beyond.append(time.perf_counter() - began - _TOOK.unpack(answer)[0])
        socket.close(linger=0)
    return beyond[WARM:]


def _end(folder: str, name: str) -> str:
    return f"ipc://{folder}/{name}"


def _relay(folder: str) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    clients, worker = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    clients.bind(_end(folder, "relay"))
    worker.bind(_end(folder, "worker"))
    poller = zmq.Poller()
    poller.register(clients, zmq.POLLIN)
    poller.register(worker, zmq.POLLIN)
    other = {clients: worker, worker: clients}
    while True:
        for socket, _ in poller.poll():
            other[socket].send_multipart(socket.recv_multipart())


def _work(folder: str, path: str) -> None:
    import mlx.core as mx  # not in the client's process

    from actors.engine.draws import draw_greedy
    from actors.engine.model import load

    model = load(path)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(_end(folder, "worker"))
    while True:
        client, _ = socket.recv_multipart()
        began = time.perf_counter()
        caches = model.new_caches()
        token = draw_greedy(model.next_logits(mx.array([IDS], mx.uint32), caches))
        mx.eval(token, [cache.state for cache in caches])
        token.tolist()
        socket.send_multipart([client, _TOOK.pack(time.perf_counter() - began)])


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=300, help="(300)")
    parser.add_argument(CHILD, nargs="+", dest="child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        role, *rest = args.child
        if role == "relay":
            _relay(*rest)
        _work(*rest)
    from bench.models import tiny_model

    beyond = sorted(measure(tiny_model(), args.requests))
    deciles = [round(beyond[len(beyond) * tenth // 10] * 1000, 3) for tenth in (1, 5, 9)]
    print(f"beyond the model: p50 {statistics.median(beyond) * 1000:.3f} ms; p10, p50, p90: {deciles}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
