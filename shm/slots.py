"""The slots of a pool, one transition a method: the shared table and what is known of it in memory change together.

    FREE ─load──────▶ LOADING ─ready▶ READY ◀─pin, unpin─▶ PINNED      slots of a layer, at most `limit`
     ▲                   │ fail         │ evict
     ├───────────────────┴──────────────┘
     ▼
    FREE ─load_staged▶ LOADING ─ready▶ READY ─promote▶ the layer's     staging, for each slab size

A FREE slot belongs to nobody: layers and staging of one slab size take from the same stock, each up to its limit. Slots
with pages are taken first, so there are never more pages than the limits allow. Every transition but an eviction (see
`policy`) takes the same time however many slots there are. What may be done when is decided in `pool`, which is the only user.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from colibri_mp.errors import PoolError
from colibri_mp.shm.layer_pool import LayerPool, SlabClass
from colibri_mp.shm.layout import NO_EXPERT, NO_LAYER, SlotFlag, SlotState
from colibri_mp.shm.pages import PageLocks
from colibri_mp.shm.policy import Eviction
from colibri_mp.shm.tables import PAGES_RESERVED, PoolTables

FREE, LOADING, READY, PINNED = (int(state) for state in SlotState)
STAGED = int(SlotFlag.STAGED)


class Slots:
    """Everything that changes in a pool. `holds` counts, for each slot, the acquires that have not been released."""

    def __init__(self, tables: PoolTables, floor: int, eviction: Eviction) -> None:
        """Take over what the tables say: READY and PINNED slots are trusted, LOADING and staged ones become FREE."""
        self.tables = tables
        layout = tables.layout
        self.classes = [SlabClass(*pair) for pair in zip(layout.classes, tables.staging_limits, strict=True)]
        rows = zip(layout.layers, layout.class_of_layer, tables.limits, strict=True)
        self.layers: dict[int, LayerPool] = {}
        for entry, idx, limit in rows:
            own_floor = min(floor, entry.num_experts)
            policy = eviction.make(entry.layer, entry.num_experts, own_floor)
            self.layers[entry.layer] = LayerPool(entry, self.classes[idx], limit, own_floor, policy)
        self.holds = [0] * layout.num_slots
        self.clock = int(tables.slots["last_use"].max()) + 1
        self.locks = PageLocks()
        self._recover()

    def owner(self, slot: int) -> LayerPool:
        """The layer that a slot serves, or that its staged expert is of; the slot is not FREE or still held."""
        return self.layers[self.tables.layers[slot]]

    # ── use ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def hold(self, pool: LayerPool, experts: Iterable[int], slots: Iterable[int]) -> None:
        """Keep experts of a layer, in these slots, from being evicted, until `release`."""
        holds, take_out = self.holds, pool.evictable.pop
        for slot in slots:
            holds[slot] += 1
        for expert in experts:
            take_out(expert, None)

    def release(self, pool: LayerPool, experts: Sequence[int], slots: Sequence[int]) -> None:
        """Undo `hold`; the last one becomes the most recent one."""
        holds, states, last_use, clock = self.holds, self.tables.states, self.tables.last_use, self.clock
        evictable = pool.evictable
        for expert, slot in zip(experts, slots, strict=True):
            holds[slot] -= 1
            if holds[slot]:
                continue
            state = states[slot]
            if state >= READY:
                last_use[slot] = clock
                clock += 1
                if state == READY:
                    evictable[expert] = None
            elif state == FREE:
                self._leave(pool, slot)
        self.clock = clock
        if pool.num_owned > pool.limit:
            self.trim(pool)

    # ── reads ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def reserve(self, slabs: SlabClass, num_slots: int) -> None:
        """Have pages for so many FREE slots. `PoolError` if /dev/shm is full: nothing else has changed then."""
        while len(slabs.free) < num_slots:
            self.tables.reserve_slab(slabs.bare[-1], slabs.entry.slab_bytes)
            slabs.free.append(slabs.bare.pop())

    def load(self, pool: LayerPool, expert: int) -> int:
        """FREE to LOADING: a slot of the layer, below its limit, for the expert. Its pages have been reserved."""
        slot = self._begin(pool, expert, PAGES_RESERVED)
        pool.loading.add(slot)
        self._join(pool, expert, slot)
        return slot

    def load_staged(self, pool: LayerPool, expert: int) -> int:
        """The same in staging, below its limit."""
        slot = self._begin(pool, expert, PAGES_RESERVED | STAGED)
        pool.staged[expert] = slot
        pool.slabs.num_staged += 1
        pool.counters.issued += 1
        return slot

    def ready(self, slot: int) -> None:
        """LOADING to READY, or PINNED if that was asked for; evictable unless it is held."""
        pool, tables = self.owner(slot), self.tables
        if tables.flags[slot] & STAGED:
            tables.states[slot] = READY
            pool.slabs.staged[slot] = None
            self.trim_staging(pool.slabs)
            return
        pool.loading.remove(slot)
        pool.residency[tables.experts[slot]] = True
        if slot in pool.pinned:
            self._set_pinned(pool, slot)
        else:
            tables.states[slot] = READY
        if not self.holds[slot]:
            self._touch(pool, slot)

    def fail(self, slot: int) -> None:
        """LOADING to FREE, at once or when nobody holds the slot any more."""
        pool, tables = self.owner(slot), self.tables
        expert = tables.experts[slot]
        if tables.flags[slot] & STAGED:
            pool.counters.failed += 1
            self._leave_staging(pool, slot)
            return
        del pool.slot_of[expert]
        pool.loading.remove(slot)
        pool.pinned.discard(slot)
        tables.states[slot] = FREE
        tables.experts[slot] = NO_EXPERT
        if not self.holds[slot]:
            self._leave(pool, slot)

    # ── between FREE, layer and staging ─────────────────────────────────────────────────────────────────────────────

    def evict(self, pool: LayerPool) -> None:
        """The slot of the layer's READY expert that its policy chooses becomes FREE."""
        self._remove(pool, pool.slot_of[pool.evictable.evict()])

    def promote(self, pool: LayerPool, expert: int) -> int:
        """A staged slot becomes the layer's, which is below its limit, as its most recent one; not evictable yet."""
        slot, slabs = pool.staged.pop(expert), pool.slabs
        was_above = slabs.num_staged > slabs.staging_limit
        slabs.num_staged -= 1
        slabs.staged.pop(slot, None)
        pool.counters.promoted += 1
        self.tables.flags[slot] = PAGES_RESERVED
        self._join(pool, expert, slot)
        if self.tables.states[slot] == LOADING:
            pool.loading.add(slot)
            pool.counters.late += 1
        else:
            pool.residency[expert] = True
            self._stamp(slot)
        if was_above:  # what the layer has evicted for it is too much for staging
            self._punch(slabs)
        return slot

    def drop_staged(self, slabs: SlabClass) -> None:
        """The oldest READY slot of staging becomes FREE."""
        slot = slabs.staged.evict()
        pool = self.owner(slot)
        pool.counters.dropped += 1
        self._leave_staging(pool, slot)

    # ── pins ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def pin(self, pool: LayerPool, slot: int) -> None:
        """READY to PINNED, and locked in memory if the system allows it; LOADING: when the read ends."""
        pool.pinned.add(slot)
        if self.tables.states[slot] == READY:
            pool.evictable.pop(self.tables.experts[slot], None)
            self._set_pinned(pool, slot)

    def unpin(self, pool: LayerPool, slot: int) -> None:
        """PINNED to READY, as the most recent one; LOADING: no longer to be pinned."""
        pool.pinned.remove(slot)
        if self.tables.states[slot] == PINNED:
            self.locks.unlock(int(self.tables.addresses[slot]))
            self.tables.states[slot] = READY
            if not self.holds[slot]:
                self._touch(pool, slot)

    def give_up_pin(self, slot: int) -> None:
        """PINNED to FREE; nobody holds it."""
        pool = self.owner(slot)
        pool.pinned.remove(slot)
        self.locks.unlock(int(self.tables.addresses[slot]))
        self._remove(pool, slot)

    # ── size ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def set_limits(self, limits: Iterable[int], staging_limits: Iterable[int]) -> None:
        """Limits of the layers and of staging, each in the order of the tables; then evict what is above them."""
        for idx, (pool, limit) in enumerate(zip(self.layers.values(), limits, strict=True)):
            pool.limit = self.tables.limits[idx] = limit
        for idx, (slabs, limit) in enumerate(zip(self.classes, staging_limits, strict=True)):
            slabs.staging_limit = self.tables.staging_limits[idx] = limit
        for pool in self.layers.values():
            self.trim(pool)
        for slabs in self.classes:
            self.trim_staging(slabs)
            self._punch(slabs)

    def trim(self, pool: LayerPool) -> None:
        """Evict until the layer is within its limit, as far as its slots are not in use."""
        while pool.num_owned > pool.limit and pool.evictable:
            self.evict(pool)

    def trim_staging(self, slabs: SlabClass) -> None:
        """The same for the staging of one slab size."""
        while slabs.num_staged > slabs.staging_limit and slabs.staged:
            self.drop_staged(slabs)

    # ── parts of transitions ────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, pool: LayerPool, expert: int, flags: int) -> int:
        """The table's side of a read that starts. The state is written before layer and expert: see `_recover`."""
        slot, tables = pool.slabs.free.pop(), self.tables
        tables.flags[slot] = flags
        tables.states[slot] = LOADING
        tables.layers[slot] = pool.entry.layer
        tables.experts[slot] = expert
        tables.generations[slot] += 1
        return slot

    def _join(self, pool: LayerPool, expert: int, slot: int) -> None:
        pool.slot_of[expert] = slot
        pool.num_owned += 1

    def _remove(self, pool: LayerPool, slot: int) -> None:
        expert = self.tables.experts[slot]
        del pool.slot_of[expert]
        pool.residency[expert] = False
        self._leave(pool, slot)

    def _leave(self, pool: LayerPool, slot: int) -> None:
        """A slot of the layer, which no lookup names any more, becomes nobody's."""
        was_above = pool.num_owned > pool.limit
        pool.num_owned -= 1
        self._vacate(pool.slabs, slot, was_above)

    def _leave_staging(self, pool: LayerPool, slot: int) -> None:
        """A staged slot becomes nobody's."""
        slabs = pool.slabs
        was_above = slabs.num_staged > slabs.staging_limit
        slabs.num_staged -= 1
        del pool.staged[self.tables.experts[slot]]
        self._vacate(slabs, slot, was_above)

    def _vacate(self, slabs: SlabClass, slot: int, give_back: bool) -> None:
        """The table's side of it, the state first. Pages above a limit go back to the system."""
        tables = self.tables
        tables.states[slot] = FREE
        tables.flags[slot] = PAGES_RESERVED
        tables.experts[slot] = NO_EXPERT
        tables.layers[slot] = NO_LAYER
        slabs.free.append(slot)
        if give_back:
            self._punch(slabs)

    def _touch(self, pool: LayerPool, slot: int) -> None:
        """A READY or PINNED slot that nobody holds becomes the most recent one."""
        self._stamp(slot)
        if self.tables.states[slot] == READY:
            pool.evictable[self.tables.experts[slot]] = None
            self.trim(pool)

    def _stamp(self, slot: int) -> None:
        self.tables.last_use[slot] = self.clock
        self.clock += 1

    def _set_pinned(self, pool: LayerPool, slot: int) -> None:
        self.tables.states[slot] = PINNED
        self.locks.lock(int(self.tables.addresses[slot]), pool.entry.slab_bytes)

    def _punch(self, slabs: SlabClass) -> None:
        """Give back the pages of all FREE slots; where the system cannot do that, they keep them."""
        kept: list[int] = []
        while slabs.free:
            has_pages = not self.tables.punch_slab(slabs.free[-1], slabs.entry.slab_bytes)
            (kept if has_pages else slabs.bare).append(slabs.free.pop())
        slabs.free = kept

    # ── start ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _recover(self) -> None:
        """Rebuild everything in memory from the tables, whatever transition the last writer died in."""
        table = self.tables.slots
        table["state"][(table["state"] == LOADING) | (table["flags"] & STAGED != 0)] = FREE
        is_free = table["state"] == FREE
        table["expert"][is_free], table["layer"][is_free] = NO_EXPERT, NO_LAYER
        table["flags"] &= PAGES_RESERVED
        order = np.argsort(table["last_use"], kind="stable")
        for slot in order[~is_free[order]].tolist():
            self._take_over(slot)
        for slabs in self.classes:
            free = [slot for slot in reversed(slabs.slots) if is_free[slot]]
            slabs.free = [slot for slot in free if self.tables.flags[slot]]
            slabs.bare = [slot for slot in free if not self.tables.flags[slot]]
        for pool in self.layers.values():
            self.trim(pool)
        for slabs in self.classes:
            self._punch(slabs)

    def _take_over(self, slot: int) -> None:
        """A READY or PINNED slot of the last writer; to the policy it has been used once. Called in order of the last use."""
        pool, expert = self.layers.get(self.tables.layers[slot]), self.tables.experts[slot]
        if pool is None or not 0 <= expert < pool.entry.num_experts:
            raise PoolError(
                f"slot {slot} states expert {expert} of layer {self.tables.layers[slot]}, which is not in this pool: "
                "the segment is damaged"
            )
        self._join(pool, expert, slot)
        pool.residency[expert] = True
        pool.evictable.used((expert,))
        if self.tables.states[slot] == PINNED:
            pool.pinned.add(slot)
            self._set_pinned(pool, slot)
        else:
            pool.evictable[expert] = None
