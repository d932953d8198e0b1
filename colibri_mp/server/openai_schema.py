"""What a client may send to the OpenAI endpoints: every field with its type and range; a field that is not here is refused.

The structs are the one source: `msgspec` checks a body against them, and `openapi` publishes them. Fields under "accepted" are
sent by common clients, mean nothing here, and change no answer.
"""

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

LARGEST_INT = 2**63 - 1
MOST_CHOICES = 128
MOST_STOPS = 16
MOST_TOP_LOGPROBS = 20

Count: TypeAlias = Annotated[int, Meta(ge=1, le=LARGEST_INT)]
Seed: TypeAlias = Annotated[int, Meta(ge=0, le=LARGEST_INT)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
StopText: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1000)]
StopList: TypeAlias = Annotated[list[StopText], Meta(max_length=MOST_STOPS)]
Temperature: TypeAlias = Annotated[float, Meta(ge=0, le=2)]
Share: TypeAlias = Annotated[float, Meta(gt=0, le=1)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
LogitBias: TypeAlias = dict[str, Annotated[float, Meta(ge=-100, le=100)]]
Text: TypeAlias = Annotated[str, Meta(max_length=65_536)]


class Struct(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Base of everything a client sends: an unknown field is an error."""


# -- messages ----------------------------------------------------------------------------------------------------------


class TextPart(Struct, tag_field="type", tag="text"):
    """A part of a message; text is the only kind."""

    text: str


class RefusalPart(Struct, tag_field="type", tag="refusal"):
    """What an assistant once refused: part of its words, and of nobody else's."""

    refusal: str


Content: TypeAlias = str | list[TextPart | RefusalPart]


class SystemMessage(Struct, tag_field="role", tag="system"):
    """Instructions."""

    content: Content
    name: str | None = None


class DeveloperMessage(Struct, tag_field="role", tag="developer"):
    """Instructions, by the newer name; the template gets them as "system"."""

    content: Content
    name: str | None = None


class UserMessage(Struct, tag_field="role", tag="user"):
    """What the user says."""

    content: Content
    name: str | None = None


class CalledFunction(Struct):
    """The function of a call: `arguments` is a JSON object as text."""

    name: str
    arguments: str


class ToolCall(Struct):
    """A call that the assistant made."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class AssistantMessage(Struct, tag_field="role", tag="assistant"):
    """An answer of before. The fields below `reasoning_content` come back from clients unchanged and must be null."""

    content: Content | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    name: str | None = None
    refusal: str | None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None


class ToolMessage(Struct, tag_field="role", tag="tool"):
    """What a tool answered."""

    content: Content
    tool_call_id: str
    name: str | None = None


ChatMessage: TypeAlias = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


# -- tools and forms of the answer ---------------------------------------------------------------------------------------


class Function(Struct):
    """A function that the model may call; `parameters` is a JSON schema. `strict` is what `tool_choice` forces anyway."""

    name: Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct):
    """A tool; functions are the only kind."""

    function: Function
    type: Literal["function"]


class FunctionName(Struct):
    """Names a function."""

    name: str


class NamedChoice(Struct):
    """The tool that has to be called."""

    function: FunctionName
    type: Literal["function"]


class TextFormat(Struct, tag_field="type", tag="text"):
    """Free text."""


class JsonObjectFormat(Struct, tag_field="type", tag="json_object"):
    """Any JSON object."""


class JsonSchema(Struct):
    """A schema and its name; the answer always keeps to it, whatever `strict` says."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(Struct, tag_field="type", tag="json_schema"):
    """JSON that keeps to a schema."""

    json_schema: JsonSchema


class StreamOptions(Struct):
    """`include_progress` is of this server: chunks with the field `prefill_progress` while the prompt is computed."""

    include_usage: bool | None = None
    include_progress: bool | None = None
    include_obfuscation: Literal[False] | None = None


# -- requests ------------------------------------------------------------------------------------------------------------


class GenerationRequest(Struct, kw_only=True):
    """What both endpoints take."""

    model: str | None = None
    max_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    seed: Seed | None = None
    stop: str | StopList | None = None
    n: Annotated[int, Meta(ge=1, le=MOST_CHOICES)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # of this server
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, lt=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MOST_STOPS)] | None = None
    guided_regex: Text | None = None
    guided_grammar: Text | None = None
    # accepted
    user: str | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # accepted
    parallel_tool_calls: bool | None = None
    metadata: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    modalities: list[Literal["text"]] | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """Body of POST /v1/completions."""

    max_tokens: Annotated[int, Meta(ge=0, le=LARGEST_INT)] | None = None
    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=MOST_CHOICES)] | None = None
