"""What an observer sees of a pool without asking its worker: residency, for prefetch, `status` and `top`.

The owner writes while observers read, without locks: what a view returns is advice, right at some moment of the call.
"""

import numpy as np
from numpy.typing import NDArray

from colibri_mp.errors import PoolError
from colibri_mp.shm.layout import SlotFlag, SlotState, read_layout, slot_table_in
from colibri_mp.shm.segment import Segment


class PoolView:
    """Read-only look at the pool in an attached segment; use `attach`, and `close` at the end."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self.layout, self.fingerprint = read_layout(segment.buffer)
        self._slots: NDArray[np.void] | None = slot_table_in(segment.buffer, self.layout)
        self._slots.flags.writeable = False

    @classmethod
    def attach(cls, name: str) -> "PoolView":
        """Attach to the segment `name`; `PoolError` if there is none or no pool in it yet."""
        segment = Segment.attach(name)
        try:
            return cls(segment)
        except PoolError:
            segment.close()
            raise

    def slots(self) -> NDArray[np.void]:
        """A copy of the slot table [num_slots] (dtype `layout.SLOT`)."""
        assert self._slots is not None, "the view is closed"
        return self._slots.copy()

    def resident(self, layer: int) -> NDArray[np.bool_]:
        """Which experts of a layer can be used without a read, bool [E]; staged ones do not count."""
        for entry in self.layout.layers:
            if entry.layer == layer:
                table = self.slots()
                experts = table["expert"][_is_resident(table) & (table["layer"] == layer)]
                resident = np.zeros(entry.num_experts, dtype=np.bool_)
                resident[experts[(experts >= 0) & (experts < entry.num_experts)]] = True
                return resident
        raise PoolError(f"layer {layer} is not in pool {self._segment.name!r}")

    @property
    def layers(self) -> list[int]:
        """The layers of the pool."""
        return [entry.layer for entry in self.layout.layers]

    def pinned(self, layer: int) -> list[int]:
        """The experts of a layer that are PINNED, ascending."""
        table = self.slots()
        experts = table["expert"][(table["state"] == SlotState.PINNED) & (table["layer"] == layer)]
        return sorted(experts.tolist())

    def num_resident(self) -> int:
        """Slots of layers that hold a complete expert."""
        return int(np.count_nonzero(_is_resident(self.slots())))

    def reserved_bytes(self) -> int:
        """Memory that the pool takes now: its tables, and the slabs whose pages have been committed."""
        classes = self.layout.classes
        slab_bytes = np.repeat([entry.slab_bytes for entry in classes], [entry.num_slots for entry in classes])
        is_reserved = self.slots()["flags"] & SlotFlag.PAGES_RESERVED != 0
        return self.layout.slabs_offset + int(slab_bytes[is_reserved].sum())

    def close(self) -> None:
        """Unmap the segment."""
        self._slots = None
        self._segment.close()


def _is_resident(table: NDArray[np.void]) -> NDArray[np.bool_]:
    """READY or PINNED and not staged, for each slot of the table."""
    is_resident: NDArray[np.bool_] = (table["state"] >= SlotState.READY) & (table["flags"] & SlotFlag.STAGED == 0)
    return is_resident
