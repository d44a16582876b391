"""What a `Generate` must hold to be taken, whatever the state of the server. Pure; called by the streamer."""

from typing import Any

from actors.streamer.forced_calls import forced_calls
from protocol.limits import MAX_DEPTH, check_messages, too_deep
from protocol.messages import Generate
from protocol.sampling import MAX_CHOICES, MAX_TOOLS, InvalidParam, check_params

_MODES = ("auto", "none", "required", "named")


def find_fault(request: Generate, vocab_size: int) -> None:
    """Raises InvalidParam naming the first thing that is wrong with a request."""
    refs = [request.ref, *request.more_refs]
    if len(set(refs)) < len(refs):
        raise InvalidParam("more_refs", "each choice needs a ref of its own")
    if len(refs) > MAX_CHOICES:
        raise InvalidParam("n", f"n must be at most {MAX_CHOICES}, not {len(refs)}")
    if sum(given is not None for given in (request.prompt, request.messages, request.ids)) != 1:
        raise InvalidParam("prompt", "give exactly one of prompt, messages and ids")
    if request.messages is not None:
        check_messages(request.messages)
    for name in ("template_kwargs", "tools"):
        if too_deep(getattr(request, name)):
            raise InvalidParam(name, f"{name} are nested more than {MAX_DEPTH} deep")
    if not (request.return_text or request.return_ids):
        raise InvalidParam("return_text", "return_text and return_ids must not both be false")
    if request.params.stop and not request.return_text:
        raise InvalidParam("stop", "stop strings need return_text")
    check_params(request.params, vocab_size)
    if request.timeout is not None and not request.timeout > 0:
        raise InvalidParam("timeout", f"timeout must be greater than 0, not {request.timeout}")
    _check_tools(request)


def _check_tools(request: Generate) -> None:
    mode = request.tool_choice.mode
    if mode not in _MODES:
        raise InvalidParam("tool_choice", f"tool_choice must be one of {', '.join(_MODES)}, not {mode!r}")
    if len(request.tools) > MAX_TOOLS:
        raise InvalidParam("tools", f"at most {MAX_TOOLS} tools, not {len(request.tools)}")
    for i, tool in enumerate(request.tools):
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise InvalidParam("tools", f"tools[{i}] must be a function with a name")
        if not isinstance(parameters := function.get("parameters"), dict | None):
            raise InvalidParam(
                "tools", f"tools[{i}].function.parameters must be a JSON schema, not {_kind(parameters)}"
            )
    if mode in ("required", "named"):
        if not request.tools:
            raise InvalidParam("tool_choice", "tool_choice asks for a call, but there are no tools")
        if request.params.grammar is not None:
            raise InvalidParam(request.params.grammar.field, "a reply can't be held to a grammar and to a tool call")
    try:
        forced_calls(request.tools, request.tool_choice)
    except ValueError as error:
        raise InvalidParam("tool_choice", str(error)) from None


def _kind(value: Any) -> str:
    return {list: "a list", str: "a text", bool: "a boolean"}.get(type(value), "a number")
