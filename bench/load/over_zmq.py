"""The ZeroMQ side of the load: all streams on one `AsyncClient`. Runs on the event loop of the load process.

A client that vanishes has a connection of its own, whose thread stops without a word.
"""

import asyncio

from bench.load.manners import ABORTS, SLOW, SLOW_PAUSE, VANISHES
from bench.load.outcome import Outcome
from bench.load.plan import Ask, Plan
from protocol import AsyncClient, AsyncStream
from protocol.client.connection import Connection
from protocol.errors import CallboardError
from protocol.ids import pack_ids
from protocol.messages import Deltas, Generate, SamplingParams, ServerMessage


class ZmqLoad:
    """Runs requests of a plan over one ZeroMQ connection. `open` maps a request in flight to its stream."""

    def __init__(self, plan: Plan, endpoint: str) -> None:
        self.plan = plan
        self.endpoint = endpoint
        self.client = AsyncClient(endpoint=endpoint, name_in_logs="load")
        self.open: dict[int, AsyncStream] = {}

    async def __aenter__(self) -> "ZmqLoad":
        await self.client.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()

    async def run(self, ask: Ask, outcome: Outcome) -> None:
        """Run one request to its end, or to where its client leaves, and write down how it went."""
        if ask.manner == VANISHES:
            await self._vanish(ask, outcome)
            return
        plan = self.plan
        keeps = plan.record or plan.turns > 1
        outcome.begin()
        counted = 0
        error = ""
        try:
            stream = self.client.generate(
                ids=ask.ids,
                max_tokens=ask.max_tokens,
                temperature=plan.temperature,
                top_p=plan.top_p,
                seed=ask.index,
                ignore_eos=True,
                model=plan.model,
                return_ids=keeps,
                return_text=not plan.record,
                cache_salt=plan.cache_salt,
            )
            self.open[ask.index] = stream
            async for delta in stream:
                counted += delta.count
                outcome.token()
                if keeps:
                    outcome.ids += delta.ids
                if ask.manner == SLOW:
                    await asyncio.sleep(SLOW_PAUSE)
                elif outcome.arrivals == ask.leaves:
                    stream.cancel()
            if ask.manner == ABORTS and outcome.arrivals >= ask.leaves:
                outcome.leave()
                return
            error = self._judge(stream, outcome, counted)
        except CallboardError as problem:
            error = f"{problem.code}: {problem.message}"
        finally:
            self.open.pop(ask.index, None)
        outcome.end(error)

    async def _vanish(self, ask: Ask, outcome: Outcome) -> None:
        plan = self.plan
        loop = asyncio.get_running_loop()
        over: asyncio.Future[str] = loop.create_future()

        def finish(error: str) -> None:
            if not over.done():
                over.set_result(error)

        def on_message(message: ServerMessage) -> None:
            if not isinstance(message, Deltas):
                return
            for ids in message.ids:
                outcome.token()
                if plan.record:
                    outcome.ids += memoryview(ids).cast("I").tolist()
                if outcome.arrivals == ask.leaves:
                    finish("")
            for end in message.ends:
                finish("" if end.outcome == "finished" else f"{end.code}: {end.message}")

        def hand_over(message: ServerMessage) -> None:
            loop.call_soon_threadsafe(on_message, message)

        def lost(error: CallboardError) -> None:
            loop.call_soon_threadsafe(finish, f"{error.code}: {error.message}")

        outcome.begin()
        connection = await asyncio.to_thread(Connection, self.endpoint, hand_over, lost, name="vanishes")
        params = SamplingParams(plan.temperature, plan.top_p, ask.index, ask.max_tokens, ignore_eos=True)
        ids = pack_ids(ask.ids)
        connection.send(Generate(1, params, ids=ids, model=plan.model, return_text=False, return_ids=True))
        error = await over
        await asyncio.to_thread(connection.close)
        if error:
            outcome.end(error)
        else:
            outcome.leave()

    def _judge(self, stream: AsyncStream, outcome: Outcome, counted: int) -> str:
        end = stream.end
        if end is None:
            return "the stream ended without a terminal message"
        outcome.prompt_tokens = end.usage.prompt_tokens
        outcome.completion_tokens = end.usage.completion_tokens
        if end.outcome != "finished" or end.reason != "length":
            return f"ended as {end.outcome} {end.reason}, not as finished length"
        if counted != end.usage.completion_tokens:
            return f"the deltas carried {counted} tokens, usage says {end.usage.completion_tokens}"
        return ""
