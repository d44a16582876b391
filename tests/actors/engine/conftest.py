"""Shared by the engine's tests: a loaded tiny model, a driver for `Engine`, and the plain run it is held to.

The plain run knows neither batches nor chunks: one forward over the prompt, then one per token, on mlx-lm's
unbatched caches, with the sampling options applied as they are defined.
"""

import importlib.util
from collections.abc import Callable, Iterable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from actors.engine.block_cuts import PackedBlock
from actors.engine.engine import Engine, Outcome, row_options
from actors.engine.model import Model, load
from actors.engine.sampler import Sampler
from actors.engine.scheduler import Limits
from cache_store.store import PrefixStore
from protocol.ids import pack_ids, unpack_ids
from protocol.messages import SamplingParams, Submit

MARGIN = 1e-4  # of the magnitude: closer than this, two scores are a tie


@pytest.fixture(scope="session")
def model(tiny_model: Path) -> Model:
    return load(tiny_model)


@pytest.fixture(scope="session")
def kind_model() -> Callable[..., Model]:
    """Makes a tiny model with the named kind of caches; see `tests/models/kinds.py`."""
    spec = importlib.util.spec_from_file_location("kinds", Path(__file__).parents[2] / "models" / "kinds.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    make: Callable[..., Model] = module.kind_model
    return make


def request(rid: int, ids: Iterable[int], budget: int, **options: object) -> Submit:
    ids = list(ids)
    given = {"prompt_tokens": len(ids), "temperature": 0.0, "top_p": 1.0, "seed": rid, "ignore_eos": True} | options
    return Submit(epoch=1, streamer=1, rid=rid, ids=pack_ids(ids), budget=budget, **given)


class Run:
    """Drives an engine until it is idle and keeps what it said."""

    def __init__(
        self, model: Model, limits: Limits | None = None, store: PrefixStore[PackedBlock] | None = None
    ) -> None:
        self.engine = Engine(model, limits or Limits(), store=store)
        self.cached: dict[int, int] = {}
        self.tokens: dict[int, list[int]] = {}
        self.reasons: dict[int, str] = {}
        self.errors: dict[int, str] = {}
        self.admitted: list[int] = []

    def turn(self) -> None:
        self.engine.turn(self.take)
        self.engine.tidy()

    def take(self, outcome: Outcome) -> None:
        self.admitted += outcome.admitted
        for rid, cached in zip(outcome.cached, outcome.cached_tokens, strict=True):
            assert rid not in self.cached
            self.cached[rid] = cached
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
        if ids[:-1]:
            model.forward(mx.array([ids[:-1]], mx.uint32), caches)
        last = ids[-1]
        params = submit.params or SamplingParams()
        for i in range(submit.budget):
            logits = model.forward(mx.array([[last]], mx.uint32), caches)[:, -1].astype(mx.float32)
            options = row_options(submit, params, (), index + i)
            generated = np.array([*ids[submit.prompt_tokens :], *self.tokens], np.uint32)
            prompt = np.array(ids[: submit.prompt_tokens], np.uint32)

            def draw(scores: mx.array, options=options, prompt=prompt, generated=generated) -> int:
                sampler = Sampler(model.vocab_size)
                sampler.append(options, prompt, generated)
                return int(sampler.draw(scores).tokens[0])

            last = draw(logits)
            self.tokens.append(last)
            self.gaps.append(_gap(logits, last, submit.temperature, draw))

    def tie_or_equal(self, tokens: list[int]) -> bool:
        """True when `tokens` are the same; False at a first difference that is a tie; fails on any other."""
        assert len(tokens) == len(self.tokens)
        for position, (mine, theirs) in enumerate(zip(self.tokens, tokens, strict=True)):
            if mine != theirs:
                print(f"tie? position {position}: {mine} or {theirs}, relative gap {self.gaps[position]:.2e}")
                assert self.gaps[position] < MARGIN, f"other tokens from position {position} on"
                return False
        return True


def _gap(logits: mx.array, token: int, temperature: float, draw: Callable[[mx.array], int]) -> float:
    """How far the second best is behind, relative to the magnitude.

    For a row that draws, 0 when scores that differ by less than the margin draw another token, else 1.
    """
    scores = np.array(logits[0])
    magnitude = max(1.0, float(np.abs(scores).max()))
    if temperature == 0:
        second, first = np.partition(scores, -2)[-2:]
        return float(first - second) / magnitude
    random = np.random.default_rng(0)
    for _ in range(4):
        nudge = random.uniform(-MARGIN, MARGIN, scores.shape) * magnitude
        if draw(mx.array((scores + nudge).astype(np.float32))[None]) != token:
            return 0.0
    return 1.0


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
