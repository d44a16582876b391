"""Check of the KV events: a subscriber of a real server rebuilds the tree of its prefix blocks."""

import random
import socket
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import zmq

from bench.checks.report import Report
from bench.harness import RunningServer
from cache_store.keys import BLOCK_SIZE
from protocol import Client

Socket = zmq.Socket[bytes]
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


class Stored(NamedTuple):
    """What a follower knows of a block: the one before it, and the number of its LoRA adapter."""

    parent: bytes | None
    lora: int | None


def kv_events(report: Report, server: RunningServer, port: int, adapters: Sequence[str]) -> None:
    """Prompts with a common beginning give a tree with one trunk; replay gives what was missed. `adapters` are those of
    the server, which give trees of their own."""
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
    heard = len(_heard(subscriber))
    tree: dict[bytes, Stored] = {}
    numbers = _replay(asker, tree)
    report.measured("batches_heard", heard)
    report.measured("batches_replayed", len(numbers))
    report.expect(heard > 0, "events are published as they happen")
    report.expect(numbers == list(range(len(numbers))), "the replay has every batch, in order")
    report.expect(len(tree) == 3 + 2 * prompts, "each block is there once, the common ones too", len(tree))
    children: dict[bytes | None, int] = {}
    for block in tree.values():
        children[block.parent] = children.get(block.parent, 0) + 1
    report.expect(children.get(None) == 1 and max(children.values()) == prompts, "the tree has one trunk", children)
    known = set(tree)
    with Client(endpoint=server.endpoint) as client:
        for name in adapters:
            client.generate(ids=[*trunk, 1], model=name, max_tokens=2, ignore_eos=True).text()
    _heard(subscriber)
    _replay(asker, tree)
    loras = sorted(str(block.lora) for key, block in tree.items() if key not in known)
    wanted = [str(number) for number in range(1, len(adapters) + 1) for _ in range(3)]
    report.expect(loras == wanted, "blocks of an adapter have its number", loras)
    report.expect(all(tree[key].lora is None for key in known), "blocks of the model itself have none")
    _replaced(report, server, subscriber, asker, tree)
    context.destroy(linger=0)


def _replaced(
    report: Report, server: RunningServer, subscriber: Socket, asker: Socket, tree: dict[bytes, Stored]
) -> None:
    """A new engine begins with an empty tree and counts anew; its follower finds out."""
    server.kill("engine")
    with Client(endpoint=server.endpoint) as client:
        client.generate(ids=[9] * (2 * BLOCK_SIZE + 1), max_tokens=2, ignore_eos=True).text()
    numbers = _heard(subscriber)
    again = _replay(asker, tree)
    report.expect(again == list(range(len(again))) and set(numbers) <= set(again), "a new engine counts from 0 again")
    report.expect(len(tree) == 2, "after a new engine's AllBlocksCleared only its own blocks are there", len(tree))


def _heard(subscriber: Socket) -> list[int]:
    """Numbers of the batches that come until no more do."""
    numbers = []
    while subscriber.poll(QUIET_MS):
        numbers.append(int.from_bytes(subscriber.recv_multipart()[1], "big"))
    return numbers


def _replay(asker: Socket, tree: dict[bytes, Stored]) -> list[int]:
    """Have all batches sent again and apply them; their numbers."""
    asker.send_multipart([b"", (0).to_bytes(8, "big")])
    numbers = []
    while (frames := asker.recv_multipart())[2]:
        numbers.append(int.from_bytes(frames[1], "big"))
        for name, *fields in msgspec.msgpack.decode(frames[2])[1]:
            if name == "BlockStored":
                tree.update(dict.fromkeys(fields[0], Stored(fields[1], fields[4])))
            elif name == "BlockRemoved":
                for key in fields[0]:
                    tree.pop(key)
            else:
                tree.clear()
    return numbers
