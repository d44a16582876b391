"""Check of fairness between clients: one floods the server, and another one's requests don't wait behind the flood."""

import asyncio
import statistics
from typing import Any

from bench.checks.report import Report
from bench.harness import RunningServer
from protocol import AsyncClient
from protocol.errors import RequestRejected
from protocol.messages import Trace


def fair_clients(report: Report, server: RunningServer, *, seats: int, flood: int, tokens: int, asked: int) -> None:
    """A client asks for more than the server takes at once, again and again; another asks `asked` times, one after the
    other.

    Each of those begins before more than a few rows of the flood have ended, although hundreds came first; and none is
    refused, although the flood has filled the queue. Texts, so that the tokenizers are shared fairly, too.
    """
    alone, beside, ended, refused = asyncio.run(_run(server, flood, tokens, asked))
    report.measured("ttft_alone_ms", round(statistics.median(alone) * 1000, 1))
    report.measured("ttft_beside_the_flood_ms", round(statistics.median(beside) * 1000, 1))
    report.measured("flood_rows_ended_meanwhile", ended)
    report.measured("flood_refused", refused)
    report.expect(len(beside) == asked, "every request of the other client is served", len(beside))
    # A seat has to become free; rows of the flood that were promised one before end, too.
    bound = 2 * seats + 2
    report.expect(max(ended) <= bound, f"each begins before more than {bound} rows of the flood have ended", ended)


async def _run(
    server: RunningServer, flood: int, tokens: int, asked: int
) -> tuple[list[float], list[float], list[int], int]:
    options: dict[str, Any] = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "trace": True}
    finished: list[float] = []  # when rows of the flood ended, by the server's clock
    refused = 0
    begun, over = asyncio.Event(), asyncio.Event()
    async with AsyncClient(endpoint=server.endpoint) as flooding, AsyncClient(endpoint=server.endpoint) as other:

        async def ask(number: int) -> Trace:
            stream = other.generate(f"Request {number}", **options)
            async for _ in stream:
                stream.cancel()
            assert stream.end is not None
            assert stream.end.trace is not None
            return stream.end.trace

        async def drain(number: int) -> None:
            nonlocal refused
            while not over.is_set():
                stream = flooding.generate(f"Flood {number}", **options)
                try:
                    async for _ in stream:
                        begun.set()
                        if over.is_set():
                            stream.cancel()
                except RequestRejected:
                    refused += 1
                    return
                if stream.end is not None and stream.end.trace is not None and stream.end.outcome == "finished":
                    finished.append(stream.end.trace.ended)

        alone = [await ask(number) for number in range(asked)]
        tasks = [asyncio.create_task(drain(number)) for number in range(flood)]
        await begun.wait()
        beside = [await ask(number) for number in range(asked)]
        over.set()
        await asyncio.gather(*tasks)
    ended = [sum(trace.received < moment <= trace.arrived for moment in finished) for trace in beside]
    return _ttfts(alone), _ttfts(beside), ended, refused


def _ttfts(traces: list[Trace]) -> list[float]:
    return [trace.arrived - trace.received for trace in traces]
