"""Texts with answers in them: `{answer}`, `{answers[0]}`, `{anna.answer}`, `{anna.answers[-1]}`, `{repeat}`.

`{{` and `}}` are braces. Everything else in braces is an error, found when the file is read.
"""

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

NAME = r"[A-Za-z0-9][A-Za-z0-9_-]*"
_PIECE = re.compile(r"\{\{|\}\}|\{[^{}]*\}|[{}]")
_REFERENCE = re.compile(rf"\{{(?:({NAME})\.)?answer(?:s\[(-?\d+)\])?\}}")
_KNOWN = ("{answer}", "{answers[0]}", "{repeat}")


@dataclass(frozen=True)
class Answer:
    """The answer with this index of a session, or of the session itself if that is None; -1 is the last one."""

    session: str | None
    index: int


@dataclass(frozen=True)
class Repeat:
    """The number of this repeat of the session, from 1."""


Part: TypeAlias = str | Answer | Repeat


@dataclass(frozen=True)
class Template:
    """A text in parts: literal text, and what is filled in."""

    parts: tuple[Part, ...]

    @property
    def answers(self) -> tuple[Answer, ...]:
        """The answers that the text needs."""
        return tuple(part for part in self.parts if isinstance(part, Answer))

    def fill(self, answer: Callable[[Answer], str], repeat: int) -> str:
        """The text with everything filled in; answers are taken as they are, braces in them mean nothing."""
        return "".join(_filled(part, answer, repeat) for part in self.parts)


def _filled(part: Part, answer: Callable[[Answer], str], repeat: int) -> str:
    match part:
        case Answer():
            return answer(part)
        case Repeat():
            return str(repeat)
        case _:
            return part


def parse(text: str) -> Template:
    """The parts of `text`.

    Raises:
        ValueError: a brace that stands alone, or a placeholder that does not exist.
    """
    parts: list[Part] = []
    end = 0
    for piece in _PIECE.finditer(text):
        parts += [text[end : piece.start()], _part(piece[0])]
        end = piece.end()
    parts.append(text[end:])
    return Template(tuple(part for part in parts if part != ""))


def _part(piece: str) -> Part:
    if piece in ("{{", "}}"):
        return piece[0]
    if piece == "{repeat}":
        return Repeat()
    if found := _REFERENCE.fullmatch(piece):
        return Answer(found[1], -1 if found[2] is None else int(found[2]))
    if piece in ("{", "}"):
        raise ValueError(f"a single {piece!r}; write {piece * 2!r} for a brace")
    raise ValueError(f"there is no placeholder {piece!r}; {_hint(piece)}")


def _hint(piece: str) -> str:
    nearest = difflib.get_close_matches(piece, _KNOWN, n=1)
    known = f"did you mean {nearest[0]}?" if nearest else f"known are {', '.join(_KNOWN)}, {{NAME.answer}}"
    return f"{known} (for braces write {{{{ and }}}})"
