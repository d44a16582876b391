"""Bodies of Ollama's API: what `server.ollama` takes. Answers are built where they are worded."""

from typing import Annotated, Any

from msgspec import Meta, Struct


class OllamaOptions(Struct, kw_only=True):
    """`options` of a request. Those of Ollama's own runtime (`num_ctx`, `num_gpu`, …) are ignored. Whole numbers may
    come with a point, as some languages write them."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | float | None = None
    min_p: float | None = None
    seed: int | float | None = None
    num_predict: int | float | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class OllamaFunction(Struct, kw_only=True):
    """The function of a tool, or of a call, whose arguments are an object here."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    arguments: dict[str, Any] | str | None = None


class OllamaTool(Struct, kw_only=True):
    """A tool, or a call of one."""

    function: OllamaFunction
    type: str = "function"
    id: str | None = None


class OllamaMessage(Struct, kw_only=True):
    """One chat message."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[OllamaTool] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaRequest(Struct, kw_only=True):
    """What requests for text share. `keep_alive` is how long the model may stay without requests."""

    model: str
    stream: bool | None = None
    format: dict[str, Any] | str | None = None
    options: OllamaOptions | None = None
    keep_alive: float | str | None = None
    think: bool | str | None = None


class OllamaChatRequest(OllamaRequest, kw_only=True):
    """Body of `POST /api/chat`."""

    messages: list[OllamaMessage] = []
    tools: list[OllamaTool] | None = None


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    """Body of `POST /api/generate`."""

    prompt: str = ""
    system: str | None = None
    suffix: str | None = None
    template: str | None = None
    raw: bool | None = None
    context: list[int] | None = None
    images: list[str] | None = None


class OllamaEmbedRequest(Struct, kw_only=True):
    """Body of `POST /api/embed`, and of the older `POST /api/embeddings`, which has `prompt`. A text longer than the
    model's context is cut there, unless `truncate` is false."""

    model: str
    input: str | list[str] | None = None
    prompt: str | None = None
    truncate: bool | None = None
    keep_alive: float | str | None = None
    options: dict[str, Any] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None


class OllamaShowRequest(Struct, kw_only=True):
    """Body of `POST /api/show`."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None
