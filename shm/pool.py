"""The expert pool of one worker: which expert lies in which slab of the shared segment.

One step of a layer:

    held = pool.acquire(layer, union)      hits: ready to compute; misses: a slot each, LOADING
      ... read each miss into pool.slab_view(slot) ...
      pool.mark_ready(slot, generation)    or pool.fail(slot, generation)
      ... compute with pool.addresses[slot] ...
    pool.release(held)                     evictable again, as the most recent, in ascending expert id; see `policy`

Beside the steps: `stage` takes a slot for a read ahead, `fill` a free one for an expert worth having, `pin` and
`load_pinned` keep experts for good, `resize` changes how much memory the slabs take. Which experts a layer holds depends on
what was acquired, filled, pinned and resized, in this order, and never on staging: a staged expert becomes the layer's only
when it is acquired, and what the layer would have evicted for it goes then.

A slot that is held by an acquire, or LOADING, is never evicted. A union larger than the layer's slots is worked
through in `rounds`. One process, one thread writes; see `slots` for a slot's life, `view` for observers, `layout` for the bytes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from colibri_mp.errors import PoolError
from colibri_mp.shm.integrity import find_defects
from colibri_mp.shm.layer_pool import LayerPool, SlabClass, StagingCounters
from colibri_mp.shm.layout import LayerSlots, SlotState
from colibri_mp.shm.policy import DEFAULT_EVICTION, Eviction, LayerDemand, StagingDemand, plan_size
from colibri_mp.shm.segment import Segment
from colibri_mp.shm.slots import LOADING, PINNED, Slots
from colibri_mp.shm.tables import PoolTables


class Held(NamedTuple):
    """Slots of one acquire, until its `release`. Each pair of lists is parallel, in ascending expert id.

    `misses` are to be read by the caller under the given generations; `pending` are being read already, for an earlier
    acquire (a read that outlived its step), for a pin, or ahead: wait for them, do not read them again. Of the experts
    in `hits` and `pending`, `num_promoted` came out of staging, `num_late` of these are in `pending`.
    """

    layer: int
    hits: list[int]
    hit_slots: list[int]
    misses: list[int]
    miss_slots: list[int]
    generations: list[int]
    pending: list[int]
    pending_slots: list[int]
    num_evicted: int
    num_promoted: int
    num_late: int


class ExpertPool:
    """Single writer of a pool segment. Slots are numbered through the whole pool."""

    def __init__(
        self, segment: Segment, layers: Sequence[LayerSlots], fingerprint: str, *, floor: int = 1, staging: int = 0,
        eviction: Eviction = DEFAULT_EVICTION,
    ) -> None:  # fmt: skip
        """Take over `segment`: a fresh one is formatted, one of the same model and layers is recovered.

        `floor` slots of each layer (one token's experts) are never pinned or given up; `staging` slots of each slab
        size are for reads ahead. After a crash of the previous writer LOADING and staged slots become FREE, READY and
        PINNED ones are trusted, and the pool keeps the size that it had; of their uses only the order of the last ones is
        known. The caller makes sure that the previous writer
        is dead. Raises `PoolError` if the segment is of another model, layer range or size, or below the floor.
        """
        _check_floor(layers, floor)
        self._tables = PoolTables(segment, layers, fingerprint, staging)
        self.layout = self._tables.layout
        self.addresses = self._tables.addresses
        self._slots = Slots(self._tables, floor, eviction)
        self._layers = self._slots.layers
        self.check_integrity()

    # ── one step ────────────────────────────────────────────────────────────────────────────────────────────────────

    def rounds(self, layer: int, expert_ids: Iterable[int]) -> list[list[int]]:
        """Split a union into parts that fit the layer's slots, to be acquired one after the other.

        Resident experts come first, so that none is evicted before its use, then the others; each ascending.
        """
        pool = self._layer(layer)
        union = sorted(set(expert_ids))
        if len(union) <= pool.num_available:
            return [union] if union else []
        staying, others = self._by_need(pool, union)
        capacity = self._num_usable(pool, others)
        if others and capacity < 1:
            raise PoolError(f"layer {layer}: all {pool.limit} slots are in use by unfinished reads")
        parts = [others[start : start + capacity] for start in range(0, len(others), capacity)] if others else [[]]
        return [staying + parts[0], *parts[1:]]

    def acquire(self, layer: int, expert_ids: Iterable[int]) -> Held:
        """Give every expert of a union a slot, all or none; nothing is evicted that the union needs.

        Raises `PoolError` if the union needs more slots than the layer has, or /dev/shm is full; nothing has changed then.
        """
        pool = self._layer(layer)
        union = sorted(set(expert_ids))
        found = self.find(layer, union)
        if found is not None:
            self._slots.hold(pool, union, found)
            held = Held(layer, union, found, [], [], [], [], [], 0, 0, 0)
        else:
            held = self._acquire_some(pool, union)
        pool.evictable.used(union)
        return held

    def find(self, layer: int, expert_ids: Iterable[int]) -> list[int] | None:
        """Slots of experts that are all in memory; None if one is not, or is being read. Changes nothing."""
        pool = self._layer(layer)
        try:
            found = list(map(pool.slot_of.__getitem__, expert_ids))
        except KeyError:
            return None
        return found if not pool.loading or pool.loading.isdisjoint(found) else None

    def mark_ready(self, slot: int, generation: int) -> None:
        """The slab's bytes are complete. `PoolError` if the slot is not LOADING under this generation."""
        self._check_loading(slot, generation)
        self._slots.ready(slot)

    def fail(self, slot: int, generation: int) -> None:
        """The read failed, or has been called off before it began: the slot is FREE again.

        `PoolError` if it is not LOADING under this generation.
        """
        self._check_loading(slot, generation)
        self._slots.fail(slot)

    def release(self, held: Held) -> None:
        """End of use: the slots become evictable, the highest expert id as the most recent one."""
        experts, slots = held.hits, held.hit_slots
        if held.misses or held.pending:
            slot_of = dict(zip(held.hits, held.hit_slots, strict=True))
            slot_of.update(zip(held.misses, held.miss_slots, strict=True))
            slot_of.update(zip(held.pending, held.pending_slots, strict=True))
            experts = sorted(slot_of)
            slots = [slot_of[expert] for expert in experts]
        self._slots.release(self._layers[held.layer], experts, slots)

    def slab_view(self, slot: int) -> NDArray[np.uint8]:
        """The slab's bytes, uint8 [slab_bytes], writable; valid while the slot is held or LOADING."""
        return self._tables.slab_view(slot, self._slots.owner(slot).entry.slab_bytes)

    # ── reads ahead, fills, pins, size ─────────────────────────────────────────────────────────────────────────────────────

    def stage(self, layer: int, expert: int) -> tuple[int, int] | None:
        """A staging slot and the generation for a read ahead of demand, which ends with `mark_ready` or `fail`.

        None if there is nothing to read (the expert is in memory, or on its way) or no place: all staging slots of this
        slab size are being read into. The oldest complete one gives way. `PoolError` if /dev/shm is full.
        """
        pool = self._layer(layer)
        self._check_experts(pool, expert, expert)
        if expert in pool.slot_of or expert in pool.staged or not self._make_staging_room(pool.slabs):
            return None
        self._slots.reserve(pool.slabs, 1)
        return self._with_generation(self._slots.load_staged(pool, expert))

    def fill(self, layer: int, expert: int) -> Held | None:
        """Give a slot that nobody uses to an expert that nobody has asked for yet: its only miss, to be released after the read.

        It counts as no use. None if there is nothing to read (it is in memory, staged, or on its way) or no place: no free slot,
        or none that a step could have beside it.
        """
        pool = self._layer(layer)
        self._check_experts(pool, expert, expert)
        is_known = expert in pool.slot_of or expert in pool.staged
        if is_known or self.num_free(layer) < 1 or pool.num_available < 2:
            return None
        return self._acquire_some(pool, [expert])

    def pin(self, layer: int, expert: int) -> bool:
        """Never evict a READY expert of the layer, and lock it in memory where the system allows it.

        False if it is not READY, or the layer has no slot above the floor that is not pinned.
        """
        pool = self._layer(layer)
        slot = pool.slot_of.get(expert)
        if slot is None or slot in pool.loading:
            return False
        if slot in pool.pinned:
            return True
        if not _may_pin(pool):
            return False
        self._slots.pin(pool, slot)
        return True

    def load_pinned(self, layer: int, expert: int) -> tuple[int, int] | None:
        """A slot of the layer and the generation for a read that ends PINNED with `mark_ready`, or with `fail`.

        None if there is nothing to read (a staged expert is pinned, at once or at the end of its read; one that is in the
        layer already stays as it is: see `pin`) or no place (no slot above the floor that is not pinned, or all in use).
        """
        pool = self._layer(layer)
        self._check_experts(pool, expert, expert)
        if expert in pool.slot_of or not _may_pin(pool) or pool.num_available < 1:
            return None
        is_staged = expert in pool.staged
        num_evicted = max(0, 1 + pool.num_owned - pool.limit)
        self._slots.reserve(pool.slabs, 1 - is_staged - num_evicted)
        for _ in range(num_evicted):
            self._slots.evict(pool)
        slot = self._slots.promote(pool, expert) if is_staged else self._slots.load(pool, expert)
        self._slots.pin(pool, slot)
        return None if is_staged else self._with_generation(slot)

    def unpin(self, layer: int, expert: int) -> None:
        """The expert may be evicted again, as the most recent one of its layer. Nothing happens if it is not pinned."""
        pool = self._layer(layer)
        slot = pool.slot_of.get(expert)
        if slot in pool.pinned:
            self._slots.unpin(pool, slot)

    def resize(self, slab_bytes: int) -> int:
        """Let slabs take `slab_bytes`, of all that the segment has room for; returns what they may take from now on.

        Every layer keeps its floor, then come pins (the least recent are given up first), staging, and equal shares of
        what each layer had. What is evicted is what the layer's policy chooses, and its pages go back to the system at once.
        What is held or being read stays until it is released or read; so the result can be above `slab_bytes`.
        """
        self._give_up_pins(slab_bytes)
        layers, classes = self._layers.values(), self._slots.classes
        demands = [
            LayerDemand(pool.entry.num_slots, pool.entry.slab_bytes, pool.floor + len(pool.pinned)) for pool in layers
        ]
        staging = [StagingDemand(self.layout.num_staging, slabs.entry.slab_bytes) for slabs in classes]
        limits, staging_limits = plan_size(demands, staging, slab_bytes)
        self._slots.set_limits(limits, staging_limits)
        layer_bytes = sum(n * demand.slab_bytes for n, demand in zip(limits, demands, strict=True))
        return layer_bytes + sum(n * demand.slab_bytes for n, demand in zip(staging_limits, staging, strict=True))

    # ── looking ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def residency(self, layer: int) -> NDArray[np.bool_]:
        """Which experts the layer holds, READY or PINNED, bool [E]. A live view: it changes with the pool."""
        return self._layer(layer).residency_view

    def pinned(self, layer: int) -> list[int]:
        """The experts that are PINNED, or will be at the end of their read, ascending."""
        pool = self._layer(layer)
        return sorted(self._tables.experts[slot] for slot in pool.pinned)

    def staging_counters(self) -> dict[int, StagingCounters]:
        """For each layer what became of its reads ahead; copies."""
        return {layer: replace(pool.counters) for layer, pool in self._layers.items()}

    def num_free(self, layer: int) -> int:
        """Slots that the layer may still fill without evicting anything."""
        pool = self._layer(layer)
        return pool.limit - pool.num_owned

    def num_available(self, layer: int) -> int:
        """Slots that a step could have now: free ones, and experts that may be evicted; negative while a pool is being made smaller."""
        return self._layer(layer).num_available

    def limits(self) -> dict[int, int]:
        """How many slots each layer may have now."""
        return {layer: pool.limit for layer, pool in self._layers.items()}

    def num_resident(self) -> int:
        """Slots of layers that hold a complete expert."""
        return sum(len(pool.slot_of) - len(pool.loading) for pool in self._layers.values())

    @property
    def locked(self) -> tuple[int, str | None]:
        """Bytes of pins that are locked in memory, and why the system refused to lock more, the last time it did."""
        return self._slots.locks.nbytes, self._slots.locks.refusal

    def check_integrity(self) -> None:
        """`PoolError` that lists every contradiction between the shared tables and the state in memory."""
        self._tables.check_header()
        defects = find_defects(self._slots)
        if defects:
            raise PoolError(f"the expert pool {self._tables.segment.name!r} is damaged: " + "; ".join(defects[:8]))

    def close(self) -> None:
        """Let go of the segment, so that it can be unmapped; the pool cannot be used afterwards."""
        self._tables.close()

    # ── parts ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _layer(self, layer: int) -> LayerPool:
        try:
            return self._layers[layer]
        except KeyError:
            raise PoolError(f"layer {layer} is not in this pool, which has {sorted(self._layers)}") from None

    def _acquire_some(self, pool: LayerPool, union: list[int]) -> Held:
        """`acquire` of a union that is not wholly READY. Pages first: after that nothing can fail half-way."""
        slots = self._slots
        new = [expert for expert in union if expert not in pool.slot_of]
        self._check_experts(pool, union[0], union[-1])
        self._check_room(pool, union)
        num_evicted = max(0, len(new) + pool.num_owned - pool.limit)
        promoted = [expert for expert in new if expert in pool.staged]
        misses = [expert for expert in new if expert not in pool.staged]
        slots.reserve(pool.slabs, len(misses) - num_evicted)
        here = [expert for expert in union if expert in pool.slot_of]
        slots.hold(pool, here, [pool.slot_of[expert] for expert in here])
        for _ in range(num_evicted):
            slots.evict(pool)
        miss_slots = [slots.load(pool, expert) for expert in misses]
        slots.hold(pool, misses, miss_slots)
        slots.hold(pool, promoted, [slots.promote(pool, expert) for expert in promoted])
        hits = [expert for expert in union if pool.residency[expert]]
        pending = sorted(set(union).difference(hits, misses))
        return Held(
            layer=pool.entry.layer,
            hits=hits,
            hit_slots=[pool.slot_of[expert] for expert in hits],
            misses=misses,
            miss_slots=miss_slots,
            generations=[self._tables.generations[slot] for slot in miss_slots],
            pending=pending,
            pending_slots=[pool.slot_of[expert] for expert in pending],
            num_evicted=num_evicted,
            num_promoted=len(promoted),
            num_late=sum(not pool.residency[expert] for expert in promoted),
        )

    def _by_need(self, pool: LayerPool, union: list[int]) -> tuple[list[int], list[int]]:
        """Experts whose slots stay taken whatever happens (pinned, or held by somebody); the others, in order of use."""
        staying, here, missing = [], [], []
        for expert in union:
            slot = pool.slot_of.get(expert)
            if slot is None:
                missing.append(expert)
            elif slot in pool.pinned or self._slots.holds[slot]:
                staying.append(expert)
            else:
                here.append(expert)
        return staying, here + missing

    def _make_staging_room(self, slabs: SlabClass) -> bool:
        if slabs.num_staged < slabs.staging_limit:
            return True
        if not slabs.staged:
            return False
        self._slots.drop_staged(slabs)
        return True

    def _with_generation(self, slot: int) -> tuple[int, int]:
        return slot, self._tables.generations[slot]

    def _give_up_pins(self, budget_bytes: int) -> None:
        """Pins that do not fit beside the floors, least recent first; those in use or being read stay."""
        layers = self._layers.values()
        too_much = sum((p.floor + len(p.pinned)) * p.entry.slab_bytes for p in layers) - budget_bytes
        if too_much <= 0:
            return
        pins = [slot for pool in layers for slot in pool.pinned if self._tables.states[slot] == PINNED]
        for slot in sorted(pins, key=self._tables.last_use.__getitem__):
            if too_much > 0 and not self._slots.holds[slot]:
                too_much -= self._slots.owner(slot).entry.slab_bytes
                self._slots.give_up_pin(slot)

    # ── checks ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _num_usable(self, pool: LayerPool, union: list[int]) -> int:
        """Slots for a union: those that the layer can take or evict, and those in use that the union names."""
        in_use = (
            slot for expert in union if (slot := pool.slot_of.get(expert)) is not None and expert not in pool.evictable
        )
        return pool.num_available + sum(1 for _ in in_use)

    def _check_room(self, pool: LayerPool, union: list[int]) -> None:
        usable = self._num_usable(pool, union)
        if len(union) <= usable:
            return
        missing_bytes = (len(union) - usable) * pool.entry.slab_bytes
        raise PoolError(
            f"layer {pool.entry.layer} needs {len(union)} slots of {pool.entry.slab_bytes} bytes for one step, "
            f"the pool has {usable} to give; raise --ram by {missing_bytes} bytes a layer, or work in rounds"
        )

    def _check_experts(self, pool: LayerPool, lowest: int, highest: int) -> None:
        if lowest < 0 or highest >= pool.entry.num_experts:
            raise PoolError(
                f"layer {pool.entry.layer} has experts 0..{pool.entry.num_experts - 1}, asked for {lowest}..{highest}"
            )

    def _check_loading(self, slot: int, generation: int) -> None:
        if self._tables.states[slot] != LOADING or self._tables.generations[slot] != generation:
            state = SlotState(self._tables.states[slot]).name
            raise PoolError(
                f"slot {slot} is {state} in generation {self._tables.generations[slot]}, not LOADING in {generation}: "
                f"a read ended twice or too late"
            )


def _may_pin(pool: LayerPool) -> bool:
    return len(pool.pinned) < pool.limit - pool.floor


def _check_floor(layers: Sequence[LayerSlots], floor: int) -> None:
    """One token's experts must fit each layer: the least that makes progress without reading them twice."""
    for entry in layers:
        needed = min(entry.num_experts, floor)
        if entry.num_slots < needed:
            missing_bytes = (needed - entry.num_slots) * entry.slab_bytes
            raise PoolError(
                f"layer {entry.layer} needs {needed} slots of {entry.slab_bytes} bytes for one token, the pool has "
                f"{entry.num_slots}; raise --ram by {missing_bytes} bytes a layer"
            )
