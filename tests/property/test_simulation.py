"""The simulated cache is the pool, and no policy passes the bound: random unions, those larger than a layer included."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import combinations
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st
from segments import fresh_name

from colibri_mp.errors import PoolError
from colibri_mp.shm.layout import LayerSlots, pool_bytes
from colibri_mp.shm.policy import Eviction
from colibri_mp.shm.pool import ExpertPool, Held
from colibri_mp.shm.segment import Segment
from colibri_mp.simulate.cache import POLICIES, LayerCache

LAYER, NUM_EXPERTS, SLAB_BYTES = 3, 10, 4096


def unions_of(num_experts: int, most: int, longest: int) -> st.SearchStrategy[list[list[int]]]:
    """Sequences of unions, ascending, of at most `most` experts."""
    union = st.sets(st.integers(0, num_experts - 1), min_size=1, max_size=most).map(sorted)
    return st.lists(union, min_size=1, max_size=longest)


EVICTIONS = st.sampled_from(
    [
        Eviction("lru"),
        Eviction("lrfu", 0.5),
        Eviction("lrfu", 4),
        Eviction("lrfu", 30, {LAYER: tuple(0.7 * expert for expert in range(NUM_EXPERTS))}),
    ]
)


@settings(max_examples=100, deadline=None)
@given(unions_of(NUM_EXPERTS, NUM_EXPERTS, 40), st.integers(1, NUM_EXPERTS), EVICTIONS)
def test_simulation_is_the_pool(unions: list[list[int]], num_slots: int, eviction: Eviction) -> None:
    """Misses and evictions of every visit are those of `ExpertPool` on a segment, rounds included, whatever the policy."""
    with both(num_slots, 1, eviction) as pair:
        for union in unions:
            pair.visit(union)


OPERATIONS = st.one_of(
    st.tuples(st.just("visit"), st.sets(st.integers(0, NUM_EXPERTS - 1), min_size=1).map(sorted)),
    st.tuples(st.sampled_from(["pin", "unpin", "load", "fill", "land", "fail"]), st.integers(0, NUM_EXPERTS - 1)),
    st.tuples(st.just("resize"), st.integers(1, NUM_EXPERTS)),
)


@settings(max_examples=250, deadline=None)
@given(st.lists(OPERATIONS, min_size=1, max_size=60), st.integers(2, NUM_EXPERTS), EVICTIONS)
@example(
    [("fill", 3), ("visit", [0, 1, 2, 3, 4, 5]), ("visit", [2])], 3, Eviction("lru")
)  # a read is taken over by the first of several rounds
def test_pins_and_sizes_are_the_pools(operations: list[tuple[str, Any]], num_slots: int, eviction: Eviction) -> None:
    """The same with the events of a trace between the visits: reads for pins and for free slots that land or fail, pins, and sizes."""
    with both(num_slots, 2, eviction) as pair:
        for name, value in operations:
            getattr(pair, name)(value)


class Both:
    """A pool of one layer and its simulation: each method does the same to the two, and `visit` compares."""

    def __init__(self, pool: ExpertPool, simulated: LayerCache) -> None:
        self.pool, self.simulated = pool, simulated
        # Reads beside the visits, by expert: slot, generation, and what a read for a free slot holds until its end.
        self.reads: dict[int, tuple[int, int, Held | None]] = {}

    def visit(self, union: list[int]) -> None:
        """As a worker makes it: what is under way is waited for. Nothing happens where reads take all slots."""
        with suppress(PoolError):
            rounds = self.pool.rounds(LAYER, union)
            counts = [self.acquire(part) for part in rounds]
            assert self.simulated.visit(union) == tuple(map(sum, zip(*counts, strict=True)))

    def acquire(self, part: list[int]) -> tuple[int, int]:
        held = self.pool.acquire(LAYER, part)
        for expert in held.pending:
            slot, generation, own = self.reads.pop(expert)
            self.pool.mark_ready(slot, generation)
            if own is not None:
                self.pool.release(own)
        for slot, generation in zip(held.miss_slots, held.generations, strict=True):
            self.pool.mark_ready(slot, generation)
        self.pool.release(held)
        return len(held.misses) + len(held.pending), held.num_evicted

    def pin(self, expert: int) -> None:
        if self.pool.pin(LAYER, expert):
            self.simulated.pin(expert)

    def unpin(self, expert: int) -> None:
        if expert not in self.reads and expert in self.pool.pinned(LAYER):
            self.pool.unpin(LAYER, expert)
            self.simulated.unpin(expert)

    def load(self, expert: int) -> None:
        read = self.pool.load_pinned(LAYER, expert)
        if read is not None:
            self.reads[expert] = (*read, None)
            self.simulated.load(expert)

    def fill(self, expert: int) -> None:
        held = self.pool.fill(LAYER, expert)
        if held is None:
            return
        self.reads[expert] = (held.miss_slots[0], held.generations[0], held)
        self.simulated.fill(expert)

    def land(self, _: int) -> None:
        if self.reads:
            expert, (slot, generation, own) = self.reads.popitem()
            self.pool.mark_ready(slot, generation)
            if own is None:
                self.simulated.pin(expert)
            else:
                self.pool.release(own)
                self.simulated.unpin(expert)

    def fail(self, _: int) -> None:
        if self.reads:
            expert, (slot, generation, own) = self.reads.popitem()
            self.pool.fail(slot, generation)
            if own is not None:
                self.pool.release(own)
            self.simulated.drop(expert)

    def resize(self, num_slots: int) -> None:
        before = self.pool.pinned(LAYER)
        self.pool.resize(num_slots * SLAB_BYTES)
        for expert in set(before).difference(self.pool.pinned(LAYER)):
            self.simulated.drop(expert)
        self.simulated.resize(self.pool.limits()[LAYER])


@contextmanager
def both(num_slots: int, floor: int, eviction: Eviction) -> Iterator[Both]:
    """A fresh pool on a segment, and its simulation."""
    slots = (LayerSlots(LAYER, NUM_EXPERTS, num_slots, SLAB_BYTES),)
    with Segment.create(fresh_name(), pool_bytes(slots)) as segment:
        pool = ExpertPool(segment, slots, "a" * 64, floor=floor, eviction=eviction)
        yield Both(pool, LayerCache(num_slots, eviction.make(LAYER, NUM_EXPERTS, floor)))
        pool.check_integrity()
        pool.close()


@settings(max_examples=300, deadline=None)
@given(unions_of(NUM_EXPERTS, NUM_EXPERTS, 50), st.integers(1, NUM_EXPERTS), st.integers(1, 3))
def test_no_policy_passes_the_bound(unions: list[list[int]], num_slots: int, floor: int) -> None:
    """Whatever the slots, the unions and the policy."""
    made = {name: kind.make(unions, num_slots, min(floor, num_slots)) for name, kind in POLICIES.items()}
    misses = {name: sum(cache.visit(union)[0] for union in unions) for name, cache in made.items()}
    assert misses["belady"] == min(misses.values())


@settings(max_examples=150, deadline=None)
@given(unions_of(5, 3, 7), st.integers(2, 4))
def test_bound_is_the_least_that_any_choice_of_victims_gives(unions: list[list[int]], num_slots: int) -> None:
    """Against all choices tried out: never above, and equal where every union fits."""
    bound = POLICIES["belady"].make(unions, num_slots, 1)
    misses = sum(bound.visit(union)[0] for union in unions)
    least = least_misses(tuple(map(tuple, unions)), num_slots)
    assert misses <= least
    if max(map(len, unions)) <= num_slots:
        assert misses == least


def least_misses(unions: tuple[tuple[int, ...], ...], num_slots: int) -> int:
    """The least number of misses under the pool's rules, over all victims that could be chosen."""

    @cache
    def from_visit(visit: int, held: frozenset[int]) -> int:
        if visit == len(unions):
            return 0
        misses = len(set(unions[visit]) - held)
        return misses + min(from_visit(visit + 1, after) for after in states_after(unions[visit], held, num_slots))

    return from_visit(0, frozenset())


def states_after(union: tuple[int, ...], held: frozenset[int], num_slots: int) -> Iterator[frozenset[int]]:
    """What a layer can hold after a visit: in each round any experts that it does not need may go."""
    order = [e for e in union if e in held] + [e for e in union if e not in held]
    states = {held}
    for start in range(0, len(order), num_slots):
        part = frozenset(order[start : start + num_slots])
        states = {part | frozenset(kept) for state in states for kept in keepable(state - part, num_slots - len(part))}
    yield from states


def keepable(others: frozenset[int], room: int) -> Iterator[tuple[int, ...]]:
    """The ways to keep as many of `others` as there is room for."""
    yield from combinations(sorted(others), min(room, len(others)))
