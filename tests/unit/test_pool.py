"""The expert pool: acquire, rounds, recency, recovery, and what observers see."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from segments import fresh_name

from colibri_mp.errors import MemoryPlanError, PoolError
from colibri_mp.shm.layout import SLOT, LayerSlots, SlotFlag, SlotState, plan_layout, pool_bytes
from colibri_mp.shm.policy import Eviction, LayerDemand, StagingDemand, plan_size, plan_slots
from colibri_mp.shm.pool import ExpertPool, Held
from colibri_mp.shm.segment import Segment
from colibri_mp.shm.view import PoolView

SLAB = 4096
LAYERS = (LayerSlots(2, 8, 3, SLAB), LayerSlots(5, 6, 6, 2 * SLAB))
LRU = Eviction("lru")  # easy to follow
FINGERPRINT = "f" * 64


@dataclass
class Opened:
    """A pool and its segment."""

    segment: Segment
    pool: ExpertPool

    def reopen(self) -> None:
        """What a replacement of a dead worker does."""
        self.pool = ExpertPool(self.segment, LAYERS, FINGERPRINT, eviction=LRU)

    def use(self, layer: int, experts: list[int]) -> Held:
        """One step: acquire, load what is missing, release."""
        held = self.pool.acquire(layer, experts)
        for slot, generation in zip(held.miss_slots, held.generations, strict=True):
            self.pool.mark_ready(slot, generation)
        self.pool.release(held)
        self.pool.check_integrity()
        return held

    def resident(self, layer: int) -> list[int]:
        """Experts that are READY, ascending."""
        return np.flatnonzero(PoolView(self.segment).resident(layer)).tolist()


@pytest.fixture
def opened() -> Iterator[Opened]:
    """A fresh pool of layers 2 (3 of 8 experts) and 5 (all 6)."""
    name = fresh_name()
    segment = Segment.create(name, pool_bytes(LAYERS))
    yield Opened(segment, ExpertPool(segment, LAYERS, FINGERPRINT, eviction=LRU))
    segment.close()
    segment.unlink()


def test_misses_then_hits(opened: Opened) -> None:
    """The first use of an expert is a miss with a slot of its own, the second a hit in the same slot."""
    first = opened.use(2, [4, 1, 4])
    assert (first.hits, first.misses) == ([], [1, 4])
    assert len(set(first.miss_slots)) == 2
    second = opened.use(2, [1, 4])
    assert (second.hits, second.misses, second.hit_slots) == ([1, 4], [], first.miss_slots)


def test_least_recent_is_evicted(opened: Opened) -> None:
    """With three slots, the expert whose last use is oldest goes, however often it was used before."""
    for experts in ([0], [0], [0], [1], [2], [1]):
        opened.use(2, experts)
    assert opened.use(2, [3]).num_evicted == 1
    assert opened.resident(2) == [1, 2, 3]


def test_within_a_step_the_highest_id_is_most_recent(opened: Opened) -> None:
    """Experts of one step age in ascending id, whatever order they were asked in, so that a run can be simulated."""
    opened.use(2, [7, 0, 3])
    opened.use(2, [5])
    assert opened.resident(2) == [3, 5, 7]


def test_hits_and_misses_of_a_step_age_together(opened: Opened) -> None:
    """The order is that of the ids, not that of arrival: a hit with a higher id outlives a miss of the same step."""
    for experts in ([5], [7], [3, 7], [1], [2]):
        opened.use(2, experts)
    assert opened.resident(2) == [1, 2, 7]


def test_layers_do_not_evict_each_other(opened: Opened) -> None:
    """Filling one layer leaves the other alone."""
    opened.use(2, [0, 1, 2])
    opened.use(5, [0, 1, 2, 3, 4, 5])
    assert opened.resident(2) == [0, 1, 2]


def test_acquired_slots_are_never_evicted(opened: Opened) -> None:
    """While a step holds two of three slots, another acquire can only use the third."""
    opened.use(2, [0, 1, 2])
    held = opened.pool.acquire(2, [0, 1])
    assert opened.use(2, [5]).num_evicted == 1
    with pytest.raises(PoolError, match=r"layer 2 needs 2 slots of 4096 bytes.*has 1 to give.*raise --ram by 4096"):
        opened.pool.acquire(2, [6, 7])
    opened.pool.release(held)
    assert opened.resident(2) == [0, 1, 5]
    opened.pool.check_integrity()


def test_refused_acquire_changes_nothing(opened: Opened) -> None:
    """A union larger than the layer is refused as a whole: same residents, same recency."""
    opened.use(2, [0, 1, 2])
    with pytest.raises(PoolError, match="needs 4 slots"):
        opened.pool.acquire(2, [0, 4, 5, 6])
    opened.use(2, [7])
    assert opened.resident(2) == [1, 2, 7]


def test_rounds_use_residents_first(opened: Opened) -> None:
    """A union of 7 in 3 slots: the residents come in the first round, every expert exactly once, each round fits."""
    opened.use(2, [6, 2])
    rounds = opened.pool.rounds(2, [7, 6, 5, 4, 3, 2, 1])
    assert rounds == [[2, 6, 1], [3, 4, 5], [7]]
    assert [len(opened.use(2, part).misses) for part in rounds] == [1, 3, 1]


def test_failed_read_frees_the_slot(opened: Opened) -> None:
    """A failed miss is not resident afterwards; its neighbours of the same step are."""
    held = opened.pool.acquire(2, [1, 2])
    opened.pool.fail(held.miss_slots[0], held.generations[0])
    opened.pool.check_integrity()
    opened.pool.mark_ready(held.miss_slots[1], held.generations[1])
    opened.pool.release(held)
    opened.pool.check_integrity()
    assert opened.resident(2) == [2]


def test_read_that_outlives_its_step_is_pending(opened: Opened) -> None:
    """A slot still LOADING after release is neither given away nor read again, and becomes resident when it lands."""
    held = opened.pool.acquire(2, [1])
    opened.pool.release(held)
    opened.pool.check_integrity()
    assert opened.pool.rounds(2, [4, 5, 6]) == [[4, 5], [6]]
    again = opened.pool.acquire(2, [1, 3])
    assert (again.pending, again.misses, again.hits) == ([1], [3], [])
    opened.pool.mark_ready(held.miss_slots[0], held.generations[0])
    opened.pool.mark_ready(again.miss_slots[0], again.generations[0])
    opened.pool.release(again)
    opened.pool.check_integrity()
    assert opened.resident(2) == [1, 3]


def test_pool_full_of_unfinished_reads_says_so(opened: Opened) -> None:
    """Where every slot waits for the disk, rounds cannot be made."""
    opened.pool.release(opened.pool.acquire(2, [0, 1, 2]))
    with pytest.raises(PoolError, match="all 3 slots are in use by unfinished reads"):
        opened.pool.rounds(2, [4])


def test_late_or_double_completion_is_refused(opened: Opened) -> None:
    """A completion counts once, and only under the generation of its read."""
    held = opened.pool.acquire(2, [1])
    slot, generation = held.miss_slots[0], held.generations[0]
    with pytest.raises(PoolError, match="too late"):
        opened.pool.mark_ready(slot, generation - 1)
    opened.pool.mark_ready(slot, generation)
    with pytest.raises(PoolError, match="is READY"):
        opened.pool.fail(slot, generation)


def test_unknown_layer_and_expert_are_refused(opened: Opened) -> None:
    """Layers of other pools and experts that do not exist are named."""
    with pytest.raises(PoolError, match=r"layer 3 is not in this pool.*\[2, 5\]"):
        opened.pool.acquire(3, [0])
    with pytest.raises(PoolError, match=r"experts 0\.\.7"):
        opened.pool.acquire(2, [8])


def test_slabs_are_disjoint_and_aligned(opened: Opened) -> None:
    """Every slab starts on 4096 bytes, and writing one changes no other."""
    pool = opened.pool
    held = [pool.acquire(2, [0, 1, 2]), pool.acquire(5, range(6))]
    slots = [slot for each in held for slot in each.miss_slots]
    for slot in slots:
        assert pool.addresses[slot] % 4096 == 0
        pool.slab_view(slot)[:] = slot + 1
    assert [pool.slab_view(slot).size for slot in slots] == [SLAB] * 3 + [2 * SLAB] * 6
    assert all((pool.slab_view(slot) == slot + 1).all() for slot in slots)
    pool.check_integrity()


def test_pages_come_on_first_use(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot's pages are committed once, when it is first used."""
    reserved: list[tuple[int, int]] = []
    monkeypatch.setattr(opened.segment, "reserve", lambda offset, nbytes: reserved.append((offset, nbytes)))
    layout = plan_layout(LAYERS)
    opened.use(2, [0])
    start = layout.classes[0].slabs_offset
    assert reserved == [(start, SLAB)]
    for expert in range(8):
        opened.use(2, [expert])
    assert sorted(offset for offset, _ in reserved) == [start + n * SLAB for n in range(3)]


def test_full_memory_undoes_the_acquire(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """If pages run out half-way, the whole acquire is undone and what was resident stays usable."""
    opened.use(2, [0])
    left = [1]

    def reserve(offset: int, nbytes: int) -> None:
        if not left:
            raise PoolError("/dev/shm is full")
        left.pop()

    monkeypatch.setattr(opened.segment, "reserve", reserve)
    with pytest.raises(PoolError, match="is full"):
        opened.pool.acquire(2, [0, 1, 2])
    opened.pool.check_integrity()
    assert opened.resident(2) == [0]
    assert opened.use(2, [0, 5]).hits == [0]


def test_recovery_trusts_ready_and_drops_loading(opened: Opened) -> None:
    """After a crash in the middle of a step: READY experts and their recency survive, half-read ones are gone."""
    opened.use(2, [4])
    opened.use(2, [1])
    opened.pool.acquire(2, [4, 6])
    opened.reopen()
    opened.pool.check_integrity()
    assert opened.resident(2) == [1, 4]
    assert opened.use(2, [2, 3]).num_evicted == 1
    assert opened.resident(2) == [1, 2, 3]


def crash_in_the_middle(name: str) -> None:
    """Body of a spawned process: one expert complete, one half written, then die without a word."""
    opened = Opened(segment := Segment.attach(name), ExpertPool(segment, LAYERS, FINGERPRINT, eviction=LRU))
    held = opened.pool.acquire(2, [3, 7])
    opened.pool.slab_view(held.miss_slots[0])[:] = 33
    opened.pool.slab_view(held.miss_slots[1])[: SLAB // 2] = 77
    opened.pool.mark_ready(held.miss_slots[0], held.generations[0])
    os.kill(os.getpid(), signal.SIGKILL)


def test_pool_survives_the_death_of_its_writer(opened: Opened) -> None:
    """A killed process leaves its complete experts, with their bytes, to the next writer."""
    child = multiprocessing.get_context("spawn").Process(target=crash_in_the_middle, args=(opened.segment.name,))
    child.start()
    child.join(60)
    assert child.exitcode == -9
    opened.reopen()
    held = opened.use(2, [3, 7])
    assert (held.hits, held.misses) == ([3], [7])
    assert (opened.pool.slab_view(held.hit_slots[0]) == 33).all()


def test_other_model_or_layers_are_refused(opened: Opened) -> None:
    """A segment is only taken over by the same model with the same slots."""
    with pytest.raises(PoolError, match="another model"):
        ExpertPool(opened.segment, LAYERS, "e" * 64)
    with pytest.raises(PoolError, match="other layers or slots"):
        ExpertPool(opened.segment, (LayerSlots(2, 8, 4, SLAB),), FINGERPRINT)
    with pytest.raises(PoolError, match="its pool needs"):
        ExpertPool(opened.segment, (LayerSlots(2, 800, 400, SLAB),), FINGERPRINT)


def test_integrity_finds_damage(opened: Opened) -> None:
    """A slot table that was written by somebody else is noticed."""
    opened.use(2, [0, 1])
    layout = plan_layout(LAYERS)
    table = opened.segment.buffer[layout.slot_table_offset : layout.slot_table_offset + 9 * SLOT.itemsize].view(SLOT)
    table["expert"][0] = 7
    with pytest.raises(PoolError, match="layer 2, slot 0: holds expert 7, which the lookup has in slot None"):
        opened.pool.check_integrity()
    table["expert"][0], table["state"][1] = 0, SlotState.LOADING
    with pytest.raises(PoolError, match="slot 1: state 1, but"):
        opened.pool.check_integrity()
    table["state"][1], table["expert"][1] = SlotState.READY, 0
    with pytest.raises(PoolError, match="damaged"):
        opened.reopen()


def test_observer_sees_residency(opened: Opened) -> None:
    """A read-only view in another mapping shows what is READY, and cannot write."""
    opened.use(5, [1, 4])
    opened.pool.acquire(5, [0])
    view = PoolView.attach(opened.segment.name)
    assert view.resident(5).tolist() == [False, True, False, False, True, False]
    assert (view.num_resident(), view.fingerprint) == (2, FINGERPRINT)
    assert view.layout == plan_layout(LAYERS)
    assert np.count_nonzero(view.slots()["flags"] == SlotFlag.PAGES_RESERVED) == 3
    assert view.reserved_bytes() == 4096 + 3 * 2 * SLAB
    with pytest.raises(PoolError, match="layer 9"):
        view.resident(9)
    view.close()


def test_observer_of_no_pool_is_told(opened: Opened) -> None:
    """A segment that nobody has formatted yet is no pool."""
    name = fresh_name()
    with Segment.create(name, 8192), pytest.raises(PoolError, match="no magic number"):
        PoolView.attach(name)


def test_plan_fills_the_budget_evenly() -> None:
    """Layers get slots in proportion to their experts, from the floor up to all; the rest is said."""
    layers = [LayerDemand(64, 100, 8), LayerDemand(64, 200, 8), LayerDemand(8, 100, 2)]
    assert plan_slots(layers, 2600) == ((8, 8, 2), 0)
    assert plan_slots(layers, 10_000).num_slots == (32, 32, 4)
    assert plan_slots(layers, 10_099).left_bytes == 99
    assert plan_slots(layers, 10**6) == ((64, 64, 8), 10**6 - 20_000)


def test_plan_never_exceeds_the_budget_or_the_experts() -> None:
    """For many budgets: slots between floor and experts, bytes add up, more budget never means fewer slots."""
    layers = [LayerDemand(16, 4096, 4), LayerDemand(128, 12_288, 8), LayerDemand(4, 8192, 6)]
    before = (0, 0, 0)
    for budget in range(147_456, 2_000_000, 10_007):
        slots, left = plan_slots(layers, budget)
        used = sum(n * layer.slab_bytes for n, layer in zip(slots, layers, strict=True))
        assert used + left == budget
        assert all(min(la.floor, la.num_experts) <= n <= la.num_experts for n, la in zip(slots, layers, strict=True))
        assert sum(slots) >= sum(before)
        before = slots


def test_plan_refuses_below_the_floor() -> None:
    """One byte less than one token's experts is refused with both numbers and the difference."""
    layers = [LayerDemand(64, 100, 8)] * 3
    assert plan_slots(layers, 2400).num_slots == (8, 8, 8)
    with pytest.raises(MemoryPlanError, match=r"at least 2400 bytes.*2399 are left.*by 1 bytes"):
        plan_slots(layers, 2399)


def test_size_plan_serves_floors_staging_then_equal_shares() -> None:
    """A smaller budget takes from the layers evenly, then from staging, and never from the floors."""
    layers = [LayerDemand(8, 100, 2), LayerDemand(16, 100, 2), LayerDemand(4, 200, 2)]
    staging = [StagingDemand(4, 100), StagingDemand(4, 200)]
    assert plan_size(layers, staging, 4400) == ((8, 16, 4), (4, 4))
    assert plan_size(layers, staging, 4399) == ((8, 15, 4), (4, 4))
    assert plan_size(layers, staging, 2800) == ((4, 8, 2), (4, 4))
    assert plan_size(layers, staging, 1500) == ((2, 3, 2), (4, 1))
    assert plan_size(layers, staging, 0) == ((2, 2, 2), (0, 0))


sizes = st.integers(1, 3).map(lambda num_pages: num_pages * 4096)
layer_demands = st.builds(
    lambda floor, more, slab_bytes: LayerDemand(floor + more, slab_bytes, floor),
    st.integers(1, 4),
    st.integers(0, 12),
    sizes,
)


@given(
    st.lists(layer_demands, min_size=1, max_size=5),
    st.lists(st.builds(StagingDemand, st.integers(0, 3), sizes), max_size=3),
    st.integers(0, 10**6),
)
def test_size_plan_is_fair_and_full(layers: list[LayerDemand], staging: list[StagingDemand], budget: int) -> None:
    """Limits lie between floor and all, spend the budget up to less than a slab, and take more from nobody than from others."""
    limits, staging_limits = plan_size(layers, staging, budget)
    pairs = list(zip(limits, layers, strict=True))
    used = sum(n * layer.slab_bytes for n, layer in pairs)
    used += sum(n * demand.slab_bytes for n, demand in zip(staging_limits, staging, strict=True))
    assert used <= max(budget, sum(layer.floor * layer.slab_bytes for layer in layers))
    assert all(layer.floor <= n <= layer.num_experts for n, layer in pairs)
    wanting = [(n, layer) for n, layer in pairs if n < layer.num_experts]
    assert all(used + layer.slab_bytes > budget for _, layer in wanting)
    if len({layer.slab_bytes for layer in layers}) == 1:
        before_last = [(n - 1) / layer.num_experts for n, layer in pairs if n > layer.floor]
        assert all(n / layer.num_experts >= share for n, layer in wanting for share in before_last)
