"""What the engine's death must not change: texts under a schema, tool calls, and the choices of one prompt."""

import json
import os
import signal
from typing import Any

import pytest

from bench.harness import RunningServer
from protocol import Client
from protocol.messages import Grammar

SCHEMA = {
    "type": "object",
    "properties": {"names": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 60}},
    "required": ["names"],
    "additionalProperties": False,
}
QUESTION = [{"role": "user", "content": "Name some rivers."}]


@pytest.fixture(scope="module")
def breakable_server(tiny_model):
    """A server whose engine is killed."""
    with RunningServer(tiny_model, "--served-model-name", "tiny") as running:
        yield running


def answers(server: RunningServer, *, kill_at: int = 0) -> tuple[list[list[int]], list[Any]]:
    """The ids of a stream under a schema, one that sees a tool, and two choices; the engine dies after `kill_at`
    tokens of the first."""
    sampled = {"temperature": 0.8, "return_ids": True}
    with Client(endpoint=server.endpoint) as client:
        streams = [
            client.generate(
                messages=QUESTION, max_tokens=300, seed=3, grammar=Grammar("json", json.dumps(SCHEMA)), **sampled
            ),
            client.generate(
                messages=QUESTION,
                max_tokens=200,
                seed=4,
                tools=[{"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}],
                tool_choice="required",
                split_reply=True,
                **sampled,
            ),
            *client.generate_choices(
                2, messages=QUESTION, max_tokens=300, seed=5, ignore_eos=True, cache_salt="mine", **sampled
            ),
        ]
        ids: list[list[int]] = [[] for _ in streams]
        for place, stream in enumerate(streams):
            for delta in stream:
                ids[place] += delta.ids
                if kill_at and len(ids[0]) >= kill_at:
                    kill_at = 0
                    engine = next(actor for actor in server.health()["actors"] if actor["name"].startswith("engine"))
                    os.kill(engine["pid"], signal.SIGKILL)
        return ids, [stream.end for stream in streams]


def test_a_schema_a_tool_call_and_two_choices_survive_the_death_of_the_engine(breakable_server: RunningServer):
    undisturbed, _ = answers(breakable_server)
    epoch = breakable_server.health()["actors"]
    ids, ends = answers(breakable_server, kill_at=20)
    assert breakable_server.health()["actors"] != epoch
    assert ids == undisturbed
    assert ids[2] != ids[3]
    assert [end.outcome for end in ends] == ["finished"] * 4
    assert [end.usage.prompt_tokens for end in ends[2:]] == [ends[0].usage.prompt_tokens] * 2
