"""`POST /v1/chat/completions`: what reaches the streamer, and the shape of the answers."""

from typing import Any

import openai
import pytest
from fake_streamer import FakeStream
from http_worker import HttpWorker, chat, events

from protocol.messages import Generate, SamplingParams


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
    names += " user metadata store chat_template_kwargs"
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
