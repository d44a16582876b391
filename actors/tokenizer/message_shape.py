"""`MessageShape`: makes messages fit for templates that know neither tools nor the developer role.

Pure. Used by `TextJobs` in a tokenizer process, on messages as `plain_messages` makes them. What a template doesn't
mention, it would leave out without a word: tools are then described in the system message, calls and their results are
written into the texts, in the form that the Hermes models made common and that `tool_parsers/json_tools.py` of mlx-lm
reads.
"""

import json
from typing import Any

Message = dict[str, Any]

_TOOLS = """You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a JSON object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


class MessageShape:
    """What one template, by its source, can render."""

    def __init__(self, template: str) -> None:
        self._tools = "tools" in template
        self._calls = "tool_calls" in template
        self._developer = "developer" in template

    def fit(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> list[Message]:
        """The messages as the template can render them; they are not changed themselves."""
        if not self._developer:
            messages = [_renamed(message, "developer", "system") for message in messages]
        if not self._calls:
            messages = [_with_calls_as_text(message) for message in messages]
        if tools and not self._tools:
            messages = _with_tools(messages, tools)
        return messages


def _renamed(message: Message, role: str, other: str) -> Message:
    return {**message, "role": other} if message["role"] == role else message


def _with_calls_as_text(message: Message) -> Message:
    if message["role"] == "tool":
        return {**message, "role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    calls = [
        json.dumps({key: call["function"].get(key) for key in ("name", "arguments")}, ensure_ascii=False)
        for call in message["tool_calls"]
    ]
    parts = [message["content"], *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)]
    return {**message, "content": "\n".join(part for part in parts if part)}


def _with_tools(messages: list[Message], tools: list[dict[str, Any]]) -> list[Message]:
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = _TOOLS.format(tools=lines)
    first = messages[0]
    if first["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
