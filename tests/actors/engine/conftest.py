"""Shared by the engine's tests: a loaded tiny model, a driver for `Engine`, and the plain run it is held to.

The plain run knows neither batches nor chunks: one forward over the prompt, then one per token, on mlx-lm's
unbatched caches, with the sampling options applied as they are defined.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from actors.engine.engine import Engine
from actors.engine.model import Model, load
from actors.engine.sampler import gumbel, noise_keys, stream_of
from actors.engine.scheduler import Limits
from protocol.ids import pack_ids, unpack_ids
from protocol.messages import Submit

MARGIN = 1e-4  # of the magnitude: closer than this, two scores are a tie


@pytest.fixture(scope="session")
def model(tiny_model: Path) -> Model:
    return load(tiny_model)


def request(rid: int, ids: Iterable[int], budget: int, **options: object) -> Submit:
    ids = list(ids)
    given = {"prompt_tokens": len(ids), "temperature": 0.0, "top_p": 1.0, "seed": rid, "ignore_eos": True} | options
    return Submit(epoch=1, streamer=1, rid=rid, ids=pack_ids(ids), budget=budget, **given)


class Run:
    """Drives an engine until it is idle and keeps what it said."""

    def __init__(self, model: Model, limits: Limits | None = None) -> None:
        self.engine = Engine(model, limits or Limits())
        self.tokens: dict[int, list[int]] = {}
        self.reasons: dict[int, str] = {}
        self.errors: dict[int, str] = {}
        self.admitted: list[int] = []

    def turn(self) -> None:
        outcome = self.engine.turn()
        self.engine.tidy()
        self.admitted += outcome.admitted
        for rid, token in zip(outcome.rids, outcome.tokens, strict=True):
            assert rid not in self.reasons
            self.tokens.setdefault(rid, []).append(token)
        for rid, reason, error in zip(outcome.ended, outcome.reasons, outcome.errors, strict=True):
            assert rid not in self.reasons, "a row ended twice"
            self.reasons[rid] = reason
            self.errors[rid] = error

    def finish(self) -> "Run":
        while self.engine.busy:
            self.turn()
        return self

    def all(self, requests: Iterable[Submit]) -> dict[int, list[int]]:
        for each in requests:
            self.engine.submit(each)
        return self.finish().tokens


class Plain:
    """The tokens of one request run plainly, and at each position how close the runner-up was."""

    def __init__(self, model: Model, submit: Submit) -> None:
        self.tokens: list[int] = []
        self.gaps: list[float] = []
        caches = model.new_caches()
        ids = unpack_ids(submit.ids)
        index = len(ids) - submit.prompt_tokens
        stream = np.array([stream_of(submit.seed, submit.choice)], np.uint64)
        if ids[:-1]:
            model.forward(mx.array([ids[:-1]], mx.uint32), caches)
        last = ids[-1]
        for i in range(submit.budget):
            logits = model.forward(mx.array([[last]], mx.uint32), caches)[0, -1].astype(mx.float32)
            if submit.temperature == 0:
                last, gap = _best(np.array(logits), np.abs(logits).max())
            else:
                noise = gumbel(noise_keys(stream, np.array([index + i], np.uint64)), len(logits))[0]
                last, gap = _draw(np.array(logits), np.array(noise), submit.temperature, submit.top_p)
            self.tokens.append(last)
            self.gaps.append(gap)

    def tie_or_equal(self, tokens: list[int]) -> bool:
        """True when `tokens` are the same; False at a first difference that is a tie; fails on any other."""
        assert len(tokens) == len(self.tokens)
        for position, (mine, theirs) in enumerate(zip(self.tokens, tokens, strict=True)):
            if mine != theirs:
                print(f"tie? position {position}: {mine} or {theirs}, relative gap {self.gaps[position]:.2e}")
                assert self.gaps[position] < MARGIN, f"other tokens from position {position} on"
                return False
        return True


def _best(scores: np.ndarray, magnitude: float) -> tuple[int, float]:
    """The best token, and how far the second best is behind, relative to `magnitude`."""
    second, first = np.partition(scores, -2)[-2:]
    return int(scores.argmax()), float(first - second) / max(1.0, float(magnitude))


def _draw(logits: np.ndarray, noise: np.ndarray, temperature: float, top_p: float) -> tuple[int, float]:
    """The token drawn, and the smallest relative distance at which another one would have been."""
    magnitude = max(1.0, float(np.abs(logits).max()))
    scaled = logits / np.float32(temperature)
    if top_p == 1:
        return _best(scaled + noise, magnitude)
    probabilities = np.exp(scaled.astype(np.float64) - scaled.max())
    probabilities /= probabilities.sum()
    order = np.argsort(-probabilities, kind="stable")
    kept = np.empty(len(scaled), bool)
    kept[order] = np.cumsum(probabilities[order]) - probabilities[order] < top_p
    inside = np.where(kept, scaled + noise, -np.inf)
    outside = np.where(kept, -np.inf, scaled + noise)
    token, gap = _best(inside, magnitude)
    # The border of top_p might fall on the token's other side, or on the other side of a better one outside.
    border = float(scaled[token] - scaled[~kept].max(initial=-np.inf))
    if outside.max() > inside.max():
        border = min(border, float(scaled[kept].min() - scaled[outside.argmax()]))
    return token, min(gap, border / magnitude)


def assert_same(model: Model, requests: Iterable[Submit], tokens: dict[int, list[int]]) -> None:
    """Every request got the tokens of its plain run; ties in at most 2 % of the streams."""
    requests = list(requests)
    ties = sum(not Plain(model, each).tie_or_equal(tokens[each.rid]) for each in requests)
    assert ties <= 0.02 * len(requests)


@pytest.fixture
def make_request() -> Callable[..., Submit]:
    return request


@pytest.fixture
def start_run() -> Callable[..., Run]:
    return Run


@pytest.fixture
def plain() -> Callable[..., Plain]:
    return Plain


@pytest.fixture
def same_as_plain() -> Callable[..., None]:
    return assert_same
