"""Writing events to clients that take nothing any more."""

import asyncio
from typing import Any

import pytest

from server.sse import SseWriter


@pytest.mark.parametrize("at", ["last write", "keep-alive"])
def test_a_write_that_waits_too_long_ends_the_connection(at: str) -> None:
    async def run() -> None:
        gone = asyncio.Event()

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.body" and message["body"]:
                await gone.wait()

        writer = SseWriter(send, 0.05, 0.2, gone.set)
        if at == "last write":
            await writer.start()
            await writer.finish(b"data: [DONE]\n\n")
        else:
            await writer.start()
            beside = asyncio.create_task(writer.keep_alive(lambda: True))
            await gone.wait()
            beside.cancel()

    asyncio.run(asyncio.wait_for(run(), 20))


def test_a_write_in_time_ends_nothing() -> None:
    async def run() -> None:
        aborted: list[bool] = []

        async def send(message: dict[str, Any]) -> None:
            await asyncio.sleep(0)

        writer = SseWriter(send, 0.05, 0.1, lambda: aborted.append(True))
        beside = asyncio.create_task(writer.keep_alive(lambda: True))
        await writer.write(b"data: x\n\n")
        await asyncio.sleep(0.3)
        beside.cancel()
        await writer.finish(b"data: [DONE]\n\n")
        await asyncio.sleep(0.2)
        assert not aborted

    asyncio.run(run())
