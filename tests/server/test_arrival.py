"""When a request came: what Linux says of it, and what is told of it."""

import struct
import time

import pytest
from http_worker import HttpWorker, chat

from server.arrival import LAST_DATA, LONGEST, waited


@pytest.mark.parametrize(
    ("info", "seconds"),
    [
        (bytes(LAST_DATA) + struct.pack("I", 140), 0.14),
        (bytes(LAST_DATA) + struct.pack("II", 7, 9), 0.007),
        (bytes(LAST_DATA) + struct.pack("I", int(LONGEST) * 1000 + 1), 0.0),
        (bytes(LAST_DATA), 0.0),
        (b"", 0.0),
    ],
)
def test_what_the_kernel_says(info: bytes, seconds: float):
    assert waited(info) == seconds


@pytest.mark.parametrize("stream", [True, False])
def test_the_streamer_hears_when_a_request_came_and_when_its_text_was_written(worker: HttpWorker, stream: bool):
    before = time.monotonic()
    assert worker.client.post("/v1/chat/completions", json=chat(stream=stream)).status_code == 200
    request = worker.streamer.stream().request
    assert before - 0.02 <= request.received <= time.monotonic()  # the kernel counts in steps of up to 10 ms
    worker.wait_until(lambda: worker.streamer.ttfts)
    [ttft] = worker.streamer.ttfts
    assert ttft > 0
