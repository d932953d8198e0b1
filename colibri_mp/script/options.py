"""Options of a request in a script: what `Cluster.submit` takes, by the same names, types and ranges.

They may stand in [defaults], in a session and in a turn; the innermost wins.
"""

import typing
from collections.abc import Callable
from typing import Any

import msgspec

from colibri_mp.errors import RequestError
from colibri_mp.messages import Constraint, Generate, Sampling
from colibri_mp.sampling import resolve
from colibri_mp.script.section import Section, one_or_more, text, whole


def take_options(section: Section) -> dict[str, Any]:
    """The options that stand in this table; `seed` is not among them, since it means something else at each level."""
    missing = object()
    found = {name: section.take(name, check, missing) for name, check in _CHECKS.items()}
    return {name: value for name, value in found.items() if value is not missing}


def _sampling_check(name: str, kind: Any) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        converted = _convert(value, kind)
        try:
            resolve(Sampling(**{name: converted}), {}, 0)
        except RequestError as error:
            raise ValueError(str(error).removeprefix(f"{name} ")) from error
        return converted

    return check


def _convert(value: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise ValueError(
            f"{error}, and this is {value!r}".replace("Expected", "expected").replace("`", "").replace(" | null", "")
        ) from error


def _type_check(kind: Any) -> Callable[[Any], Any]:
    return lambda value: _convert(value, kind)


def _constraint(value: Any) -> Constraint:
    if isinstance(value, dict) and not value.keys() <= set(Constraint.__struct_fields__):
        raise ValueError(f"has the keys kind and text, not {', '.join(value)}")
    found: Constraint = _convert(value, Constraint)
    return found


_SAMPLING_TYPES = typing.get_type_hints(Sampling)
_REQUEST_TYPES = typing.get_type_hints(Generate)
_CHECKS: dict[str, Callable[[Any], Any]] = {
    "max_tokens": whole(1),
    "stop": one_or_more(text),
    "ignore_eos": _type_check(_REQUEST_TYPES["ignore_eos"]),
    "stop_ids": _type_check(_REQUEST_TYPES["stop_ids"]),
    "constraint": _constraint,
    **{name: _sampling_check(name, kind) for name, kind in _SAMPLING_TYPES.items() if name != "seed"},
}
