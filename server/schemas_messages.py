"""Anthropic's Messages API as msgspec Structs: requests, answers and events. Only shapes stand here."""

from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from server.schemas import SamplingFields


class MessageParam(Struct):
    """One message of a conversation. `content` is a text or a list of blocks."""

    role: str
    content: str | list[dict[str, Any]]


class MessagesTool(Struct):
    """One of `tools`: a function with a JSON schema of its input."""

    name: Annotated[str, Meta(min_length=1)]
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None


class MessagesToolChoice(Struct):
    """`tool_choice`: auto, any, none, or tool with its name."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingOptions(Struct):
    """`thinking`: enabled with a budget in tokens, adaptive or disabled."""

    type: str
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(Struct):
    """`output_config.format`: json_schema."""

    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(Struct):
    """`output_config`."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountTokensRequest(SamplingFields, kw_only=True):
    """Body of `POST /v1/messages/count_tokens`. The options of sampling may be left in it, and change nothing."""

    messages: list[MessageParam]
    system: str | list[dict[str, Any]] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Body of `POST /v1/messages`."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    metadata: dict[str, Any] | None = None


class TextBlock(Struct, tag_field="type", tag="text"):
    """A text of the answer."""

    text: str = ""


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    """Reasoning before the answer."""

    thinking: str = ""
    signature: str = ""


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Any] = {}


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessagesUsage(Struct):
    """`usage`, in tokens. `input_tokens` are those of the prompt that were computed."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class MessageBody(Struct):
    """A whole answer, and what `message_start` carries of a streamed one."""

    id: str
    model: str
    usage: MessagesUsage
    content: list[Block] = []
    stop_reason: str | None = None
    stop_sequence: str | None = None
    role: str = "assistant"
    type: str = "message"


class EventDelta(Struct, omit_defaults=True):
    """`delta` of a `content_block_delta`, where the other field depends on its `type`, or of a `message_delta`, which
    has no type."""

    type: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET
    stop_reason: str | UnsetType | None = UNSET
    stop_sequence: str | UnsetType | None = UNSET


class MessageEvent(Struct, omit_defaults=True):
    """One event of a streamed answer; which fields it has depends on its `type`."""

    type: str
    message: MessageBody | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: Block | UnsetType = UNSET
    delta: EventDelta | UnsetType = UNSET
    usage: MessagesUsage | UnsetType = UNSET


class TokenCount(Struct):
    """Body of an answer to `POST /v1/messages/count_tokens`."""

    input_tokens: int


class MessagesErrorDetail(Struct):
    """What went wrong."""

    type: str
    message: str


class MessagesError(Struct):
    """Body of an error response, and data of an error event."""

    error: MessagesErrorDetail
    type: str = "error"
    request_id: str | None = None


class MessagesModel(Struct):
    """A model, as Anthropic's `GET /v1/models/{id}` has it."""

    id: str
    display_name: str
    created_at: str
    type: str = "model"


class MessagesModelList(Struct):
    """Answer of Anthropic's `GET /v1/models`: one page of all."""

    data: list[MessagesModel]
    first_id: str | None
    last_id: str | None
    has_more: bool = False
