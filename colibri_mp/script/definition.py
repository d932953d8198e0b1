"""What a script asks for, once it has been checked: plain data, no behaviour.

Turns are numbered from 1, as people count; answers in placeholders are indexed from 0, as programs do.
"""

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from colibri_mp.script.placeholders import Template

Form = Literal["chat", "text", "ids"]
"""How a session's prompt grows: messages for the chat template, one text, or token ids."""


@dataclass(frozen=True)
class Turn:
    """One request of a session. `options` are those of `Cluster.submit`, complete but for a seed that is derived.

    `when` and `unless` are searched in the answer before, and decide whether the turn is played; the answer fails the session
    if `expect` is not found in it.
    """

    text: Template | None
    ids: tuple[int, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None
    delay_s: float = 0.0
    when: re.Pattern[str] | None = None
    unless: re.Pattern[str] | None = None
    expect: re.Pattern[str] | None = None


@dataclass(frozen=True)
class Session:
    """One conversation, played `repeat` times. It begins `delay_s` after all sessions of `after` have ended."""

    name: str
    form: Form
    turns: tuple[Turn, ...]
    system: Template | None = None
    template_options: dict[str, Any] = field(default_factory=dict)
    history: bool = True
    repeat: int = 1
    delay_s: float = 0.0
    after: tuple[str, ...] = ()
    seed: int | None = None


@dataclass(frozen=True)
class Script:
    """A whole file. `launch` holds settings of `LaunchConfig`; `fresh`: the first launch knows of no earlier one."""

    path: str
    name: str
    sessions: tuple[Session, ...]
    seed: int = 0
    launches: int = 1
    concurrency: int = 16
    settle_s: float = 0.0
    fresh: bool = False
    launch: dict[str, Any] = field(default_factory=dict)

    def session(self, name: str) -> Session:
        """The session of that name."""
        return next(session for session in self.sessions if session.name == name)
