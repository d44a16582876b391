"""`GET /openapi.json`: the description of what is served, made from the Structs that requests are decoded with.

The table here is the one place that says which endpoint takes and gives what; a test holds it against the routes.
"""

import functools
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from server import schemas, schemas_calls, schemas_messages, schemas_models, schemas_responses
from server.errors import ErrorBody

_REF = "#/components/schemas/{name}"


class Operation(NamedTuple):
    """One endpoint. `streams` are the events of an answer that may come as server-sent events."""

    method: str
    path: str
    summary: str
    answer: Any
    body: Any = None
    streams: Any = None
    error: Any = ErrorBody


OPERATIONS = (
    Operation(
        *("post", "/v1/chat/completions", "Chat, as OpenAI has it", schemas.ChatBody),
        *(schemas.ChatRequest, schemas.ChatChunk),
    ),
    Operation(
        *("post", "/v1/completions", "Continue a text, as OpenAI has it", schemas.CompletionBody),
        *(schemas.CompletionRequest, schemas.CompletionBody),
    ),
    Operation(
        *("post", "/v1/responses", "OpenAI's Responses API", schemas_responses.ResponseBody),
        *(schemas_responses.ResponsesRequest, schemas_responses.ResponseEvent),
    ),
    Operation("get", "/v1/responses/{id}", "A response that was stored", schemas_responses.ResponseBody),
    Operation("delete", "/v1/responses/{id}", "Forget a response", schemas_responses.ResponseDeleted),
    Operation(
        *("post", "/v1/messages", "Anthropic's Messages API", schemas_messages.MessageBody),
        *(schemas_messages.MessagesRequest, schemas_messages.MessageEvent, schemas_messages.MessagesError),
    ),
    Operation(
        *("post", "/v1/messages/count_tokens", "Tokens of a message's prompt", schemas_messages.TokenCount),
        *(schemas_messages.CountTokensRequest, None, schemas_messages.MessagesError),
    ),
    Operation("post", "/tokenize", "Text to tokens", schemas_calls.TokenizeBody, schemas_calls.TokenizeRequest),
    Operation("post", "/detokenize", "Tokens to text", schemas_calls.DetokenizeBody, schemas_calls.DetokenizeRequest),
    Operation(
        *("post", "/v1/embeddings", "Vectors of texts", schemas_calls.EmbeddingsBody),
        schemas_calls.EmbeddingsRequest,
    ),
    Operation("post", "/v1/rerank", "Rank texts", schemas_calls.RerankBody, schemas_calls.RerankRequest),
    Operation("post", "/v1/requests/{id}/cancel", "End a running request", schemas_calls.CancelBody),
    Operation("get", "/v1/models", "The models that are served", schemas.ModelListBody),
    Operation("get", "/v1/models/{name}", "One model", schemas.ModelBody),
    *(
        Operation("post", f"/models/{action}", summary, schemas_models.ModelOrderBody, schemas_models.ModelOrderRequest)
        for action, summary in (
            ("load", "Load one of several models"),
            ("unload", "Unload one of several models"),
            ("pin", "Load one of several models, and keep it"),
            ("unpin", "Let a model be unloaded again"),
        )
    ),
    Operation("get", "/health", "The state of the system", schemas.HealthBody),
    Operation("get", "/ready", "Whether requests can be served", schemas.ReadyBody),
    Operation("get", "/openapi.json", "This description", dict[str, Any]),
)


async def describe(_request: Request) -> Response:
    """The description as JSON."""
    return Response(_encoded(), media_type="application/json")


@functools.cache
def _encoded() -> bytes:
    return msgspec.json.encode(document())


def document() -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    kinds = [kind for one in OPERATIONS for kind in (one.answer, one.body, one.streams, one.error) if kind is not None]
    shapes, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    shape_of = {id(kind): shape for kind, shape in zip(kinds, shapes, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for one in OPERATIONS:
        paths.setdefault(one.path, {})[one.method] = _operation(one, shape_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Callboard", "version": "1", "description": "A multiprocess LLM server on MLX."},
        "paths": paths,
        "components": {"schemas": components},
    }


def _operation(one: Operation, shape_of: dict[int, Any]) -> dict[str, Any]:
    content = {"application/json": {"schema": shape_of[id(one.answer)]}}
    if one.streams is not None:
        described = {"type": "string", "description": "Events", "x-event": shape_of[id(one.streams)]}
        content["text/event-stream"] = {"schema": described}
    error = {"application/json": {"schema": shape_of[id(one.error)]}}
    if one.path == "/health":
        error = content
    operation: dict[str, Any] = {
        "summary": one.summary,
        "operationId": f"{one.method}_{one.path.strip('/').replace('/', '_').replace('{', '').replace('}', '')}",
        "responses": {
            "200": {"description": "The answer", "content": content},
            "4XX": {"description": "The request is wrong", "content": error},
            "5XX": {"description": "The server can't serve it now, or failed", "content": error},
        },
    }
    if one.body is not None:
        body = {"application/json": {"schema": shape_of[id(one.body)]}}
        operation["requestBody"] = {"required": True, "content": body}
    names = [part[1:-1] for part in one.path.split("/") if part.startswith("{")]
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    return operation
