"""Contradictions inside a pool: the shared tables against the lookups, stocks and recency kept in memory."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from colibri_mp.shm.layout import NO_EXPERT, NO_LAYER, SlotFlag, SlotState

if TYPE_CHECKING:
    from colibri_mp.shm.layer_pool import LayerPool, SlabClass
    from colibri_mp.shm.slots import Slots


class _Row(NamedTuple):
    """A slot's entry in the table."""

    layer: int
    expert: int
    state: int
    flags: int
    last_use: int

    @property
    def is_staged(self) -> bool:
        return bool(self.flags & SlotFlag.STAGED)


def find_defects(slots: "Slots") -> list[str]:
    """Every contradiction, one sentence each; empty if the pool is sound."""
    table = slots.tables.slots
    rows = list(map(_Row, *(table[name].tolist() for name in _Row._fields)))
    defects = [defect for slabs in slots.classes for defect in _class_defects(slots, slabs, rows)]
    defects += [defect for pool in slots.layers.values() for defect in _layer_defects(pool, rows)]
    limits = [pool.limit for pool in slots.layers.values()], [slabs.staging_limit for slabs in slots.classes]
    if limits != (slots.tables.limits.tolist(), slots.tables.staging_limits.tolist()):
        defects.append(f"limits of layers and staging are {limits}, in the tables they are others")
    return defects


def _class_defects(slots: "Slots", slabs: "SlabClass", rows: list[_Row]) -> Iterator[str]:
    """Each slot by itself, then the stock of FREE slots and the staging."""
    stock = dict.fromkeys(slabs.free, True) | dict.fromkeys(slabs.bare, False)
    for slot in slabs.slots:
        row = rows[slot]
        if row.state == SlotState.FREE:
            found = _free_defects(row, stock.get(slot), slots.holds[slot])
        else:
            found = _used_defects(slots, slabs, row, slot, is_free=slot in stock)
        yield from (f"layer {row.layer}, slot {slot}: {what}" for what in found)
    name = f"slots of {slabs.entry.slab_bytes} bytes"
    if len(stock) != len(slabs.free) + len(slabs.bare):
        yield f"{name}: one is free twice"
    num_staged = sum(rows[slot].is_staged for slot in slabs.slots)
    if num_staged != slabs.num_staged or (num_staged > slabs.staging_limit and slabs.staged):
        yield f"{name}: {slabs.num_staged} counted as staged, {num_staged} are, {slabs.staging_limit} may be"


def _free_defects(row: _Row, has_pages: bool | None, num_holds: int) -> Iterator[str]:
    """A FREE slot is in the stock with or without pages, or held since its read failed (`has_pages` is None)."""
    if (has_pages is None) != (num_holds > 0):
        yield f"FREE, held {num_holds} times, in the stock: {has_pages is not None}"
    if row.expert != NO_EXPERT or row.is_staged or (has_pages is not None and row.layer != NO_LAYER):
        yield f"FREE, but expert {row.expert}, flags {row.flags}"
    if has_pages is not None and has_pages != bool(row.flags & SlotFlag.PAGES_RESERVED):
        yield f"flags {row.flags}, but in the stock of slots {'with' if has_pages else 'without'} pages"


def _used_defects(slots: "Slots", slabs: "SlabClass", row: _Row, slot: int, is_free: bool) -> Iterator[str]:
    """A slot that is not FREE is in one lookup, and in the collections that its state says."""
    pool = slots.layers.get(row.layer)
    if pool is None or pool.slabs is not slabs or not 0 <= row.expert < pool.entry.num_experts:
        yield f"expert {row.expert} cannot be there"
        return
    if is_free or not row.flags & SlotFlag.PAGES_RESERVED:
        yield f"state {row.state}, but in the stock of free slots: {is_free}, flags {row.flags}"
    lookup, other = (pool.staged, pool.slot_of) if row.is_staged else (pool.slot_of, pool.staged)
    if lookup.get(row.expert) != slot or row.expert in other:
        yield f"holds expert {row.expert}, which the lookup has in slot {lookup.get(row.expert)}"
    is_held, is_evictable = slots.holds[slot] > 0, row.expert in pool.evictable
    own_state = None if row.is_staged else row.state
    facts = (is_evictable, slot in slabs.staged, slot in pool.loading)
    expected = (
        own_state == SlotState.READY and not is_held,
        row.is_staged and row.state == SlotState.READY,
        own_state == SlotState.LOADING,
    )
    may_be_pinned = own_state in (SlotState.LOADING, SlotState.PINNED)
    is_pinned = slot in pool.pinned
    if facts != expected or is_pinned not in (may_be_pinned, own_state == SlotState.PINNED):
        yield f"state {row.state}, but held {is_held}; evictable, staged, loading: {facts}; pinned {is_pinned}"
    if slots.holds[slot] < 0 or (row.is_staged and is_held):
        yield f"held {slots.holds[slot]} times"


def _layer_defects(pool: "LayerPool", rows: list[_Row]) -> Iterator[str]:
    """The lookups, counts, limits and recency of a layer."""
    name, entry = f"layer {pool.entry.layer}", pool.entry
    own = [row for row in rows if row.layer == entry.layer]
    owned = [row for row in own if not row.is_staged]
    num_used = sum(row.state != SlotState.FREE for row in owned)
    if (len(pool.slot_of), pool.num_owned, len(pool.staged)) != (num_used, len(owned), len(own) - len(owned)):
        yield f"{name}: the lookup has {len(pool.slot_of)} experts, the slot table another number"
    if not pool.floor <= pool.limit - len(pool.pinned) <= pool.limit <= entry.num_slots:
        yield f"{name}: limit {pool.limit} of {entry.num_slots}, floor {pool.floor}, {len(pool.pinned)} pins"
    if pool.num_owned > pool.limit and pool.evictable:
        yield f"{name}: has {pool.num_owned} slots, its limit is {pool.limit}"
    resident = {row.expert for row in owned if row.state >= SlotState.READY}
    if resident != set(pool.residency.nonzero()[0].tolist()):
        yield f"{name}: residency is not what the slot table says"
    uses = [rows[pool.slot_of[expert]].last_use for expert in pool.evictable if expert in pool.slot_of]
    if len(uses) != len(pool.evictable):
        yield f"{name}: may evict {sorted(set(pool.evictable).difference(pool.slot_of))}, which it does not have"
    if uses != sorted(uses):
        yield f"{name}: recency and last use disagree"
    counters = pool.counters
    if counters.issued != counters.promoted + counters.dropped + counters.failed + len(pool.staged):
        yield f"{name}: {counters} do not add up with {len(pool.staged)} staged"
