"""Chat templates: a checkpoint's Jinja template, rendered as `transformers` does it.

Templates come with the weights and are not trusted: they run in Jinja's immutable sandbox. They are looked for in this
order: chat_template.jinja, `chat_template` in tokenizer_config.json (a text, or a list of named ones),
chat_template.json. Reference: transformers/utils/chat_template_utils.py (`_compile_jinja_template`).
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from colibri_mp.checkpoint.json_file import read_json_object
from colibri_mp.errors import CheckpointError, RequestError

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment


def find_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """The checkpoint's templates by name; the ordinary one is called "default"."""
    stated = tokenizer_config.get("chat_template")
    if stated is None and (folder / "chat_template.json").exists():
        stated = read_json_object(folder / "chat_template.json").get("chat_template")
    templates = _named(stated)
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = _read_text(file)
    if (folder / "chat_template.jinja").exists():
        templates["default"] = _read_text(folder / "chat_template.jinja")
    return templates


def render(template: str, variables: Mapping[str, Any]) -> str:
    """The text that `template` makes of `variables`. Raises `RequestError` if the template refuses or cannot do it."""
    import jinja2

    try:
        return _environment().from_string(template).render(**variables)
    except jinja2.TemplateSyntaxError as error:
        raise RequestError(
            f"the checkpoint's chat template is not valid (line {error.lineno}: {error.message})"
        ) from error
    except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
        raise RequestError(f"the checkpoint's chat template refuses these messages: {error}") from error


def _named(stated: object) -> dict[str, str]:
    if stated is None:
        return {}
    if isinstance(stated, str):
        return {"default": stated}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in _entries(stated)}
    except (TypeError, KeyError) as error:
        raise CheckpointError(
            "tokenizer_config.json: chat_template is neither a text nor a list of named texts"
        ) from error


def _entries(stated: object) -> Sequence[Any]:
    if not isinstance(stated, list):
        raise TypeError(type(stated).__name__)
    return stated


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}): fetch the file again") from error


@cache
def _environment() -> "ImmutableSandboxedEnvironment":
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """{% generation %} marks the assistant's words for training; here its contents are simply rendered."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 asks for a set

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML; templates expect plain JSON."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
