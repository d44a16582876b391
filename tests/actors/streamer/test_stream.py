"""The life of one stream: what is sent when, credit, stop strings, ends, and what a resume carries."""

import pytest

from actors.streamer.stream import WINDOW, Phase, Stream
from protocol.ids import pack_ids, unpack_ids
from protocol.messages import Generate, SamplingParams


class Letters:
    """A detokenizer for tests: id 97 is "a"; id 0 holds back until the next token."""

    def __init__(self):
        self.held = ""

    def push(self, token_id):
        if token_id == 0:
            self.held += "·"
            return ""
        held, self.held = self.held, ""
        return held + chr(token_id)

    def flush(self):
        return self.held


def make(stop=(), return_ids=False, max_tokens=None):
    request = Generate(7, SamplingParams(stop=list(stop), max_tokens=max_tokens), prompt="p", return_ids=return_ids)
    stream = Stream(1, b"c", request, temperature=0.0, top_p=1.0, seed=5, deadline=100.0, now=10.0)
    stream.encoded(pack_ids([1, 2, 3]), 50, Letters(), 11.0)
    return stream


def push(stream, text):
    for character in text:
        stream.push(ord(character), 13.0)


def test_every_token_is_due_at_interval_one():
    stream = make()
    sent = []
    for character in "abc":
        push(stream, character)
        assert stream.due(1)
        sent.append(stream.take())
    assert sent == [("a", b"", 1), ("b", b"", 1), ("c", b"", 1)]


def test_the_first_token_goes_out_at_once_and_then_every_interval():
    stream = make()
    due = []
    for character in "abcdefg":
        push(stream, character)
        if stream.due(3):
            due.append(stream.take()[0])
    assert due == ["a", "bcd", "efg"]


def test_nothing_is_due_while_text_is_held_back():
    stream = make()
    stream.push(0, 12.0)
    assert not stream.due(1)
    push(stream, "a")
    assert stream.take() == ("·a", b"", 2)


def test_without_credit_text_is_gathered_and_counted():
    stream = make()
    for _ in range(WINDOW):
        push(stream, "a")
        assert stream.due(1)
        stream.take()
    push(stream, "bcé")
    assert not stream.due(1)
    assert stream.unread == 4
    stream.credit(1)
    assert stream.due(1)
    assert stream.take() == ("bcé", b"", 3)


def test_credit_never_grows_beyond_what_was_sent():
    stream = make()
    stream.credit(10**9)
    stream.credit(-5)
    for _ in range(WINDOW):
        push(stream, "a")
        stream.take()
    push(stream, "a")
    assert not stream.due(1)


def test_a_stop_string_ends_the_text_before_it():
    stream = make(stop=["cd"])
    push(stream, "abc")
    assert stream.take()[0] == "ab"
    push(stream, "d")
    assert stream.stopped
    push(stream, "zz")
    assert stream.take() == ("", b"", 3)
    assert not stream.has_rest


def test_what_was_held_for_a_stop_string_comes_at_the_end():
    stream = make(stop=["cd"])
    push(stream, "abc")
    assert stream.take()[0] == "ab"
    stream.finish_text()
    assert not stream.stopped
    assert stream.take()[0] == "c"


def test_ids_are_returned_when_asked_for():
    stream = make(return_ids=True)
    push(stream, "ab")
    text, ids, count = stream.take()
    assert (text, unpack_ids(ids), count) == ("ab", [97, 98], 2)


def test_a_resume_carries_prompt_tokens_so_far_and_the_rest_of_the_budget():
    stream = make()
    push(stream, "ab")
    again = stream.submit(4, 9)
    assert (again.epoch, again.streamer, again.rid) == (4, 9, 1)
    assert unpack_ids(again.ids) == [1, 2, 3, 97, 98]
    assert (again.prompt_tokens, again.budget, again.seed) == (3, 48, 5)


def test_the_end_reports_usage_and_where_the_time_went():
    stream = make()
    assert stream.phase is Phase.WAITING
    stream.admitted(12.0)
    assert stream.phase is Phase.PREFILLING
    push(stream, "ab")
    assert stream.phase is Phase.RUNNING
    end = stream.end(15.0, "finished", "stop")
    assert (end.ref, end.outcome, end.reason) == (7, "finished", "stop")
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (3, 2)
    timing = end.timing
    assert (timing.tokenize, timing.queue, timing.prefill, timing.ttft, timing.total) == (1, 1, 1, 3, 5)


def test_a_stream_ends_once():
    stream = make()
    stream.end(12.0, "cancelled")
    with pytest.raises(AssertionError):
        stream.end(12.0, "finished", "stop")


def test_tokens_without_text_are_counted_in_the_last_delta():
    stream = make()
    stream.push(0, 12.0)
    assert not stream.due(1)
    assert stream.has_rest
    assert stream.take() == ("", b"", 1)
