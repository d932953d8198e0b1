"""The shared side of a pool: its segment formatted or checked, and views of the tables and slabs in it.

One view for each column that changes, all writable: `slots` is their only writer. What they say of each other, and of
the state in memory, is held together by `integrity`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_mp.errors import PoolError
from colibri_mp.shm.layout import (
    HEADER,
    MAGIC,
    LayerSlots,
    SlotFlag,
    class_table_in,
    class_table_of,
    header_of,
    layer_table_in,
    layer_table_of,
    plan_layout,
    read_layout,
    slot_table_in,
    slot_table_of,
)
from colibri_mp.shm.segment import Segment

PAGES_RESERVED = int(SlotFlag.PAGES_RESERVED)


class PoolTables:
    """Tables and slabs of the pool in `segment`; valid until `close`, which must come before the segment's."""

    def __init__(self, segment: Segment, layers: Sequence[LayerSlots], fingerprint: str, num_staging: int) -> None:
        """Format a fresh segment, or check that a used one is of the same model, layers and slots (else `PoolError`)."""
        self.segment = segment
        self.layout = plan_layout(layers, num_staging)
        self.fingerprint = fingerprint
        if segment.nbytes < self.layout.nbytes:
            raise PoolError(f"segment {segment.name!r} has {segment.nbytes} bytes, its pool needs {self.layout.nbytes}")
        if bytes(segment.buffer[: len(MAGIC)]) != MAGIC:
            self._format()
        self.check_header()
        self._map()

    def check_header(self) -> None:
        """`PoolError` if the segment belongs to another model, or was made for other layers or slots."""
        stated, fingerprint = read_layout(self.segment.buffer)
        if fingerprint != self.fingerprint:
            raise PoolError(f"segment {self.segment.name!r} holds experts of another model ({fingerprint[:12]}...)")
        if stated != self.layout:
            raise PoolError(f"segment {self.segment.name!r} was made for other layers or slots than these")

    def slab_view(self, slot: int, nbytes: int) -> NDArray[np.uint8]:
        """The first `nbytes` of a slab, writable."""
        offset = self._slab_offset(slot)
        return self.segment.buffer[offset : offset + nbytes]

    def reserve_slab(self, slot: int, nbytes: int) -> None:
        """Commit the pages of a FREE slot's slab. `PoolError` if /dev/shm is full."""
        self.segment.reserve(self._slab_offset(slot), nbytes)
        self.flags[slot] |= PAGES_RESERVED

    def punch_slab(self, slot: int, nbytes: int) -> bool:
        """Give the pages of a FREE slot's slab back; False where the system cannot do that.

        The flag goes first: whoever takes over after a crash in between reserves once more, which harms nothing.
        """
        is_gone = False
        self.flags[slot] &= ~PAGES_RESERVED
        try:
            is_gone = self.segment.punch(self._slab_offset(slot), nbytes)
        finally:
            if not is_gone:
                self.flags[slot] |= PAGES_RESERVED
        return is_gone

    def close(self) -> None:
        """Drop the views, so that the segment can be unmapped; the tables cannot be used afterwards."""
        del self.slots, self.layers, self.experts, self.generations, self.states, self.flags, self.last_use
        del self.limits, self.staging_limits

    def _slab_offset(self, slot: int) -> int:
        return int(self.addresses[slot]) - self.segment.address

    def _format(self) -> None:
        """Write header and tables of a fresh segment; the magic number last, so that a crash leaves it fresh."""
        layout, buffer = self.layout, self.segment.buffer
        self.segment.reserve(0, layout.slabs_offset)
        header = header_of(layout, self.fingerprint).view(np.uint8)
        made = (layer_table_of(layout), class_table_of(layout), slot_table_of(layout))
        tables = np.concatenate([table.view(np.uint8) for table in made])
        buffer[HEADER.itemsize : HEADER.itemsize + tables.nbytes] = tables
        buffer[len(MAGIC) : HEADER.itemsize] = header[len(MAGIC) :]
        buffer[: len(MAGIC)] = header[: len(MAGIC)]

    def _map(self) -> None:
        """The columns of the tables as memoryviews, which read and write single items in half of numpy's time.

        `slots` is the whole slot table [num_slots]; `addresses` i64 [num_slots] says where each slab is.
        """
        layout, buffer = self.layout, self.segment.buffer
        buffer[: HEADER.itemsize].view(HEADER)["generation"] += 1
        self.limits = _column(layer_table_in(buffer, len(layout.layers)), "limit")
        self.staging_limits = _column(class_table_in(buffer, layout), "staging_limit")
        self.slots = slot_table_in(buffer, layout)
        self.layers, self.experts = _column(self.slots, "layer"), _column(self.slots, "expert")
        self.states, self.flags = _column(self.slots, "state"), _column(self.slots, "flags")
        self.generations, self.last_use = _column(self.slots, "generation"), _column(self.slots, "last_use")
        slabs = [
            self.segment.address + entry.slabs_offset + np.arange(entry.num_slots, dtype=np.int64) * entry.slab_bytes
            for entry in layout.classes
        ]
        self.addresses: NDArray[np.int64] = np.concatenate(slabs)


def _column(table: NDArray[np.void], name: str) -> memoryview:
    column: Any = table[name]
    return memoryview(column)
