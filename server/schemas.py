"""The OpenAI API's requests and responses that Callboard speaks, as msgspec Structs.

Only shapes stand here. Requests are decoded by `server.request_body`; options that clients may send and that aren't
supported yet are listed in `server.unsupported`.
"""

from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from protocol.sampling import MAX_CHOICES
from server.schemas_models import HeldModel

# -- requests ----------------------------------------------------------------------------------------


class StreamOptions(Struct):
    """`stream_options`."""

    include_usage: bool | None = None


class JsonSchemaFormat(Struct):
    """`json_schema` of a response format."""

    schema: dict[str, Any] | bool | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct):
    """`response_format`: text, json_object or json_schema."""

    type: str
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`. One of its first five fields is set. `server.unsupported` has what the last three
    may hold; `disable_fallback` changes nothing, as there is one backend."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_fallback: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None
    structural_tag: str | dict[str, Any] | None = None


class FunctionSpec(Struct):
    """A function that the model may call. `parameters` are a JSON schema."""

    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(Struct):
    """One of `tools`."""

    type: str
    function: FunctionSpec


class FunctionName(Struct):
    """Which function `tool_choice` names."""

    name: str


class AllowedTools(Struct):
    """`allowed_tools` of a tool choice. `mode` is auto or required."""

    mode: str
    tools: list[dict[str, Any]]


class NamedToolChoice(Struct):
    """A tool choice that names a function, or the functions that may be called."""

    type: str
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


class FunctionCallBody(Struct):
    """What a call calls. `arguments` are JSON."""

    name: str
    arguments: str


class ToolCallBody(Struct):
    """One of `tool_calls` of a message."""

    id: str
    function: FunctionCallBody
    type: str = "function"


class ContentPart(Struct):
    """One part of a message's content. Only `text` and `refusal` parts are served."""

    type: str
    text: str | None = None
    refusal: str | None = None


class ChatMessage(Struct):
    """What a chat message must hold; whatever else it holds goes to the model's template as it is."""

    role: Annotated[str, Meta(min_length=1)]
    content: str | list[ContentPart] | UnsetType | None = UNSET


class SamplingFields(Struct, kw_only=True):
    """The options that every API takes. None is the default of the model, or of the endpoint."""

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    # vLLM and mlx-lm
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    priority: int | None = None
    cache_salt: Annotated[str, Meta(max_length=1024)] | None = None
    structured_outputs: StructuredOutputs | None = None


class TextFields(SamplingFields, kw_only=True):
    """The options that chat and completions share."""

    max_tokens: int | None = None
    stop: str | list[str] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None


class ChatRequest(TextFields, kw_only=True):
    """Body of `POST /v1/chat/completions`. `messages` are checked as `ChatMessage` and kept as they came."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    tools: list[ToolSpec] | None = None
    tool_choice: str | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    thinking_token_budget: Annotated[int, Meta(ge=0)] | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(TextFields, kw_only=True):
    """Body of `POST /v1/completions`. A list is of strings, of token ids, or of lists of token ids."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None


# -- responses ---------------------------------------------------------------------------------------


class PromptTokensDetails(Struct):
    """Which prompt tokens were not computed."""

    cached_tokens: int


class CompletionTokensDetails(Struct):
    """Which generated tokens are reasoning."""

    reasoning_tokens: int


class UsageBody(Struct):
    """`usage`, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TopLogprob(Struct):
    """One of the most probable tokens at a place. `bytes` are its UTF-8, which `token` may be only an escape of."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct):
    """One generated token of a chat's `logprobs`."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """`logprobs` of a chat choice, whole or of one chunk."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(Struct):
    """`logprobs` of a completion, whole or of one event, in columns. `text_offset` is in characters of the text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class AssistantMessage(Struct):
    """`message` of a whole chat response. `content` is null beside tool calls when there is no text."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallBody] | UnsetType = UNSET


class ChatChoice(Struct):
    """One choice of a whole chat response."""

    index: int
    message: AssistantMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None
    stop_reason: str | UnsetType = UNSET


class ChatBody(Struct):
    """A whole chat response."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    object: str = "chat.completion"


class FunctionDelta(Struct, omit_defaults=True):
    """A piece of a call: its name comes first, then its arguments, JSON in pieces."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallChunk(Struct, omit_defaults=True):
    """A piece of tool call number `index`. The first has id and type."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta | UnsetType = UNSET


class ChatDelta(Struct, omit_defaults=True):
    """`delta` of a chat chunk."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallChunk] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    """One choice of a chat chunk."""

    index: int
    delta: ChatDelta
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None
    stop_reason: str | UnsetType = UNSET


class ChatChunk(Struct):
    """One event of a streamed chat response. `usage` is there (null but in the last) when it was asked for."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageBody | UnsetType | None = UNSET
    object: str = "chat.completion.chunk"


class CompletionChoice(Struct):
    """One choice of a completion, whole or streamed."""

    index: int
    text: str
    finish_reason: str | None = None
    logprobs: CompletionLogprobs | None = None
    stop_reason: str | UnsetType = UNSET


class CompletionBody(Struct):
    """A whole completion, or one event of a streamed one (`usage` as in `ChatChunk`)."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody | UnsetType | None = UNSET
    object: str = "text_completion"


class ModelBody(Struct):
    """One model of `GET /v1/models`, as vLLM describes it. `max_model_len` is its context in tokens, 0 before it was
    first loaded; a LoRA adapter has its folder as `root` and its base as `parent`.

    With several models also what the house says: `state` (unloaded, waiting, loading, ready, unloading, failed), the
    `progress` of loading from 0 to 1, whether it is `pinned`, the `size` of its weights in bytes, and `aliases`."""

    id: str
    created: int
    max_model_len: int
    root: str
    parent: str | None = None
    object: str = "model"
    owned_by: str = "callboard"
    state: str | UnsetType = UNSET
    progress: float | UnsetType = UNSET
    pinned: bool | UnsetType = UNSET
    size: int | UnsetType = UNSET
    aliases: list[str] | UnsetType = UNSET


class ModelListBody(Struct):
    """Body of `GET /v1/models`."""

    data: list[ModelBody]
    object: str = "list"


class HealthActor(Struct):
    """One actor in `GET /health`."""

    name: str
    pid: int
    state: str
    epoch: int


class HealthPrefixCache(Struct):
    """The prefix cache in `GET /health`. Sums since the engine's start, in prompt tokens; `hit_rate` is a part of 1."""

    hit_rate: float
    memory_tokens: int
    ssd_tokens: int
    computed_tokens: int
    memory_blocks: int
    memory_bytes: int
    memory_limit: int
    ssd_bytes: int
    ssd_limit: int
    queued_bytes: int
    faults: int
    yielded_bytes: int
    acquired_blocks: int


class HealthEngine(Struct):
    """The engine's load in `GET /health`, and sums since its start: seconds of its thread by where they went, tokens
    prefilled and generated, rows parked. Memory is all that MLX holds, `cache_bytes` the rows' part of it."""

    step: int
    running: int
    prefilling: int
    waiting: int
    seconds_in_model: float
    seconds_in_python: float
    seconds_in_sockets: float
    prefilled: int
    decoded: int
    parked: int
    memory_bytes: int
    cache_bytes: int


class HealthBody(Struct):
    """Body of `GET /health`. `message` says why a failed system failed. With several models `models` are all of them,
    the load is that of all together, and the names of their actors begin with the model's."""

    status: str
    model: str
    actors: list[HealthActor]
    engine: HealthEngine
    prefix_cache: HealthPrefixCache
    message: str | UnsetType = UNSET
    models: list[HeldModel] | UnsetType = UNSET


class ReadyBody(Struct):
    """Body of `GET /ready`."""

    status: str
