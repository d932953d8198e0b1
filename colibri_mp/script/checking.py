"""From plain values to a `Script`: every name, type, range and dependence is checked before anything starts.

All problems of a file are reported at once, each with session, turn and key.
"""

import re
from pathlib import Path
from typing import Any

from colibri_mp.errors import ConfigError
from colibri_mp.script.definition import Form, Script, Session, Turn
from colibri_mp.script.dependence import check_dependence
from colibri_mp.script.launching import take_launch
from colibri_mp.script.options import take_options
from colibri_mp.script.placeholders import NAME, Template, parse
from colibri_mp.script.reading import RawScript, read_raw
from colibri_mp.script.section import (
    Problems,
    Section,
    flag,
    items,
    one_or_more,
    pattern,
    seconds,
    table,
    text,
    token_ids,
    whole,
)

_MOST_SHOWN = 20
_MOST_REPEATS = 10_000
_MOST_SEED = 2**63 - 1


def read_script(path: Path) -> Script:
    """The script in a file.

    Raises:
        ConfigError: it cannot be read, or something in it is wrong; names every place.
    """
    raw = read_raw(path)
    problems = Problems()
    script = _script(problems, raw)
    if not problems.lines:
        check_dependence(problems, script)
    if problems.lines:
        shown = [f"{path}: {line}" for line in problems.lines[:_MOST_SHOWN]]
        if more := len(problems.lines) - len(shown):
            shown.append(f"{path}: and {more} more")
        raise ConfigError("\n".join(shown))
    return script


def _script(problems: Problems, raw: RawScript) -> Script:
    section = Section(problems, "", raw.settings)
    defaults = Section(problems, "defaults", section.take("defaults", table, {}))
    shared = _Shared(problems, take_options(defaults), defaults.take("system", _template, None))
    defaults.close()
    script = Script(
        path=str(raw.path),
        name=section.take("name", text, raw.path.stem),
        seed=section.take("seed", whole(0, _MOST_SEED), 0),
        launches=section.take("launches", whole(1, _MOST_REPEATS), 1),
        concurrency=section.take("concurrency", whole(1), Script.concurrency),
        settle_s=section.take("settle_s", seconds, 0.0),
        fresh=section.take("fresh", flag, False),
        launch=take_launch(Section(problems, "launch", section.take("launch", table, {}))),
        sessions=shared.sessions(raw),
    )
    section.close()
    if not raw.sessions:
        problems.add("there is no session; a session has a name and turns (see docs/scripts.md)")
    if script.fresh and "usage" in script.launch:
        problems.add("fresh", "keeps what is learned in a file of its own: leave launch.usage out, or this")
    return script


class _Shared:
    """What the sessions of a file share while they are read: [defaults], and the names that are taken."""

    def __init__(self, problems: Problems, options: dict[str, Any], system: Template | None) -> None:
        self._problems = problems
        self._options = options
        self._system = system
        self._names: dict[str, str] = {}

    def sessions(self, raw: RawScript) -> tuple[Session, ...]:
        """All sessions of the file."""
        found = []
        for place, values in zip(raw.places, raw.sessions, strict=True):
            if isinstance(values, dict):
                found.append(self._session(place, values))
            else:
                self._problems.add(place, f"must be a table with a name and turns, not {values!r}")
        return tuple(found)

    def _session(self, place: str, values: dict[str, Any]) -> Session:
        name = self._name(place, values)
        section = Section(self._problems, f"session {name!r}" if name else place, {**values, "name": name or "unnamed"})
        section.take("name", text, "")
        options = {**self._options, **take_options(section)}
        raw_turns: list[Any] = section.take("turns", items, [])
        if "turns" not in values:
            section.problem('has no turns: give a list of texts, such as turns = ["Hello"], or of tables')
        turns = tuple(self._turn(section, number, turn, options) for number, turn in enumerate(raw_turns, 1))
        session = Session(
            name=name,
            form=self._form(section, [turn for many in turns for turn in many]),
            turns=tuple(turn for many in turns for turn in many),
            system=section.take("system", _template, self._system),
            template_options=section.take("template_options", table, {}),
            history=section.take("history", flag, True),
            repeat=section.take("repeat", whole(1, _MOST_REPEATS), 1),
            delay_s=section.take("delay_s", seconds, 0.0),
            after=section.take("after", one_or_more(text), ()),
            seed=section.take("seed", whole(0, _MOST_SEED), None),
        )
        if session.form != "chat" and (values.keys() & {"system", "template_options"}):
            section.problem(
                "only a session with the chat template has it (turns are texts, chat is not false)", "system"
            )
        section.close()
        return session

    def _name(self, place: str, values: dict[str, Any]) -> str:
        name = values.get("name")
        if not isinstance(name, str) or not re.fullmatch(NAME, name):
            self._problems.add(place, "name", f"must be a word of letters, digits, _ and -, not {name!r}")
            return ""
        if name in self._names:
            self._problems.add(place, "name", f"{name!r} is taken by {self._names[name]}; use repeat to play it again")
        self._names.setdefault(name, place)
        return name

    def _form(self, section: Section, turns: list[Turn]) -> Form:
        has_ids = {turn.text is None for turn in turns}
        if len(has_ids) > 1:
            section.problem("turns are texts or token ids, not both in one session", "turns")
        is_chat = section.take("chat", flag, True)
        return "ids" if has_ids == {True} else "chat" if is_chat else "text"

    def _turn(self, session: Section, number: int, value: Any, options: dict[str, Any]) -> list[Turn]:
        """The turn, as often as it is repeated."""
        where = f"{session.where}, turn {number}"
        if isinstance(value, str):
            value = {"text": value}
        elif isinstance(value, list):
            value = {"ids": value}
        elif not isinstance(value, dict):
            self._problems.add(where, f"must be a text, a list of token ids, or a table, not {value!r}")
            return []
        section = Section(self._problems, where, value)
        if section.has("text") == section.has("ids"):
            section.problem("needs either text or ids")
        turn = Turn(
            text=section.take("text", _template, None),
            ids=section.take("ids", token_ids, ()),
            options={**options, **take_options(section)},
            seed=section.take("seed", whole(0, _MOST_SEED), None),
            delay_s=section.take("delay_s", seconds, 0.0),
            when=section.take("when", pattern, None),
            unless=section.take("unless", pattern, None),
            expect=section.take("expect", pattern, None),
        )
        repeat = section.take("repeat", whole(1, _MOST_REPEATS), 1)
        section.close()
        return [turn] * repeat


def _template(value: Any) -> Template:
    return parse(text(value))
