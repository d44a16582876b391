"""Options that aren't served are refused by name, by every API, and accepted when they ask for nothing."""

import asyncio
from typing import Any

import pytest
from parsed import APIS, fault, parsed

from server.calls import tokenize
from server.errors import ApiError
from server.pooled import embeddings, rerank
from server.schemas import ChatRequest, CompletionRequest
from server.schemas_messages import MessagesRequest
from server.schemas_responses import ResponsesRequest
from server.unsupported import (
    CHAT_UNSUPPORTED,
    COMPLETION_UNSUPPORTED,
    MESSAGES_UNSUPPORTED,
    RESPONSES_UNSUPPORTED,
)

TABLES = {
    "chat": CHAT_UNSUPPORTED,
    "completions": COMPLETION_UNSUPPORTED,
    "responses": RESPONSES_UNSUPPORTED,
    "messages": MESSAGES_UNSUPPORTED,
}
REGEX = {"regex": "a+"}


def field(name: str, value: Any) -> dict[str, Any]:
    """The field of a body that gives the option `name` this value."""
    outer, _, inner = name.partition(".")
    if not inner:
        return {name: value}
    return {outer: {**(REGEX if outer == "structured_outputs" else {}), inner: value}}


@pytest.mark.parametrize(("api", "name"), [(api, name) for api, table in TABLES.items() for name in table])
def test_it_is_refused_by_name_unless_it_asks_for_nothing(api: str, name: str) -> None:
    for value in TABLES[api][name]:
        parsed(api, **field(name, value))
    for value in (["something", 7], "something", {"a": 1}, 10**400, -7, 7):
        error = fault(api, **field(name, value))
        assert (error.param, error.shown.code) == (name, "unsupported_parameter")
        assert error.message.startswith(f"{name} is not supported")


@pytest.mark.parametrize(
    ("api", "kind"),
    [
        ("chat", ChatRequest),
        ("completions", CompletionRequest),
        ("responses", ResponsesRequest),
        ("messages", MessagesRequest),
    ],
)
def test_what_is_served_is_not_called_unsupported(api: str, kind: Any) -> None:
    assert TABLES[api].keys() & set(kind.__struct_fields__) <= {"truncation"}


@pytest.mark.parametrize("api", APIS)
def test_options_of_others_are_refused_everywhere(api: str) -> None:
    for name in ("bad_words", "allowed_token_ids", "prompt_logprobs", "include_stop_str_in_output", "best_of"):
        assert fault(api, **{name: [5]}).param == name
    for name in ("presence_context_size", "frequency_context_size", "role_mapping", "guided_whitespace_pattern"):
        assert fault(api, **{name: 20}).param == name
    assert fault(api, guided_json_object=True).param == "guided_json_object"
    assert fault(api, structural_tag="{}").param == "structural_tag"


@pytest.mark.parametrize("api", ["responses", "messages"])
def test_options_of_chats_are_refused_where_they_have_no_effect(api: str) -> None:
    given = {"guided_json": {}, "guided_regex": "a", "guided_choice": ["a"], "guided_grammar": "x", "n": 2}
    for name, value in given.items():
        assert fault(api, **{name: value}).param == name
    assert fault(api, response_format={"type": "json_object"}).param == "response_format"


def test_an_option_inside_of_a_wrong_type_is_refused_for_its_type() -> None:
    assert fault("responses", text=5).param == "text"
    assert fault("chat", structured_outputs=["regex"]).param == "structured_outputs"


@pytest.mark.parametrize(
    ("call", "body", "name"),
    [
        (embeddings, b'{"input": "x", "truncate_prompt_tokens": 5}', "truncate_prompt_tokens"),
        (rerank, b'{"query": "x", "documents": ["y"], "max_tokens_per_doc": 5}', "max_tokens_per_doc"),
        (tokenize, b'{"prompt": "x", "chat_template": "{{ x }}"}', "chat_template"),
    ],
)
def test_options_of_the_small_endpoints(call: Any, body: bytes, name: str) -> None:
    async def no_model(_name: str | None) -> Any:
        raise AssertionError("it is refused before a model is looked for")

    with pytest.raises(ApiError) as caught:
        asyncio.run(call(body, no_model))
    assert (caught.value.status, caught.value.param) == (400, name)


@pytest.mark.parametrize("edits", [[], [{"type": "clear_thinking_20251015", "keep": "all"}]])
def test_what_would_be_left_out_of_a_conversation_stays_in_it(edits: list[Any]) -> None:
    assert parsed("messages", context_management={"edits": edits}).prompts == parsed("messages").prompts
