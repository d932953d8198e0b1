"""Typed reading of config.json, in both of its dialects, with errors that name the field.

Older files and transformers 5 name some fields differently: `torch_dtype`/`dtype`, `num_experts`/`num_local_experts`,
`rope_theta` + `rope_scaling` / `rope_parameters`. A field is asked for by all its names; null counts as absent.
"""

import math
from collections.abc import Mapping
from typing import Any

from colibri_mp.errors import CheckpointError
from colibri_mp.specs import RopeSpec, RopeType

_LARGEST = 2**31 - 1


class ConfigReader:
    """The fields of config.json (or of an object within it, then `prefix` names it)."""

    def __init__(self, fields: Mapping[str, Any], prefix: str = "") -> None:
        self._fields = fields
        self._prefix = prefix

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._fields.get(name) is not None

    def is_list(self, name: str) -> bool:
        """Whether the field holds a list, where the reference takes a list or something else."""
        return isinstance(self._fields.get(name), list)

    def whole(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """A whole number from `least` to 2^31 - 1."""
        name, value = self._find(names, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _LARGEST:
            raise self._wrong(name, value, f"a whole number from {least} to {_LARGEST}")
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        """A finite number."""
        name, value = self._find(names, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._wrong(name, value, "a finite number")
        return float(value)

    def positive(self, *names: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.number(*names, default=default)
        if value <= 0:
            raise self._wrong(names[0], value, "a number above 0")
        return value

    def optional_number(self, name: str) -> float | None:
        """A finite number, or None where the field is absent."""
        return self.number(name) if self.has(name) else None

    def flag(self, *names: str, default: bool | None = None) -> bool:
        """true or false."""
        name, value = self._find(names, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def text(self, *names: str, default: str | None = None) -> str:
        """A string."""
        name, value = self._find(names, default)
        if not isinstance(value, str):
            raise self._wrong(name, value, "a string")
        return value

    def whole_list(self, name: str) -> list[int]:
        """A list of whole numbers; empty where the field is absent."""
        value = self._fields.get(name) or []
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise self._wrong(name, value, "a list of whole numbers")
        return value

    def text_list(self, name: str) -> list[str]:
        """A list of strings; empty where the field is absent."""
        value = self._fields.get(name) or []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(name, value, "a list of strings")
        return value

    def section(self, name: str) -> "ConfigReader":
        """The object in a field; empty where the field is absent."""
        value = self._fields.get(name) or {}
        if not isinstance(value, dict):
            raise self._wrong(name, value, "an object")
        return ConfigReader(value, f"{self._prefix}{name}.")

    def require(self, name: str, found: object, *allowed: object) -> None:
        """Refuse a value of field `name` that this program does not implement."""
        if found not in allowed:
            raise CheckpointError(
                f"config.json: {self._prefix}{name} = {found!r} is not supported; supported: "
                f"{', '.join(repr(value) for value in allowed)}"
            )

    def _find(self, names: tuple[str, ...], default: Any) -> tuple[str, Any]:
        for name in names:
            if self.has(name):
                return name, self._fields[name]
        if default is None:
            wanted = " or ".join(self._prefix + name for name in names)
            raise CheckpointError(f"config.json: has no {wanted}, which this model type needs")
        return names[0], default

    def _wrong(self, name: str, value: object, wanted: str) -> CheckpointError:
        return CheckpointError(f"config.json: {self._prefix}{name} = {value!r} must be {wanted}")


def read_rope(
    config: ConfigReader, head_dim: int, default_theta: float, partial_rotary: float | None = None
) -> RopeSpec:
    """Rotary embedding from `rope_parameters`, or from `rope_theta` and `rope_scaling`.

    `partial_rotary`: the share of a head that turns where the config does not say; None: the family knows no other than all of it.
    Defaults are those of transformers/modeling_rope_utils.py: a missing factor is max_position_embeddings over the
    original length.
    """
    parameters = config.section("rope_parameters" if config.has("rope_parameters") else "rope_scaling")
    theta = parameters.number("rope_theta", default=config.number("rope_theta", default=default_theta))
    rotary_dim = _rotary_dim(config, parameters, head_dim, partial_rotary)
    rope_type = _rope_type(parameters)
    if rope_type == "default":
        return RopeSpec(theta, rotary_dim)
    max_position = config.whole("max_position_embeddings")
    original = parameters.whole("original_max_position_embeddings", default=max_position)
    return RopeSpec(
        theta=theta,
        rotary_dim=rotary_dim,
        rope_type=rope_type,
        factor=parameters.positive("factor", default=max_position / original),
        original_max_position=original,
        beta_fast=parameters.number("beta_fast", default=32.0),
        beta_slow=parameters.number("beta_slow", default=1.0),
        attention_factor=parameters.optional_number("attention_factor"),
        mscale=parameters.optional_number("mscale"),
        mscale_all_dim=parameters.optional_number("mscale_all_dim"),
        truncate=parameters.flag("truncate", default=True),
        low_freq_factor=parameters.number("low_freq_factor", default=1.0),
        high_freq_factor=parameters.number("high_freq_factor", default=4.0),
    )


def _rotary_dim(config: ConfigReader, parameters: ConfigReader, head_dim: int, partial_rotary: float | None) -> int:
    """Elements of a head that turn, an even number."""
    if partial_rotary is None:
        for reader in (config, parameters):
            reader.require("partial_rotary_factor", reader.number("partial_rotary_factor", default=1.0), 1.0)
        return head_dim
    stated = config.number("partial_rotary_factor", default=partial_rotary)
    share = parameters.positive("partial_rotary_factor", default=stated)
    rotary_dim = int(head_dim * share)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise CheckpointError(
            f"config.json: partial_rotary_factor = {share} turns {rotary_dim} of {head_dim} elements of a head, which must be "
            "an even number of them"
        )
    return rotary_dim


def read_max_context(config: ConfigReader, rope: RopeSpec) -> int:
    """Tokens of the longest context: max_position_embeddings, or what rotary scaling makes of the original length."""
    scaled = rope.factor * rope.original_max_position
    if not scaled <= _LARGEST:
        raise CheckpointError(
            f"config.json: rope factor {rope.factor} makes a context of {scaled:.3g} tokens, which cannot be meant"
        )
    return max(config.whole("max_position_embeddings"), int(scaled))


def _rope_type(parameters: ConfigReader) -> RopeType:
    found = parameters.text("rope_type", "type", default="default")
    known: tuple[RopeType, ...] = ("default", "linear", "yarn", "llama3")
    for rope_type in known:
        if found == rope_type:
            return rope_type
    parameters.require("rope_type", found, *known)
    raise AssertionError("require() has refused the value")
