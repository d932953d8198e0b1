"""One table of a script, read key by key: each value is checked, and what is left over has an unknown name.

Problems are collected, so that a file is told all that is wrong with it at once.
"""

import difflib
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class Problems:
    """What is wrong with a file, in the order in which it was found."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, *place_and_problem: str) -> None:
        """Note a problem: the place from the outside in, then what it is; empty parts are left out."""
        *place, problem = place_and_problem
        where = ", ".join(part for part in place if part)
        self.lines.append(f"{where}: {problem}" if where else problem)


class Section:
    """The values of one table that stands at `where` ("session 'anna', turn 2")."""

    def __init__(self, problems: Problems, where: str, values: Mapping[str, Any]) -> None:
        self.where = where
        self._problems = problems
        self._values = dict(values)
        self._known: list[str] = []

    def take(self, key: str, check: Callable[[Any], T], default: T) -> T:
        """The value of `key` as `check` returns it, or `default` if it is left out or wrong.

        `check` raises ValueError with what the value must be.
        """
        self._known.append(key)
        if key not in self._values:
            return default
        value = self._values.pop(key)
        try:
            return check(value)
        except ValueError as error:
            self._problems.add(self.where, key, str(error))
            return default

    def has(self, key: str) -> bool:
        """Whether the key is given and not taken yet."""
        return key in self._values

    def problem(self, what: str, key: str = "") -> None:
        """Note a problem of this table, or of a key in it."""
        self._problems.add(self.where, key, what)

    def close(self) -> None:
        """Note every key that nobody has asked for, with the nearest known one."""
        for key in self._values:
            nearest = difflib.get_close_matches(key, self._known, n=1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"known are {', '.join(sorted(self._known))}"
            self._problems.add(self.where, f"unknown key {key!r}; {hint}")


# -- checks ------------------------------------------------------------------------------------------------------------


def _wrong(wanted: str, value: object) -> ValueError:
    shown = repr(value)
    return ValueError(f"must be {wanted}, not {shown if len(shown) <= 60 else shown[:57] + '...'}")


def text(value: Any) -> str:
    """A text that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise _wrong("a text that is not empty", value)
    return value


def flag(value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise _wrong("true or false", value)
    return value


def whole(least: int, most: int = 2**63 - 1) -> Callable[[Any], int]:
    """A check for an integer in a range."""

    def check(value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            limit = f"from {least} to {most}" if most < 2**63 - 1 else f"of at least {least}"
            raise _wrong(f"an integer {limit}", value)
        return value

    return check


def seconds(value: Any) -> float:
    """A finite number of seconds, not negative, at most a day."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _wrong("a number of seconds", value)
    if not 0 <= value <= 86400:
        raise _wrong("a number of seconds from 0 to 86400", value)
    return float(value)


def pattern(value: Any) -> re.Pattern[str]:
    """A regular expression that is searched in an answer."""
    try:
        return re.compile(text(value))
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"not a regular expression: {error}") from error


def token_ids(value: Any) -> tuple[int, ...]:
    """A list of token ids, not empty."""
    if not isinstance(value, list) or not value or not all(type(token) is int and token >= 0 for token in value):
        raise _wrong("a list of token ids that is not empty", value)
    return tuple(value)


def table(value: Any) -> dict[str, Any]:
    """A table of further keys."""
    if not isinstance(value, dict):
        raise _wrong("a table", value)
    return value


def items(value: Any) -> list[Any]:
    """A list that is not empty."""
    if not isinstance(value, list) or not value:
        raise _wrong("a list that is not empty", value)
    return value


def one_or_more(check: Callable[[Any], T]) -> Callable[[Any], tuple[T, ...]]:
    """A check for one value or a list of them."""

    def check_all(value: Any) -> tuple[T, ...]:
        return tuple(check(item) for item in (value if isinstance(value, list) else [value]))

    return check_all
