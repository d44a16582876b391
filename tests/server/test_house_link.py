"""What a worker tells the house: wants, as long as somebody waits, and orders with their answers."""

import asyncio
from typing import Any

import pytest

from protocol.messages import ModelAnswer, ModelOrder, WantModel
from server import house_link
from server.errors import ApiError
from server.house_link import HouseLink


def test_a_want_is_repeated_until_nobody_waits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(house_link, "REPEAT", 0.001)
    told: asyncio.Queue[Any] = asyncio.Queue()

    async def run() -> None:
        link = HouseLink(told.put_nowait)
        waiting = {"a": 1}
        link.want("a", waiting)
        waiting["a"] = 2
        link.want("a", waiting)
        assert [await told.get() for _ in range(5)] == [WantModel("a", 1), *[WantModel("a", 2)] * 4]
        waiting.clear()
        link._repeat()
        assert link._repeating is None

    asyncio.run(asyncio.wait_for(run(), 10))


def test_orders_get_their_own_answers():
    told: list[Any] = []

    async def run() -> None:
        link = HouseLink(told.append)
        first, second = (asyncio.ensure_future(link.order("load", name, None)) for name in "ab")
        await asyncio.sleep(0)
        assert told == [ModelOrder(1, "load", "a"), ModelOrder(2, "load", "b")]
        link.on_answer(ModelAnswer(7))  # of nobody
        link.on_answer(ModelAnswer(2, "loading", "it can't be loaded", retry_after=4.0))
        link.on_answer(ModelAnswer(1, endpoint="ipc:///x"))
        assert (await first).endpoint == "ipc:///x"
        with pytest.raises(ApiError, match="it can't be loaded") as caught:
            await second
        assert (caught.value.status, caught.value.retry_after) == (503, 4.0)

    asyncio.run(run())
