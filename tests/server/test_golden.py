"""The order and the shape of every event and of every whole answer, held to files.

`UPDATE_GOLDEN=1 pytest tests/server/test_golden.py` writes them anew; read the difference before you commit it.
"""

import os
import re
from pathlib import Path
from typing import Any

import pytest
from fake_streamer import FakeStream
from http_worker import HttpWorker, chat

from protocol.messages import ToolCallDelta

GOLDEN = Path(__file__).parent / "golden"
TOOL = {"name": "f", "description": "d", "parameters": {"type": "object"}}

BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        chat(tools=[{"type": "function", "function": TOOL}], stream_options={"include_usage": True}),
    ),
    "completions": ("/v1/completions", {"prompt": "x", "stream_options": {"include_usage": True}}),
    "responses": ("/v1/responses", {"input": "x", "tools": [{"type": "function", **TOOL}], "store": False}),
    "messages": (
        "/v1/messages",
        {
            "max_tokens": 9,
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "thinking": {"type": "enabled", "budget_tokens": 5},
        },
    ),
}


def say_all(stream: FakeStream) -> None:
    """Reasoning, text, and two calls."""
    stream.accept()
    stream.piece(reasoning="Let me ")
    stream.piece(reasoning="see.")
    stream.piece("Hello")
    stream.piece(", you")
    stream.piece("", "", ToolCallDelta(0, "call_1", "f"), ToolCallDelta(0, arguments='{"a": '))
    stream.piece("", "", ToolCallDelta(0, arguments="1}"))
    stream.piece("", "", ToolCallDelta(1, "call_2", "f", "{}"))
    stream.finish("tool_calls")


def say_text(stream: FakeStream) -> None:
    """Two pieces of text, up to the limit."""
    stream.accept()
    stream.text("Hello", ", you")
    stream.finish("length")


def fail_later(stream: FakeStream) -> None:
    """A piece of text, and an error."""
    stream.accept()
    stream.text("Hello")
    stream.fail("engine_lost", "the engine process died")


def normal(text: str) -> str:
    """Without what is another each time."""
    text = re.sub(r"resp_[0-9a-f]{24}_", "resp_", text)
    text = re.sub(r"[0-9a-f]{32}", "ID", text)
    return re.sub(r'"(created|created_at)":\d+', r'"\1":0', text)


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("api", BODIES)
@pytest.mark.parametrize("say", [say_all, say_text, fail_later], ids=["all", "text", "failed"])
def test_answers_are_worded_as_ever(worker: HttpWorker, api: str, say: Any, stream: bool) -> None:
    if api == "completions" and say is say_all:
        pytest.skip("a completion is nothing but text")
    path, body = BODIES[api]
    worker.streamer.on_generate = say
    response = worker.client.post(path, json=body | {"stream": stream})
    said = f"{response.status_code} {response.headers['content-type']}\n{normal(response.text)}"
    file = GOLDEN / f"{api}-{say.__name__}-{'streamed' if stream else 'whole'}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(said, encoding="utf-8")
    assert said == file.read_text(encoding="utf-8")
