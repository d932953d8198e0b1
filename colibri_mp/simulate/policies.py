"""Which expert goes next: the policies that `simulate` compares, each on the experts of one layer.

`add` makes an expert evictable as the one used last, `remove` takes it out because it is in use, `evict` takes out and
returns the victim. `lru` is the pool's own.
"""

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from colibri_mp.shm.policy import Lru


class Policy(Protocol):
    """The evictable experts of one layer."""

    def add(self, expert: int) -> None:
        """Make evictable: it has just been used."""

    def remove(self, expert: int) -> None:
        """Take out: it is in use."""

    def evict(self) -> int:
        """Take out and return the one to drop."""

    def __len__(self) -> int: ...

    def __contains__(self, expert: object) -> bool: ...


class LeastRecent(Lru):
    """The pool's own policy, with experts in the place of slots."""

    def add(self, expert: int) -> None:
        """Make evictable: it has just been used."""
        self[expert] = None

    def remove(self, expert: int) -> None:
        """Take out: it is in use."""
        del self[expert]


class _Ranked:
    """Evicts the member with the least key. Keys are given by `_insert` alone; entries of the heap that are outdated are skipped."""

    def __init__(self) -> None:
        self._keys: dict[int, tuple[float, int]] = {}
        self._heap: list[tuple[tuple[float, int], int]] = []

    def _insert(self, expert: int, key: tuple[float, int]) -> None:
        self._keys[expert] = key
        heapq.heappush(self._heap, (key, expert))

    def remove(self, expert: int) -> None:
        del self._keys[expert]

    def evict(self) -> int:
        while True:
            key, expert = heapq.heappop(self._heap)
            if self._keys.get(expert) == key:
                del self._keys[expert]
                return expert

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, expert: object) -> bool:
        return expert in self._keys


class Lfu(_Ranked):
    """The least frequently used since the start, uses before an eviction included; of equals the least recent."""

    def __init__(self) -> None:
        super().__init__()
        self._uses: Counter[int] = Counter()
        self._clock = 0

    def add(self, expert: int) -> None:
        self._clock += 1
        self._uses[expert] += 1
        self._insert(expert, (self._uses[expert], self._clock))


class LruFreq:
    """Frequency x recency: the least number of uses over the number of the layer's uses since the last of them."""

    def __init__(self) -> None:
        self._uses: Counter[int] = Counter()
        self._last: dict[int, int] = {}
        self._clock = 0

    def add(self, expert: int) -> None:
        self._clock += 1
        self._uses[expert] += 1
        self._last[expert] = self._clock

    def remove(self, expert: int) -> None:
        del self._last[expert]

    def evict(self) -> int:
        now, uses = self._clock + 1, self._uses
        victim, _ = min(self._last.items(), key=lambda member: uses[member[0]] / (now - member[1]))
        del self._last[victim]
        return victim

    def __len__(self) -> int:
        return len(self._last)

    def __contains__(self, expert: object) -> bool:
        return expert in self._last


class Lrfu(_Ranked):
    """The least count of uses where a use loses half its weight with each `half_life` later uses of the layer.

    Lee et al., "LRFU: a spectrum of policies that subsumes the least recently used and least frequently used policies" (IEEE
    Transactions on Computers 50, 2001). Counts are kept as the logarithm of the sum of 2^(time / half_life): decay keeps the order.
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
        self._weights[expert] = weight = now + math.log2(1 + 2 ** (before - now))
        self._insert(expert, (weight, self._clock))


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
        self._insert(expert, (-uses[-1], expert))
