"""The kinds of mixers that MLX computes, by the class of their spec: the one place that knows which there are."""

from collections.abc import Callable
from typing import Any, NamedTuple

from colibri_mp.mlx_backend import attention
from colibri_mp.mlx_backend.mixer import Mixer, WeightReader
from colibri_mp.mlx_backend.rows import Rope
from colibri_mp.models.structure import ModelSpec
from colibri_mp.specs import AttentionSpec


class MixerKind(NamedTuple):
    """How a kind is made, and the bytes that it takes; the arguments are those of `attention.Attention` and its functions."""

    make: Callable[[WeightReader, Any, Any, Rope, int], Mixer]
    kv_bytes: Callable[[Any, int], int]
    scratch_bytes: Callable[[Any, int, int], int]


KINDS: dict[type, MixerKind] = {
    AttentionSpec: MixerKind(attention.Attention, attention.kv_bytes, attention.scratch_bytes)
}


def missing_kinds(model: ModelSpec) -> list[str]:
    """Names of the specs in the model that MLX does not compute."""
    specs = {layer.attention for layer in model.layers}
    gated = {"attention with a gate" for spec in specs if isinstance(spec, AttentionSpec) and spec.gated}
    return sorted(gated | {type(spec).__name__ for spec in specs if type(spec) not in KINDS})
