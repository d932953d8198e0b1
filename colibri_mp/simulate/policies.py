"""Which expert goes next: the policies that `simulate` compares, each on the experts of one layer.

A policy is a dictionary of the experts that may be evicted, as the pool's own `shm.policy.Lru` is, which *is* the policy `lru` here:
`add` makes an expert evictable as the one used last, `pop` takes it out because it is in use, `evict` takes out the victim.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from colibri_mp.shm.policy import Lru


class Policy(Protocol):
    """The evictable experts of one layer."""

    def add(self, expert: int) -> None:
        """Make evictable: it has just been used."""

    def pop(self, expert: int, /) -> object:
        """Take out: it is in use."""

    def evict(self) -> int:
        """Take out and return the one to drop."""

    def __len__(self) -> int: ...

    def __contains__(self, expert: object) -> bool: ...


class PoolLru(Lru):
    """The pool's own policy."""

    def add(self, expert: int) -> None:
        self[expert] = None


class _Ranked(dict[int, float]):
    """Evicts the member with the least value, of equals the least recent, which stands first."""

    def evict(self) -> int:
        victim = min(self, key=self.__getitem__)
        del self[victim]
        return victim


class Lfu(_Ranked):
    """The least frequently used since the start, uses before an eviction included."""

    def __init__(self) -> None:
        super().__init__()
        self._uses: Counter[int] = Counter()

    def add(self, expert: int) -> None:
        self._uses[expert] += 1
        self[expert] = self._uses[expert]


class LruFreq(_Ranked):
    """Frequency x recency: the least number of uses over the number of the layer's uses since the last of them.

    The values are the times of the last uses.
    """

    def __init__(self) -> None:
        super().__init__()
        self._uses: Counter[int] = Counter()
        self._clock = 0

    def add(self, expert: int) -> None:
        self._clock += 1
        self._uses[expert] += 1
        self[expert] = self._clock

    def evict(self) -> int:
        now, uses = self._clock + 1, self._uses
        victim, _ = min(self.items(), key=lambda member: uses[member[0]] / (now - member[1]))
        del self[victim]
        return victim


class Lrfu(_Ranked):
    """The least count of uses where a use loses half its weight with each `half_life` later uses of the layer.

    Lee et al., "LRFU: a spectrum of policies that subsumes the least recently used and least frequently used policies" (IEEE
    Transactions on Computers 50, 2001). Values are the logarithm of the sum of 2^(time / half_life): decay keeps their order.
    """

    def __init__(self, half_life: int) -> None:
        super().__init__()
        self._half_life = half_life
        self._weights: dict[int, float] = {}
        self._clock = 0

    def add(self, expert: int) -> None:
        self._clock += 1
        now = self._clock / self._half_life
        before = self._weights.get(expert, -math.inf)
        self[expert] = self._weights[expert] = now + math.log2(1 + 2 ** (before - now))


class Belady(_Ranked):
    """The farthest next use goes first; knows the unions of all visits, past and to come. See `cache.BoundCache`."""

    def __init__(self, unions: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self._next_uses: dict[int, list[int]] = {}  # visits that are to come, the next one last, "never" first
        for visit in range(len(unions) - 1, -1, -1):
            for expert in unions[visit]:
                self._next_uses.setdefault(expert, [len(unions)]).append(visit)

    def add(self, expert: int) -> None:
        uses = self._next_uses[expert]
        uses.pop()
        self[expert] = -uses[-1]
