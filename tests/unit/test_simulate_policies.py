"""Each policy on sequences short enough to follow by hand, pins and sizes, and rounds."""

from collections.abc import Sequence

import pytest

from colibri_mp.errors import TraceError
from colibri_mp.shm.policy import Lrfu, Lru
from colibri_mp.simulate.cache import POLICIES, LayerCache
from colibri_mp.simulate.policies import Lfu, LruFreq, Policy


def victims(policy: Policy, uses: Sequence[int]) -> list[int]:
    """The order in which everything is evicted after `uses`."""
    for expert in uses:
        if expert in policy:
            policy.pop(expert)
        policy.used([expert])
        policy[expert] = None
    return [policy.evict() for _ in range(len(policy))]


def test_lfu_evicts_the_least_used() -> None:
    """By number of uses, then by the last one; uses before an eviction count."""
    assert victims(Lfu(), [1, 1, 1, 2, 3, 3, 4, 2]) == [4, 3, 2, 1]
    policy = Lfu()
    assert victims(policy, [5, 5, 6]) == [6, 5]
    assert victims(policy, [6, 7, 5]) == [7, 6, 5]


def test_lru_freq_weighs_uses_against_age() -> None:
    """Two uses long ago lose against one just now, and win against one as old."""
    assert victims(LruFreq(), [1, 1, 2, 3, 4, 5]) == [2, 3, 1, 4, 5]  # 2/5 for expert 1, then 1/4, 1/3, 1/2, 1/1
    assert victims(LruFreq(), [1] * 9 + [2, 3]) == [2, 3, 1]


def test_lrfu_lies_between_lru_and_lfu() -> None:
    """A short half-life sees only the last use, a long one only the number of uses."""
    uses = [1, 1, 1, 2, 2, 3]
    assert victims(Lrfu(4, 1), [*uses, 2, 1]) == [3, 2, 1]
    assert victims(Lrfu(4, 1), uses) == [1, 2, 3] == victims(Lru(), uses)
    assert victims(Lrfu(4, 10_000), uses) == [3, 2, 1] == victims(Lfu(), uses)
    assert victims(Lrfu(4, 2), uses) == [1, 3, 2]  # weights 0.52, 1, 1.21 of the last use's


def test_belady_knows_the_future() -> None:
    """The farthest next use goes, one that never comes first of all."""
    unions = [[0], [1], [2], [0], [1], [3], [0]]
    cache = POLICIES["belady"].make(unions, 2, 1)
    assert [cache.visit(union) for union in unions] == [(1, 0), (1, 0), (1, 1), (0, 0), (1, 1), (1, 1), (0, 0)]


def test_union_that_does_not_fit_is_worked_through_in_rounds() -> None:
    """Resident experts are used before they are evicted; the last round's experts stay."""
    cache = LayerCache(3, Lru())
    assert cache.visit([5, 7]) == (2, 0)
    assert cache.visit([1, 2, 3, 5, 7]) == (3, 2)  # rounds 1 5 7 and 2 3
    assert cache.visit([2, 3, 7]) == (0, 0)


def test_bound_may_leave_any_experts_of_a_union_that_does_not_fit() -> None:
    """Rounds leave 2 and 3 behind; the bound keeps what comes next."""
    unions = [[0, 1, 2, 3], [0, 1]]
    caches = [POLICIES[name].make(unions, 2, 1) for name in ("lru", "belady")]
    assert [[cache.visit(union)[0] for union in unions] for cache in caches] == [[4, 2], [4, 0]]


def test_pins_stay_and_count() -> None:
    """A pin takes a slot of its own if it must, is never evicted, and shrinks what is left for others."""
    cache = LayerCache(3, Lru())
    cache.visit([0, 1, 2])
    cache.pin(0)
    cache.pin(7)  # evicts 1
    assert cache.visit([1, 3]) == (2, 2)  # a round each: one slot is left
    assert cache.visit([0, 3, 7]) == (0, 0)
    cache.unpin(0)
    assert cache.visit([4, 5]) == (2, 2)  # 3 and 0 go
    assert cache.visit([0, 7]) == (1, 1)


def test_expert_that_is_being_read_for_a_pin_is_missed_once() -> None:
    """It has its slot from the start, a visit that needs it waits, and after that it is there."""
    cache = LayerCache(2, Lru())
    cache.visit([0, 1])
    cache.load(5)  # evicts 0
    assert cache.visit([1, 5]) == (1, 0)
    assert cache.visit([1, 5]) == (0, 0)
    cache.pin(5)
    assert cache.visit([2]) == (1, 1)
    cache.drop(5)
    assert cache.visit([5]) == (1, 0)


def test_reads_into_free_slots() -> None:
    """Such a read has its slot; a visit that needs the expert before takes it over, as a miss that evicts nothing."""
    cache = LayerCache(3, Lru())
    cache.fill(4)
    cache.fill(5)
    assert cache.visit([0, 5]) == (2, 0)
    assert cache.visit([1]) == (1, 1)  # 0 goes: 4 is still being read
    cache.unpin(4)
    cache.unpin(5)  # which a visit has taken over: nothing happens
    assert cache.visit([1, 4, 5]) == (0, 0)
    assert cache.visit([2]) == (1, 1)
    other = LayerCache(3, Lru())
    other.fill(3)
    assert other.visit([0, 1, 2, 3, 4, 5]) == (6, 3)  # rounds 0 1 3, 2 4 and 5
    assert other.visit([2, 4, 5]) == (0, 0)


def test_sizes_change() -> None:
    """The least recent go when slots are taken away; pins stay, and a visit that has no slot beside them is impossible."""
    cache = LayerCache(4, Lru())
    cache.visit([0, 1, 2, 3])
    cache.resize(2)
    assert cache.visit([2, 3]) == (0, 0)
    cache.resize(3)
    assert cache.visit([0]) == (1, 0)
    cache.pin(0)
    cache.resize(1)
    assert cache.visit([0]) == (0, 0)
    with pytest.raises(TraceError, match="1 pins and reads under way leave no slot of 1"):
        cache.visit([2])
    with pytest.raises(TraceError, match="1 slots cannot hold 1 pins, 0 reads under way and 1 experts more"):
        cache.load(5)


def test_learned_pins_stay_after_the_first_part() -> None:
    """What the first tenth used most is kept through visits that an LRU loses it in."""
    unions = [[0, 1]] * 2 + [[2, 3], [4, 5], [0, 6]] * 6
    made = {name: POLICIES[name].make(unions, 4, 2) for name in ("lru", "lru+pins")}
    misses = {name: [cache.visit(union)[0] for union in unions] for name, cache in made.items()}
    assert misses["lru"][4:] == [2] * 16
    assert sum(misses["lru+pins"][4:]) == sum(misses["lru"][4:]) - 6 + 1
