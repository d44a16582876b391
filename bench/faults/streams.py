"""`Stream`: one request of a check of faults, how it went, and whether its tokens are those of an undisturbed run.

Run from the event loop of the check, over HTTP or ZeroMQ.
"""

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.checks.report import Report
from bench.load.over_http import Exchange, build_request
from bench.load.plan import FIRST_PLAIN_ID
from bench.mlx_child import MlxChild
from protocol import AsyncClient
from protocol.errors import CallboardError

MARGIN = 1e-4  # of the magnitude: closer than this, two scores are a tie
TIES = 0.02  # of the streams may end in a tie
WORDS = ["lamp", "river", "stone", "cloud", "paper", "seven", "north", "apple", "Straße", "😀", "漢字"]


class Asked:
    """What one stream asks for: greedy or seeded, from so many `ids`, or from a text when `words` are given."""

    def __init__(self, index: int, tokens: int, words: int = 0, ids: int = 0) -> None:
        draw = random.Random(f"fault {index}")
        self.index = index
        self.tokens = tokens
        self.text = " ".join(draw.choices(WORDS, k=words)) if words else None
        self.ids = draw.choices(range(FIRST_PLAIN_ID, 10_000), k=ids or draw.randrange(16, 200))
        self.options: dict[str, Any] = {"temperature": [0.0, 0.8][index % 2], "seed": index}

    @property
    def prompt(self) -> dict[str, Any]:
        """The prompt as an argument of `generate`."""
        return {"ids": self.ids} if self.text is None else {"prompt": self.text}


class Stream:
    """How one request went. `times` are those of arrivals; `ends` counts terminal messages, of which there is one."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.began = 0.0
        self.ended = 0.0
        self.ends = 0
        self.error = ""
        self.text = ""
        self.ids: list[int] = []
        self.times: list[float] = []
        self.tokens = 0  # that the end counted
        self.marks: list[tuple[int, int]] = []  # length of the text and number of tokens after each arrival

    @property
    def open(self) -> bool:
        """Whether it has begun and not ended."""
        return bool(self.began) and not self.ended

    def arrived(self, text: str, ids: Sequence[int] = ()) -> None:
        """A delta has come."""
        self.text += text
        self.ids += ids
        self.times.append(time.monotonic())
        self.marks.append((len(self.text), len(self.ids)))

    async def over_zmq(self, client: AsyncClient) -> "Stream":
        """Run it on a client."""
        asked = self.asked
        self.began = time.monotonic()
        try:
            stream = client.generate(
                max_tokens=asked.tokens, ignore_eos=True, return_ids=True, **asked.prompt, **asked.options
            )
            async for delta in stream:
                self.arrived(delta.text, delta.ids)
            self.ends += 1
            assert stream.end is not None
            self.tokens = stream.end.usage.completion_tokens
            if stream.end.outcome != "finished":
                self.error = f"ended as {stream.end.outcome}"
        except CallboardError as error:
            self.ends += 1
            self.error = f"{error.code}: {error.message}"
        self.ended = time.monotonic()
        return self

    async def over_http(self, url: str) -> "Stream":
        """Run it on a connection of its own."""
        asked = self.asked
        body = {
            "prompt": asked.ids if asked.text is None else asked.text,
            "max_tokens": asked.tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **asked.options,
        }
        done = 0

        def on_data(data: bytes) -> None:
            nonlocal done
            if data == b"[DONE]":
                done += 1
                return
            event = json.loads(data)
            if "error" in event:
                self.ends += 1
                self.error = f"{event['error']['code']}: {event['error']['message']}"
            if event.get("usage"):
                self.tokens = event["usage"]["completion_tokens"]
            for choice in event.get("choices", ()):
                if choice["text"]:
                    self.arrived(choice["text"])
                if choice["finish_reason"]:
                    self.ends += 1

        parts = urlsplit(url)
        self.began = time.monotonic()
        exchange = None
        try:
            request = build_request(url, "/v1/completions", json.dumps(body).encode())
            _, exchange = await asyncio.get_running_loop().create_connection(
                lambda: Exchange(request, on_data), parts.hostname or "", parts.port or 80
            )
            await exchange.finished
        except OSError as error:
            self.ends += 1
            self.error = self.error or f"connection: {error}"
        finally:
            if exchange is not None:
                exchange.abort()
        if exchange is not None and not self.error:
            if exchange.status != 200:
                self.ends += 1
                self.error = f"HTTP {exchange.status} {bytes(exchange.body[:200]).decode(errors='replace')}"
            elif done != 1:
                self.error = f"{done} × [DONE]"
        self.ended = time.monotonic()
        return self


async def undisturbed(endpoint: str, requests: Sequence[Asked]) -> list[Stream]:
    """All requests at once on a healthy server: what the others are compared with."""
    async with AsyncClient(endpoint=endpoint) as client:
        return await asyncio.gather(*(Stream(asked).over_zmq(client) for asked in requests))


def first_difference(reference: Stream, got: Stream) -> int | None:
    """The token at which a run departs from the reference, None when it doesn't; found in the texts without ids."""
    if got.ids or not got.text:
        wanted, found = reference.ids, got.ids
        if wanted == found:
            return None
        return next(
            (i for i, (a, b) in enumerate(zip(wanted, found, strict=False)) if a != b), min(len(wanted), len(found))
        )
    if reference.text == got.text:
        return None
    same = next(
        (i for i, (a, b) in enumerate(zip(reference.text, got.text, strict=False)) if a != b),
        min(len(reference.text), len(got.text)),
    )
    return next((tokens - 1 for length, tokens in reference.marks if length > same), len(reference.ids))


def compare(
    report: Report,
    model: Path,
    what: str,
    reference: Sequence[Stream],
    got: Sequence[Stream],
    of: int | None = None,
) -> None:
    """Each stream that finished has the tokens of the reference, or its first difference is a tie.

    The model is asked whether it is. Streams from texts have no ids here to ask by: a difference of theirs counts as
    a tie. `of` is how many streams there were when `got` are only some of them.
    """
    wanted = {stream.asked.index: stream for stream in reference}
    finished = [stream for stream in got if not stream.error]
    places = [(stream.asked, first_difference(wanted[stream.asked.index], stream)) for stream in finished]
    different = [(asked, place) for asked, place in places if place is not None]
    ties: list[str] = []
    other: list[str] = []
    with contextlib.ExitStack() as stack:
        child = stack.enter_context(MlxChild("bench.ties", str(model))) if different else None
        for asked, place in different:
            ids = wanted[asked.index].ids
            gap = 1.0 if asked.text is None else 0.0
            if child is not None and place < len(ids) and asked.text is None:
                gap = child.ask([asked.ids + ids[:place], len(asked.ids), asked.options])
            (ties if gap < MARGIN else other).append(f"request {asked.index}, token {place}, gap {gap:.2e}")
    report.measured(f"{what}: streams that differ by a tie", ties)
    report.expect(not other, f"{what}: the same tokens as undisturbed", other)
    allowed = max(1, int(TIES * (of or len(finished))))
    report.expect(len(ties) <= allowed, f"{what}: ties in at most {TIES:.0%} of the streams", len(ties))


@contextlib.asynccontextmanager
async def running(tasks: Sequence["asyncio.Task[Any]"]) -> Any:
    """Cancel tasks that are left when the block ends."""
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
