"""Settings of a launch in a script: those of `LaunchConfig`, by the names of the flags (`workers`, `prefill_chunk`)."""

import dataclasses
from collections.abc import Callable
from typing import Any

from colibri_mp.config import LaunchConfig, flag_of
from colibri_mp.errors import ConfigError
from colibri_mp.script.section import Section


def take_launch(section: Section) -> dict[str, Any]:
    """Keywords for `LaunchConfig`, as far as they are given."""
    missing = object()
    found = {
        spec.name: section.take(flag_of(spec).removeprefix("--").replace("-", "_"), _check(spec), missing)
        for spec in dataclasses.fields(LaunchConfig)
    }
    section.close()
    return {name: value for name, value in found.items() if value is not missing}


def _check(spec: "dataclasses.Field[Any]") -> Callable[[Any], Any]:
    default = spec.default
    kinds = (int, str) if spec.name == "ram" else (int, float) if isinstance(default, float) else (type(default),)

    def check(value: Any) -> Any:
        if type(value) not in kinds:
            raise ValueError(f"must be {' or '.join(kind.__name__ for kind in kinds)}, not {value!r}")
        try:
            LaunchConfig(**{spec.name: value})
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return value

    return check
