"""The parts of an answer: words, reasoning and calls of tools, as they come."""

import secrets
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class CallDelta:
    """A part of a call: the first of each has its `name`, all have a piece of the `arguments` (JSON text)."""

    idx: int
    name: str | None
    arguments: str


@dataclass(frozen=True)
class Delta:
    """What has been added to an answer: one of these."""

    text: str = ""
    reasoning: str = ""
    call: CallDelta | None = None


class Reader(Protocol):
    """Takes the text of one answer apart."""

    def push(self, text: str) -> list[Delta]:
        """Take more text."""

    def finish(self) -> list[Delta]:
        """What has been held back."""


class PlainReader:
    """All is words."""

    def push(self, text: str) -> list[Delta]:
        """The text."""
        return [Delta(text)] if text else []

    def finish(self) -> list[Delta]:
        """Nothing is held back."""
        return []


@dataclass
class ToolCalls:
    """The calls of an answer, in OpenAI's form."""

    found: list[dict[str, Any]] = field(default_factory=list)

    def add(self, delta: CallDelta) -> dict[str, Any]:
        """Add a part; returns it as a chunk has it."""
        if delta.idx == len(self.found):
            function = {"name": delta.name, "arguments": ""}
            self.found.append({"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function})
            head = {"id": self.found[-1]["id"], "type": "function"}
            named = {"name": delta.name}
        else:
            head, named = {}, {}
        self.found[delta.idx]["function"]["arguments"] += delta.arguments
        return {"index": delta.idx, **head, "function": {**named, "arguments": delta.arguments}}
