"""Contradictions inside a pool: the shared slot table against the lookup, free lists and recency kept in memory."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from colibri_mp.shm.layout import NO_EXPERT, SlotState

if TYPE_CHECKING:
    from colibri_mp.shm.pool import LayerPool


class _Slot(NamedTuple):
    """What table and memory say of one slot."""

    layer: int
    expert: int
    state: int
    num_holds: int
    is_free: bool
    is_evictable: bool


def find_defects(slots: NDArray[np.void], layers: "Mapping[int, LayerPool]", holds: Sequence[int]) -> list[str]:
    """Every contradiction, one sentence each; empty if the pool is sound. `slots` is the slot table [num_slots]."""
    return [defect for pool in layers.values() for defect in _layer_defects(slots, pool, holds)]


def _layer_defects(slots: NDArray[np.void], pool: "LayerPool", holds: Sequence[int]) -> Iterator[str]:
    layer, own = pool.entry.layer, slice(pool.slots.start, pool.slots.stop)
    columns = (slots[name][own].tolist() for name in ("layer", "expert", "state"))
    free = set(pool.free)
    for slot, (owner, expert, state) in zip(pool.slots, zip(*columns, strict=True), strict=True):
        facts = _Slot(owner, expert, state, holds[slot], slot in free, slot in pool.lru)
        yield from (f"layer {layer}, slot {slot}: {what}" for what in _slot_defects(facts, pool, slot))
    if len(pool.slot_of) != np.count_nonzero(slots["state"][own] != SlotState.FREE):
        yield f"layer {layer}: the lookup has {len(pool.slot_of)} experts, the slot table another number"
    if len(free) != len(pool.free):
        yield f"layer {layer}: a slot is free twice"
    if np.any(np.diff(slots["last_use"][list(pool.lru)].astype(np.int64)) < 0):
        yield f"layer {layer}: recency and last use disagree"


def _slot_defects(slot: _Slot, pool: "LayerPool", number: int) -> Iterator[str]:
    is_held = slot.num_holds > 0
    places = f"free {slot.is_free}, evictable {slot.is_evictable}, held {is_held}"
    if slot.layer != pool.entry.layer:
        yield f"belongs to layer {slot.layer}"
    if slot.num_holds < 0:
        yield "released more often than acquired"
    if slot.state == SlotState.FREE:
        if slot.expert != NO_EXPERT or slot.is_evictable or slot.is_free == is_held:
            yield f"FREE, but expert {slot.expert}, {places}"
        return
    if pool.slot_of.get(slot.expert) != number or not 0 <= slot.expert < pool.entry.num_experts:
        yield f"holds expert {slot.expert}, which the lookup has in slot {pool.slot_of.get(slot.expert)}"
    if slot.is_free or slot.is_evictable != (slot.state == SlotState.READY and not is_held):
        yield f"state {slot.state}, but {places}"
