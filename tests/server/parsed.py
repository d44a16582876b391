"""Requests as each API makes them of a body, without a server. A test tool."""

import json
from typing import Any

import pytest

from server.chat import parse_chat
from server.completions import parse_completion
from server.errors import ApiError
from server.generation import Generation
from server.messages import parse_message
from server.responses import parse_response

TURN = {"role": "user", "content": "Hi"}
APIS: dict[str, tuple[Any, dict[str, Any]]] = {
    "chat": (parse_chat, {"messages": [TURN]}),
    "completions": (parse_completion, {"prompt": "Hi"}),
    "responses": (parse_response, {"input": "Hi"}),
    "messages": (parse_message, {"messages": [TURN], "max_tokens": 9}),
}


def parsed(api: str, **fields: Any) -> Generation:
    """What `api` makes of its smallest body and these fields. Raises ApiError."""
    parse, body = APIS[api]
    generation: Generation = parse(json.dumps({**body, **fields}).encode(), "tiny", "id")[1]
    return generation


def fault(api: str, **fields: Any) -> ApiError:
    """The error of a body that must be refused with 400."""
    with pytest.raises(ApiError) as caught:
        parsed(api, **fields)
    assert caught.value.status == 400
    return caught.value
