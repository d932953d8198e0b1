"""Bookkeeping of slots for recurrent states: ids and keys only, no arrays (those are in `kernels.delta_inputs`).

A slot holds what a sequence's recurrent layers know after some number of its tokens, the same number in all layers.

    free ── take ──▶ owned by one sequence ── keep ──▶ kept, to be found by what it holds ── hold ──▶ held by several that start from it
      ▲                     │ release                          │ evict, drop                                   │ let_go
      └─────────────────────┴◀─────────────────────────────────┘◀──────────────────────────────────────────────┘

A kept state is named by the key of the KV block that ends where it does (`kvcache.PrefixKeys`) and is never written again. When a slot is
needed and none is free, the kept one that was used least recently and that nobody holds gives way.
"""

from collections import Counter


class StateSlots:
    """Hands out slot ids 0 .. num_slots - 1."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_evicted = 0
        self._free = list(range(num_slots - 1, -1, -1))
        self._kept: dict[bytes, int] = {}  # least recently used first
        self._holders: Counter[bytes] = Counter()

    @property
    def num_kept(self) -> int:
        """Slots that can be found by what they hold."""
        return len(self._kept)

    def __contains__(self, key: bytes) -> bool:
        return key in self._kept

    def num_takeable(self, besides: bytes | None = None) -> int:
        """Slots that `take` could give, were the kept one `besides` held."""
        idle = sum(not self._holders[key] and key != besides for key in self._kept)
        return len(self._free) + idle

    def take(self) -> int | None:
        """A slot for one sequence alone, or None: all are in use."""
        if not self._free:
            key = next((key for key in self._kept if not self._holders[key]), None)
            if key is None:
                return None
            self.drop(key)
            self.num_evicted += 1
        return self._free.pop()

    def release(self, slot: int) -> None:
        """Give a slot back that `take` gave."""
        self._free.append(slot)

    def keep(self, slot: int, key: bytes) -> None:
        """Let an owned slot be found by its content; where that is kept already, the slot is free."""
        if key in self._kept:
            self.release(slot)
        else:
            self._kept[key] = slot

    def hold(self, key: bytes) -> int:
        """The slot of a kept state, which stays until it is let go."""
        slot = self._kept[key] = self._kept.pop(key)  # the last one used
        self._holders[key] += 1
        return slot

    def let_go(self, key: bytes) -> None:
        """Undo a `hold`."""
        self._holders[key] -= 1
        if not self._holders[key]:
            del self._holders[key]

    def drop(self, key: bytes) -> None:
        """Forget a kept state, unless somebody holds it or it has gone."""
        if key in self._kept and not self._holders[key]:
            self.release(self._kept.pop(key))

    def slot_of(self, key: bytes) -> int:
        """Where a kept state lies."""
        return self._kept[key]

    def check_integrity(self, owned: list[int], held: list[bytes]) -> None:
        """Assert that each slot is free, kept or owned once, and held as often as counted."""
        assert sorted(self._free + list(self._kept.values()) + owned) == list(range(self.num_slots)), (
            "slots lost or owned twice"
        )
        assert Counter(held) == self._holders, "states held by nobody, or more often than counted"
