"""Answers in OpenAI's form: whole, or as a stream of chunks. One form for chats, one for completions."""

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from colibri_mp.messages import Finished, Piece, Progress, PromptLogprobs, TokenLogprob
from colibri_mp.server import sse
from colibri_mp.server.deltas import ToolCalls
from colibri_mp.server.openai_schema import StreamOptions
from colibri_mp.server.prompts import TextPrompt
from colibri_mp.server.token_texts import TokenTexts
from colibri_mp.server.turns import Turn
from colibri_mp.server.view import Model
from colibri_mp.tool_calls import ContentDelta, Event, OutputParser, ReasoningDelta, joined

_DONE = b"data: [DONE]\n\n"


class Form(ABC):
    """What chats and completions have in common. `num_each`: choices of each prompt."""

    name: str
    chunk_name: str

    def __init__(self, turn: Turn, model: Model, num_each: int, stream_options: StreamOptions | None) -> None:
        self._turn = turn
        self._texts = TokenTexts(model.tokenizer)
        self._num_each = num_each
        self._options = stream_options or StreamOptions()
        self._head = {
            "id": turn.id,
            "object": self.name,
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": f"fp_{model.fingerprint[:16]}",
        }

    @property
    def _num_choices(self) -> int:
        return len(self._turn.questions)

    async def whole(self) -> dict[str, Any]:
        """The whole answer, when it is complete."""
        stats: dict[int, dict[str, Any]] = {}
        async for choice, event in self._turn.events():
            match event:
                case Piece():
                    self._add(choice, event)
                case PromptLogprobs():
                    self._add_prompt(choice, event)
                case Finished():
                    stats[choice] = event.stats
                    self._end(choice, event)
        return {**self._head, "choices": self._whole_choices(), "usage": usage(stats, self._num_each)}

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The answer in chunks as it is made, and [DONE]."""
        self._head["object"] = self.chunk_name
        stats: dict[int, dict[str, Any]] = {}
        for chunk in self._first_chunks():
            yield self._chunk([chunk])
        async for choice, event in self._turn.events():
            match event:
                case Progress() if self._options.include_progress:
                    yield self._progress(choice, event)
                case Piece():
                    for chunk in self._add(choice, event):
                        yield self._chunk([chunk])
                case PromptLogprobs():
                    self._add_prompt(choice, event)
                case Finished():
                    stats[choice] = event.stats
                    for chunk in self._end(choice, event):
                        yield self._chunk([chunk])
        if self._options.include_usage:
            yield sse.data({**self._head, "choices": [], "usage": usage(stats, self._num_each)})
        yield _DONE

    def _chunk(self, choices: list[dict[str, Any]]) -> bytes:
        return sse.data({**self._head, "choices": choices, **({"usage": None} if self._options.include_usage else {})})

    def _progress(self, choice: int, event: Progress) -> bytes:
        progress = {"index": choice, "computed_tokens": event.num_computed, "prompt_tokens": event.num_prompt}
        return sse.data({**self._head, "choices": [], "prefill_progress": progress})

    @abstractmethod
    def _first_chunks(self) -> list[dict[str, Any]]:
        """Chunks that need nothing of the engine."""

    @abstractmethod
    def _add(self, choice: int, piece: Piece) -> list[dict[str, Any]]:
        """Take new tokens; returns the choices of the chunks to send."""

    @abstractmethod
    def _add_prompt(self, choice: int, part: PromptLogprobs) -> None:
        """Take logprobs of the prompt."""

    @abstractmethod
    def _end(self, choice: int, end: Finished) -> list[dict[str, Any]]:
        """Take the end; returns the choices of the last chunks."""

    @abstractmethod
    def _whole_choices(self) -> list[dict[str, Any]]:
        """All choices, complete."""


def usage(stats: dict[int, dict[str, Any]], num_each: int) -> dict[str, Any]:
    """What the answer took: a prompt counts once, however many choices it has."""
    prompt = sum(stats[choice]["prompt_tokens"] for choice in stats if choice % num_each == 0)
    cached = sum(stats[choice].get("cached_tokens", 0) for choice in stats if choice % num_each == 0)
    new = sum(each["completion_tokens"] for each in stats.values())
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


# -- chat ----------------------------------------------------------------------------------------------------------------


@dataclass
class _ChatChoice:
    parser: OutputParser
    content: str = ""
    reasoning: str = ""
    calls: ToolCalls = field(default_factory=ToolCalls)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None


class ChatForm(Form):
    """`chat.completion`. `parsers` take each choice's text apart."""

    name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(
        self,
        turn: Turn,
        model: Model,
        stream_options: StreamOptions | None,
        parsers: list[OutputParser],
        has_logprobs: bool,
    ) -> None:
        super().__init__(turn, model, len(parsers), stream_options)
        self._choices = [_ChatChoice(parser) for parser in parsers]
        self._has_logprobs = has_logprobs

    def _first_chunks(self) -> list[dict[str, Any]]:
        role = {"role": "assistant", "content": ""}
        return [self._choice(idx, role, None, None) for idx in range(self._num_choices)]

    def _add(self, choice: int, piece: Piece) -> list[dict[str, Any]]:
        state = self._choices[choice]
        entries = [self._entry(token) for token in piece.logprobs]
        state.logprobs += entries
        return self._chunks(choice, state.parser.push(piece.text), entries)

    def _add_prompt(self, choice: int, part: PromptLogprobs) -> None:
        """Chats do not ask for any."""

    def _end(self, choice: int, end: Finished) -> list[dict[str, Any]]:
        state = self._choices[choice]
        chunks = self._chunks(choice, [*state.parser.push(end.text), *state.parser.finish()], [])
        state.finish_reason = "tool_calls" if state.calls.found and end.finish_reason == "stop" else end.finish_reason
        return [*chunks, self._choice(choice, {}, None, state.finish_reason)]

    def _chunks(self, choice: int, said: list[Event], entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """A chunk for each event; logprobs go with the first, or with an empty one."""
        state = self._choices[choice]
        bodies = [_delta(state, event) for event in joined(said)] or ([{"content": ""}] if entries else [])
        return [self._choice(choice, body, None if idx else entries, None) for idx, body in enumerate(bodies)]

    def _choice(
        self, idx: int, delta: dict[str, Any], entries: list[dict[str, Any]] | None, reason: str | None
    ) -> dict[str, Any]:
        logprobs = {"content": entries, "refusal": None} if self._has_logprobs and entries else None
        return {"index": idx, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _whole_choices(self) -> list[dict[str, Any]]:
        return [self._whole_choice(idx, state) for idx, state in enumerate(self._choices)]

    def _whole_choice(self, idx: int, state: _ChatChoice) -> dict[str, Any]:
        calls = state.calls.found
        message: dict[str, Any] = {
            "role": "assistant",
            "content": state.content if state.content or not calls else None,
            "refusal": None,
        }
        if state.reasoning:
            message["reasoning_content"] = state.reasoning
        if calls:
            message["tool_calls"] = calls
        logprobs = {"content": state.logprobs, "refusal": None} if self._has_logprobs else None
        return {"index": idx, "message": message, "logprobs": logprobs, "finish_reason": state.finish_reason}

    def _entry(self, token: TokenLogprob) -> dict[str, Any]:
        top = [self._one(token_id, logprob) for token_id, logprob in token.top]
        return {**self._one(token.token_id, token.logprob), "top_logprobs": top}

    def _one(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, raw = self._texts.text(token_id), self._texts.bytes_of(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(raw)}


def _delta(state: _ChatChoice, event: Event) -> dict[str, Any]:
    """An event as a chunk has it; it is kept for the whole answer."""
    match event:
        case ContentDelta(text=text):
            state.content += text
            return {"content": text}
        case ReasoningDelta(text=text):
            state.reasoning += text
            return {"reasoning_content": text}
        case _:
            return {"tool_calls": [state.calls.add(event)]}


# -- completions -----------------------------------------------------------------------------------------------------------


@dataclass
class _Listed:
    """Logprobs in the older form: parallel lists."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The object in the answer."""
        return dict(vars(self))


@dataclass
class _TextChoice:
    prompt: TextPrompt  # what is echoed
    text: str = ""
    offset: int = 0
    listed: _Listed = field(default_factory=_Listed)
    unsent: _Listed = field(default_factory=_Listed)
    finish_reason: str | None = None


class CompletionForm(Form):
    """`text_completion`. `echoed`: the prompts, if they go before their answers."""

    name = chunk_name = "text_completion"

    def __init__(
        self, turn: Turn, model: Model, num_each: int, stream_options: StreamOptions | None,
        echoed: list[TextPrompt] | None, has_logprobs: bool,
    ) -> None:  # fmt: skip
        super().__init__(turn, model, num_each, stream_options)
        prompts = [echoed[idx // num_each] if echoed else TextPrompt([], "") for idx in range(self._num_choices)]
        self._choices = [_TextChoice(prompt, text=prompt.text) for prompt in prompts]
        self._has_logprobs = has_logprobs

    def _first_chunks(self) -> list[dict[str, Any]]:
        return [self._choice(idx, c.prompt.text, None) for idx, c in enumerate(self._choices) if c.prompt.text]

    def _add(self, choice: int, piece: Piece) -> list[dict[str, Any]]:
        state = self._choices[choice]
        state.text += piece.text
        for token in piece.logprobs:
            self._list(state, token)
        if not piece.text and not piece.logprobs:
            return []
        return [self._choice(choice, piece.text, None)]

    def _add_prompt(self, choice: int, part: PromptLogprobs) -> None:
        for entry in part.entries:
            self._list(self._choices[choice], entry)

    def _end(self, choice: int, end: Finished) -> list[dict[str, Any]]:
        state = self._choices[choice]
        state.text += end.text
        state.finish_reason = end.finish_reason
        return [self._choice(choice, end.text, end.finish_reason)]

    def _list(self, state: _TextChoice, token: TokenLogprob | None) -> None:
        text = self._texts.text(state.prompt.ids[0] if token is None else token.token_id)
        top = None if token is None else {self._texts.text(each): logprob for each, logprob in token.top}
        for listed in (state.listed, state.unsent):
            listed.tokens.append(text)
            listed.token_logprobs.append(None if token is None else token.logprob)
            listed.top_logprobs.append(top)
            listed.text_offset.append(state.offset)
        state.offset += len(text)

    def _choice(self, idx: int, text: str, reason: str | None) -> dict[str, Any]:
        state = self._choices[idx]
        logprobs = state.unsent.as_dict() if self._has_logprobs and state.unsent.tokens else None
        state.unsent = _Listed()
        return {"index": idx, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _whole_choices(self) -> list[dict[str, Any]]:
        return [
            {
                "index": idx,
                "text": state.text,
                "logprobs": state.listed.as_dict() if self._has_logprobs else None,
                "finish_reason": state.finish_reason,
            }
            for idx, state in enumerate(self._choices)
        ]
