"""`OllamaAnswer`: how Ollama words a reply, as lines of JSON; see `server.generation.Answer`."""

import secrets
from datetime import UTC, datetime
from typing import Any

from protocol import Delta
from protocol.messages import End
from server.errors import ApiError
from server.generation import Choice
from server.schemas import UsageBody
from server.sse import encode_json
from server.tools import arguments_of, join_calls

_NS = 1_000_000_000


def now() -> str:
    """This moment as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class OllamaAnswer:
    """Words one answer. With `chat` the text is a message's content, else the response."""

    def __init__(self, model: str, *, chat: bool, thinks: bool) -> None:
        self._model = model
        self._chat = chat
        self._thinks = thinks
        self._calls: list[Any] = []
        self._end: End | None = None

    def _body(self, text: str, thinking: str = "", calls: list[Any] | None = None) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self._model, "created_at": now()}
        said: dict[str, Any] = {"role": "assistant", "content": text} if self._chat else {"response": text}
        if thinking and self._thinks:
            said["thinking"] = thinking
        if calls:
            said["tool_calls"] = calls
        return body | ({"message": said} if self._chat else said)

    def _line(self, body: dict[str, Any]) -> bytes:
        return encode_json(body) + b"\n"

    def opening(self, index: int, prompt_tokens: int) -> bytes:
        """Nothing comes before the first piece."""
        return b""

    def around_text(self, index: int) -> tuple[bytes, bytes]:
        """The line of a text, without the text. All lines of a reply have the time of its first one."""
        marker = secrets.token_hex(16)
        before, after = self._line(self._body(marker) | {"done": False}).split(encode_json(marker))
        return before, after

    def piece(self, index: int, delta: Delta) -> bytes:
        """A line for reasoning and text; calls are gathered, as Ollama sends them whole."""
        self._calls += delta.tool_calls
        if not (delta.text or (delta.reasoning and self._thinks)):
            return b""
        return self._line(self._body(delta.text, delta.reasoning) | {"done": False})

    def closing(self, index: int, end: End) -> bytes:
        """The line with the tool calls, if there are any."""
        self._end = end
        if not self._calls:
            return b""
        return self._line(self._body("", calls=_calls(join_calls(self._calls))) | {"done": False})

    def ending(self, usage: UsageBody) -> bytes:
        """The last line, with counts and durations."""
        return self._line(self._body("") | self._totals(self._end, usage))

    def failure(self, error: ApiError) -> bytes:
        """The line with the error."""
        return self._line({"error": error.message})

    def whole(self, choices: list[Choice], usage: UsageBody) -> object:
        """The response that is sent whole."""
        choice = choices[0]
        body = self._body(choice.text, choice.reasoning, _calls(choice.calls))
        return body | self._totals(choice.end, usage)

    def _totals(self, end: End | None, usage: UsageBody) -> dict[str, Any]:
        timing = end.timing if end is not None else None
        total = max(timing.total, 0.0) if timing is not None else 0.0
        ttft = max(timing.ttft, 0.0) if timing is not None else 0.0
        prefill = max(timing.prefill, 0.0) if timing is not None else 0.0
        return {
            "done": True,
            "done_reason": "length" if end is not None and end.reason == "length" else "stop",
            "total_duration": int(total * _NS),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": int(prefill * _NS),
            "eval_count": usage.completion_tokens,
            "eval_duration": int(max(total - ttft, 0.0) * _NS),
        }


def _calls(calls: list[Any]) -> list[dict[str, Any]]:
    return [{"function": {"name": call.function.name, "arguments": arguments_of(call)}} for call in calls]
