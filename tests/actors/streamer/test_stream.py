"""The life of one stream: what is sent when, credit, stop strings, ends, and what a resume carries."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.streamer.logprobs import StepLogprobs
from actors.streamer.stream import WINDOW, Phase, Stream
from protocol.ids import pack_floats, pack_ids, unpack_ids
from protocol.messages import Generate, SamplingParams, Usage


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


class Spelling(dict):
    def __missing__(self, token_id):
        return chr(token_id).encode()


def make(stop=(), return_ids=False, text=True, cache_salt="", **options):
    params = SamplingParams(temperature=0.0, top_p=1.0, seed=5, stop=list(stop), **options)
    request = Generate(7, params, prompt="p", return_ids=return_ids, cache_salt=cache_salt)
    stream = Stream(1, b"c", request, params, deadline=100.0, now=10.0)
    detokenizer, spelling = (Letters(), Spelling()) if text else (None, None)
    stream.encoded(pack_ids([1, 2, 3]), 50, detokenizer, 11.0, spelling)
    return stream


def push(stream, text):
    for character in text:
        token = 0 if character == "·" else ord(character)
        top = StepLogprobs(-0.5, pack_ids([token, 120]), pack_floats([-0.5, -1.5]))
        stream.push(token, 13.0, top if stream.params.logprobs is not None else None)


def test_every_token_is_due_at_interval_one():
    stream = make()
    sent = []
    for character in "abc":
        push(stream, character)
        assert stream.due(1)
        sent.append(stream.take())
    assert sent == [("a", b"", 1, [], "", []), ("b", b"", 1, [], "", []), ("c", b"", 1, [], "", [])]


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
    assert stream.take() == ("·a", b"", 2, [], "", [])


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
    assert stream.take() == ("bcé", b"", 3, [], "", [])


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
    assert stream.take() == ("", b"", 3, [], "", [])
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
    text, ids, count, logprobs, *_ = stream.take()
    assert (text, unpack_ids(ids), count, logprobs) == ("ab", [97, 98], 2, [])


def test_a_resume_carries_prompt_tokens_so_far_and_the_rest_of_the_budget():
    stream = make()
    push(stream, "ab")
    again = stream.submit(4, 9)
    assert (again.epoch, again.streamer, again.rid) == (4, 9, 1)
    assert unpack_ids(again.ids) == [1, 2, 3, 97, 98]
    assert (again.prompt_tokens, again.budget, again.seed) == (3, 48, 5)
    assert again.params == stream.params


def test_the_engine_gets_every_option():
    submit = make(top_k=5, logit_bias={3: -1.0}, min_tokens=2, stop_token_ids=[9], priority=-4, ignore_eos=True).submit(
        1, 2
    )
    assert submit.params == SamplingParams(
        temperature=0.0,
        top_p=1.0,
        seed=5,
        top_k=5,
        logit_bias={3: -1.0},
        min_tokens=2,
        stop_token_ids=[9],
        priority=-4,
        ignore_eos=True,
    )
    assert (submit.temperature, submit.top_p, submit.seed, submit.ignore_eos, submit.priority) == (
        0,
        1,
        5,
        True,
        -4,
    )


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
    assert stream.take() == ("", b"", 1, [], "", [])


def tokens_of(logprobs):
    return [(token.token.decode(), token.offset) for token in logprobs]


def test_log_probabilities_come_with_their_text():
    stream = make(logprobs=2)
    push(stream, "a")
    (token,) = stream.take()[3]
    assert (token.token_id, token.logprob, token.token, token.offset) == (97, -0.5, b"a", 0)
    assert token.top == [(97, -0.5, b"a"), (120, -1.5, b"x")]
    push(stream, "b·")
    assert tokens_of(stream.take()[3]) == [("b", 1)]
    push(stream, "c")
    text, _, count, logprobs, *_ = stream.take()
    assert (text, count) == ("·c", 1)
    assert tokens_of(logprobs) == [("\0", 2), ("c", 2)]


def test_log_probabilities_of_text_held_for_a_stop_string_wait_with_it():
    stream = make(stop=["bcd"], logprobs=0)
    push(stream, "abc")
    assert tokens_of(stream.take()[3]) == [("a", 0)]
    push(stream, "x")
    text, _, _, logprobs, *_ = stream.take()
    assert (text, tokens_of(logprobs)) == ("bcx", [("b", 1), ("c", 2), ("x", 3)])


def test_tokens_cut_off_by_a_stop_string_have_no_log_probabilities():
    stream = make(stop=["bcd"], logprobs=0)
    push(stream, "abcd")
    assert stream.stopped
    stream.finish_text()
    text, _, count, logprobs, *_ = stream.take()
    assert (text, count, tokens_of(logprobs)) == ("a", 4, [("a", 0)])
    assert not stream.has_rest


def test_a_token_of_which_a_stop_string_leaves_a_part_keeps_its_log_probability():
    class Words(Letters):
        def push(self, token_id):
            return {1: "The", 2: " capital", 3: " of"}[token_id]

    stream = make(stop=["ital of"], logprobs=0)
    stream._detokenizer = Words()
    for token in (1, 2, 3):
        stream.push(token, 13.0, StepLogprobs(-1.0, b"", b""))
    text, _, _, logprobs, *_ = stream.take()
    assert (text, [token.token_id for token in logprobs]) == ("The cap", [1, 2])


def test_the_last_log_probabilities_come_though_their_text_never_does():
    stream = make(logprobs=1)
    push(stream, "a·")
    stream.take()
    stream._detokenizer.held = ""
    stream.finish_text()
    assert stream.has_rest
    text, _, _, logprobs, *_ = stream.take()
    assert (text, tokens_of(logprobs)) == ("", [("\0", 1)])
    assert not stream.has_rest


def test_log_probabilities_without_text_are_not_spelled():
    stream = make(text=False, return_ids=True, logprobs=2)
    push(stream, "a")
    assert stream.due(1)
    (token,) = stream.take()[3]
    assert (token.token_id, token.token) == (97, b"")
    assert token.top == [(97, -0.5, b""), (120, -1.5, b"")]


def test_log_probabilities_count_as_unread():
    stream = make(logprobs=20)
    for _ in range(10):
        stream.push(97, 13.0, StepLogprobs(-1.0, pack_ids(range(20)), pack_floats([-1.0] * 20)))
    assert stream.unread > 10 * 20 * 8
    stream.take()
    assert stream.unread == 0


@given(st.lists(st.sampled_from(["a", "b", "·"])), st.lists(st.text("ab", min_size=1, max_size=3), max_size=2))
def test_every_token_of_the_text_has_its_log_probability_in_order(letters, stops):
    stream = make(stop=stops, logprobs=1)
    text, logprobs = "", []
    for letter in letters:
        push(stream, letter)
        if stream.stopped:
            break
        if stream.due(1):
            piece, _, _, tokens, *_ = stream.take()
            text += piece
            logprobs += tokens
            assert all(token.offset < len(text) for token in tokens)
    stream.finish_text()
    piece, _, _, tokens, *_ = stream.take()
    text += piece
    logprobs += tokens
    # A "·" comes out with the letter behind it, so both begin where the text before them ends.
    begins = [len("".join(letters[:i]).rstrip("·")) for i in range(len(letters))]
    expected = [
        (0 if letter == "·" else ord(letter), begin)
        for letter, begin in zip(letters, begins, strict=True)
        if not stream.stopped or begin < len(text)
    ]
    assert [(token.token_id, token.offset) for token in logprobs] == expected


def test_a_stop_string_before_min_tokens_does_not_count():
    stream = make(stop=["b"], min_tokens=3)
    push(stream, "abb")
    assert not stream.stopped
    assert stream.take()[0] == "abb"
    push(stream, "b")
    assert stream.stopped
    assert stream.take()[0] == ""


def test_a_stop_string_may_begin_before_min_tokens():
    stream = make(stop=["bcd"], min_tokens=2)
    push(stream, "ab")
    assert stream.take()[0] == "a"
    push(stream, "cd")
    assert stream.stopped
    assert stream.take()[0] == ""


def test_usage_tells_what_was_found_of_the_prompt():
    stream = make(cache_salt="tenant")
    assert stream.submit(1, 2).cache_salt == "tenant"
    stream.cached(2)
    push(stream, "a")
    stream.cached(3)  # of a resume
    assert stream.end(14.0, "finished", "length").usage == Usage(3, 1, 2)
