"""From Anthropic requests to questions for the engine: their blocks become the messages that chat templates know."""

from typing import Any

import msgspec

from colibri_mp.messages import Constraint, Conversation
from colibri_mp.server.anthropic_schema import (
    AnthropicTool,
    Block,
    CountTokensRequest,
    MessageParam,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from colibri_mp.server.errors import HttpError
from colibri_mp.server.forced_calls import ForcedCall

_PASSED_ON = ("temperature", "top_p", "top_k")


def message_options(body: MessagesRequest) -> dict[str, Any]:
    """The options of a message."""
    options: dict[str, Any] = {name: value for name in _PASSED_ON if (value := getattr(body, name)) is not None}
    if body.output_config is not None and body.output_config.format is not None:
        options["constraint"] = Constraint(
            "json_schema", msgspec.json.encode(body.output_config.format.schema).decode()
        )
    return options | {"max_tokens": body.max_tokens, "stop": tuple(body.stop_sequences or ()), "progress": True}


def forced_call(body: MessagesRequest) -> ForcedCall | None:
    """Whether the answer has to be a call, and of what."""
    choice = body.tool_choice
    if choice is None or choice.type in ("auto", "none"):
        return None
    if (choice.name is None) != (choice.type == "any"):
        raise HttpError(400, "tool_choice.name: needed with type tool, and only there", param="tool_choice.name")
    return ForcedCall("tool_choice", choice.name)


def conversation_of(body: CountTokensRequest) -> Conversation:
    """The conversation as the chat template gets it."""
    messages = [{"role": "system", "content": _joined(body.system, "system")}] if body.system else []
    for idx, message in enumerate(body.messages):
        messages += _turn(message, f"messages.{idx}")
    uses_tools = body.tools and not (body.tool_choice and body.tool_choice.type == "none")
    if body.messages[-1].role == "assistant":
        raise HttpError(
            400, "messages: the last one must be the user's; continuing an answer is not supported", param="messages"
        )
    options = {}
    if body.thinking is not None and body.thinking.type != "adaptive":
        options["enable_thinking"] = body.thinking.type == "enabled"
    return Conversation(messages, tools=_tools(body.tools or []) if uses_tools else None, template_options=options)


def _turn(message: MessageParam, where: str) -> list[dict[str, Any]]:
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    return _user_turn(message, where) if message.role == "user" else [_assistant_turn(message, where)]


def _user_turn(message: MessageParam, where: str) -> list[dict[str, Any]]:
    """Results of tools are messages of their own, before what the user says beside them."""
    made, texts = [], []
    for idx, block in enumerate(message.content):
        match block:
            case TextBlock(text=text):
                texts.append(text)
            case ToolResultBlock():
                prefix = "Error: " if block.is_error else ""
                content = prefix + _joined(block.content, f"{where}.content.{idx}.content")
                made.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
            case _:
                raise _misplaced(block, f"{where}.content.{idx}", "user")
    return [*made, {"role": "user", "content": "".join(texts)}] if texts or not made else made


def _assistant_turn(message: MessageParam, where: str) -> dict[str, Any]:
    made: dict[str, Any] = {"role": "assistant", "content": ""}
    for idx, block in enumerate(message.content):
        match block:
            case TextBlock(text=text):
                made["content"] += text
            case ThinkingBlock(thinking=thinking):
                made["reasoning_content"] = made.get("reasoning_content", "") + thinking
            case ToolUseBlock():
                call = {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
                made.setdefault("tool_calls", []).append(call)
            case _:
                raise _misplaced(block, f"{where}.content.{idx}", "assistant")
    return made


def _misplaced(block: object, where: str, role: str) -> HttpError:
    tag = getattr(type(block), "__struct_config__").tag  # noqa: B009 - msgspec's name for it
    return HttpError(400, f"{where}: a block of type {tag!r} cannot stand in a message of role {role!r}", param=where)


def _joined(content: str | list[Block] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for idx, block in enumerate(content):
        if not isinstance(block, TextBlock):
            raise HttpError(400, f"{where}.{idx}: only blocks of type 'text' can stand here", param=f"{where}.{idx}")
        texts.append(block.text)
    return "".join(texts)


def _tools(tools: list[AnthropicTool]) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": tool.input_schema,
            },
        }
        for tool in tools
    ]
