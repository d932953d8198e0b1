"""Answers that have to be a call of a tool: a grammar that allows nothing else, in the dialect of the checkpoint's template."""

import json
from dataclasses import dataclass
from typing import Any

from colibri_mp.messages import Constraint
from colibri_mp.server.errors import HttpError, unsupported
from colibri_mp.tool_calls import HERMES, HERMES_END, MISTRAL, THINK, THINK_END

_SPACES = {"whitespace_pattern": r"[ \t\r\n]{1,20}"}


@dataclass(frozen=True)
class ForcedCall:
    """A call of the function `name`, or of any; `field` is where the request says so."""

    field: str
    name: str | None

    def constraint(self, tools: list[dict[str, Any]] | None, template: str | None) -> Constraint:
        """One call of one of `tools`.

        Raises:
            HttpError: no such tool, or a template whose calls cannot be forced.
        """
        functions = [tool["function"] for tool in tools or [] if self.name in (None, tool["function"]["name"])]
        if not functions:
            raise HttpError(400, f"{self.field}: no tool {self.name or 'at all'} is given", param=self.field)
        body = json.dumps({"x-guidance": _SPACES, **self._schema(functions)})
        match [marker for marker in (HERMES, MISTRAL) if marker in (template or "")]:
            case [marker] if marker == HERMES:
                text = f'start: "{HERMES}\\n" call "\\n{HERMES_END}"\ncall: %json {body}\n'
            case [marker] if marker == MISTRAL:
                text = f'start: "{MISTRAL}[" call "]"\ncall: %json {body}\n'
            case _:
                raise unsupported(self.field, "calls cannot be forced with this checkpoint's chat template; use auto")
        return Constraint("grammar", text)

    def _schema(self, functions: list[dict[str, Any]]) -> dict[str, Any]:
        """A schema of all calls that are allowed; definitions move to its top, where references look for them."""
        definitions: dict[str, Any] = {}
        calls = []
        for function in functions:
            parameters = dict(function["parameters"])
            for name, definition in parameters.pop("$defs", {}).items():
                if definitions.setdefault(name, definition) != definition:
                    raise unsupported("tools", f"two functions define {name!r} differently; force one of them by name")
            properties = {"name": {"const": function["name"]}, "arguments": parameters}
            calls.append({
                "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
            })  # fmt: skip
        return {"anyOf": calls, "$defs": definitions}


def check_free(prompt: str, field: str) -> None:
    """Refuse a constraint on an answer that begins in the middle of reasoning: it would be on that.

    Raises:
        HttpError: it does.
    """
    if prompt.rfind(THINK) > prompt.rfind(THINK_END):
        raise unsupported(field, "the answer begins with reasoning; switch that off in chat_template_kwargs")
