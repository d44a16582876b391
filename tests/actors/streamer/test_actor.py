"""The streamer as its clients and the engine see it, over real sockets."""

import contextlib
import socket
import threading
import time

import msgspec
import pytest
import zmq

from actors.streamer.recovery import PASSED
from actors.streamer.stream import WINDOW
from actors.streamer.warm_prompts import read_warm_prompts
from protocol import Client
from protocol.codec import encode
from protocol.errors import RequestFailed, RequestRejected, ServerLost
from protocol.ids import pack_ids, unpack_ids
from protocol.keys import ClientKeys, ServerKeys, new_pair, write_keys
from protocol.limits import MAX_DEPTH, MAX_MESSAGES
from protocol.messages import CallFailed, Credit, Deltas, Generate, Hello, Refused, SamplingParams, Step, Stop, Welcome
from protocol.sockets import connect_dealer

EOS = 2


def test_text_goes_round(rig):
    stream = rig.client().generate("The capital", max_tokens=20, seed=3, temperature=0.5, label="x")
    submit = rig.engine.submit()
    assert unpack_ids(submit.ids) == rig.ids_of("The capital")
    assert (submit.budget, submit.seed, submit.temperature, submit.top_p) == (20, 3, 0.5, 1.0)
    rig.run(submit, rig.ids_of(" of France is Paris"))
    assert stream.text() == " of France is Paris"
    assert stream.end.reason == "length"
    assert stream.end.usage.prompt_tokens == len(rig.ids_of("The capital"))
    assert stream.end.usage.completion_tokens == len(rig.ids_of(" of France is Paris"))


def test_the_eos_token_is_neither_text_nor_counted(rig):
    stream = rig.client().generate("x", return_ids=True)
    rig.run(rig.engine.submit(), [*rig.ids_of("hello"), EOS], "stop")
    deltas = list(stream)
    assert "".join(d.text for d in deltas) == "hello"
    assert [i for d in deltas for i in d.ids] == rig.ids_of("hello")
    assert EOS not in [i for d in deltas for i in d.ids]
    assert (stream.end.reason, stream.end.usage.completion_tokens) == ("stop", len(rig.ids_of("hello")))


def test_ids_in_and_out_skip_the_text(rig):
    stream = rig.client().generate(ids=[5, 6, 7], return_text=False, return_ids=True)
    rig.run(rig.engine.submit(), [8, 9])
    assert [(d.text, d.ids) for d in stream] == [("", [8]), ("", [9])]


def test_a_stop_string_across_tokens_ends_text_and_row(rig):
    stream = rig.client().generate("x", stop="ital of Fr")
    submit = rig.engine.submit()
    for token in rig.ids_of("The capital of France"):
        rig.engine.step({submit.rid: token})
    assert stream.text() == "The cap"
    assert stream.end.reason == "stop"
    assert rig.engine.abort() == [submit.rid]


def test_every_option_reaches_the_engine(rig):
    options = {
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 3,
        "max_tokens": 20,
        "ignore_eos": True,
        "stop": ["a", "b"],
        "top_k": 40,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.25,
        "logit_bias": {5: -100.0, 49151: 2.0},
        "min_tokens": 2,
        "stop_token_ids": [7, 8],
        "xtc_probability": 0.5,
        "xtc_threshold": 0.2,
        "logprobs": 3,
        "priority": -1,
    }
    options |= {"thinking_budget": 5}
    assert options.keys() | {"grammar"} == set(SamplingParams.__struct_fields__)
    rig.client().generate("x", **options)
    submit = rig.engine.submit()
    assert submit.params == SamplingParams(**options)
    assert submit.priority == -1


def test_options_left_open_are_resolved(rig):
    rig.client().generate("x", top_k=-1)
    submit = rig.engine.submit()
    assert submit.params == SamplingParams(
        temperature=1.0,
        top_p=1.0,
        seed=submit.seed,
        top_k=0,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        xtc_probability=0.0,
        xtc_threshold=0.1,
    )


def test_log_probabilities_go_round(rig):
    client = rig.client()
    stream, silent = client.generate("x", logprobs=2), client.generate("y")
    asked, other = rig.engine.submit(), rig.engine.submit()
    hello, world = rig.ids_of("hello")[0], rig.ids_of(" world")[0]
    rig.engine.step({asked.rid: hello, other.rid: hello}, logprobs={asked.rid: (-0.5, {hello: -0.5, world: -1.5})})
    rig.engine.step({asked.rid: world}, logprobs={asked.rid: (-2.5, {hello: -0.25, EOS: -0.75})})
    end = [(asked.rid, "stop"), (other.rid, "length")]
    rig.engine.step({asked.rid: EOS, other.rid: world}, end, logprobs={asked.rid: (-1.0, {EOS: -1.0})})
    deltas = list(stream)
    first, second = (token for delta in deltas for token in delta.logprobs)
    assert "".join(delta.text for delta in deltas) == "hello world"
    assert (first.token_id, first.logprob, first.token, first.offset) == (hello, -0.5, b"hello", 0)
    assert first.top == [(hello, -0.5, b"hello"), (world, -1.5, b" world")]
    assert (second.token_id, second.logprob, second.token, second.offset) == (world, -2.5, b" world", 5)
    assert second.top == [(hello, -0.25, b"hello"), (EOS, -0.75, b"<|im_end|>")]
    assert [delta.logprobs for delta in silent] == [[], []]


def test_log_probabilities_of_ids_alone(rig):
    stream = rig.client().generate(ids=[5], return_text=False, return_ids=True, logprobs=1)
    rid = rig.engine.submit().rid
    rig.engine.step({rid: 8}, [(rid, "length")], logprobs={rid: (-0.5, {9: -0.25})})
    ((token,),) = [delta.logprobs for delta in stream]
    assert (token.token_id, token.token, token.top) == (8, b"", [(9, -0.25, b"")])


def test_the_token_of_a_stop_token_id_is_no_text(rig):
    stop = EOS + 4000
    stream = rig.client().generate("x", stop_token_ids=[stop])
    submit = rig.engine.submit()
    assert submit.params.stop_token_ids == [stop]
    rig.run(submit, [*rig.ids_of("hello"), stop], "stop")
    assert stream.text() == "hello"
    assert stream.end.reason == "stop"


def test_no_stop_string_matches_before_min_tokens(rig):
    ids = rig.ids_of("The capital of France is Paris")
    stream = rig.client().generate("x", stop=" of", min_tokens=3)
    rig.run(rig.engine.submit(), ids)
    assert stream.text() == "The capital of France is Paris"
    stream = rig.client().generate("x", stop=" of", min_tokens=2)
    submit = rig.engine.submit()
    for token in ids[:3]:
        rig.engine.step({submit.rid: token})
    assert stream.text() == "The capital"


def test_without_a_seed_every_stream_gets_its_own(rig):
    client = rig.client()
    client.generate("x"), client.generate("x")
    assert rig.engine.submit().seed != rig.engine.submit().seed


def test_cancelling_ends_the_stream_and_the_row_and_is_idempotent(rig):
    stream = rig.client().generate("x")
    submit = rig.engine.submit()
    stream.cancel(), stream.cancel()
    assert stream.text() == ""
    assert stream.end.outcome == "cancelled"
    assert rig.engine.abort() == [submit.rid]
    rig.engine.step({submit.rid: 5})
    assert rig.open_streams() == 0


@pytest.mark.parametrize(
    ("options", "param", "text"),
    [
        ({"prompt": "x", "temperature": -1.0}, "temperature", "at least 0"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens", "at least 1"),
        ({"prompt": "x", "stop": [""]}, "stop", "empty"),
        ({"prompt": "x", "timeout": 0.0}, "timeout", "greater than 0"),
        ({"prompt": "x", "model": "other"}, "model", "'tiny'"),
        ({"messages": []}, "messages", "empty"),
        ({"ids": []}, "prompt", "empty"),
        ({"ids": [1] * 1000}, "prompt", "1000 tokens, but the prompt has 1000"),
        ({"prompt": "x", "return_text": False}, "return_text", "both"),
        ({"prompt": "x", "logit_bias": {49152: 1.0}}, "logit_bias", "49152 is outside the vocabulary"),
        ({"prompt": "x", "stop_token_ids": [49152]}, "stop_token_ids", "49152 is outside the vocabulary"),
        ({"prompt": "x", "min_tokens": 3, "max_tokens": 2}, "min_tokens", "at most"),
        ({"prompt": "x", "logprobs": 21}, "logprobs", "at most 20"),
    ],
)
def test_bad_requests_are_rejected_naming_the_option(rig, options, param, text):
    with pytest.raises(RequestRejected, match=text) as caught:
        rig.client().generate(**options).text()
    assert caught.value.param == param
    assert rig.open_streams() == 0


def test_a_budget_is_cut_at_the_context(rig):
    rig.client().generate(ids=[1] * 990, max_tokens=50)
    assert rig.engine.submit().budget == 10


def test_loading_queue_full_and_draining_are_refused_with_a_time_to_come_back(make_rig):
    rig = make_rig(max_num_seqs=1)
    client = rig.client()
    with pytest.raises(RequestRejected, match="loading") as caught:
        client.generate("x").text()
    assert (caught.value.code, caught.value.retry_after) == ("loading", 1.0)
    rig.announce()
    streams = [client.generate(ids=[1]) for _ in range(33)]
    with pytest.raises(RequestRejected) as caught:
        client.generate(ids=[1]).text()
    assert (caught.value.code, caught.value.retry_after >= 1) == ("queue_full", True)
    rig.drain()
    with pytest.raises(RequestRejected) as caught:
        client.generate(ids=[1]).text()
    assert (caught.value.code, caught.value.retry_after) == ("draining", 30.0)
    rig.run(rig.engine.submit(), rig.ids_of("still"))
    assert streams[0].text() == "still"


def test_an_error_of_the_engine_ends_one_stream_alone(rig):
    client = rig.client()
    bad, good = client.generate("x"), client.generate("y")
    first, second = rig.engine.submit(), rig.engine.submit()
    rig.engine.step({}, ended=[(first.rid, "invalid_request")], errors=["no such id"])
    with pytest.raises(RequestRejected, match="no such id"):
        bad.text()
    rig.run(second, rig.ids_of("fine"))
    assert good.text() == "fine"


def test_steps_of_another_epoch_are_dropped(rig):
    stream = rig.client().generate("x")
    submit = rig.engine.submit()
    rig.engine.step({submit.rid: 5}, epoch=99)
    rig.run(submit, rig.ids_of("right"))
    assert stream.text() == "right"


def test_all_streams_of_one_connection_share_a_message_per_step(rig):
    raw = rig.raw()
    raw.send(Hello(1))
    for ref in range(3):
        raw.send(Generate(ref, SamplingParams(), ids=b"\5\0\0\0"))
    rids = [rig.engine.submit().rid for _ in range(3)]
    rig.engine.step(dict.fromkeys(rids, rig.ids_of("a")[0]))
    message = raw.receive(Deltas)
    assert (message.refs, message.texts, message.counts) == ([0, 1, 2], ["a"] * 3, [1] * 3)


def test_without_credit_text_is_gathered_and_credit_releases_it(rig):
    raw = rig.raw()
    raw.send(Hello(1))
    raw.send(Generate(1, SamplingParams(), ids=b"\5\0\0\0"))
    rid = rig.engine.submit().rid
    token = rig.ids_of("a")[0]
    for _ in range(WINDOW + 10):
        rig.engine.step({rid: token})
    received: list[str] = []
    while len(received) < WINDOW:
        received += raw.receive(Deltas).texts
    assert received == ["a"] * WINDOW
    rig.open_streams()
    assert not raw.socket.poll(100)
    raw.send(Credit([1], [1]))
    message = raw.receive(Deltas)
    assert (message.texts, message.counts) == (["a" * 10], [10])


def test_a_reader_that_is_too_slow_loses_its_stream_alone(rig, monkeypatch):
    monkeypatch.setattr("actors.streamer.actor.MAX_UNREAD", 1000)
    raw = rig.raw()
    raw.send(Hello(1))
    raw.send(Generate(1, SamplingParams(), ids=b"\5\0\0\0", return_ids=True))
    slow = rig.engine.submit().rid
    good = rig.client().generate("x")
    other = rig.engine.submit()
    for _ in range(1000 // 4 + WINDOW + 1):
        rig.engine.step({slow: 5})
    assert raw.end().code == "slow_consumer"
    assert rig.engine.abort() == [slow]
    rig.run(other, rig.ids_of("fine"))
    assert good.text() == "fine"


def test_a_silent_client_loses_its_streams(rig):
    raw = rig.raw()
    raw.send(Hello(1))
    began = time.monotonic()
    raw.send(Generate(1, SamplingParams(), ids=b"\5\0\0\0"))
    rid = rig.engine.submit().rid
    assert rig.engine.abort() == [rid]
    assert time.monotonic() - began > 3
    assert raw.end().outcome == "cancelled"


def test_a_client_that_closed_its_socket_is_cancelled_at_the_next_send(rig):
    raw = rig.raw()
    raw.send(Hello(1))
    raw.send(Generate(1, SamplingParams(), ids=b"\5\0\0\0"))
    rid = rig.engine.submit().rid
    raw.socket.close(linger=0)
    token = rig.ids_of("a")[0]
    until = time.monotonic() + 10
    while rig.open_streams() and time.monotonic() < until:
        rig.engine.step({rid: token})
    assert rig.engine.abort() == [rid]


def test_a_deadline_ends_a_stream(rig):
    with pytest.raises(RequestFailed) as caught:
        rig.client().generate(ids=[5], timeout=0.3).text()
    assert caught.value.code == "timeout"
    assert rig.engine.abort() == [rig.engine.submit().rid]


def test_streams_go_on_in_a_new_engine_where_they_were(rig):
    client = rig.client()
    ids = rig.ids_of("The capital of France is Paris")
    stream = client.generate("x", max_tokens=len(ids), seed=7, stop="never seen", label="a")
    first = rig.engine.submit()
    for token in ids[:3]:
        rig.engine.step({first.rid: token})
    rig.open_streams()
    rig.replace_engine()
    again = rig.engine.submit()
    assert unpack_ids(again.ids) == unpack_ids(first.ids) + ids[:3]
    assert (again.rid, again.prompt_tokens, again.budget) == (first.rid, first.prompt_tokens, len(ids) - 3)
    assert (again.seed, again.params) == (7, first.params)
    rig.run(again, ids[3:])
    assert stream.text() == "The capital of France is Paris"
    assert stream.end.usage.completion_tokens == len(ids)


def test_a_stop_string_across_a_death_is_found(rig):
    ids = rig.ids_of("The capital of France")
    stream = rig.client().generate("x", stop="ital of Fr")
    submit = rig.engine.submit()
    for token in ids[:2]:
        rig.engine.step({submit.rid: token})
    rig.open_streams()
    rig.replace_engine()
    for token in ids[2:]:
        rig.engine.step({rig.engine.submit().rid if token == ids[2] else submit.rid: token})
    assert stream.text() == "The cap"


def test_what_a_dead_engine_still_sent_counts(rig):
    stream = rig.client().generate("x")
    submit = rig.engine.submit()
    rig.run(submit, rig.ids_of("done"))
    rig.announce(engine_state="dead")
    assert stream.text() == "done"


def test_requests_wait_while_the_engine_is_replaced(rig):
    rig.announce(engine_state="dead")
    stream = rig.client().generate("x")
    assert rig.open_streams() <= 1
    rig.replace_engine()
    rig.run(rig.engine.submit(), rig.ids_of("fine"))
    assert stream.text() == "fine"


def test_a_request_that_two_engines_died_of_fails_alone(rig):
    client = rig.client()
    good = client.generate("x")
    decoding = rig.engine.submit()
    token = rig.ids_of("a")[0]
    rig.engine.step({decoding.rid: token})
    bad = client.generate("bad")
    suspect = rig.engine.submit()
    rig.open_streams()
    rig.replace_engine()
    assert rig.engine.submit().rid == decoding.rid
    for _ in range(PASSED):
        rig.engine.step({decoding.rid: token})
    assert rig.engine.submit().rid == suspect.rid
    rig.replace_engine()
    with pytest.raises(RequestFailed, match="brought the engine down") as caught:
        bad.text()
    assert caught.value.code == "crashed_engine"
    rig.run(rig.engine.submit(), [token])
    assert good.text() == "a" * (PASSED + 2)
    said = [(use.stepped, use.suspects) for use in rig.uses]
    assert said[:2] == [(False, False), (False, True)]
    assert said[2] in ((True, False), (True, True))  # before the trial, or with it


def bad_columns(rig, rid):
    return encode(Step(rig.engine.epoch, rig.engine.attached, [rid, 99], pack_ids([5])))


def unread(rig, rid):
    return encode(Step(rig.engine.epoch, rig.engine.attached, [], b"", unread=True))


@pytest.mark.parametrize("frame", [lambda rig, rid: b"\x9f\1", bad_columns, unread])
def test_a_lost_frame_breaks_the_link_to_the_engine_and_loses_nothing(rig, frame):
    ids = rig.ids_of("The capital of France is Paris")
    stream = rig.client().generate("x")
    first = rig.engine.submit()
    rig.engine.step({first.rid: ids[0]})
    rig.engine.socket.send_multipart([rig.engine.peer, frame(rig, first.rid)])
    with contextlib.suppress(zmq.ZMQError):  # the streamer may have let go of the link already
        rig.engine.step({first.rid: ids[2]})  # behind what was lost, so it can't be used
    rig.open_streams()
    rig.replace_engine()
    again = rig.engine.submit()
    assert unpack_ids(again.ids) == unpack_ids(first.ids) + ids[:1]
    rig.run(again, ids[1:])
    assert stream.text() == "The capital of France is Paris"
    assert any(use.broken for use in rig.uses)


def test_an_engine_that_is_replaced_on_demand_is_nobodys_fault(rig):
    client = rig.client()
    streams = [client.generate("x") for _ in range(3)]
    rids = [rig.engine.submit().rid for _ in streams]
    for _ in range(3):
        rig.replace_engine("stopping")
        assert [rig.engine.submit().rid for _ in streams] == rids
    for rid in rids:
        rig.engine.step({rid: rig.ids_of("a")[0]}, [(rid, "length")])
    assert [stream.text() for stream in streams] == ["a"] * 3


def test_a_stop_order_ends_every_stream(make_rig):
    rig = make_rig()
    rig.announce()
    stream = rig.client().generate("x")
    rig.engine.submit()
    rig.order(Stop("server_stopped", "bye"))
    rig.stopped = True
    with pytest.raises(RequestFailed, match="bye"):
        stream.text()


def test_tokenize_detokenize_and_models(rig):
    client = rig.client()
    assert client.tokenize("hello world") == rig.ids_of("hello world")
    assert client.tokenize(messages=[{"role": "user", "content": "hi"}]) == rig.ids_of("hi")
    assert client.detokenize([1, 2]) == "decoded"
    assert [card.name for card in client.models()] == ["tiny"]


def test_busy_polling_serves_as_ever(make_rig):
    rig = make_rig(busy_poll=0.02)
    rig.announce()
    for _ in range(2):
        stream = rig.client().generate("x", max_tokens=2)
        rig.run(rig.engine.submit(), [8, 9])
        assert stream.result().stats.completion_tokens == 2
    assert rig.open_streams() == 0


def test_loopback_tcp_is_served_too_when_asked_for(make_rig):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    rig = make_rig(zmq_tcp=address)
    rig.announce()
    with Client(endpoint=f"tcp://{address}") as client:
        assert client.tokenize("hello") == rig.ids_of("hello")


def test_tcp_with_keys_lets_in_their_clients_alone(make_rig, tmp_path):
    """ipc, on the same socket, needs no keys; a client's key counts as soon as it is in the file."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    server, known, stranger = (ServerKeys(*new_pair()), new_pair(), new_pair())
    file = tmp_path / "server.key"
    write_keys(file, msgspec.structs.replace(server, clients={"one": known[0]}))
    rig = make_rig(zmq_tcp=address, zmq_keys=str(file))
    rig.announce()
    endpoint = f"tcp://{address}"
    with Client(endpoint=endpoint, keys=ClientKeys(*known, server.public)) as client:
        assert client.tokenize("hello") == rig.ids_of("hello")
    assert rig.client().tokenize("hello") == rig.ids_of("hello")
    bare = zmq.Context()
    for keys in (None, ClientKeys(*stranger, server.public), ClientKeys(*known, stranger[0])):
        refused = connect_dealer(bare, endpoint, keys=keys)
        watch = refused.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED)
        refused.send(encode(Hello(1)))
        assert watch.poll(10_000), "the connection was not ended"
        assert not refused.poll(0)
        refused.disable_monitor()
        watch.close(0)
        refused.close(0)
    bare.term()
    write_keys(file, msgspec.structs.replace(server, clients={"two": stranger[0]}))
    with Client(endpoint=endpoint, keys=ClientKeys(*stranger, server.public)) as client:
        assert client.tokenize("hello") == rig.ids_of("hello")


def test_number_and_depth_of_messages_are_bounded(rig):
    client = rig.client()
    with pytest.raises(RequestRejected, match="not 4097"):
        client.generate(messages=[{"role": "user", "content": "x"}] * (MAX_MESSAGES + 1)).text()
    deep = [0]
    for _ in range(MAX_DEPTH):
        deep = [deep]
    for options in ({"messages": [{"role": "user", "content": deep}]}, {"prompt": "x", "template_kwargs": {"a": deep}}):
        with pytest.raises(RequestRejected, match="nested more than 64"):
            client.generate(**options).text()
    with pytest.raises(RequestRejected, match="nested more than 64"):
        client.tokenize(messages=[{"role": "user", "content": deep}])


def test_another_version_is_refused_naming_both(rig):
    raw = rig.raw()
    raw.send(Hello(99))
    assert "99" in raw.receive(Refused).message
    raw.send(Generate(1, SamplingParams(), ids=b"\5\0\0\0"))
    assert "Hello" in raw.receive(Refused).message


def test_garbage_is_answered_or_dropped_and_harms_nobody(rig):
    stream = rig.client().generate("x")
    submit = rig.engine.submit()
    raw = rig.raw()
    raw.send(b"\xff\xfe")
    raw.send(Hello(1))
    raw.receive(Welcome)
    for frame in (b"", b"\x00", b"\x91" * 5000, encode(Welcome(1, 1, 1))):
        raw.send(frame)
        assert raw.receive(CallFailed).ref == -1
    raw.socket.send_multipart([b"a", b"b", b"c"])
    rig.run(submit, rig.ids_of("fine"))
    assert stream.text() == "fine"


def test_a_ref_in_use_is_refused_and_the_first_stream_goes_on(rig):
    raw = rig.raw()
    raw.send(Hello(1))
    request = Generate(1, SamplingParams(), ids=b"\5\0\0\0")
    raw.send(request)
    raw.send(request)
    rid = rig.engine.submit().rid
    assert "ref 1" in raw.end().message
    assert rig.open_streams() == 1
    rig.engine.step({rid: rig.ids_of("a")[0]})
    assert raw.receive(Deltas).texts == ["a"]


def test_streams_of_many_threads_share_a_client(rig):
    client = rig.client()
    streams = [client.generate(f"{i}") for i in range(8)]
    texts = {}
    threads = [threading.Thread(target=lambda i=i, s=s: texts.update({i: s.text()})) for i, s in enumerate(streams)]
    for thread in threads:
        thread.start()
    submits = [rig.engine.submit() for _ in streams]
    for i, submit in enumerate(submits):
        rig.run(submit, rig.ids_of(f"answer {i}"))
    for thread in threads:
        thread.join(10)
    assert texts == {i: f"answer {i}" for i in range(8)}


def test_a_server_that_vanishes_ends_streams_as_lost(make_rig):
    rig = make_rig()
    rig.announce()
    context = zmq.Context()
    silent = context.socket(zmq.ROUTER)
    endpoint = f"ipc://{rig.run_dir}/silent"
    silent.bind(endpoint)

    def welcome():
        identity, _ = silent.recv_multipart()
        silent.send_multipart([identity, encode(Welcome(1, 5, 64))])

    thread = threading.Thread(target=welcome)
    thread.start()
    began = time.monotonic()
    with Client(endpoint=endpoint) as client:
        thread.join()
        with pytest.raises(ServerLost, match="silent"):
            client.generate("x").text()
        assert time.monotonic() - began > 3
    context.destroy(linger=0)


def test_a_huge_stop_string_is_refused_before_anything_is_made_of_it(rig):
    raw = rig.raw()
    raw.send(Hello(1))
    began = time.process_time()  # of the streamer's thread, too, whatever else runs on the machine
    raw.send(Generate(1, SamplingParams(stop=["x" * (8 << 20)]), ids=b"\5\0\0\0"))
    assert "1024" in raw.end().message
    assert time.process_time() - began < 2


def test_messages_too_deep_to_be_passed_on_fail_alone(rig):
    raw = rig.raw()
    raw.send(Hello(1))
    for depth in range(900, 1010, 3):
        value = "x"
        for _ in range(depth):
            value = [value]
        try:
            frame = encode(Generate(depth, SamplingParams(), messages=[{"role": "user", "content": value}]))
        except ValueError:
            break
        raw.send(frame)
    assert rig.client().tokenize("hello") == rig.ids_of("hello")


def test_closing_a_client_ends_its_readers(rig):
    client = rig.client()
    stream = client.generate("x")
    ends = []

    def read():
        try:
            stream.text()
        except RequestFailed as error:
            ends.append(error.code)

    reader = threading.Thread(target=read)
    reader.start()
    rig.engine.submit()
    client.close()
    reader.join(10)
    assert not reader.is_alive()
    assert stream.end is not None or ends == ["server_lost"]


def test_cached_tokens_and_salt_go_through(rig):
    stream = rig.client().generate(ids=range(3, 303), max_tokens=2, cache_salt="a", return_text=False, return_ids=True)
    submit = rig.engine.submit()
    assert submit.cache_salt == "a"
    rig.engine.step({}, cached={submit.rid: 256, 99: 512})
    rig.run(submit, [8, 9])
    assert len(list(stream)) == 2
    assert stream.end.usage.cached_tokens == 256


def test_warm_prompts_are_computed_at_start_and_belong_to_nobody(make_rig, tmp_path):
    file = tmp_path / "warm.jsonl"
    file.write_text(
        '{"prompt": "The capital"}\n\n{"messages": [{"role": "user", "content": "hi"}], "cache_salt": "a"}\n'
    )
    rig = make_rig(warm_prompts=str(file))
    rig.announce()
    first, second = rig.engine.submit(), rig.engine.submit()
    assert unpack_ids(first.ids) == rig.ids_of("The capital")
    assert (first.warm, first.budget, second.warm, second.cache_salt) == (True, 1, True, "a")
    rig.engine.step({first.rid: 5, second.rid: 5}, ended=[(first.rid, "length"), (second.rid, "length")])
    stream = rig.client().generate("x", max_tokens=1)
    submit = rig.engine.submit()
    assert not submit.warm
    rig.run(submit, rig.ids_of(" Paris"))
    stream.text()


@pytest.mark.parametrize(
    "line", ['{"prompt": 1}', "{}", '{"prompt": "a", "messages": []}', '{"other": "a"}', "no json"]
)
def test_a_bad_warm_prompt_is_named_by_its_line(tmp_path, line):
    file = tmp_path / "warm.jsonl"
    file.write_text(f'{{"prompt": "good"}}\n{line}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_warm_prompts(file)


def test_a_missing_file_of_warm_prompts_is_named(tmp_path):
    with pytest.raises(ValueError, match="can't be read"):
        read_warm_prompts(tmp_path / "none")
