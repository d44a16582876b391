"""`ResponseEvents`: the output of a response item by item, and the events that tell of it.

Used by `server.responses` on the event loop, one object per response. Items come one after another: one is done before
the next is added.
"""

import secrets
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import UNSET

from protocol import Delta
from server.logprobs import chat_logprobs
from server.schemas_responses import (
    FunctionCallItem,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseBody,
    ResponseEvent,
)


class ResponseEvents:
    """`items` is the output so far."""

    def __init__(self) -> None:
        self.items: list[OutputItem] = []
        self._sequence = 0

    def event(self, kind: str, **fields: Any) -> ResponseEvent:
        """An event with the next sequence number."""
        self._sequence += 1
        return ResponseEvent(kind, self._sequence - 1, **fields)

    def about(self, kind: str, response: ResponseBody) -> ResponseEvent:
        """An event that carries the whole response."""
        return self.event(kind, response=msgspec.structs.replace(response, output=self.items.copy()))

    def take(self, delta: Delta) -> Iterator[ResponseEvent]:
        """The events of a piece."""
        if delta.reasoning:
            yield from self._reasoning(delta.reasoning)
        if delta.text or delta.logprobs:
            yield from self._text(delta)
        for call in delta.tool_calls:
            if call.id:
                yield from self.close()
                item = FunctionCallItem(f"fc_{secrets.token_hex(16)}", call.id, call.name)
                yield self._added(item, msgspec.structs.replace(item))
            last = self.items[-1]
            if call.arguments and isinstance(last, FunctionCallItem):
                last.arguments += call.arguments
                yield self._at("response.function_call_arguments.delta", delta=call.arguments)

    def close(self, status: str = "completed") -> Iterator[ResponseEvent]:
        """The events that end the item that is open, if one is."""
        if not self.items or self.items[-1].status != "in_progress":
            return
        last = self.items[-1]
        last.status = status
        match last:
            case MessageItem():
                (part,) = last.content
                yield self._at("response.output_text.done", content_index=0, text=part.text, logprobs=part.logprobs)
                yield self._at("response.content_part.done", content_index=0, part=part)
            case ReasoningItem():
                (thought,) = last.content
                yield self._at("response.reasoning_text.done", content_index=0, text=thought.text)
                yield self._at("response.content_part.done", content_index=0, part=thought)
            case FunctionCallItem():
                done = "response.function_call_arguments.done"
                yield self._at(done, arguments=last.arguments, name=last.name)
        yield self.event("response.output_item.done", output_index=len(self.items) - 1, item=last)

    def _reasoning(self, text: str) -> Iterator[ResponseEvent]:
        if not self.items or not isinstance(self.items[-1], ReasoningItem):
            yield from self.close()
            shown = ReasoningItem(f"rs_{secrets.token_hex(16)}")
            yield self._added(ReasoningItem(shown.id, content=[ReasoningText()]), shown)
            yield self._at("response.content_part.added", content_index=0, part=ReasoningText())
        last = self.items[-1]
        assert isinstance(last, ReasoningItem)
        last.content[0].text += text
        yield self._at("response.reasoning_text.delta", content_index=0, delta=text)

    def _text(self, delta: Delta) -> Iterator[ResponseEvent]:
        if not self.items or not isinstance(self.items[-1], MessageItem):
            yield from self.close()
            shown = MessageItem(f"msg_{secrets.token_hex(16)}")
            yield self._added(MessageItem(shown.id, content=[OutputText(annotations=[], logprobs=[])]), shown)
            yield self._at("response.content_part.added", content_index=0, part=OutputText())
        last = self.items[-1]
        assert isinstance(last, MessageItem)
        worded = chat_logprobs(delta.logprobs or None)
        logprobs = worded.content if worded is not None else []
        last.content[0].text += delta.text
        last.content[0].logprobs += logprobs
        yield self._at("response.output_text.delta", content_index=0, delta=delta.text, logprobs=logprobs)

    def _added(self, item: OutputItem, shown: OutputItem) -> ResponseEvent:
        self.items.append(item)
        return self.event("response.output_item.added", output_index=len(self.items) - 1, item=shown)

    def _at(self, kind: str, **fields: Any) -> ResponseEvent:
        last = self.items[-1]
        return self.event(kind, item_id=last.id or UNSET, output_index=len(self.items) - 1, **fields)
