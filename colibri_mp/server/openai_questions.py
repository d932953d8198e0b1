"""From OpenAI requests to questions for the engine; every field is passed on, or refused by name."""

from typing import Any

import msgspec

from colibri_mp.messages import Constraint, Conversation
from colibri_mp.server.errors import HttpError, unsupported
from colibri_mp.server.forced_calls import ForcedCall
from colibri_mp.server.openai_schema import (
    LARGEST_INT,
    AssistantMessage,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    Content,
    DeveloperMessage,
    FunctionName,
    GenerationRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedChoice,
    RefusalPart,
    Tool,
    ToolCall,
    ToolMessage,
)
from colibri_mp.server.turns import Question

_PASSED_ON = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "ignore_eos",
)  # fmt: skip
_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions


def options_of(body: GenerationRequest, max_tokens: int) -> dict[str, Any]:
    """What both endpoints ask for; `max_tokens` 0: as many as the context holds. A choice's seed is added by `choices`."""
    options = {name: value for name in _PASSED_ON if (value := getattr(body, name)) is not None}
    options |= {"max_tokens": max_tokens or None, "stop": _stops(body.stop), "progress": True}
    if body.stop_token_ids:
        options["stop_ids"] = tuple(body.stop_token_ids)
    if body.logit_bias:
        options["logit_bias"] = _bias(body.logit_bias)
    if body.guided_regex is not None and body.guided_grammar is not None:
        raise HttpError(400, "guided_regex and guided_grammar exclude each other", param="guided_grammar")
    if body.guided_regex is not None:
        options["constraint"] = Constraint("regex", body.guided_regex)
    if body.guided_grammar is not None:
        options["constraint"] = Constraint("grammar", body.guided_grammar)
    if body.stream_options is not None and not body.stream:
        raise HttpError(400, "stream_options: only with stream", param="stream_options")
    return options


def choices(questions: list[Question], body: GenerationRequest) -> list[Question]:
    """`n` questions in place of each; their seeds count up from the request's."""
    num = body.n or 1
    found = [
        question.seeded(None if body.seed is None else _wrapped(body.seed + i))
        for question in questions
        for i in range(num)
    ]
    if len(found) > 128:
        raise HttpError(400, f"n: {len(questions)} prompts x {num} choices are more than 128 answers", param="n")
    return found


def chat_options(body: ChatRequest, default_tokens: int) -> dict[str, Any]:
    """The options of a chat; `default_tokens`: of an answer, where the request does not say."""
    max_tokens = body.max_completion_tokens or body.max_tokens or default_tokens
    options = options_of(body, max_tokens)
    if body.top_logprobs is not None and not body.logprobs:
        raise HttpError(400, "top_logprobs: only with logprobs", param="top_logprobs")
    if body.logprobs:
        options["logprobs"] = body.top_logprobs or 0
    if (constraint := _response_format(body)) is not None:
        if "constraint" in options:
            raise HttpError(
                400, "response_format: not together with guided_regex or guided_grammar", param="response_format"
            )
        options["constraint"] = constraint
    return options


def chat_conversation(body: ChatRequest) -> Conversation:
    """The conversation of a chat."""
    return Conversation(
        [_message(message, f"messages[{idx}]") for idx, message in enumerate(body.messages)],
        tools=tools_of(body.tools) if body.tools and body.tool_choice != "none" else None,
        template_options=_template_options(body),
    )


def completion_prompts(body: CompletionRequest) -> list[str | list[int]]:
    """The prompts of a batch; token ids stay ids."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if all(isinstance(item, int) for item in prompt):
        return [[item for item in prompt if isinstance(item, int)]]
    if any(isinstance(item, int) for item in prompt):
        raise HttpError(400, "prompt: token ids and texts cannot be mixed in one list", param="prompt")
    return [item for item in prompt if not isinstance(item, int)]


def completion_options(body: CompletionRequest) -> dict[str, Any]:
    """The options of a completion."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise unsupported("best_of", f"only equal to n ({body.n or 1}): answers are not ranked")
    options = options_of(body, _COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens)
    if body.max_tokens == 0:
        if not body.echo or body.logprobs is None:
            raise HttpError(400, "max_tokens: 0 only with echo and logprobs, else at least 1", param="max_tokens")
        options["max_tokens"] = 0
    if body.logprobs is not None:
        options["logprobs"] = body.logprobs
        if body.echo:
            options["prompt_logprobs"] = body.logprobs
    return options


def tools_of(tools: list[Tool]) -> list[dict[str, Any]]:
    """The tools as the chat template gets them."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.function.name,
                "description": tool.function.description or "",
                "parameters": tool.function.parameters or {"type": "object", "properties": {}},
            },
        }
        for tool in tools
    ]


def _message(message: ChatMessage, where: str) -> dict[str, Any]:
    role = "system" if isinstance(message, DeveloperMessage) else type(message).__struct_config__.tag
    made: dict[str, Any] = {"role": role, "content": _text(message.content)}
    if role != "assistant" and isinstance(message.content, list):
        for idx, part in enumerate(message.content):
            if isinstance(part, RefusalPart):
                raise unsupported(f"{where}.content[{idx}]", "a refusal is the assistant's")
    if message.name is not None:
        made["name"] = message.name
    if isinstance(message, ToolMessage):
        made["tool_call_id"] = message.tool_call_id
    if isinstance(message, AssistantMessage):
        if message.reasoning_content is not None:
            made["reasoning_content"] = message.reasoning_content
        if message.tool_calls:
            made["tool_calls"] = [_tool_call(c, f"{where}.tool_calls[{i}]") for i, c in enumerate(message.tool_calls)]
        if message.content is None and not message.tool_calls and not message.refusal:
            raise HttpError(400, f"{where}.content: needed where there are no tool_calls", param=f"{where}.content")
        if message.refusal and not made["content"]:
            made["content"] = message.refusal
    return made


def _text(content: Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.refusal if isinstance(part, RefusalPart) else part.text for part in content)


def _tool_call(call: ToolCall, where: str) -> dict[str, Any]:
    """Templates write the arguments as an object."""
    try:
        arguments = msgspec.json.decode(call.function.arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        param = f"{where}.function.arguments"
        raise HttpError(400, f"{param}: not a JSON object in a text ({error})", param=param) from None
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def forced_call(body: ChatRequest) -> ForcedCall | None:
    """Whether the answer has to be a call, and of what."""
    match body.tool_choice:
        case None | "none" | "auto":
            return None
        case NamedChoice(function=FunctionName(name=name)):
            return ForcedCall("tool_choice", name)
        case _:
            return ForcedCall("tool_choice", None)


def _template_options(body: ChatRequest) -> dict[str, Any]:
    options = body.chat_template_kwargs or {}
    if own := sorted({"messages", "tools", "add_generation_prompt", "documents"} & options.keys()):
        raise HttpError(
            400, f"chat_template_kwargs: {own[0]} is not for the client to set", param="chat_template_kwargs"
        )
    return options


def _response_format(body: ChatRequest) -> Constraint | None:
    match body.response_format:
        case JsonObjectFormat():
            return Constraint("json_object")
        case JsonSchemaFormat(json_schema=wanted):
            return Constraint("json_schema", msgspec.json.encode(wanted.schema).decode())
        case _:
            return None


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    if stop == "":
        raise HttpError(400, "stop: an empty text stands everywhere", param="stop")
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _bias(bias: dict[str, float]) -> dict[int, float]:
    found = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise HttpError(400, f"logit_bias: the keys are token ids, not {key[:20]!r}", param="logit_bias")
        found[int(key)] = value
    return found


def _wrapped(seed: int) -> int:
    return seed - LARGEST_INT if seed > LARGEST_INT else seed
