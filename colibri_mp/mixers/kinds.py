"""The kinds of mixers that there are, and what all mixers of a model need together."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from colibri_mp.formats import Encoding
from colibri_mp.kernels.paged_cache import num_blocks_for
from colibri_mp.mixers.attention import Attention
from colibri_mp.mixers.delta_net import DeltaNet
from colibri_mp.mixers.kind import CacheShape, MixerKind, StageLimits, StateShape
from colibri_mp.mixers.mla import Mla
from colibri_mp.models.structure import LayerSpec, ModelSpec
from colibri_mp.specs import AttentionSpec, DeltaNetSpec, MlaSpec

KINDS: dict[type, MixerKind] = {AttentionSpec: Attention(), MlaSpec: Mla(), DeltaNetSpec: DeltaNet()}


def kind_of(layer: LayerSpec) -> MixerKind:
    """The kind of a layer's mixer."""
    return KINDS[type(layer.attention)]


def continues(layer: LayerSpec) -> bool:
    """Whether a layer needs the rows of the layer before it to be the same."""
    return kind_of(layer).continues(layer.attention)


def by_stage(model: ModelSpec) -> dict[Any, list[int]]:
    """Layers by the spec of the stage that they share."""
    groups: defaultdict[Any, list[int]] = defaultdict(list)
    for idx, layer in enumerate(model.layers):
        groups[kind_of(layer).stage_spec(layer.attention)].append(idx)
    return groups


def by_cache(model: ModelSpec, kv_bits: int) -> dict[CacheShape, list[int]]:
    """Layers by the shape of the paged cache that they share; those that need none are left out."""
    groups: defaultdict[CacheShape, list[int]] = defaultdict(list)
    for idx, layer in enumerate(model.layers):
        shape = kind_of(layer).cache_shape(layer.attention, kv_bits)
        if shape is not None:
            groups[shape].append(idx)
    return groups


def kv_bytes(model: ModelSpec, num_tokens: int, kv_bits: int) -> int:
    """Bytes of the paged caches for `num_tokens` positions."""
    num_blocks = num_blocks_for(num_tokens)
    return sum(shape.nbytes(len(layers), num_blocks) for shape, layers in by_cache(model, kv_bits).items())


def by_state(model: ModelSpec) -> dict[StateShape, list[int]]:
    """Layers by the shape of their recurrent state; those that have none are left out."""
    groups: defaultdict[StateShape, list[int]] = defaultdict(list)
    for idx, layer in enumerate(model.layers):
        shape = kind_of(layer).state_shape(layer.attention)
        if shape is not None:
            groups[shape].append(idx)
    return groups


def state_bytes(model: ModelSpec, num_slots: int) -> int:
    """Bytes of the recurrent states of `num_slots` slots; 0 for a model that has none."""
    return sum(shape.nbytes(len(layers), num_slots) for shape, layers in by_state(model).items())


def scratch_bytes(model: ModelSpec, limits: StageLimits) -> int:
    """Bytes that the stages allocate, at most."""
    return sum(
        KINDS[type(spec)].scratch_bytes(spec, [model.layers[idx].tensors for idx in layers], limits)
        for spec, layers in by_stage(model).items()
    )


def matrix_bytes(model: ModelSpec) -> int:
    """Bytes of all matrices of the mixers, as they are kept."""
    return sum(kind_of(layer).matrix_bytes(layer.attention, layer.tensors) for layer in model.layers)


def encodings(model: ModelSpec) -> Iterator[Encoding]:
    """Every encoding whose kernels the mixers need."""
    for layer in model.layers:
        yield from kind_of(layer).encodings(layer.attention, layer.tensors)


def blocks(model: ModelSpec) -> frozenset[str]:
    """The compiled blocks that the mixers need, by their names in `kernels.warming`."""
    return frozenset(kind_of(layer).block for layer in model.layers)
