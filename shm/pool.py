"""The expert pool of one worker: which expert lies in which slab of the shared segment.

One step of a layer:

    held = pool.acquire(layer, union)      hits: ready to compute; misses: a slot each, LOADING
      ... read each miss into pool.slab_view(slot) ...
      pool.mark_ready(slot, generation)    or pool.fail(slot, generation)
      ... compute with pool.addresses[slot] ...
    pool.release(held)                     evictable again, as the most recent, in ascending expert id

A slot's life:  FREE ─acquire▶ LOADING ─mark_ready▶ READY ─evicted by a later acquire▶ LOADING ...; LOADING ─fail▶ FREE
A slot that is held by an acquire, or LOADING, is never evicted. A union larger than the layer's slots is worked
through in `rounds`. One process, one thread writes; see `view` for observers, `layout` for the bytes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from colibri_mp.errors import PoolError
from colibri_mp.shm.integrity import find_defects
from colibri_mp.shm.layout import NO_EXPERT, LayerSlots, SlotState
from colibri_mp.shm.policy import Lru
from colibri_mp.shm.segment import Segment
from colibri_mp.shm.tables import PoolTables

FREE, LOADING, READY = int(SlotState.FREE), int(SlotState.LOADING), int(SlotState.READY)


@dataclass(frozen=True, slots=True)
class Held:
    """Slots of one acquire, until its `release`. Each pair of lists is parallel, in ascending expert id.

    `misses` are to be read by the caller under the given generations; `pending` are still being read for an earlier
    acquire (a read that outlived its step): wait for them, do not read them again.
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


class LayerPool:
    """The in-memory side of one layer's slots: lookup, free list, recency. All operations are O(1)."""

    def __init__(self, entry: LayerSlots, first_slot: int) -> None:
        self.entry = entry
        self.slots = range(first_slot, first_slot + entry.num_slots)
        self.slot_of: dict[int, int] = {}
        self.free: list[int] = []
        self.lru = Lru()


class ExpertPool:
    """Single writer of a pool segment. Slots are numbered through all layers of the pool."""

    def __init__(self, segment: Segment, layers: Sequence[LayerSlots], fingerprint: str) -> None:
        """Take over `segment`: a fresh one is formatted, one of the same model and layers is recovered.

        After a crash of the previous writer LOADING slots become FREE and READY ones are trusted. The caller makes sure
        that the previous writer is dead. Raises `PoolError` if the segment is of another model, layer range or size.
        """
        self._tables = PoolTables(segment, layers, fingerprint)
        self.layout = self._tables.layout
        self.addresses = self._tables.addresses
        self._recover()

    # ── one step ────────────────────────────────────────────────────────────────────────────────────────────────

    def rounds(self, layer: int, expert_ids: Iterable[int]) -> list[list[int]]:
        """Split a union into parts that fit the layer's slots, to be acquired one after the other.

        Resident experts come first, so that none is evicted before its use, then the others; each ascending.
        """
        pool = self._layer(layer)
        union = sorted(set(expert_ids))
        capacity = pool.entry.num_slots - self._num_blocked(pool, union)
        if capacity < 1:
            raise PoolError(f"layer {layer}: all {pool.entry.num_slots} slots are in use by unfinished reads")
        order = [e for e in union if e in pool.slot_of] + [e for e in union if e not in pool.slot_of]
        return [order[start : start + capacity] for start in range(0, len(order), capacity)]

    def acquire(self, layer: int, expert_ids: Iterable[int]) -> Held:
        """Give every expert of a union a slot, all or none; nothing is evicted that the union needs.

        Raises `PoolError` if the union needs more slots than the layer has, or /dev/shm is full.
        """
        pool = self._layer(layer)
        union = sorted(set(expert_ids))
        found = [(e, pool.slot_of[e]) for e in union if e in pool.slot_of]
        misses = [e for e in union if e not in pool.slot_of]
        self._check_room(pool, union, len(misses))
        for _, slot in found:
            self._hold(pool, slot)
        miss_slots, num_evicted = self._assign(pool, misses, [slot for _, slot in found])
        hits = [(e, slot) for e, slot in found if self._tables.states[slot] != LOADING]
        pending = [(e, slot) for e, slot in found if self._tables.states[slot] == LOADING]
        return Held(
            layer=layer,
            hits=[e for e, _ in hits],
            hit_slots=[slot for _, slot in hits],
            misses=misses,
            miss_slots=miss_slots,
            generations=[int(self._tables.generations[slot]) for slot in miss_slots],
            pending=[e for e, _ in pending],
            pending_slots=[slot for _, slot in pending],
            num_evicted=num_evicted,
        )

    def mark_ready(self, slot: int, generation: int) -> None:
        """The slab's bytes are complete. `PoolError` if the slot is not LOADING under this generation."""
        self._check_loading(slot, generation)
        self._tables.states[slot] = READY
        self._settle(slot)

    def fail(self, slot: int, generation: int) -> None:
        """The read failed: the slot is FREE again. `PoolError` if it is not LOADING under this generation."""
        self._check_loading(slot, generation)
        self._tables.states[slot] = FREE
        del self._owner(slot).slot_of[int(self._tables.experts[slot])]
        self._tables.experts[slot] = NO_EXPERT
        self._settle(slot)

    def release(self, held: Held) -> None:
        """End of use: the slots become evictable, the highest expert id as the most recent one."""
        pairs = zip(
            held.hits + held.misses + held.pending,
            held.hit_slots + held.miss_slots + held.pending_slots,
            strict=True,
        )
        for _, slot in sorted(pairs):
            self._holds[slot] -= 1
            self._settle(slot)

    def slab_view(self, slot: int) -> NDArray[np.uint8]:
        """The slab's bytes, uint8 [slab_bytes], writable; valid while the slot is held."""
        return self._tables.slab_view(slot, self._owner(slot).entry.slab_bytes)

    def num_resident(self) -> int:
        """Slots that hold a complete expert."""
        return int(np.count_nonzero(self._tables.states == READY))

    def close(self) -> None:
        """Let go of the segment, so that it can be unmapped; the pool cannot be used afterwards."""
        self._tables.close()

    def check_integrity(self) -> None:
        """`PoolError` that lists every contradiction between the shared tables and the state in memory."""
        self._tables.check_header()
        defects = find_defects(self._tables.slots, self._layers, self._holds)
        if defects:
            raise PoolError(f"the expert pool {self._tables.segment.name!r} is damaged: " + "; ".join(defects[:8]))

    # ── start and end ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _recover(self) -> None:
        """Rebuild lookup, free lists and recency from the slot table; nothing is held."""
        lost = self._tables.states == LOADING
        self._tables.experts[lost], self._tables.states[lost] = NO_EXPERT, FREE
        self._holds = [0] * self.layout.num_slots
        self._clock = int(self._tables.last_use.max()) + 1
        pairs = zip(self.layout.layers, self.layout.first_slots, strict=True)
        self._layers = {entry.layer: LayerPool(entry, first) for entry, first in pairs}
        self._owners = [pool for pool in self._layers.values() for _ in pool.slots]
        for slot in np.argsort(self._tables.last_use, kind="stable").tolist():
            if self._tables.states[slot] != FREE:
                self._owner(slot).slot_of[int(self._tables.experts[slot])] = slot
                self._owner(slot).lru.add(slot)
        for pool in self._layers.values():
            pool.free = [slot for slot in reversed(pool.slots) if self._tables.states[slot] == FREE]
        self.check_integrity()

    # ── slots ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _layer(self, layer: int) -> LayerPool:
        if layer not in self._layers:
            raise PoolError(f"layer {layer} is not in this pool, which has {sorted(self._layers)}")
        return self._layers[layer]

    def _owner(self, slot: int) -> LayerPool:
        return self._owners[slot]

    def _hold(self, pool: LayerPool, slot: int) -> None:
        if slot in pool.lru:
            pool.lru.remove(slot)
        self._holds[slot] += 1

    def _settle(self, slot: int) -> None:
        """Put a slot that nobody holds where its state says; a LOADING one waits for the end of its read."""
        if self._holds[slot]:
            return
        pool = self._owner(slot)
        if self._tables.states[slot] == FREE:
            pool.free.append(slot)
        elif self._tables.states[slot] == READY:
            self._tables.last_use[slot] = self._clock
            self._clock += 1
            pool.lru.add(slot)

    def _assign(self, pool: LayerPool, misses: list[int], held_slots: list[int]) -> tuple[list[int], int]:
        """A LOADING, held slot for each miss: free ones first, then the least recent. Undone if pages run out."""
        slots: list[int] = []
        num_evicted = 0
        try:
            for expert in misses:
                num_evicted += not pool.free
                slots.append(self._load(pool, expert))
        except PoolError:
            for slot in slots:
                self.fail(slot, int(self._tables.generations[slot]))
            for slot in held_slots + slots:
                self._holds[slot] -= 1
                self._settle(slot)
            raise
        return slots, num_evicted

    def _load(self, pool: LayerPool, expert: int) -> int:
        """Make one slot LOADING for `expert` and hold it. The state is written first: a crash finds LOADING."""
        slot = pool.free[-1] if pool.free else pool.lru.evict()
        self._tables.reserve_slab(slot, pool.entry.slab_bytes)
        if self._tables.states[slot] == FREE:
            pool.free.pop()
        else:
            del pool.slot_of[int(self._tables.experts[slot])]
        self._tables.states[slot] = LOADING
        self._tables.generations[slot] += 1
        self._tables.experts[slot] = expert
        pool.slot_of[expert] = slot
        self._holds[slot] += 1
        return slot

    # ── checks ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _num_blocked(self, pool: LayerPool, union: list[int]) -> int:
        """Slots that this union can neither use nor evict: held by somebody else, or being read."""
        used = sum(1 for e in union if e in pool.slot_of and pool.slot_of[e] not in pool.lru)
        return pool.entry.num_slots - len(pool.free) - len(pool.lru) - used

    def _check_room(self, pool: LayerPool, union: list[int], num_misses: int) -> None:
        if union and (union[0] < 0 or union[-1] >= pool.entry.num_experts):
            raise PoolError(f"layer {pool.entry.layer} has experts 0..{pool.entry.num_experts - 1}, asked for {union}")
        evictable = len(pool.lru) - sum(1 for e in union if pool.slot_of.get(e) in pool.lru)
        if num_misses <= len(pool.free) + evictable:
            return
        usable = pool.entry.num_slots - self._num_blocked(pool, union)
        missing_bytes = (len(union) - usable) * pool.entry.slab_bytes
        raise PoolError(
            f"layer {pool.entry.layer} needs {len(union)} slots of {pool.entry.slab_bytes} bytes for one step, "
            f"the pool has {usable} to give; raise --ram by {missing_bytes} bytes a layer, or work in rounds"
        )

    def _check_loading(self, slot: int, generation: int) -> None:
        if self._tables.states[slot] != LOADING or self._tables.generations[slot] != generation:
            state = SlotState(int(self._tables.states[slot])).name
            raise PoolError(
                f"slot {slot} is {state} in generation {self._tables.generations[slot]}, not LOADING in {generation}: "
                f"a read ended twice or too late"
            )
