"""The pool beside its steps: staging, pins, and its size."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from segments import fresh_name

from colibri_mp.errors import PoolError
from colibri_mp.shm.layer_pool import LayerPool, StagingCounters
from colibri_mp.shm.layout import LayerSlots, SlotFlag, SlotState, pool_bytes, slot_table_in
from colibri_mp.shm.policy import Eviction
from colibri_mp.shm.pool import ExpertPool, Held
from colibri_mp.shm.segment import SHM_DIR, Segment
from colibri_mp.shm.slots import Slots
from colibri_mp.shm.view import PoolView

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="pages are counted and given back on Linux only")
SLAB = 4096
LAYERS = (LayerSlots(2, 8, 3, SLAB), LayerSlots(5, 8, 5, SLAB), LayerSlots(6, 6, 6, 2 * SLAB))
FLOOR, STAGING = 2, 2
LRU = Eviction("lru")  # easy to follow
SMALL_BYTES, LARGE_BYTES = (8 + STAGING) * SLAB, (6 + STAGING) * 2 * SLAB
ALL_BYTES = SMALL_BYTES + LARGE_BYTES


@dataclass
class Opened:
    """A pool and its segment; `reads` are those under way: (layer, expert) -> (slot, generation)."""

    segment: Segment
    pool: ExpertPool = field(init=False)
    reads: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reopen()

    def reopen(self) -> None:
        """What a replacement of a dead worker does."""
        self.pool = ExpertPool(self.segment, LAYERS, "f" * 64, floor=FLOOR, staging=STAGING, eviction=LRU)
        self.reads.clear()

    def use(self, layer: int, experts: list[int]) -> Held:
        """One step: acquire, load what is missing, wait for what is on its way, release."""
        held = self.pool.acquire(layer, experts)
        for slot, generation in zip(held.miss_slots, held.generations, strict=True):
            self.pool.mark_ready(slot, generation)
        for expert in held.pending:
            self.land(layer, expert)
        self.pool.release(held)
        self.pool.check_integrity()
        return held

    def stage(self, layer: int, expert: int, *, land: bool = True) -> bool:
        """Read ahead, to the end if `land`; False if there was nothing to read or no place."""
        return self._begin(self.pool.stage(layer, expert), layer, expert, land)

    def load_pinned(self, layer: int, expert: int, *, land: bool = True) -> bool:
        """Read a pin."""
        return self._begin(self.pool.load_pinned(layer, expert), layer, expert, land)

    def land(self, layer: int, expert: int) -> None:
        """End a read that is under way."""
        self.pool.mark_ready(*self.reads.pop((layer, expert)))
        self.pool.check_integrity()

    def resident(self, layer: int) -> list[int]:
        """Experts that the layer holds, ascending; worker and observer agree."""
        seen = PoolView(self.segment).resident(layer)
        assert np.array_equal(seen, self.pool.residency(layer))
        return np.flatnonzero(seen).tolist()

    def _begin(self, read: tuple[int, int] | None, layer: int, expert: int, land: bool) -> bool:
        self.pool.check_integrity()
        if read is None:
            return False
        self.reads[layer, expert] = read
        if land:
            self.land(layer, expert)
        return True


@pytest.fixture
def opened() -> Iterator[Opened]:
    """A fresh pool: 3 slots for layer 2 and 5 for layer 5 of one slab size, 6 for layer 6 of another, 2 each for staging."""
    segment = Segment.create(fresh_name(), pool_bytes(LAYERS, STAGING))
    yield Opened(segment)
    segment.close()
    segment.unlink()


# -- staging


def test_staged_expert_belongs_to_no_layer(opened: Opened) -> None:
    """What has been read ahead is neither resident nor evicts anything until it is asked for."""
    opened.use(2, [0, 1, 2])
    assert opened.stage(2, 7)
    assert opened.resident(2) == [0, 1, 2]
    assert opened.pool.num_resident() == PoolView(opened.segment).num_resident() == 3
    assert opened.pool.rounds(2, [0, 1, 7]) == [[0, 1, 7]]


def test_promotion_exchanges_slots(opened: Opened) -> None:
    """An expert that was staged is a hit in the slot where it lies; the layer's least recent one leaves for it."""
    opened.use(2, [0, 1, 2])
    opened.stage(2, 7, land=False)
    slot, _ = opened.reads[2, 7]
    opened.pool.slab_view(slot)[:] = 77
    opened.land(2, 7)
    held = opened.use(2, [1, 7])
    assert (held.hits, held.hit_slots[1], held.misses, held.pending) == ([1, 7], slot, [], [])
    assert (held.num_promoted, held.num_late, held.num_evicted) == (1, 0, 1)
    assert (opened.pool.slab_view(slot) == 77).all()
    assert opened.resident(2) == [1, 2, 7]
    assert PoolView(opened.segment).reserved_bytes() == 4096 + 4 * SLAB


def test_promotion_of_a_read_under_way_is_late(opened: Opened) -> None:
    """An expert that is asked for while it is read ahead is pending, and the layer's when it lands."""
    opened.use(2, [0, 1, 2])
    opened.stage(2, 7, land=False)
    held = opened.use(2, [7])
    assert (held.pending, held.misses, held.hits) == ([7], [], [])
    assert (held.num_promoted, held.num_late, held.num_evicted) == (1, 1, 1)
    assert opened.resident(2) == [1, 2, 7]
    assert opened.use(2, [7]).hits == [7]


def test_nothing_is_staged_twice(opened: Opened) -> None:
    """Experts in memory or on their way need no read ahead; those that do not exist are refused."""
    opened.use(2, [0])
    opened.stage(2, 1)
    opened.stage(2, 3, land=False)
    assert [opened.stage(2, expert) for expert in (0, 1, 3)] == [False] * 3
    assert opened.stage(5, 1, land=False)  # the same number in another layer is another expert
    with pytest.raises(PoolError, match=r"experts 0\.\.7, asked for 8\.\.8"):
        opened.pool.stage(2, 8)


def test_oldest_staged_expert_gives_way(opened: Opened) -> None:
    """With all staging slots taken the oldest complete one is dropped, of whatever layer; one being read never is."""
    opened.stage(2, 6)
    opened.stage(5, 7, land=False)
    assert opened.stage(5, 6, land=False)
    assert not opened.stage(2, 4)
    assert opened.stage(6, 0)  # another slab size has its own staging
    opened.land(5, 7)
    assert opened.stage(2, 4)
    assert opened.use(5, [6, 7]).num_promoted == 1
    assert opened.pool.staging_counters() == {
        2: StagingCounters(issued=2, dropped=1),
        5: StagingCounters(issued=2, promoted=1, late=1, dropped=1),
        6: StagingCounters(issued=1),
    }


def test_failed_read_ahead_leaves_nothing(opened: Opened) -> None:
    """A read ahead that fails, or is called off, frees its slot; if it had been asked for, the expert is a miss next time."""
    opened.stage(2, 7, land=False)
    opened.pool.fail(*opened.reads.pop((2, 7)))
    assert opened.pool.staging_counters()[2] == StagingCounters(issued=1, failed=1)
    assert opened.use(2, [7]).misses == [7]
    opened.stage(2, 5, land=False)
    held = opened.pool.acquire(2, [5])
    opened.pool.fail(*opened.reads.pop((2, 5)))
    opened.pool.release(held)
    opened.pool.check_integrity()
    assert opened.resident(2) == [7]
    assert opened.use(2, [5]).misses == [5]


def test_step_without_experts_takes_nothing(opened: Opened) -> None:
    """An empty union has no rounds, and can be acquired while something is being read."""
    opened.stage(2, 7, land=False)
    opened.pool.release(opened.pool.acquire(2, [1]))
    assert opened.pool.rounds(2, []) == []
    opened.pool.release(opened.pool.acquire(2, []))
    opened.pool.check_integrity()


# -- pins


def test_pins_are_never_evicted(opened: Opened) -> None:
    """A pinned expert outlives any traffic; unpinned it ages like the others."""
    opened.use(5, [0, 1, 2])
    assert opened.pool.pin(5, 0)
    for expert in (3, 4, 5, 6, 7):
        opened.use(5, [expert])
    assert opened.resident(5) == [0, 4, 5, 6, 7]
    opened.pool.unpin(5, 0)
    opened.pool.check_integrity()
    for expert in (1, 2, 3, 4):
        opened.use(5, [expert])
    assert opened.resident(5) == [0, 1, 2, 3, 4]
    opened.use(5, [7])
    assert opened.resident(5) == [1, 2, 3, 4, 7]


def test_pins_leave_the_floor(opened: Opened) -> None:
    """No more than slots less floor can be pinned, by `pin` and `load_pinned` together."""
    opened.use(5, [0, 1, 2, 3, 4])
    assert [opened.pool.pin(5, 0), opened.pool.pin(5, 0), opened.load_pinned(5, 7, land=False)] == [True] * 3
    assert opened.pool.pin(5, 2)
    assert opened.pool.pinned(5) == [0, 2, 7]
    assert not opened.pool.pin(5, 3)
    assert not opened.load_pinned(5, 6)
    opened.pool.unpin(5, 7)  # while it is read
    opened.land(5, 7)
    assert opened.pool.pinned(5) == [0, 2]
    assert opened.pool.pin(5, 3)


def test_only_complete_experts_of_the_layer_can_be_pinned(opened: Opened) -> None:
    """Neither absent experts, nor those being read, nor staged ones; `unpin` of those is nothing."""
    opened.pool.release(opened.pool.acquire(5, [1]))
    opened.stage(5, 2)
    assert [opened.pool.pin(5, expert) for expert in (0, 1, 2)] == [False] * 3
    for expert in (0, 1, 2):
        opened.pool.unpin(5, expert)
    opened.pool.check_integrity()


def test_pins_are_read_in_the_background(opened: Opened) -> None:
    """`load_pinned` takes the place of the least recent expert; the read ends PINNED, or leaves nothing if it fails."""
    opened.use(5, [0, 1, 2, 3, 4])
    assert opened.load_pinned(5, 6)
    assert opened.resident(5) == [1, 2, 3, 4, 6]
    assert not opened.load_pinned(5, 6)
    assert opened.load_pinned(5, 7, land=False)
    opened.pool.fail(*opened.reads.pop((5, 7)))
    opened.pool.check_integrity()
    assert opened.pool.pinned(5) == [6]
    assert opened.use(5, [0]).num_evicted == 0
    assert opened.resident(5) == [0, 2, 3, 4, 6]


def test_pin_that_is_being_read_can_be_used(opened: Opened) -> None:
    """A step that asks for an expert whose pin is under way waits for that read."""
    opened.load_pinned(5, 6, land=False)
    held = opened.use(5, [6])
    assert (held.pending, held.num_promoted) == ([6], 0)
    assert opened.pool.pinned(5) == [6]


def test_staged_expert_is_pinned_without_a_read(opened: Opened) -> None:
    """`load_pinned` of a staged expert takes it over, whether its read has ended or not."""
    opened.use(5, [0, 1, 2, 3, 4])
    opened.stage(5, 6)
    opened.stage(5, 7, land=False)
    assert not opened.load_pinned(5, 6)
    assert not opened.load_pinned(5, 7)
    opened.land(5, 7)
    assert opened.pool.pinned(5) == [6, 7]
    assert opened.resident(5) == [2, 3, 4, 6, 7]


def test_pin_has_no_place_while_everything_is_in_use(opened: Opened) -> None:
    """A pin is read only into a slot that is free or can be evicted; nor is there one above the floor of a small pool."""
    held = opened.pool.acquire(5, range(5))
    assert not opened.load_pinned(5, 7)
    for slot, generation in zip(held.miss_slots, held.generations, strict=True):
        opened.pool.mark_ready(slot, generation)
    opened.pool.release(held)
    opened.pool.resize(0)
    assert not opened.load_pinned(5, 7)
    assert not opened.pool.pin(5, 4)
    assert opened.resident(5) == [3, 4]


def test_pin_in_use_can_be_unpinned_and_not_given_up(opened: Opened) -> None:
    """What a step holds stays where it is, whether it is pinned or not."""
    opened.use(5, [0, 1, 2, 3])
    assert all(opened.pool.pin(5, expert) for expert in (0, 1))
    held = opened.pool.acquire(5, [0, 1])
    opened.pool.unpin(5, 0)
    opened.pool.check_integrity()
    opened.pool.resize(0)
    opened.pool.check_integrity()
    assert opened.pool.pinned(5) == [1]
    assert {0, 1} <= set(opened.resident(5))
    opened.pool.release(held)
    opened.pool.check_integrity()


def test_rounds_count_pins_once(opened: Opened) -> None:
    """Pinned experts of a union come in the first round and take no place in it; each round can be acquired."""
    opened.use(5, [0, 1, 2])
    opened.pool.pin(5, 1)
    opened.pool.pin(5, 2)
    rounds = opened.pool.rounds(5, range(8))
    assert rounds == [[1, 2, 0, 3, 4], [5, 6, 7]]
    assert [len(opened.use(5, part).misses) for part in rounds] == [2, 3]
    opened.use(5, [3, 4, 5])
    assert opened.pool.rounds(5, [1, 2]) == [[1, 2]]


# -- size


def committed_bytes(opened: Opened) -> int:
    """What the file system says that the segment takes."""
    return (SHM_DIR / opened.segment.name).stat().st_blocks * 512


def fill(opened: Opened) -> None:
    """Use every slot of every layer, and stage as much as fits."""
    for entry in LAYERS:
        opened.use(entry.layer, list(range(entry.num_slots)))
    for layer, expert in ((2, 7), (5, 7)):
        assert opened.stage(layer, expert)


@linux_only
def test_pages_come_back_at_once(opened: Opened) -> None:
    """After `resize` the segment takes no more than was asked for, as the file system sees it; later use keeps to that."""
    fill(opened)
    assert committed_bytes(opened) == 4096 + ALL_BYTES - STAGING * 2 * SLAB
    for asked in (ALL_BYTES - 3 * SLAB, 20 * SLAB, 14 * SLAB):
        usable = opened.pool.resize(asked)
        opened.pool.check_integrity()
        assert asked - 2 * SLAB < usable <= asked
        assert committed_bytes(opened) <= 4096 + usable
        assert committed_bytes(opened) == PoolView(opened.segment).reserved_bytes()
        for entry in LAYERS:
            for expert in range(entry.num_experts):
                opened.use(entry.layer, [expert])
                opened.stage(entry.layer, (expert + 3) % entry.num_experts)
        assert committed_bytes(opened) <= 4096 + usable


def test_shrinking_keeps_shares_and_the_recent(opened: Opened) -> None:
    """Layers shrink to equal shares of what they had, each by its least recent experts, and not below the floor."""
    fill(opened)
    assert opened.pool.resize(2 * SLAB + 3 * SLAB + 3 * 2 * SLAB + STAGING * 3 * SLAB) == 17 * SLAB
    assert [opened.resident(layer) for layer in (2, 5, 6)] == [[1, 2], [2, 3, 4], [3, 4, 5]]
    assert opened.pool.resize(0) == FLOOR * (1 + 1 + 2) * SLAB
    opened.pool.check_integrity()
    assert [opened.resident(layer) for layer in (2, 5, 6)] == [[1, 2], [3, 4], [4, 5]]
    assert not opened.stage(2, 6)


@linux_only
def test_growing_gives_slots_back(opened: Opened) -> None:
    """After growing, every layer can be filled again; pages come with use, and a full memory is a PoolError."""
    fill(opened)
    opened.pool.resize(0)
    before = committed_bytes(opened)
    assert opened.pool.resize(10 * ALL_BYTES) == ALL_BYTES
    assert committed_bytes(opened) == before
    fill(opened)
    assert [len(opened.resident(layer)) for layer in (2, 5, 6)] == [3, 5, 6]


def test_full_memory_after_growing_is_an_error(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that somebody else has taken meanwhile are missed cleanly: the step is refused, what is resident stays."""
    fill(opened)
    opened.pool.resize(0)
    opened.pool.resize(ALL_BYTES)

    def reserve(offset: int, nbytes: int) -> None:
        raise PoolError("/dev/shm is full")

    monkeypatch.setattr(opened.segment, "reserve", reserve)
    with pytest.raises(PoolError, match="is full"):
        opened.pool.acquire(5, [0, 3])
    with pytest.raises(PoolError, match="is full"):
        opened.pool.stage(5, 0)
    with pytest.raises(PoolError, match="is full"):
        opened.pool.load_pinned(5, 0)
    opened.pool.check_integrity()
    assert opened.resident(5) == [3, 4]
    assert opened.use(5, [3, 4]).hits == [3, 4]


def test_pins_are_given_up_last_and_coldest_first(opened: Opened) -> None:
    """While anything else can go, pins stay; then the least recent pin of all layers goes first."""
    fill(opened)
    for layer, expert in ((6, 0), (5, 1), (5, 0), (6, 1)):
        opened.use(layer, [expert])
        assert opened.pool.pin(layer, expert)
    assert opened.pool.resize(14 * SLAB) == 14 * SLAB
    assert [opened.pool.pinned(layer) for layer in (2, 5, 6)] == [[], [0, 1], [0, 1]]
    assert opened.pool.resize(11 * SLAB) == 11 * SLAB  # 6/0 and 5/1 go
    opened.pool.check_integrity()
    assert [opened.pool.pinned(layer) for layer in (2, 5, 6)] == [[], [0], [1]]
    assert [opened.resident(layer) for layer in (2, 5, 6)] == [[1, 2], [0, 3, 4], [1, 4, 5]]


@linux_only
def test_slots_in_use_leave_when_they_are_released(opened: Opened) -> None:
    """What a step holds, and what is being read, stays through `resize` and goes at its end, pages too."""
    held = opened.pool.acquire(5, [0, 1, 2, 3])
    opened.load_pinned(6, 1, land=False)
    opened.stage(2, 1, land=False)
    assert opened.pool.resize(0) == (FLOOR * 4 + 2) * SLAB
    opened.pool.check_integrity()
    for slot, generation in zip(held.miss_slots[1:], held.generations[1:], strict=True):
        opened.pool.mark_ready(slot, generation)
    opened.pool.release(held)
    opened.pool.check_integrity()
    opened.pool.mark_ready(held.miss_slots[0], held.generations[0])
    opened.pool.check_integrity()
    opened.land(2, 1)
    opened.land(6, 1)
    assert [opened.resident(layer) for layer in (2, 5, 6)] == [[], [0, 3], [1]]
    assert committed_bytes(opened) == 4096 + 4 * SLAB


@linux_only
def test_unfinished_reads_and_free_slots_leave_too(opened: Opened) -> None:
    """Reads that outlive their step land in a smaller pool as far as it has place; what a failed read left goes at once."""
    held = opened.pool.acquire(5, [0, 1, 2, 3])
    opened.pool.release(held)
    opened.pool.fail(held.miss_slots[3], held.generations[3])
    assert committed_bytes(opened) == 4096 + 4 * SLAB
    opened.pool.resize(0)
    assert committed_bytes(opened) == 4096 + 3 * SLAB
    for slot, generation in zip(held.miss_slots[:3], held.generations[:3], strict=True):
        opened.pool.mark_ready(slot, generation)
        opened.pool.check_integrity()
    assert opened.resident(5) == [1, 2]
    assert committed_bytes(opened) == 4096 + 2 * SLAB


@linux_only
def test_system_that_keeps_pages(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where pages cannot be given back the pool says that it still has them, and goes on."""
    fill(opened)
    monkeypatch.setattr(opened.segment, "punch", lambda offset, nbytes: False)
    opened.pool.resize(0)
    opened.pool.check_integrity()
    assert PoolView(opened.segment).reserved_bytes() == committed_bytes(opened)
    opened.pool.resize(ALL_BYTES)
    fill(opened)


# -- death of the writer


@linux_only
def test_recovery_keeps_pins_and_size_and_drops_staging(opened: Opened) -> None:
    """A new writer finds pins pinned and the pool as large as it was; nothing is staged or being read."""
    fill(opened)
    opened.pool.pin(6, 2)
    opened.load_pinned(6, 0, land=False)
    opened.pool.resize(17 * SLAB)
    opened.stage(2, 6)
    opened.stage(5, 5, land=False)
    before = [opened.resident(layer) for layer in (2, 5, 6)]
    opened.reopen()
    assert [opened.resident(layer) for layer in (2, 5, 6)] == before
    assert opened.pool.pinned(6) == [2]
    assert [len(opened.use(layer, [0, 1]).misses) for layer in (2, 5)] == [1, 2]
    assert [len(opened.resident(layer)) for layer in (2, 5)] == [2, 3]
    assert committed_bytes(opened) <= 4096 + 17 * SLAB


def test_recovery_drops_what_is_staged(opened: Opened) -> None:
    """A staged expert is nobody's after the death of its writer, though its layer has room."""
    opened.use(2, [0])
    opened.stage(2, 7)
    opened.reopen()
    assert opened.resident(2) == [0]
    assert opened.use(2, [7]).misses == [7]


@linux_only
def test_recovery_gives_back_what_was_being_read(opened: Opened) -> None:
    """Slots that a dead writer was reading into, more than a smaller pool may have, keep no pages."""
    opened.use(2, [0, 1])
    opened.stage(5, 1, land=False)
    opened.pool.release(opened.pool.acquire(5, [2, 3, 4, 5]))
    opened.pool.resize(0)
    opened.reopen()
    assert committed_bytes(opened) == 4096 + 2 * SLAB


def test_recovery_in_the_middle_of_any_transition(opened: Opened) -> None:
    """A writer that died between two writes to the table leaves a pool that the next one can use."""
    opened.use(2, [0, 1, 2])
    opened.stage(2, 7)
    opened.stage(2, 6, land=False)
    slots = opened.pool.acquire(2, [0, 1]).hit_slots
    table = slot_table_in(opened.segment.buffer, opened.pool.layout)
    table["state"][slots[0]] = SlotState.FREE  # evicted, but still named
    table["flags"][table["expert"] == 7] = SlotFlag.PAGES_RESERVED  # promoted, and no more
    free = int(np.flatnonzero(table["state"] == SlotState.FREE)[-1])
    table["flags"][free] |= SlotFlag.STAGED  # about to be loaded
    opened.reopen()
    assert opened.resident(2) == [1, 2, 7]
    assert [opened.use(2, [expert]).misses for expert in (0, 6)] == [[0], [6]]


@pytest.mark.parametrize(("column", "value"), [("layer", 3), ("expert", 8), ("expert", -1)])
def test_recovery_refuses_a_damaged_table(opened: Opened, column: str, value: int) -> None:
    """A slot of a layer or an expert that do not exist is named."""
    opened.use(2, [0])
    table = slot_table_in(opened.segment.buffer, opened.pool.layout)
    table[column][table["state"] == SlotState.READY] = value
    with pytest.raises(PoolError, match=r"slot \d states expert .* the segment is damaged"):
        opened.reopen()
    with pytest.raises(PoolError, match="cannot be there"):
        opened.pool.check_integrity()


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda slots, pool: pool.slabs.free.append(pool.slabs.free[0]), "one is free twice"),
        (lambda slots, pool: pool.slabs.bare.pop(), "in the stock: False"),
        (lambda slots, pool: pool.slabs.free.append(pool.slabs.bare.pop()), "in the stock of slots with pages"),
        (lambda slots, pool: pool.evictable.evict(), "state 2, but held False"),
        (lambda slots, pool: pool.evictable.update({0: pool.evictable.pop(0)}), "recency and last use disagree"),
        (lambda slots, pool: pool.evictable.update({6: None}), r"may evict \[6\], which it does not have"),
        (lambda slots, pool: pool.pinned.clear(), "state 3, but held False"),
        (lambda slots, pool: pool.slabs.staged.clear(), "state 2, but held False"),
        (lambda slots, pool: pool.residency.fill(False), "residency is not what"),
        (lambda slots, pool: setattr(pool, "num_owned", 9), "the lookup has 3 experts"),
        (lambda slots, pool: setattr(pool, "limit", 2), "limits of layers and staging"),
        (lambda slots, pool: setattr(pool.slabs, "num_staged", 0), "0 counted as staged, 1 are"),
        (lambda slots, pool: setattr(pool.counters, "dropped", 1), "do not add up with 1 staged"),
        (lambda slots, pool: slots.holds.__setitem__(pool.staged[7], 1), "held 1 times"),
        (lambda slots, pool: slots.tables.limits.__setitem__(0, 1), "in the tables they are others"),
    ],
)
def test_integrity_finds_what_does_not_belong(
    opened: Opened, damage: Callable[[Slots, LayerPool], object], what: str
) -> None:
    """Each contradiction between table and memory is a sentence of its own."""
    opened.use(2, [0, 1, 2])
    opened.pool.pin(2, 1)
    opened.stage(2, 7)
    opened.use(5, [0])
    opened.pool.fail(*opened.pool.stage(5, 1))
    damage(opened.pool._slots, opened.pool._layers[2])
    with pytest.raises(PoolError, match=what):
        opened.pool.check_integrity()
