"""Requests and answers of the small endpoints: `/tokenize`, `/detokenize` and cancelling. Only shapes stand here."""

from typing import Annotated, Any

from msgspec import Meta, Struct

from server.schemas import ToolSpec


class TokenizeRequest(Struct, kw_only=True):
    """Body of `POST /tokenize`: exactly one of `prompt` and `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    tools: list[ToolSpec] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeBody(Struct):
    """Answer of `POST /tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """Body of `POST /detokenize`."""

    model: str | None = None
    tokens: list[Annotated[int, Meta(ge=0, le=2**32 - 1)]]


class DetokenizeBody(Struct):
    """Answer of `POST /detokenize`."""

    prompt: str


class CancelBody(Struct):
    """Answer of `POST /v1/requests/{id}/cancel`: how many streams were ended."""

    id: str
    cancelled: int
