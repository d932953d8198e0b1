"""Which expert goes next: the policies that `simulate` compares beside the pool's own (`shm.policy`), each on the experts of one layer.

They have the form of the pool's: a dictionary of the experts that may be evicted, the most recent one last. `used` says which
a step uses; these are taken out (`pop`) before and put back after it; `evict` takes out the victim.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Protocol


class Policy(Protocol):
    """The evictable experts of one layer."""

    def used(self, experts: Sequence[int], /) -> None:
        """A step uses these."""

    def __setitem__(self, expert: int, value: None, /) -> None:
        """Make evictable."""

    def pop(self, expert: int, /) -> object:
        """Take out: it is in use."""

    def evict(self) -> int:
        """Take out and return the one to drop."""

    def __len__(self) -> int: ...

    def __contains__(self, expert: object) -> bool: ...


class _Ranked(dict[int, None]):
    """Evicts the member with the least value, of equals the least recent, which stands first."""

    def __init__(self) -> None:
        super().__init__()
        self._values: Counter[int] = Counter()

    def evict(self) -> int:
        victim = min(self, key=self._values.__getitem__)
        del self[victim]
        return victim


class Lfu(_Ranked):
    """The least frequently used since the start, uses before an eviction included."""

    def used(self, experts: Sequence[int]) -> None:
        self._values.update(experts)


class LruFreq(_Ranked):
    """Frequency x recency: the least number of uses over the number of the layer's uses since the last of them."""

    def __init__(self) -> None:
        super().__init__()
        self._last_uses: Counter[int] = Counter()
        self._clock = 0

    def used(self, experts: Sequence[int]) -> None:
        self._values.update(experts)
        for expert in experts:
            self._clock += 1
            self._last_uses[expert] = self._clock

    def evict(self) -> int:
        now, uses, last_uses = self._clock + 1, self._values, self._last_uses
        victim = min(self, key=lambda expert: uses[expert] / (now - last_uses[expert]))
        del self[victim]
        return victim


class Belady(_Ranked):
    """The farthest next use goes first; knows the unions of all visits, past and to come. See `cache.BoundCache`."""

    def __init__(self, unions: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self._next_uses: dict[int, list[int]] = {}  # visits that are to come, the next one last, "never" first
        for visit in range(len(unions) - 1, -1, -1):
            for expert in unions[visit]:
                self._next_uses.setdefault(expert, [len(unions)]).append(visit)

    def used(self, experts: Sequence[int]) -> None:
        for expert in experts:
            uses = self._next_uses[expert]
            uses.pop()
            self._values[expert] = -uses[-1]
