"""One layer's slots under the pool's rules (`shm.pool.ExpertPool`), with any policy, without bytes.

    visit(union)   fits: hits are held, each miss takes a free slot or the policy's victim, then all become evictable,
                   ascending; does not fit: rounds, the resident experts first

Which experts a layer holds is a function of the unions asked of it and of the events between them (pins, sizes): `visit` returns
the misses and evictions that the pool counts. Layers share no slots, so each is simulated by itself.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from colibri_mp.errors import TraceError
from colibri_mp.shm.policy import HALF_LIFE_TOKENS, Lrfu, Lru
from colibri_mp.simulate.policies import Belady, Lfu, LruFreq, Policy

_LEARNING_SHARE = 0.1

Unions = Sequence[Sequence[int]]
"""What the visits of a layer ask for, one after the other: distinct experts, ascending."""


class LayerCache:
    """See the module docstring."""

    def __init__(self, num_slots: int, policy: Policy) -> None:
        self.num_slots = num_slots
        self._policy = policy
        self._pinned: set[int] = set()
        self._loading: set[int] = set()  # of the pinned ones: not there yet
        self._filling: set[int] = set()  # not there yet, will be evictable

    def visit(self, union: Sequence[int]) -> tuple[int, int]:
        """Use the experts of `union`; returns misses and evictions."""
        if self._pinned or self._filling:
            return self._visit_beside_others(union)
        return self._hold(union) if len(union) <= self.num_slots else self._hold_in_rounds(union, [], self.num_slots)

    # -- events --------------------------------------------------------------------------------------------------------

    def load(self, expert: int) -> None:
        """A read begins that ends with `pin`: it takes a slot, and a visit that needs the expert before waits for it."""
        if expert not in self._policy and expert not in self._pinned:
            self._make_room(1)
            self._pinned.add(expert)
            self._loading.add(expert)

    def fill(self, expert: int) -> None:
        """A read into a free slot begins that ends with `unpin`, or is taken over by a visit that needs the expert before."""
        self._filling.add(expert)

    def pin(self, expert: int) -> None:
        """The expert is resident and stays."""
        self.load(expert)
        self._loading.discard(expert)
        if expert in self._policy:
            self._policy.pop(expert)
            self._pinned.add(expert)

    def unpin(self, expert: int) -> None:
        """The expert may be evicted, as the one used last."""
        if expert in self._pinned or expert in self._filling:
            self.drop(expert)
            self._policy[expert] = None
            self._trim()

    def drop(self, expert: int) -> None:
        """The pin is given up and its slot with it, or the read has failed."""
        self._pinned.discard(expert)
        self._loading.discard(expert)
        self._filling.discard(expert)

    def resize(self, num_slots: int) -> None:
        """Change the number of slots; of what does not fit, that which may be evicted is, now or as soon as it may be."""
        self.num_slots = num_slots
        self._trim()

    # -- slots ---------------------------------------------------------------------------------------------------------

    def _make_room(self, num_slots: int) -> int:
        """Evict until `num_slots` are free; returns how many went."""
        num_evicted = len(self._policy) + len(self._pinned) + len(self._filling) + num_slots - self.num_slots
        if num_evicted > len(self._policy):
            raise TraceError(
                f"{self.num_slots} slots cannot hold {len(self._pinned)} pins, {len(self._filling)} reads under way and "
                f"{num_slots} experts more"
            )
        for _ in range(num_evicted):
            self._policy.evict()
        return max(0, num_evicted)

    def _trim(self) -> None:
        while len(self._policy) + len(self._pinned) + len(self._filling) > self.num_slots and len(self._policy):
            self._policy.evict()

    # -- visits --------------------------------------------------------------------------------------------------------

    def _visit_beside_others(self, union: Sequence[int]) -> tuple[int, int]:
        """A visit while pins and reads under way have slots; what it needs of these is there in the first round, and missed."""
        num_awaited = len(self._loading)
        self._loading.difference_update(union)
        num_awaited -= len(self._loading)
        capacity = self.num_slots - len(self._pinned) - len(self._filling)
        staying = [e for e in union if e in self._pinned or e in self._filling]
        self._filling.difference_update(staying)
        others = [e for e in union if e not in staying]
        if len(others) <= capacity:
            misses, evictions = self._hold(union)
        else:
            misses, evictions = self._hold_in_rounds(others, staying, capacity)
        return misses + num_awaited, evictions

    def _hold(self, union: Sequence[int]) -> tuple[int, int]:
        policy = self._policy
        evictable = [e for e in union if e not in self._pinned] if self._pinned else union
        hits = [e for e in evictable if e in policy]
        for expert in hits:
            policy.pop(expert)
        num_evicted = self._make_room(len(evictable))
        policy.used(union)
        for expert in evictable:
            policy[expert] = None
        return len(evictable) - len(hits), num_evicted

    def _hold_in_rounds(self, union: Sequence[int], at_first: list[int], capacity: int) -> tuple[int, int]:
        """Rounds of `capacity` experts, the resident ones first, those `at_first` beside the first round's."""
        if capacity < 1:
            raise TraceError(
                f"{len(self._pinned)} pins and reads under way leave no slot of {self.num_slots} for a visit"
            )
        order = [e for e in union if e in self._policy] + [e for e in union if e not in self._policy]
        parts = [order[start : start + capacity] for start in range(0, len(order), capacity)]
        parts[0] = parts[0] + at_first
        misses, evictions = zip(*(self._hold(sorted(part)) for part in parts), strict=True)
        return sum(misses), sum(evictions)


class BoundCache(LayerCache):
    """No policy in as many slots has fewer misses: Belady's choice, and a union that does not fit may leave any experts behind.

    docs/trace.md has the proof. Where every union fits, the bound is reached by a policy that knows the future.
    """

    def __init__(self, num_slots: int, unions: Unions) -> None:
        super().__init__(num_slots, Belady(unions))

    def visit(self, union: Sequence[int]) -> tuple[int, int]:
        """As `LayerCache.visit`, for a union that does not fit without the rounds."""
        if len(union) <= self.num_slots:
            return self._hold(union)
        hits = [e for e in union if e in self._policy]
        for expert in hits:
            self._policy.pop(expert)
        self._policy.used(union)
        for expert in union:
            self._policy[expert] = None
        return len(union) - len(hits), self._make_room(0)


class PinningCache(LayerCache):
    """LRU with pins: what the first visits used most stays once it is there, in up to half of the slots above the floor.

    Pins give way to a union that fits the layer but not beside them.
    """

    def __init__(self, num_slots: int, floor: int, unions: Unions) -> None:
        super().__init__(num_slots, Lru())
        self._visits_to_learn = int(len(unions) * _LEARNING_SHARE)
        uses = Counter(expert for union in unions[: self._visits_to_learn] for expert in union)
        self._chosen = {expert for expert, _ in uses.most_common((num_slots - floor) // 2)}

    def visit(self, union: Sequence[int]) -> tuple[int, int]:
        """As `LayerCache.visit`; pins afterwards, so that a pin costs no read of its own."""
        num_lacking = len(union) + len(self._pinned.difference(union)) - self.num_slots
        if num_lacking > 0 and len(union) <= self.num_slots:
            for expert in sorted(self._pinned.difference(union))[:num_lacking]:
                self.unpin(expert)
        counts = super().visit(union)
        self._visits_to_learn -= 1
        if self._visits_to_learn < 0:
            for expert in self._chosen.intersection(union):
                if expert in self._policy:
                    self.pin(expert)
        return counts


def _num_experts(unions: Unions) -> int:
    return 1 + max((union[-1] for union in unions if union), default=0)


class PolicyKind(NamedTuple):
    """A policy as it is listed: what it does, and how a layer's cache is made from its unions, slots and floor."""

    summary: str
    make: Callable[[Unions, int, int], LayerCache]


POLICIES = {
    "lrfu": PolicyKind(
        f"uses that lose half their weight in {HALF_LIFE_TOKENS:.0f} tokens; the pool's own",
        lambda unions, slots, floor: LayerCache(slots, Lrfu(_num_experts(unions), HALF_LIFE_TOKENS * floor)),
    ),
    "lru": PolicyKind("least recently used", lambda _, slots, __: LayerCache(slots, Lru())),
    "lfu": PolicyKind("least uses since the start", lambda _, slots, __: LayerCache(slots, Lfu())),
    "lru-freq": PolicyKind("frequency x recency", lambda _, slots, __: LayerCache(slots, LruFreq())),
    "lru+pins": PolicyKind(
        f"LRU; half of the slots above the floor pinned by the first {_LEARNING_SHARE:.0%} of the trace",
        lambda unions, slots, floor: PinningCache(slots, floor, unions),
    ),
    "belady": PolicyKind(
        "knows the future: a bound that no policy passes", lambda unions, slots, _: BoundCache(slots, unions)
    ),
}
