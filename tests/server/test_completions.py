"""`POST /v1/completions`: every kind of prompt, and the shape of the answers."""

import math
from typing import Any

import openai
import pytest
from fake_streamer import FakeStream
from http_worker import HttpWorker, events

from protocol.ids import pack_floats, pack_ids, unpack_ids
from protocol.messages import TokenLogprobs


def ask(worker: HttpWorker, prompt: Any, **fields: Any) -> Any:
    """Post a completion request that must succeed."""
    response = worker.client.post("/v1/completions", json={"prompt": prompt, **fields})
    assert response.status_code == 200, response.text
    return response


def test_string(worker: HttpWorker) -> None:
    body = ask(worker, "Once").json()
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": "Hello, world", "finish_reason": "stop", "logprobs": None}]
    assert body["usage"]["total_tokens"] == 8
    request = worker.streamer.stream().request
    assert request.prompt == "Once"
    assert request.add_special_tokens
    assert request.params.max_tokens == 16


def test_max_tokens(worker: HttpWorker) -> None:
    ask(worker, "a", max_tokens=5)
    assert worker.streamer.stream().request.params.max_tokens == 5
    ask(worker, "a", max_tokens=None)
    assert worker.streamer.stream().request.params.max_tokens == 16


def test_token_ids(worker: HttpWorker) -> None:
    ask(worker, [1, 2, 4294967295])
    ids = worker.streamer.stream().request.ids
    assert ids is not None
    assert unpack_ids(ids) == [1, 2, 4294967295]


def echo(stream: FakeStream) -> None:
    request = stream.request
    stream.accept()
    stream.text(request.prompt if request.prompt is not None else str(unpack_ids(request.ids or b"")))
    stream.finish(prompt=2, completion=1, cached=1)


@pytest.mark.parametrize(
    ("prompt", "texts"), [(["a", "b", "c"], ["a", "b", "c"]), ([[1], [2, 3]], ["[1]", "[2, 3]"]), (["a"], ["a"])]
)
def test_several_prompts(worker: HttpWorker, prompt: Any, texts: list[str]) -> None:
    worker.streamer.on_generate = echo
    body = ask(worker, prompt).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(len(texts)))
    assert [choice["text"] for choice in body["choices"]] == texts
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2 * len(texts), len(texts))
    assert usage["prompt_tokens_details"]["cached_tokens"] == len(texts)


def test_several_prompts_streamed(worker: HttpWorker) -> None:
    worker.streamer.on_generate = echo
    response = ask(worker, ["a", "b"], stream=True, stream_options={"include_usage": True})
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    for index, text in enumerate("ab"):
        own = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in own) == text
        assert own[-1]["finish_reason"] == "stop"
    assert chunks[-1]["usage"]["total_tokens"] == 6


@pytest.mark.parametrize("stream", [False, True])
def test_one_bad_prompt_ends_the_request(worker: HttpWorker, stream: bool) -> None:
    def reject_b(one: FakeStream) -> None:
        if one.request.prompt == "b":
            one.reject("prompt_too_long", "4096 is the limit, 5000 came", param="prompt")

    worker.streamer.on_generate = reject_b
    response = worker.client.post("/v1/completions", json={"prompt": ["a", "b", "c"], "stream": stream})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    streams = worker.streamer.streams
    worker.streamer.wait_for(lambda: streams[0].cancelled and streams[2].cancelled)


def test_openai_package(worker: HttpWorker) -> None:
    with openai.OpenAI(base_url=f"{worker.url}/v1", api_key="none", max_retries=0) as client:
        whole = client.completions.create(model="tiny", prompt="Once")
        assert whole.choices[0].text == "Hello, world"
        with client.completions.create(model="tiny", prompt=[1, 2], stream=True) as stream:
            chunks = list(stream)
        assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello, world"
        assert chunks[-1].choices[0].finish_reason == "stop"


def say_with_logprobs(stream: FakeStream) -> None:
    """ "aé" in three tokens, the last two of which are halves of a character."""
    stream.accept()
    top = pack_ids([8, 9]), pack_floats([-0.25, -math.inf])
    stream.tokens("a", TokenLogprobs(1, -0.5, *top, b"a", [b"b", b"\xc3"], 0))
    halves = [
        TokenLogprobs(2, -1.5, *top, b"\xc3", [b"b", b"\xc3"], 1),
        TokenLogprobs(3, -1, token=b"\xa9", offset=1),
    ]
    stream.tokens("é", *halves)
    stream.finish()


LOGPROBS = {
    "tokens": ["a", "bytes:\\xc3", "bytes:\\xa9"],
    "token_logprobs": [-0.5, -1.5, -1],
    "top_logprobs": [
        {"b": -0.25, "bytes:\\xc3": -9999.0, "a": -0.5},
        {"b": -0.25, "bytes:\\xc3": -9999.0},
        {"bytes:\\xa9": -1},
    ],
    "text_offset": [0, 1, 1],
}


def test_logprobs_of_a_whole_completion(worker: HttpWorker) -> None:
    worker.streamer.on_generate = say_with_logprobs
    (choice,) = ask(worker, "x", logprobs=2).json()["choices"]
    assert (choice["text"], choice["logprobs"]) == ("aé", LOGPROBS)
    assert worker.streamer.stream().request.params.logprobs == 2


def test_logprobs_of_a_streamed_completion(worker: HttpWorker) -> None:
    worker.streamer.on_generate = say_with_logprobs
    *chunks, _ = events(ask(worker, "x", logprobs=2, stream=True).text)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["text"] for choice in choices] == ["a", "é", ""]
    assert choices[-1]["logprobs"] is None
    columns = [choice["logprobs"] for choice in choices[:-1]]
    assert {name: [v for column in columns for v in column[name]] for name in LOGPROBS} == LOGPROBS


def test_logprobs_of_several_prompts(worker: HttpWorker) -> None:
    worker.streamer.on_generate = say_with_logprobs
    choices = ask(worker, ["x", "y"], logprobs=0).json()["choices"]
    assert [choice["logprobs"]["tokens"] for choice in choices] == [LOGPROBS["tokens"]] * 2


def test_logprobs_with_the_openai_package(worker: HttpWorker) -> None:
    worker.streamer.on_generate = say_with_logprobs
    with openai.OpenAI(base_url=f"{worker.url}/v1", api_key="none", max_retries=0) as client:
        logprobs = client.completions.create(model="tiny", prompt="x", logprobs=2).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.model_dump() == LOGPROBS


@pytest.mark.parametrize("value", [True, -1, 21, 1.5, "5"])
def test_bad_logprobs(worker: HttpWorker, value: Any) -> None:
    response = worker.client.post("/v1/completions", json={"prompt": "a", "logprobs": value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "logprobs"


def test_min_tokens_beyond_the_default_of_max_tokens(worker: HttpWorker) -> None:
    response = worker.client.post("/v1/completions", json={"prompt": "a", "min_tokens": 17})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "min_tokens"


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "must not be empty"),
        ([[]], "prompt[0] must not be empty"),
        (["a", 1], "only strings"),
        ([1, [2]], "only token ids"),
        ([-1], "no token id"),
        ([2**32], "no token id"),
        ([1.5], "prompt"),
        ([True], "prompt"),
        ([[1, "x"]], "prompt[0][1]: expected integer, got string"),
        (5, "prompt: expected string or array, got integer"),
        (None, "prompt: expected string or array, got null"),
        (["a"] * 257, "256"),
    ],
)
def test_bad_prompts(worker: HttpWorker, prompt: Any, words: str) -> None:
    response = worker.client.post("/v1/completions", json={"prompt": prompt})
    assert response.status_code == 400
    error = response.json()["error"]
    assert words in error["message"]
    assert error["param"].startswith("prompt")
    assert worker.streamer.streams == []


def test_missing_prompt(worker: HttpWorker) -> None:
    response = worker.client.post("/v1/completions", json={"model": "tiny"})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "prompt is required"
