"""Prompts as token ids, made in this process: the engine's thread, and with it everybody's answers, does not wait for a tokenizer.

A text that cannot fit the context is refused by its length: a hostile one of some MB would take seconds to tokenize.
"""

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from colibri_mp.errors import RequestError
from colibri_mp.messages import Conversation
from colibri_mp.server.errors import HttpError
from colibri_mp.server.forced_calls import ForcedCall, check_free
from colibri_mp.server.view import Model
from colibri_mp.tokenizer import Tokenizer
from colibri_mp.tool_calls import OutputParser


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation as the checkpoint writes it."""

    conversation: Conversation
    tokenizer: Tokenizer
    text: str
    ids: list[int]

    def constrained(self, options: dict[str, Any], forced: ForcedCall | None) -> dict[str, Any]:
        """The options with the constraint of a forced call.

        Raises:
            HttpError: constraints that exclude each other or the prompt.
        """
        tools = self.conversation.tools
        if forced is not None:
            if "constraint" in options:
                raise HttpError(400, f"{forced.field}: the answer cannot have another form as well", param=forced.field)
            options = {**options, "constraint": forced.constraint(tools, self.tokenizer.chat_template(bool(tools)))}
        if "constraint" in options:
            check_free(self.text, "tool_choice" if forced else "response_format")
        return options

    def parser(self, id_prefix: str = "call_") -> OutputParser:
        """A parser for an answer; its calls have ids that begin so."""
        tools = bool(self.conversation.tools)
        new_id = partial(_call_id, id_prefix)
        return OutputParser.for_template(
            self.tokenizer.chat_template(tools), tools, self.text, new_id, self.conversation.tools
        )


@dataclass(frozen=True)
class TextPrompt:
    """A prompt of /v1/completions: its ids, and its text where that is to be shown."""

    ids: list[int]
    text: str


async def chat_prompt(model: Model, conversation: Conversation) -> ChatPrompt:
    """Render and tokenize a conversation.

    Raises:
        HttpError: the template refuses it, or it is too long.
    """
    return await asyncio.to_thread(_render, model, conversation)


async def text_prompts(model: Model, prompts: Sequence[str | list[int]], needs_text: bool) -> list[TextPrompt]:
    """Tokenize prompts; ids are turned to text only if `needs_text`.

    Raises:
        HttpError: there is no tokenizer, or a prompt is too long.
    """
    if not needs_text and not any(isinstance(prompt, str) for prompt in prompts):
        return [TextPrompt(prompt, "") for prompt in prompts if not isinstance(prompt, str)]
    return await asyncio.to_thread(lambda: [_text_prompt(model, prompt, needs_text) for prompt in prompts])


def _render(model: Model, conversation: Conversation) -> ChatPrompt:
    tokenizer = _tokenizer(model)
    try:
        text = tokenizer.apply_chat_template(
            conversation.messages, tools=conversation.tools,
            add_generation_prompt=conversation.add_generation_prompt, **conversation.template_options,
        )  # fmt: skip
    except RequestError as error:
        raise HttpError(400, str(error), param="messages") from error
    _check_length(model, text)
    return ChatPrompt(conversation, tokenizer, text, tokenizer.encode(text, add_special_tokens=False))


def _text_prompt(model: Model, prompt: str | list[int], needs_text: bool) -> TextPrompt:
    tokenizer = _tokenizer(model)
    if isinstance(prompt, str):
        _check_length(model, prompt)
        return TextPrompt(tokenizer.encode(prompt), prompt)
    if not needs_text or len(prompt) > model.ctx_tokens:  # the engine refuses it
        return TextPrompt(prompt, "")
    return TextPrompt(prompt, tokenizer.decode(prompt, skip_special_tokens=False))


def _tokenizer(model: Model) -> Tokenizer:
    if model.tokenizer is None:
        raise HttpError(400, "this checkpoint has no tokenizer: use /v1/completions with token ids", code="unsupported")
    return model.tokenizer


def _check_length(model: Model, text: str) -> None:
    """A token stands for at most so many characters as the longest one is written with."""
    most = model.ctx_tokens * model.longest_token
    if len(text) > most:
        raise HttpError(
            400, f"the prompt of {len(text)} characters has more than {len(text) // model.longest_token} tokens, the context "
            f"holds {model.ctx_tokens}", code="context_length_exceeded",
        )  # fmt: skip


def _call_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)
