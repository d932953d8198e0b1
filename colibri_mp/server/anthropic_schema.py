"""What a client may send to the Anthropic endpoints; see `openai_schema` for how these structs are used.

`cache_control` is accepted and changes nothing: equal beginnings of prompts are found by their content.
"""

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta

from colibri_mp.server.openai_schema import Count, Share, StopList, Struct


class CacheControl(Struct):
    """A hint of where a prompt can be cut; accepted."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(Struct, tag_field="type", tag="text"):
    """Text."""

    text: str
    cache_control: CacheControl | None = None
    citations: list[Any] | None = None


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    """A call that the assistant made."""

    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: dict[str, Any] | None = None


class ToolResultBlock(Struct, tag_field="type", tag="tool_result"):
    """What a tool answered; `is_error` puts "Error: " before it."""

    tool_use_id: str
    content: "str | list[Block] | None" = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    """Reasoning of an answer of before."""

    thinking: str
    signature: str = ""


Block: TypeAlias = TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock


class MessageParam(Struct):
    """A turn."""

    role: Literal["user", "assistant"]
    content: str | list[Block]


class AnthropicTool(Struct):
    """A tool of the client's; the fields below `cache_control` are accepted."""

    name: Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[a-zA-Z0-9_-]+$")]
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    cache_control: CacheControl | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None


class ToolChoice(Struct):
    """Whether a tool is called: `name` goes with type "tool"."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct):
    """Whether the model reasons first: the template's variable enable_thinking; "adaptive" leaves it to the template.

    A budget would not be kept, so it is refused.
    """

    type: Literal["enabled", "disabled", "adaptive"]


class Metadata(Struct):
    """Accepted."""

    user_id: str | None = None


class JsonFormat(Struct):
    """JSON that keeps to a schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct):
    """The form of the answer."""

    format: JsonFormat | None = None


class CountTokensRequest(Struct, kw_only=True):
    """Body of POST /v1/messages/count_tokens."""

    messages: Annotated[list[MessageParam], Meta(min_length=1)]
    model: str | None = None
    system: str | list[Block] | None = None
    tools: Annotated[list[AnthropicTool], Meta(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    # accepted
    cache_control: CacheControl | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Body of POST /v1/messages."""

    max_tokens: Count
    stop_sequences: StopList | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    # accepted
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
