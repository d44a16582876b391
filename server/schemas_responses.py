"""OpenAI's Responses API as msgspec Structs: requests, answers and events. Only shapes stand here."""

from typing import Any

from msgspec import UNSET, Struct, UnsetType, field

from server.schemas import NamedToolChoice, SamplingFields


class TextFormat(Struct):
    """`text.format`: text, json_object, or json_schema with its `schema`."""

    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(Struct):
    """`text`."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(Struct):
    """`reasoning`."""

    effort: str | None = None
    summary: str | None = None


class ResponseTool(Struct):
    """One of `tools`: a function."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseToolChoice(NamedToolChoice):
    """A tool choice that names a function by `name`, or the functions that may be called."""

    name: str | None = None
    mode: str | None = None
    tools: list[dict[str, Any]] | None = None


class ResponsesRequest(SamplingFields, kw_only=True):
    """Body of `POST /v1/responses`."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: int | None = None
    stop: str | list[str] | None = None
    top_logprobs: int | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: str | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    truncation: str | None = None
    user: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class OutputText(Struct, tag_field="type", tag="output_text"):
    """The text of a message."""

    text: str = ""
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    """The text of reasoning."""

    text: str = ""


class MessageItem(Struct, tag_field="type", tag="message"):
    """What the model says."""

    id: str
    status: str = "in_progress"
    content: list[OutputText] = []
    role: str = "assistant"


class ReasoningItem(Struct, tag_field="type", tag="reasoning"):
    """What the model thinks."""

    id: str
    status: str = "in_progress"
    summary: list[Any] = []
    content: list[ReasoningText] = []


class FunctionCallItem(Struct, tag_field="type", tag="function_call"):
    """A call that the model makes. `arguments` are JSON."""

    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: str = "in_progress"


OutputItem = MessageItem | ReasoningItem | FunctionCallItem


class InputTokensDetails(Struct):
    """Which tokens of the input were not computed."""

    cached_tokens: int


class OutputTokensDetails(Struct):
    """Which tokens of the output are reasoning."""

    reasoning_tokens: int


class ResponseUsage(Struct):
    """`usage`, in tokens."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(Struct):
    """Why a response is incomplete."""

    reason: str


class ResponseError(Struct):
    """Why a response failed."""

    code: str
    message: str


class ResponseBody(Struct):
    """A response, whole or inside of an event."""

    id: str
    created_at: int
    model: str
    status: str = "in_progress"
    output: list[OutputItem] = []
    usage: ResponseUsage | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, Any] = {}
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: ReasoningOptions = field(default_factory=ReasoningOptions)
    store: bool = True
    temperature: float | None = None
    text: TextOptions = field(default_factory=lambda: TextOptions(TextFormat("text")))
    tool_choice: Any = "auto"
    tools: list[Any] = []
    top_p: float | None = None
    truncation: str = "disabled"
    user: str | None = None
    object: str = "response"


class ResponseDeleted(Struct):
    """Body of `DELETE /v1/responses/{id}`."""

    id: str
    deleted: bool = True
    object: str = "response"


class ResponseEvent(Struct, omit_defaults=True):
    """One event of a streamed response; which fields it has depends on its `type`."""

    type: str
    sequence_number: int
    response: ResponseBody | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    logprobs: list[Any] | UnsetType = UNSET
    code: str | UnsetType = UNSET
    message: str | UnsetType = UNSET
    param: str | UnsetType | None = UNSET
