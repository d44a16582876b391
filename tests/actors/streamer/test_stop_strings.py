"""Stop strings against their definition, for every way of cutting the text."""

import time
from itertools import combinations, pairwise, product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.streamer.detokenizer import DetokenizerFactory
from actors.streamer.stop_strings import StopMatcher


def definition(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text before the match that starts first, and the shortest stop string that starts there."""
    found = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    start, _, stop = min(found)
    return text[:start], stop


def armed_late(text: str, stops: list[str], border: int) -> str:
    """The text before the first match that ends beyond `border`."""
    starts = [
        start
        for stop in stops
        for start in range(len(text) - len(stop) + 1)
        if text.startswith(stop, start) and start + len(stop) > border
    ]
    return text[: min(starts, default=len(text))]


def stream(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    out = "".join(matcher.push(piece) for piece in pieces) + matcher.flush()
    return out, matcher.matched


def cut(text: str, at: list[int]) -> list[str]:
    edges = [0, *sorted(i % (len(text) + 1) for i in at), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, list[str], list[int]]:
    """A text made of beginnings of the stop strings, the stop strings, and places to cut the text at."""
    alphabet = draw(st.sampled_from(["ab", "abc", "aé😀"]))
    stops = draw(st.lists(st.text(alphabet, min_size=1, max_size=8), min_size=1, max_size=4))
    beginnings = st.builds(lambda stop, size: stop[:size], st.sampled_from(stops), st.integers(1, 7))
    text = "".join(draw(st.lists(beginnings | st.sampled_from(alphabet), max_size=10)))
    return text, stops, draw(st.lists(st.integers(0, 60), max_size=12))


def words(alphabet: str, longest: int) -> list[str]:
    return ["".join(chars) for size in range(longest + 1) for chars in product(alphabet, repeat=size)]


def test_every_short_text_with_every_pair_of_stop_strings() -> None:
    texts = words("ab", 7)
    for stops in combinations(words("ab", 4)[1:], 2):
        for text in texts:
            expected = definition(text, list(stops))
            assert stream(list(text), list(stops)) == expected
            assert stream([text], list(stops)) == expected


@settings(max_examples=400, deadline=None)
@given(cases())
def test_any_cut_gives_what_the_definition_says(case: tuple[str, list[str], list[int]]) -> None:
    text, stops, at = case
    assert stream(cut(text, at), stops) == definition(text, stops)
    assert stream(list(text), stops) == definition(text, stops)
    assert stream([text], stops) == definition(text, stops)


@settings(max_examples=400, deadline=None)
@given(cases(), st.integers(0, 60))
def test_a_match_that_ends_before_the_border_does_not_count(
    case: tuple[str, list[str], list[int]], border: int
) -> None:
    text, stops, at = case
    border = min(border, len(text))
    matcher, out = StopMatcher(stops), ""
    for piece in cut(text[:border], at):
        out += matcher.push(piece, armed=False)
        assert matcher.matched is None
    for piece in cut(text[border:], at):
        out += matcher.push(piece)
    out += matcher.flush()
    assert out == armed_late(text, stops, border)
    assert (matcher.matched is None) == (out == text)


@settings(max_examples=250, deadline=None)
@given(cases())
def test_holds_back_only_what_may_still_match(case: tuple[str, list[str], list[int]]) -> None:
    text, stops, _ = case
    matcher, sent, seen = StopMatcher(stops), "", ""
    for char in text:
        seen += char
        sent += matcher.push(char)
        if matcher.matched is not None:
            break
        held = seen[len(sent) :]
        assert seen == sent + held
        assert (
            not held
            or any(stop.startswith(held) or held.startswith(stop) for stop in stops)
            or any(stop in held for stop in stops)
        )
        assert len(held) < max(len(stop) for stop in stops)


def test_earliest_start_wins_over_earliest_end() -> None:
    assert stream(["xa", "ab", "c"], ["ab", "b", "aabc"]) == ("x", "aabc")


def test_a_complete_match_waits_for_an_earlier_candidate_that_dies() -> None:
    matcher = StopMatcher(["aabc", "ab"])
    assert matcher.push("xaab") == "x"
    assert matcher.matched is None
    assert matcher.push("d and more") == "a"
    assert matcher.matched == "ab"
    assert matcher.push("anything") == ""
    assert matcher.flush() == ""


def test_a_complete_match_counts_when_the_text_ends_before_the_earlier_one_is_decided() -> None:
    matcher = StopMatcher(["aabc", "ab"])
    assert matcher.push("xaab") == "x"
    assert matcher.flush() == "a"
    assert matcher.matched == "ab"


def test_flush_returns_an_unfinished_stop_string() -> None:
    assert stream(["end", "\n", "\n"], ["\n\n\n"]) == ("end\n\n", None)


def test_text_without_stop_strings_passes_at_once() -> None:
    matcher = StopMatcher([])
    assert matcher.push("anything") == "anything"
    assert StopMatcher(["###"]).push("plain text") == "plain text"


def test_time_is_linear_for_the_worst_stop_strings() -> None:
    stops = ["a" * (1000 + i) + "b" for i in range(16)]
    matcher, pieces = StopMatcher(stops), ["a" * 4] * 1000
    began = time.process_time()
    out = "".join(matcher.push(piece) for piece in pieces) + matcher.flush()
    # 4,000 characters × 16 automata take 10 ms; rescanning what is held for each piece takes seconds.
    assert time.process_time() - began < 1.0
    assert out == "a" * 4000


@pytest.mark.parametrize("stop", ["ital of Fr", "Paris", " is P", "is.", "T", "The capital of France is Paris."])
def test_stop_strings_inside_tokens(tiny_model: Path, stop: str) -> None:
    text = "The capital of France is Paris."
    factory = DetokenizerFactory.load(tiny_model)
    detokenizer, matcher = factory.stream(), StopMatcher([stop, "never"])
    out = ""
    for token in factory.tokenizer.encode(text):
        out += matcher.push(detokenizer.push(token))
    out += matcher.push(detokenizer.flush()) + matcher.flush()
    assert out == text[: text.find(stop)] if stop in text else out == text
    if stop == "ital of Fr":
        assert out == "The cap"
