"""The kinds of mixers that MLX computes, by the class of their spec: the one place that knows which there are."""

from collections.abc import Callable
from typing import Any, NamedTuple

from colibri_mp.mlx_backend import attention, delta_net, mla
from colibri_mp.mlx_backend.mixer import Mixer, Room, WeightReader
from colibri_mp.mlx_backend.rows import Rope
from colibri_mp.models.structure import ModelSpec
from colibri_mp.specs import AttentionSpec, DeltaNetSpec, MlaSpec


class MixerKind(NamedTuple):
    """How a kind is made, and the bytes that it takes; the arguments are those of `attention.Attention` and its functions."""

    make: Callable[[WeightReader, Any, Any, Rope, Room], Mixer]
    kv_bytes: Callable[[Any, int], int]
    scratch_bytes: Callable[[Any, int, int], int]


KINDS: dict[type, MixerKind] = {
    AttentionSpec: MixerKind(attention.Attention, attention.kv_bytes, attention.scratch_bytes),
    DeltaNetSpec: MixerKind(delta_net.DeltaNet, delta_net.kv_bytes, delta_net.scratch_bytes),
    MlaSpec: MixerKind(mla.Mla, mla.kv_bytes, mla.scratch_bytes),
}


def missing_kinds(model: ModelSpec) -> list[str]:
    """Names of the specs in the model that MLX does not compute."""
    return sorted({type(layer.attention).__name__ for layer in model.layers if type(layer.attention) not in KINDS})
