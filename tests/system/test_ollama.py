"""Ollama's own Python package against a server of ours."""

import json

import ollama
import pytest

from bench.harness import RunningServer

ASK = [{"role": "user", "content": "Say something."}]
SHORT = {"num_predict": 8, "temperature": 0}


def test_chat_generate_and_what_there_is(server: RunningServer):
    with ollama.Client(server.url, trust_env=False) as client:
        [listed] = client.list().models
        assert listed.model == "tiny:latest"
        whole = client.chat("tiny:latest", ASK, options=SHORT, keep_alive="5m")
        assert whole.done
        assert whole.message.content
        assert whole.eval_count is not None
        assert 0 < whole.eval_count <= 8
        pieces = [*client.chat("tiny", ASK, options=SHORT, stream=True)]
        assert "".join(piece.message.content or "" for piece in pieces) == whole.message.content
        assert pieces[-1].done_reason in ("stop", "length")
        assert client.generate("tiny", "Say something.", options=SHORT).response == whole.message.content
        assert client.show("tiny").capabilities == ["completion", "tools"]
        assert client.ps().models[0].context_length
        shape = {
            "type": "object",
            "properties": {"n": {"enum": [1, 2]}},
            "required": ["n"],
            "additionalProperties": False,
        }
        formed = client.chat("tiny", ASK, options={"num_predict": 60}, format=shape)
        assert json.loads(formed.message.content or "")["n"] in (1, 2)
        with pytest.raises(ollama.ResponseError, match="does not exist") as caught:
            client.chat("other", ASK)
        assert caught.value.status_code == 404
        with pytest.raises(ollama.ResponseError, match="callboard pull"):
            client.pull("other")
