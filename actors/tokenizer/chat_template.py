"""Chat messages to a prompt, by the model's own Jinja template.

Owns the Jinja environment that Hugging Face chat templates are written for, and the shape of messages that
templates may rely on. Used by a tokenizer process on its main thread. Templates come from downloaded
models, so they run in Jinja's sandbox.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Stands behind the text that is to be continued; the last one in a prompt is ours, whatever a message says.
_END = "\u241eend of the text to be continued\u241e"


class TemplateError(ValueError):
    """A conversation that the model's template can't or won't render. The message is for the user."""


class ChatTemplate:
    """One model's chat template, compiled once.

    `special_tokens` (`bos_token`, `eos_token`, …) are variables of the template. `now` is the clock of
    templates that write the date. Raises TemplateError when `source` is no valid template.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], now: Callable[[], datetime] = datetime.now
    ) -> None:
        self._special_tokens = dict(special_tokens)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = partial(_strftime_now, now)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the model's chat template is not valid Jinja: {error}") from None

    def render(
        self,
        messages: Sequence[Any],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """The prompt for `messages`, to be encoded without further special tokens.

        With `continue_final_message` the prompt ends within the last message, behind its text. `template_kwargs` are
        further variables of the template, such as `enable_thinking`. Raises TemplateError when a message has the
        wrong shape or the template refuses the conversation.
        """
        if "messages" in template_kwargs:
            raise TemplateError("the messages can't be given again as an option of the chat template")
        variables = {"documents": None, **self._special_tokens, **template_kwargs}
        plain = plain_messages(messages)
        if continue_final_message:
            plain, add_generation_prompt = _marked(plain), False
        variables |= {"messages": plain, "tools": tools, "add_generation_prompt": add_generation_prompt}
        rendered = self._render(variables)
        if not continue_final_message:
            return rendered
        end = rendered.rfind(_END)
        if end < 0:
            raise TemplateError("the model's chat template leaves the last message out, so it can't be continued")
        return rendered[:end]

    def _render(self, variables: dict[str, Any]) -> str:
        try:
            return self._template.render(variables)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the model's chat template can't render these messages: {error}") from None
        except Exception as error:  # a template computes with whatever the client sent
            raise TemplateError(
                f"the model's chat template failed on these messages: {type(error).__name__}: {error}"
            ) from None


def _marked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with a mark at the end of the last one's text."""
    last = messages[-1]
    if not last["content"] or last.get("tool_calls"):
        raise TemplateError("only a last message that is a text, and no tool call, can be continued")
    return [*messages[:-1], {**last, "content": last["content"] + _END}]


def plain_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages as templates expect them: `content` is a text, absent fields are left out instead of None,
    and the arguments of tool calls are objects.

    Raises TemplateError naming the first message that can't be brought into that form.
    """
    if not messages:
        raise TemplateError("messages must hold at least one message")
    return [_plain_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _plain_message(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise TemplateError(f"{where} must be an object with role and content, not {_kind(message)}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise TemplateError(f"{where} must have a role, such as system, user or assistant")
    plain = {key: value for key, value in message.items() if value is not None}
    plain["content"] = _flat_content(where, message.get("content"))
    if "tool_calls" in plain:
        plain["tool_calls"] = _plain_tool_calls(f"{where}.tool_calls", plain["tool_calls"])
    return plain


def _flat_content(where: str, content: Any) -> str:
    """Text parts are joined by newlines, as vLLM does for templates that take texts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise TemplateError(f"{where}.content must be a text or a list of parts, not {_kind(content)}")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("text", "refusal"):
            got = _kind(part) if kind is None else repr(kind)
            raise TemplateError(
                f'{where}.content[{i}] must be {{"type": "text", "text": …}}; this model takes text, not {got}'
            )
        text = part.get(kind)
        if not isinstance(text, str):
            raise TemplateError(f"{where}.content[{i}].{kind} must be a text, not {_kind(text)}")
        texts.append(text)
    return "\n".join(texts)


def _plain_tool_calls(where: str, calls: Any) -> list[Any]:
    """Tool calls with their arguments as objects: OpenAI's API carries them as JSON text, templates write
    that JSON themselves."""
    if not isinstance(calls, list):
        raise TemplateError(f"{where} must be a list, not {_kind(calls)}")
    plain = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise TemplateError(f"{where}[{i}] must be an object with a function")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _as_object(arguments)
        plain.append({**call, "function": {**function, "arguments": arguments}})
    return plain


def _as_object(arguments: str) -> Any:
    """Arguments of a call from their JSON. A model may have written it badly, or was cut off: the conversation goes on
    with the text that it is, in an object, as templates expect."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a text"}
    return names.get(type(value), "a list" if isinstance(value, list) else "an object")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is, where Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(now: Callable[[], datetime], form: str) -> str:
    return now().strftime(form)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here it is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own interface

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Callable[[], str]) -> str:
        return caller()
