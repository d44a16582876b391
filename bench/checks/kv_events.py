"""Check of the KV events: a subscriber of a real server rebuilds the tree of its prefix blocks."""

import random
import socket

import msgspec
import zmq

from bench.checks.report import Report
from bench.harness import RunningServer
from cache_store.keys import BLOCK_SIZE
from protocol import Client

QUIET_MS = 1500  # without an event for so long, all have come


def two_free_ports() -> int:
    """A free port whose successor is free, too; below those that the system gives to others by itself."""
    for port in random.sample(range(20_000, 30_000, 2), 100):
        try:
            for each in (port, port + 1):
                socket.create_server(("127.0.0.1", each)).close()
        except OSError:
            continue
        return port
    raise RuntimeError("no two free ports")


def kv_events(report: Report, server: RunningServer, port: int) -> None:
    """Prompts with a common beginning give a tree with one trunk; replay gives what was missed."""
    context = zmq.Context()
    subscriber, asker = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    subscriber.connect(f"tcp://127.0.0.1:{port}")
    subscriber.subscribe(b"")
    asker.connect(f"tcp://127.0.0.1:{port + 1}")
    asker.rcvtimeo = 10_000
    trunk, prompts = [7] * (3 * BLOCK_SIZE), 4
    with Client(endpoint=server.endpoint) as client:
        for number in range(prompts):
            ids = [*trunk, *[100 + number] * (2 * BLOCK_SIZE + 1)]
            client.generate(ids=ids, max_tokens=2, ignore_eos=True).text()
    heard = 0
    while subscriber.poll(QUIET_MS):
        subscriber.recv_multipart()
        heard += 1
    asker.send_multipart([b"", (0).to_bytes(8, "big")])
    tree: dict[bytes, bytes | None] = {}
    numbers = []
    while (frames := asker.recv_multipart())[2]:
        numbers.append(int.from_bytes(frames[1], "big"))
        for name, *fields in msgspec.msgpack.decode(frames[2])[1]:
            if name == "BlockStored":
                tree.update(dict.fromkeys(fields[0], fields[1]))
            elif name == "BlockRemoved":
                for key in fields[0]:
                    tree.pop(key)
            else:
                tree.clear()
    report.measured("batches_heard", heard)
    report.measured("batches_replayed", len(numbers))
    report.expect(heard > 0, "events are published as they happen")
    report.expect(numbers == list(range(len(numbers))), "the replay has every batch, in order")
    report.expect(len(tree) == 3 + 2 * prompts, "each block is there once, the common ones too", len(tree))
    children: dict[bytes | None, int] = {}
    for parent in tree.values():
        children[parent] = children.get(parent, 0) + 1
    report.expect(children.get(None) == 1 and max(children.values()) == prompts, "the tree has one trunk", children)
    context.destroy(linger=0)
