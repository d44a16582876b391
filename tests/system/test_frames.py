"""A conversation in frames alone: a ZeroMQ socket, bytes made by hand, and nothing of ours but docs/protocol.md.

What a client in C would do. `unpack` reads as much of MessagePack as the server sends.
"""

import struct
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from bench.harness import RunningServer

WELCOME, PONG, ACCEPTED, DELTAS, CALL_FAILED = 20, 22, 23, 24, 29


def unpack(frame: bytes) -> Any:
    """The one value in a frame."""
    value, rest = _value(frame)
    assert rest == b""
    return value


def _value(data: bytes) -> tuple[Any, bytes]:
    first, data = data[0], data[1:]
    if first <= 0x7F:
        return first, data
    if first >= 0xE0:
        return first - 0x100, data
    if first in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[first], data
    if first in (0xCA, 0xCB, 0xCC, 0xCD, 0xCE, 0xCF, 0xD0, 0xD1, 0xD2, 0xD3):
        form = ">" + "fdBHIQbhiq"[(0xCA, 0xCB, 0xCC, 0xCD, 0xCE, 0xCF, 0xD0, 0xD1, 0xD2, 0xD3).index(first)]
        size = struct.calcsize(form)
        return struct.unpack(form, data[:size])[0], data[size:]
    if 0xA0 <= first <= 0xBF:
        return data[: first - 0xA0].decode(), data[first - 0xA0 :]
    if first in (0xC4, 0xC5, 0xC6, 0xD9, 0xDA, 0xDB):
        width = {0: 1, 1: 2, 2: 4}[(first - 0xC4) if first < 0xD0 else (first - 0xD9)]
        size = int.from_bytes(data[:width], "big")
        raw, data = data[width : width + size], data[width + size :]
        return (raw if first < 0xD0 else raw.decode()), data
    if 0x80 <= first <= 0x9F or first in (0xDC, 0xDD, 0xDE, 0xDF):
        width = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}.get(first, 0)
        count = int.from_bytes(data[:width], "big") if width else first & 0x0F
        is_map = first <= 0x8F or first in (0xDE, 0xDF)
        if is_map:
            count *= 2
        data, items = data[width:], []
        for _ in range(count):
            item, data = _value(data)
            items.append(item)
        return dict(zip(items[::2], items[1::2], strict=True)) if is_map else items, data
    raise AssertionError(f"the server sent a byte {first:#x} that this reader doesn't know")


@pytest.fixture
def socket(server: RunningServer) -> Iterator[zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.rcvtimeo = 20_000
    dealer.connect(server.endpoint)
    yield dealer
    dealer.close()
    context.term()


def test_a_stream_in_frames_made_by_hand(socket: zmq.Socket[bytes]):
    socket.send(b"\x93\x01\x01\xa1C")  # [1, 1, "C"]: Hello, version 1
    tag, version, incarnation, window, models = unpack(socket.recv())
    assert (tag, version) == (WELCOME, 1)
    assert models[0][0] == "tiny"

    socket.send(b"\x92\x02\x07")  # [2, 7]: Ping
    assert unpack(socket.recv()) == [PONG, 7, incarnation]

    # [3, 1, [0, nil, nil, 100, true], nil, nil, ids, "", "", true, true]: 100 tokens after two ids, as both
    ids = struct.pack("<2I", 700, 800)
    sampling = b"\x95\x00\xc0\xc0\x64\xc3"
    socket.send(b"\x9a\x03\x01" + sampling + b"\xc0\xc0\xc4\x08" + ids + b"\xa0\xa0\xc3\xc3")
    accepted = unpack(socket.recv())
    assert accepted[:2] == [ACCEPTED, 1]
    assert accepted[3] == 2
    text, tokens, taken, end = "", [], 0, None
    while end is None:
        tag, refs, texts, packed, counts, ends, *_ = unpack(socket.recv())
        assert tag == DELTAS
        for ref, piece, four, count in zip(refs, texts, packed, counts, strict=True):
            assert ref == 1
            text += piece
            tokens += struct.unpack(f"<{len(four) // 4}I", four)
            assert len(four) == 4 * count
            taken += 1
            if taken % (window // 4) == 0:
                socket.send(b"\x93\x05\x91\x01\x91" + bytes([window // 4]))  # [5, [1], [16]]: Credit
        end = ends[0] if ends else None
    assert end[:3] == [1, "finished", "length"]
    assert end[5][:2] == [2, 100]
    assert len(tokens) == 100

    # [7, 2, ids]: Detokenize
    socket.send(b"\x93\x07\x02\xc5" + struct.pack(">H", 400) + struct.pack("<100I", *tokens))
    answer = unpack(socket.recv())
    assert answer == [27, 2, text]


def test_a_stream_is_cancelled_by_hand_and_a_wrong_frame_is_answered(socket: zmq.Socket[bytes]):
    socket.send(b"\x92\x01\x01")  # [1, 1]: Hello without a name
    assert unpack(socket.recv())[0] == WELCOME
    # [3, 9, [], "hello"]: a prompt with the model's own options, and no end in sight
    socket.send(b"\x94\x03\x09\x90\xa5hello")
    assert unpack(socket.recv())[:2] == [ACCEPTED, 9]
    socket.send(b"\x92\x04\x09")  # [4, 9]: Cancel
    ends: list[Any] = []
    while not ends:
        tag, _, _, _, _, ends, *_ = unpack(socket.recv())
        assert tag == DELTAS
    assert ends[0][:4] == [9, "cancelled", "", "cancelled"]
    socket.send(b"\x92\x04\x09")  # once more: nothing happens
    socket.send(b"\x92\x03\x01")  # [3, 1]: Generate without options is no message
    tag, ref, code, message, *_ = unpack(socket.recv())
    assert (tag, ref, code) == (CALL_FAILED, -1, "invalid_request")
    assert "version 1" in message
