"""Check that the libraries people use work at once against one server of several models, each choosing its model."""

import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ollama
import openai

from bench.checks.clients import ASK, anthropic_client, openai_client, run_script
from bench.checks.report import Report
from bench.harness import RunningServer
from protocol import Client
from protocol.client.locate import ask_house
from protocol.messages import ModelOrder

TOKENS = 12
LOAD_TIME = 120.0  # seconds

Texts = dict[str, list[str]]  # by model, what a library has got: whole and streamed
Library = Callable[[RunningServer, Sequence[str]], Iterator[tuple[str, list[str]]]]


def by_openai(server: RunningServer, models: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """The `openai` package."""
    with openai_client(server) as client:
        for model in models:
            base: dict[str, Any] = {"model": model, "messages": ASK, "max_tokens": TOKENS, "temperature": 0}
            whole = client.chat.completions.create(**base)
            pieces = [*client.chat.completions.create(**base, stream=True)]
            streamed = "".join(piece.choices[0].delta.content or "" for piece in pieces)
            assert {whole.model, *(piece.model for piece in pieces)} == {model}
            yield model, [whole.choices[0].message.content or "", streamed]


def by_anthropic(server: RunningServer, models: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """The `anthropic` package."""
    with anthropic_client(server) as typed:
        client: Any = typed
        for model in models:
            base: dict[str, Any] = {"model": model, "messages": ASK, "max_tokens": TOKENS}
            base["extra_body"] = {"temperature": 0}
            whole = client.messages.create(**base)
            with client.messages.stream(**base) as stream:
                streamed = "".join(stream.text_stream)
            assert whole.model == model
            yield model, [whole.content[0].text, streamed]


def by_ollama(server: RunningServer, models: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """The `ollama` package, which calls a model by its name with a tag."""
    options = {"num_predict": TOKENS, "temperature": 0}
    with ollama.Client(server.url, trust_env=False, timeout=LOAD_TIME) as client:
        for model in models:
            whole = client.chat(f"{model}:latest", ASK, options=options)
            pieces = client.chat(model, ASK, options=options, stream=True)
            streamed = "".join(piece.message.content or "" for piece in pieces)
            assert whole.model == f"{model}:latest"
            yield model, [whole.message.content or "", streamed]


def by_langchain(server: RunningServer, models: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """The `langchain-openai` package."""
    from langchain_openai import ChatOpenAI

    with openai.DefaultHttpxClient(trust_env=False, timeout=LOAD_TIME) as http:
        options: dict[str, Any] = {"base_url": f"{server.url}/v1", "api_key": "none", "http_client": http}
        for model in models:
            chat = ChatOpenAI(model=model, max_tokens=TOKENS, temperature=0, max_retries=0, **options)  # type: ignore[call-arg]  # an alias
            streamed = "".join(str(piece.content) for piece in chat.stream(ASK[0]["content"]))
            yield model, [str(chat.invoke(ASK[0]["content"]).content), streamed]


def by_litellm(server: RunningServer, models: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """The `litellm` package, in a process of its own."""
    script = """
import json, sys
import litellm
litellm.suppress_debug_info = True
url, ask, tokens, *models = sys.argv[1:]
for model in models:
    base = dict(model=f"openai/{model}", api_base=f"{url}/v1", api_key="none", max_tokens=int(tokens), temperature=0,
                num_retries=0, messages=json.loads(ask))
    whole = litellm.completion(**base).choices[0].message.content
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(**base, stream=True))
    print(json.dumps([model, [whole, streamed]]), flush=True)
"""
    lines = run_script([sys.executable, "-c", script, server.url, json.dumps(ASK), str(TOKENS), *models], 500)
    for line in lines:
        model, texts = json.loads(line)
        yield model, texts


LIBRARIES: dict[str, Library] = {
    "openai": by_openai,
    "anthropic": by_anthropic,
    "ollama": by_ollama,
    "langchain-openai": by_langchain,
    "litellm": by_litellm,
}


def expected(server: RunningServer, model: str) -> str:
    """What a model says, asked over ZeroMQ."""
    assert server.record is not None
    answer = ask_house(server.record.models, ModelOrder(1, "load", model), LOAD_TIME)
    assert not answer.code, answer.message
    with Client(endpoint=answer.endpoint) as client:
        return client.generate(messages=ASK, max_tokens=TOKENS, temperature=0).text()


def clients_at_once(
    report: Report, server: RunningServer, models: Sequence[str], libraries: Sequence[str], rounds: int = 1
) -> None:
    """Each library asks each model, all libraries at the same time and each beginning with another model."""
    texts = {model: expected(server, model) for model in models}
    report.expect(len(set(texts.values())) == len(models), "the models say different things", texts)
    found: dict[str, Texts] = {name: {} for name in libraries}
    faults: dict[str, str] = {}
    start = threading.Barrier(len(libraries))

    def run(name: str, first: int) -> None:
        turned = [models[(first + i) % len(models)] for i in range(len(models))] * rounds
        try:
            start.wait(30)
            for model, got in LIBRARIES[name](server, turned):
                found[name].setdefault(model, []).extend(got)
        except Exception:
            faults[name] = traceback.format_exc(limit=-3)

    began = time.monotonic()
    threads = [threading.Thread(target=run, args=(name, i)) for i, name in enumerate(libraries)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report.measured("seconds", round(time.monotonic() - began, 1))
    for name in libraries:
        report.expect(name not in faults, f"{name} works", faults.get(name))
        for model in models:
            got = found[name].get(model, [])
            right = got == [texts[model]] * (2 * rounds)
            report.expect(right, f"{name} gets what {model} says, whole and streamed", [texts[model], got])
