"""Requests and answers of the small endpoints: `/tokenize`, `/detokenize` and cancelling. Only shapes stand here."""

from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from server.schemas import ToolSpec


class TokenizeRequest(Struct, kw_only=True):
    """Body of `POST /tokenize`: exactly one of `prompt` and `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
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


class EmbeddingsRequest(Struct, kw_only=True):
    """Body of `POST /v1/embeddings`. A list is of strings, of token ids, or of lists of token ids."""

    model: str | None = None
    input: str | list[str | int | list[int]]
    encoding_format: str | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    user: str | None = None


class EmbeddingBody(Struct):
    """One vector: numbers, or float32-LE in base64."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class PooledUsage(Struct):
    """`usage`, in tokens."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsBody(Struct):
    """Answer of `POST /v1/embeddings`."""

    data: list[EmbeddingBody]
    model: str
    usage: PooledUsage
    object: str = "list"


class RerankRequest(Struct, kw_only=True):
    """Body of `POST /v1/rerank`. Documents are texts, or objects with a `text`."""

    model: str | None = None
    query: str
    documents: list[str | dict[str, Any]]
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool | None = None
    instruction: str | None = None


class RerankDocument(Struct):
    """A document of a result."""

    text: str


class RerankResult(Struct):
    """How well document number `index` answers the query, 0 to 1."""

    index: int
    relevance_score: float
    document: RerankDocument | UnsetType = UNSET


class RerankBody(Struct):
    """Answer of `POST /v1/rerank`, the best first."""

    id: str
    model: str
    usage: PooledUsage
    results: list[RerankResult]


class CancelBody(Struct):
    """Answer of `POST /v1/requests/{id}/cancel`: how many streams were ended."""

    id: str
    cancelled: int
