"""The tool calls of an answer, gathered from what `tool_calls` says of them, in OpenAI's form."""

from dataclasses import dataclass, field
from typing import Any

from colibri_mp.tool_calls import ToolCallArguments, ToolCallStart


@dataclass
class ToolCalls:
    """`found`: the calls so far, complete with their arguments when the answer has ended."""

    found: list[dict[str, Any]] = field(default_factory=list)

    def add(self, event: ToolCallStart | ToolCallArguments) -> dict[str, Any]:
        """Add a part; returns it as a chunk has it."""
        if isinstance(event, ToolCallStart):
            head = {"id": event.id, "type": "function"}
            self.found.append({**head, "function": {"name": event.name, "arguments": ""}})
            return {"index": event.index, **head, "function": {"name": event.name, "arguments": ""}}
        self.found[event.index]["function"]["arguments"] += event.text
        return {"index": event.index, "function": {"arguments": event.text}}
