"""`POST /v1/chat/completions`: what reaches the streamer, and the shape of the answers."""

import math
from typing import Any

import openai
import pytest
from fake_streamer import FakeStream
from http_worker import HttpWorker, chat, events

from protocol.ids import pack_floats, pack_ids
from protocol.messages import Generate, SamplingParams, TokenLogprobs


def asked(worker: HttpWorker, body: dict[str, Any]) -> Generate:
    """Post a chat request that must succeed, and return what the streamer was asked for."""
    response = worker.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return worker.streamer.stream().request


def test_whole_answer(worker: HttpWorker) -> None:
    response = worker.client.post("/v1/chat/completions", json=chat())
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["model"] == "tiny"
    assert body["created"] > 1_700_000_000
    (choice,) = body["choices"]
    assert choice["index"] == 0
    assert choice["message"] == {"role": "assistant", "content": "Hello, world", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_streamed_answer(worker: HttpWorker) -> None:
    response = worker.client.post("/v1/chat/completions", json=chat(stream=True))
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert [choice["delta"].get("content") for choice in choices[1:-1]] == ["Hello", ", ", "world"]
    assert choices[-1]["delta"] == {}
    assert [choice["finish_reason"] for choice in choices] == [None] * 4 + ["stop"]
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize(
    ("stream_options", "included"),
    [({"include_usage": True}, True), ({"include_usage": None}, False), ({}, False), (None, False)],
)
def test_usage_in_stream(worker: HttpWorker, stream_options: Any, included: bool) -> None:
    body = chat(stream=True, stream_options=stream_options)
    *chunks, _ = events(worker.client.post("/v1/chat/completions", json=body).text)
    if not included:
        assert all("usage" not in chunk for chunk in chunks)
        return
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == 8
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


def test_openai_package(worker: HttpWorker) -> None:
    with openai.OpenAI(base_url=f"{worker.url}/v1", api_key="none", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "Hi"}]
        whole = client.chat.completions.create(model="tiny", messages=messages)
        assert whole.choices[0].message.content == "Hello, world"
        assert whole.usage is not None
        assert whole.usage.prompt_tokens_details is not None
        assert whole.usage.prompt_tokens_details.cached_tokens == 2
        with client.chat.completions.create(
            model="tiny", messages=messages, stream=True, stream_options={"include_usage": True}
        ) as stream:
            chunks = list(stream)
        texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert "".join(texts) == "Hello, world"
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.total_tokens == 8
        assert [model.id for model in client.models.list()] == ["tiny"]
        assert client.models.retrieve("tiny").created == 1_700_000_000
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="tiny", messages=messages, temperature=9)
        assert caught.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="other", messages=messages)


def test_defaults_are_left_to_the_streamer(worker: HttpWorker) -> None:
    request = asked(worker, {"messages": [{"role": "user", "content": "Hi"}]})
    assert request.params == SamplingParams()
    assert request.messages == [{"role": "user", "content": "Hi"}]
    assert (request.prompt, request.ids, request.timeout, request.template_kwargs) == (None, None, None, {})
    assert request.return_text
    assert not request.return_ids


def test_null_is_the_default(worker: HttpWorker) -> None:
    names = "model max_tokens max_completion_tokens temperature top_p seed stop ignore_eos stream stream_options"
    names += " user metadata store chat_template_kwargs top_k min_p repetition_penalty presence_penalty"
    names += " frequency_penalty logit_bias min_tokens stop_token_ids xtc_probability xtc_threshold priority"
    names += " logprobs top_logprobs"
    request = asked(worker, chat() | dict.fromkeys(names.split()))
    assert request.params == SamplingParams()


def test_options_reach_the_streamer(worker: HttpWorker) -> None:
    request = asked(
        worker,
        chat(
            temperature=1,
            top_p=0.5,
            seed=-7,
            max_tokens=9,
            stop="END",
            ignore_eos=True,
            user="me",
            metadata={"a": "b"},
            store=False,
            chat_template_kwargs={"enable_thinking": False},
        ),
    )
    assert request.params == SamplingParams(1.0, 0.5, -7, 9, True, ["END"])
    assert request.template_kwargs == {"enable_thinking": False}


EVERY: dict[str, Any] = {
    "top_k": 40,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "presence_penalty": -0.5,
    "frequency_penalty": 1,
    "min_tokens": 2,
    "stop_token_ids": [7, 8],
    "xtc_probability": 0.5,
    "xtc_threshold": 0.2,
    "priority": -1,
}


def test_every_sampling_option_reaches_the_streamer(worker: HttpWorker) -> None:
    body = chat(**EVERY, logit_bias={"5": -100, "49151": 1.5}, logprobs=True, top_logprobs=3)
    params = SamplingParams(**EVERY, logit_bias={5: -100.0, 49151: 1.5}, logprobs=3)
    assert asked(worker, body).params == params


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"top_logprobs": None}, None),
    ],
)
def test_how_many_logprobs(worker: HttpWorker, fields: dict[str, Any], logprobs: int | None) -> None:
    assert asked(worker, chat(**fields)).params.logprobs == logprobs


def test_the_openai_package_sends_every_option(worker: HttpWorker) -> None:
    messages: Any = [{"role": "user", "content": "Hi"}]
    extra = {k: v for k, v in EVERY.items() if k not in ("presence_penalty", "frequency_penalty")}
    with openai.OpenAI(base_url=f"{worker.url}/v1", api_key="none", max_retries=0) as client:
        client.chat.completions.create(
            model="tiny",
            messages=messages,
            presence_penalty=EVERY["presence_penalty"],
            frequency_penalty=EVERY["frequency_penalty"],
            logit_bias={"5": -100},
            extra_body=extra,
        )
    assert worker.streamer.stream().request.params == SamplingParams(**EVERY, logit_bias={5: -100.0})


def say_with_logprobs(stream: FakeStream) -> None:
    """ "Hé" in three tokens, the second and third of which are halves of a character; and a token without text."""
    stream.accept()
    top = pack_ids([1, 9]), pack_floats([-0.5, -math.inf])
    stream.tokens("H", TokenLogprobs(1, -0.5, *top, b"H", [b"H", b"\xc3"], 0))
    halves = [
        TokenLogprobs(2, -1.5, *top, b"\xc3", [b"H", b"\xc3"], 1),
        TokenLogprobs(3, -0.25, token=b"\xa9", offset=1),
    ]
    stream.tokens("é", *halves)
    stream.tokens("", TokenLogprobs(4, -math.inf, token=b"<|x|>", offset=2))
    stream.finish()


CONTENT = [
    {
        "token": "H",
        "logprob": -0.5,
        "bytes": [72],
        "top_logprobs": [
            {"token": "H", "logprob": -0.5, "bytes": [72]},
            {"token": "\\xc3", "logprob": -9999.0, "bytes": [0xC3]},
        ],
    },
    {
        "token": "\\xc3",
        "logprob": -1.5,
        "bytes": [0xC3],
        "top_logprobs": [
            {"token": "H", "logprob": -0.5, "bytes": [72]},
            {"token": "\\xc3", "logprob": -9999.0, "bytes": [0xC3]},
        ],
    },
    {"token": "\\xa9", "logprob": -0.25, "bytes": [0xA9], "top_logprobs": []},
    {"token": "<|x|>", "logprob": -9999.0, "bytes": list(b"<|x|>"), "top_logprobs": []},
]


def test_logprobs_of_a_whole_answer(worker: HttpWorker) -> None:
    worker.streamer.on_generate = say_with_logprobs
    body = worker.client.post("/v1/chat/completions", json=chat(logprobs=True, top_logprobs=2)).json()
    (choice,) = body["choices"]
    assert choice["message"]["content"] == "Hé"
    assert choice["logprobs"] == {"content": CONTENT, "refusal": None}


def test_logprobs_of_a_streamed_answer(worker: HttpWorker) -> None:
    worker.streamer.on_generate = say_with_logprobs
    body = chat(logprobs=True, top_logprobs=2, stream=True)
    *chunks, done = events(worker.client.post("/v1/chat/completions", json=body).text)
    assert done == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["delta"].get("content") for choice in choices] == ["", "H", "é", "", None]
    assert [choice["logprobs"] and choice["logprobs"]["content"] for choice in choices] == [
        None,
        CONTENT[:1],
        CONTENT[1:3],
        CONTENT[3:],
        None,
    ]


def test_logprobs_of_an_empty_answer(worker: HttpWorker) -> None:
    worker.streamer.on_generate = lambda stream: stream.finish("stop", completion=0)
    body = worker.client.post("/v1/chat/completions", json=chat(logprobs=True)).json()
    assert body["choices"][0]["logprobs"] == {"content": [], "refusal": None}


def test_logprobs_with_the_openai_package(worker: HttpWorker) -> None:
    worker.streamer.on_generate = say_with_logprobs
    messages: Any = [{"role": "user", "content": "Hi"}]
    with openai.OpenAI(base_url=f"{worker.url}/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(model="tiny", messages=messages, logprobs=True, top_logprobs=2)
        logprobs = whole.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert b"".join(bytes(token.bytes or []) for token in logprobs.content[:3]).decode() == "Hé"
        assert logprobs.content[0].top_logprobs[0].token == "H"
        with client.chat.completions.create(
            model="tiny", messages=messages, logprobs=True, top_logprobs=2, stream=True
        ) as stream:
            chunks = [chunk.choices[0] for chunk in stream]
        found = [token for c in chunks if c.logprobs for token in c.logprobs.content or []]
        assert [token.logprob for token in found] == [-0.5, -1.5, -0.25, -9999.0]


def test_max_completion_tokens_wins(worker: HttpWorker) -> None:
    assert asked(worker, chat(max_tokens=3, max_completion_tokens=4)).params.max_tokens == 4


def test_stop_list(worker: HttpWorker) -> None:
    assert asked(worker, chat(stop=["a", "b"])).params.stop == ["a", "b"]
    assert asked(worker, chat(stop=[])).params.stop == []


def test_messages_pass_as_they_came(worker: HttpWorker) -> None:
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
        {"role": "assistant", "reasoning_content": "hm"},
        {"role": "tool", "content": "nul \0 and 😀", "tool_call_id": "1", "name": "f"},
    ]
    assert asked(worker, {"messages": messages}).messages == messages


def test_text_with_everything(worker: HttpWorker) -> None:
    text = 'quotes " and \\ and \n\r\t and \0 and \u2028 and 😀 and data: [DONE]\n\n'

    def say(stream: FakeStream) -> None:
        stream.text(*text)
        stream.finish()

    worker.streamer.on_generate = say
    *chunks, _ = events(worker.client.post("/v1/chat/completions", json=chat(stream=True)).text)
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == text
    whole = worker.client.post("/v1/chat/completions", json=chat()).json()
    assert whole["choices"][0]["message"]["content"] == text


def test_empty_answer(worker: HttpWorker) -> None:
    worker.streamer.on_generate = lambda stream: stream.finish("length", completion=0)
    *chunks, _ = events(worker.client.post("/v1/chat/completions", json=chat(stream=True)).text)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "length"]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
