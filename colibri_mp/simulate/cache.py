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
from colibri_mp.simulate.policies import Belady, Lfu, Lrfu, LruFreq, Policy, PoolLru

_HALF_LIFE_TOKENS = 16
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
        self._filling.difference_update(union)  # a miss as any other, in the slot that it has
        num_awaited = len(self._loading)
        if num_awaited:
            self._loading.difference_update(union)
            num_awaited -= len(self._loading)
        hold = self._hold if len(union) <= self._capacity(union) else self._hold_in_rounds
        misses, evictions = hold(union)
        return misses + num_awaited, evictions

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
            self._policy.add(expert)

    def drop(self, expert: int) -> None:
        """The pin is given up and its slot with it, or the read that was to end in a pin has failed."""
        self._pinned.discard(expert)
        self._loading.discard(expert)
        self._filling.discard(expert)

    def resize(self, num_slots: int) -> None:
        """Change the number of slots; what does not fit any more is evicted."""
        self.num_slots = num_slots
        self._make_room(0)

    def _capacity(self, union: Sequence[int]) -> int:
        """Slots that `union` may use."""
        if not (self._pinned or self._filling):
            return self.num_slots
        return self.num_slots - len(self._filling) - len(self._pinned.difference(union))

    def _make_room(self, num_slots: int) -> int:
        """Evict until `num_slots` are free; returns how many went."""
        num_evicted = len(self._policy) + len(self._pinned) + len(self._filling) + num_slots - self.num_slots
        if num_evicted > len(self._policy):
            raise TraceError(f"{self.num_slots} slots cannot hold {len(self._pinned)} pins and {num_slots} more")
        for _ in range(num_evicted):
            self._policy.evict()
        return max(0, num_evicted)

    def _hold(self, union: Sequence[int]) -> tuple[int, int]:
        policy = self._policy
        loose = [e for e in union if e not in self._pinned] if self._pinned else union
        hits = [e for e in loose if e in policy]
        for expert in hits:
            policy.pop(expert)
        num_evicted = self._make_room(len(loose))
        for expert in loose:
            policy.add(expert)
        return len(loose) - len(hits), num_evicted

    def _hold_in_rounds(self, union: Sequence[int]) -> tuple[int, int]:
        """Pinned experts are there in each round; of the others the resident ones come first."""
        loose = [e for e in union if e not in self._pinned]
        order = [e for e in loose if e in self._policy] + [e for e in loose if e not in self._policy]
        capacity = self.num_slots - len(self._pinned) - len(self._filling)
        rounds = (sorted(order[start : start + capacity]) for start in range(0, len(order), capacity))
        misses, evictions = zip(*(self._hold(part) for part in rounds), strict=True)
        return sum(misses), sum(evictions)


class BoundCache(LayerCache):
    """No policy in as many slots has fewer misses: Belady's choice, and a union that does not fit may leave any experts behind.

    docs/trace.md has the proof. Where every union fits, the bound is reached by a policy that knows the future.
    """

    def __init__(self, num_slots: int, unions: Unions) -> None:
        super().__init__(num_slots, Belady(unions))

    def _hold_in_rounds(self, union: Sequence[int]) -> tuple[int, int]:
        hits = [e for e in union if e in self._policy]
        for expert in hits:
            self._policy.pop(expert)
        for expert in union:
            self._policy.add(expert)
        return len(union) - len(hits), self._make_room(0)


class PinningCache(LayerCache):
    """LRU with pins: what the first visits used most stays once it is there, in up to half of the slots above the floor.

    Pins give way to a union that fits the layer but not beside them.
    """

    def __init__(self, num_slots: int, floor: int, unions: Unions) -> None:
        super().__init__(num_slots, PoolLru())
        self._visits_to_learn = int(len(unions) * _LEARNING_SHARE)
        uses = Counter(expert for union in unions[: self._visits_to_learn] for expert in union)
        self._chosen = {expert for expert, _ in uses.most_common((num_slots - floor) // 2)}

    def visit(self, union: Sequence[int]) -> tuple[int, int]:
        """As `LayerCache.visit`; pins afterwards, so that a pin costs no read of its own."""
        if self._capacity(union) < len(union) <= self.num_slots:
            for expert in sorted(self._pinned.difference(union))[: len(union) - self._capacity(union)]:
                self.unpin(expert)
        counts = super().visit(union)
        self._visits_to_learn -= 1
        if self._visits_to_learn < 0:
            for expert in self._chosen.intersection(union):
                if expert in self._policy:
                    self.pin(expert)
        return counts


class PolicyKind(NamedTuple):
    """A policy as it is listed: what it does, and how a layer's cache is made from its unions, slots and floor."""

    summary: str
    make: Callable[[Unions, int, int], LayerCache]


POLICIES = {
    "lru": PolicyKind("least recently used; the pool's own", lambda _, slots, __: LayerCache(slots, PoolLru())),
    "lfu": PolicyKind("least uses since the start", lambda _, slots, __: LayerCache(slots, Lfu())),
    "lru-freq": PolicyKind("frequency x recency", lambda _, slots, __: LayerCache(slots, LruFreq())),
    "lrfu": PolicyKind(
        f"uses that lose half their weight in {_HALF_LIFE_TOKENS} tokens",
        lambda _, slots, floor: LayerCache(slots, Lrfu(_HALF_LIFE_TOKENS * floor)),
    ),
    "lru+pins": PolicyKind(
        f"LRU; half of the slots above the floor pinned by the first {_LEARNING_SHARE:.0%} of the trace",
        lambda unions, slots, floor: PinningCache(slots, floor, unions),
    ),
    "belady": PolicyKind(
        "knows the future: a bound that no policy passes", lambda unions, slots, _: BoundCache(slots, unions)
    ),
}
