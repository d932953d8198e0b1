"""Arguments that a model writes as text between tags (Qwen3-Coder), to JSON values, with the help of the tools' schemas.

<tool_call> <function=f> <parameter=city> Paris </parameter> </function> </tool_call>
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

Types = dict[tuple[str, str], str]
"""JSON types by function and parameter; what is left out may be anything."""


def parameter_types(tools: Sequence[Mapping[str, Any]] | None) -> Types:
    """The types that tools in OpenAI's form state; whatever is not of that form states none."""
    found: Types = {}
    for tool in tools or ():
        function = _mapping(tool.get("function"))
        for name, schema in _mapping(_mapping(function.get("parameters")).get("properties")).items():
            if isinstance(stated := _mapping(schema).get("type"), str):
                found[str(function.get("name")), name] = stated
    return found


def value_json(text: str, stated: str | None) -> str:
    """A value as JSON text: a string where that is `stated`, else what the text is as JSON, else a string.

    One line break next to each tag belongs to the layout.
    """
    text = text.removeprefix("\n").removesuffix("\n")
    if stated != "string":
        try:
            value = json.loads(text.lower() if stated == "boolean" else text)
            return json.dumps(value, ensure_ascii=False)
        except (ValueError, RecursionError):
            pass
    return json.dumps(text, ensure_ascii=False)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
