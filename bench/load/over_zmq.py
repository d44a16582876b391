"""The ZeroMQ side of the load: all streams on one `AsyncClient`. Runs on the event loop of the load process."""

from bench.load.outcome import Outcome
from bench.load.plan import Plan, prompt_ids
from protocol import AsyncClient, AsyncStream
from protocol.errors import CallboardError


class ZmqLoad:
    """Runs requests of a plan over one ZeroMQ connection. `open` maps a request in flight to its stream."""

    def __init__(self, plan: Plan, endpoint: str) -> None:
        self.plan = plan
        self.client = AsyncClient(endpoint=endpoint, name_in_logs="load")
        self.open: dict[int, AsyncStream] = {}

    async def __aenter__(self) -> "ZmqLoad":
        await self.client.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()

    async def run(self, index: int, outcome: Outcome) -> None:
        """Run request `index` to its end and write down how it went."""
        plan = self.plan
        ids = prompt_ids(plan, index)
        outcome.begin()
        counted = 0
        error = ""
        try:
            stream = self.client.generate(
                ids=ids,
                max_tokens=plan.max_tokens,
                temperature=plan.temperature,
                top_p=plan.top_p,
                seed=index,
                ignore_eos=True,
                model=plan.model,
            )
            self.open[index] = stream
            async for delta in stream:
                counted += delta.count
                outcome.token()
            error = self._judge(stream, outcome, counted)
        except CallboardError as problem:
            error = f"{problem.code}: {problem.message}"
        finally:
            self.open.pop(index, None)
        outcome.end(error)

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
