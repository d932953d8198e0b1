"""Answers in Anthropic's form: a message of blocks, whole or as its stream of events.

    message_start  (content_block_start  content_block_delta*  content_block_stop)*  message_delta  message_stop

A block is thinking, text or tool_use; a new one begins when the kind of what comes changes.
"""

from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from colibri_mp.messages import Finished, Piece
from colibri_mp.server import sse
from colibri_mp.server.turns import Turn
from colibri_mp.server.view import Model
from colibri_mp.tool_calls import ContentDelta, OutputParser, ReasoningDelta, ToolCallArguments, ToolCallStart, joined
from colibri_mp.tool_calls import Event as Said

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}


class MessageForm:
    """The answer to POST /v1/messages."""

    def __init__(self, turn: Turn, model: Model, parser: OutputParser, num_prompt: int) -> None:
        self._turn = turn
        self._model = model
        self._parser = parser
        self._num_prompt = num_prompt
        self._blocks: list[dict[str, Any]] = []
        self._arguments = ""  # of the open tool_use block

    async def whole(self) -> dict[str, Any]:
        """The whole message, when it is complete."""
        end: Finished | None = None
        async for _, event in self._turn.events():
            if isinstance(event, Piece | Finished):
                self._take(event)
                end = event if isinstance(event, Finished) else None
        assert end is not None
        return self._message(end)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The events of the message as it is made."""
        has_started = False
        async for _, event in self._turn.events():
            if not has_started:
                has_started = True
                yield _event("message_start", message=self._message(None))
            if isinstance(event, Piece | Finished):
                for part in self._take(event):
                    yield part
            if isinstance(event, Finished):
                usage = _usage(event.stats)
                yield _event("message_delta", delta=self._why(event), usage=usage)
        yield _event("message_stop")

    def _take(self, event: Piece | Finished) -> list[bytes]:
        """Events for new text; keeps the blocks."""
        said = self._parser.push(event.text)
        if isinstance(event, Finished):
            said += self._parser.finish()
        parts = [part for each in joined(said) for part in self._add(each)]
        return [*parts, *self._close()] if isinstance(event, Finished) else parts

    def _add(self, said: Said) -> list[bytes]:
        """Events for a part of the answer, which goes into the open block or a new one."""
        match said:
            case ToolCallStart():
                return self._open({"type": "tool_use", "id": said.id, "name": said.name, "input": {}})
            case ToolCallArguments(text=text):
                self._arguments += text
                return [self._changed({"type": "input_json_delta", "partial_json": text})]
            case ReasoningDelta(text=text):
                parts = self._open_unless("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                self._blocks[-1]["thinking"] += text
                return [*parts, self._changed({"type": "thinking_delta", "thinking": text})]
            case ContentDelta(text=text):
                parts = self._open_unless("text", {"type": "text", "text": ""})
                self._blocks[-1]["text"] += text
                return [*parts, self._changed({"type": "text_delta", "text": text})]

    def _changed(self, change: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=len(self._blocks) - 1, delta=change)

    def _open_unless(self, kind: str, block: dict[str, Any]) -> list[bytes]:
        return [] if self._blocks and self._blocks[-1]["type"] == kind else self._open(block)

    def _open(self, block: dict[str, Any]) -> list[bytes]:
        closing = self._close()
        self._blocks.append(block)
        return [*closing, _event("content_block_start", index=len(self._blocks) - 1, content_block=block)]

    def _close(self) -> list[bytes]:
        """End the open block, if there is one."""
        if not self._blocks:
            return []
        if self._blocks[-1]["type"] == "tool_use":
            self._blocks[-1]["input"] = _object(self._arguments)
            self._arguments = ""
        return [_event("content_block_stop", index=len(self._blocks) - 1)]

    def _message(self, end: Finished | None) -> dict[str, Any]:
        why = {"stop_reason": None, "stop_sequence": None} if end is None else self._why(end)
        return {
            "id": self._turn.id,
            "type": "message",
            "role": "assistant",
            "model": self._model.name,
            "content": self._blocks,
            **why,
            "usage": _usage({"prompt_tokens": self._num_prompt, "completion_tokens": 0} if end is None else end.stats),
        }

    def _why(self, end: Finished) -> dict[str, Any]:
        if end.finish_reason == "stop" and isinstance(end.stopped_by, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": end.stopped_by}
        if end.finish_reason == "stop" and any(block["type"] == "tool_use" for block in self._blocks):
            return {"stop_reason": "tool_use", "stop_sequence": None}
        return {"stop_reason": _STOP_REASONS[end.finish_reason], "stop_sequence": None}


def _event(name: str, **fields: Any) -> bytes:
    return sse.named(name, {"type": name, **fields})


def _usage(stats: dict[str, Any]) -> dict[str, Any]:
    """Anthropic counts cached tokens apart from the others."""
    cached = stats.get("cached_tokens", 0)
    return {
        "input_tokens": stats["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": stats["completion_tokens"],
    }


def _object(arguments: str) -> dict[str, Any]:
    """The input of a call; a model may have written no JSON, or been cut off."""
    try:
        return msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except msgspec.DecodeError:
        return {"unparsed": arguments}
