"""`HouseLink`: what an HTTP worker of several models tells the house, on its control channel. On the event loop."""

import asyncio
import itertools
from collections.abc import Callable, Mapping

from protocol.messages import ActorReport, Charge, ModelAnswer, ModelOrder, Quota, WantModel
from server.errors import ApiError

REPEAT = 1.0  # seconds between two words on models that requests wait for


class HouseLink:
    """Wants and orders. `report` sends without waiting."""

    def __init__(self, report: Callable[[ActorReport], None]) -> None:
        self._report = report
        self._wanted: Mapping[str, int] = {}
        self._repeating: asyncio.TimerHandle | None = None
        self._rids = itertools.count(1)
        self._orders: dict[int, asyncio.Future[ModelAnswer]] = {}

    def want(self, model: str, waiting: Mapping[str, int]) -> None:
        """A request has begun to wait for `model`. `waiting` has how many wait for each one, now and later: that is
        told again and again."""
        self._wanted = waiting
        self._report(WantModel(model, waiting[model]))
        if self._repeating is None:
            self._repeating = asyncio.get_running_loop().call_later(REPEAT, self._repeat)

    def _repeat(self) -> None:
        for model, count in self._wanted.items():
            self._report(WantModel(model, count))
        self._repeating = asyncio.get_running_loop().call_later(REPEAT, self._repeat) if self._wanted else None

    def keep(self, model: str, keep_alive: float) -> None:
        """How long a model may stay without streams, from now on."""
        self._report(WantModel(model, 0, keep_alive))

    async def order(self, action: str, model: str, keep_alive: float | None) -> ModelAnswer:
        """The answer to an order. Raises ApiError when it says that it was not done."""
        return await self._ask(ModelOrder(next(self._rids), action, model, keep_alive))

    async def charge(self, name: str, quotas: list[Quota], requests: int, tokens: int) -> None:
        """Account for requests or tokens of an API key. Raises ApiError when a request goes beyond a quota."""
        await self._ask(Charge(next(self._rids), name, quotas, requests, tokens))

    async def _ask(self, asked: ModelOrder | Charge) -> ModelAnswer:
        rid = asked.rid if isinstance(asked, ModelOrder) else asked.ref
        future: asyncio.Future[ModelAnswer] = asyncio.get_running_loop().create_future()
        self._orders[rid] = future
        try:
            self._report(asked)
            answer = await future
        finally:
            del self._orders[rid]
        if answer.code:
            text = answer.message or "it was not done"
            raise ApiError(answer.code, text, retry_after=answer.retry_after)
        return answer

    def on_answer(self, answer: ModelAnswer) -> None:
        """An answer has come; perhaps nobody waits for it any more."""
        future = self._orders.get(answer.rid)
        if future is not None and not future.done():
            future.set_result(answer)
