"""`/v1/embeddings`, as OpenAI has it, and `/v1/rerank`, as Cohere, Jina and vLLM have it.

For servers that were started for it; others answer 400.
"""

import base64
import math
import secrets
from typing import Any

from protocol.ids import pack_floats
from server.choosing import Chooser
from server.completions import prompts_of
from server.errors import invalid
from server.request_body import decode_request
from server.schemas_calls import (
    EmbeddingBody,
    EmbeddingsBody,
    EmbeddingsRequest,
    PooledUsage,
    RerankBody,
    RerankDocument,
    RerankRequest,
    RerankResult,
)
from server.unsupported import POOLED_UNSUPPORTED

MAX_TEXTS = 2048


async def embeddings(body: bytes, choose: Chooser) -> EmbeddingsBody:
    """`POST /v1/embeddings`. Raises ApiError, and what the client raises."""
    asked = decode_request(body, EmbeddingsRequest, POOLED_UNSUPPORTED)
    if asked.encoding_format not in (None, "float", "base64"):
        text = f"encoding_format must be float or base64, not {asked.encoding_format!r}"
        raise invalid(text, "encoding_format")
    prompts = prompts_of(asked.input, "input", MAX_TEXTS)
    backend = await choose(asked.model)
    client = backend.client()
    if "prompt" in prompts[0]:
        found = await client.embed([one["prompt"] for one in prompts])
    else:
        found = await client.embed(ids=[one["ids"] for one in prompts])
    usage = _usage([count for _, count in found])
    choose.used(usage.total_tokens)
    vectors = shortened([vector for vector, _ in found], asked.dimensions)
    as_text = asked.encoding_format == "base64"
    data = [EmbeddingBody(i, _base64(vector) if as_text else vector) for i, vector in enumerate(vectors)]
    return EmbeddingsBody(data, backend.model, usage)


async def rerank(body: bytes, choose: Chooser) -> RerankBody:
    """`POST /v1/rerank`. Raises ApiError, and what the client raises."""
    asked = decode_request(body, RerankRequest, POOLED_UNSUPPORTED)
    if not asked.documents:
        raise invalid("documents must not be empty", "documents")
    if len(asked.documents) > MAX_TEXTS:
        raise invalid(f"a request may have {MAX_TEXTS} documents, not {len(asked.documents)}", "documents")
    documents = [_text(document, i) for i, document in enumerate(asked.documents)]
    backend = await choose(asked.model)
    found = await backend.client().rank(asked.query, documents, asked.instruction or "")
    best = sorted(range(len(found)), key=lambda i: (-found[i][0], i))[: asked.top_n]
    results = [RerankResult(i, found[i][0]) for i in best]
    if asked.return_documents:
        for result in results:
            result.document = RerankDocument(documents[result.index])
    usage = _usage([count for _, count in found])
    choose.used(usage.total_tokens)
    return RerankBody(f"rerank-{secrets.token_hex(16)}", backend.model, usage, results)


def _text(document: Any, index: int) -> str:
    text = document.get("text") if isinstance(document, dict) else document
    if not isinstance(text, str):
        raise invalid(f"documents[{index}].text must be a string", f"documents[{index}].text")
    return text


def shortened(vectors: list[list[float]], width: int | None) -> list[list[float]]:
    """The first `width` numbers of each, again of unit length. Raises ApiError when they have fewer."""
    most = len(vectors[0])
    if width is not None and width > most:
        raise invalid(f"dimensions must be at most {most}, not {width}", "dimensions")
    return [_shortened(vector, width) for vector in vectors]


def _shortened(vector: list[float], width: int | None) -> list[float]:
    if width is None or width == len(vector):
        return vector
    kept = vector[:width]
    length = math.sqrt(sum(value * value for value in kept)) or 1.0
    return [value / length for value in kept]


def _base64(vector: list[float]) -> str:
    return base64.b64encode(pack_floats(vector)).decode()


def _usage(counts: list[int]) -> PooledUsage:
    return PooledUsage(sum(counts), sum(counts))
