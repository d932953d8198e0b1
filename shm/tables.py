"""The shared side of a pool: its segment formatted or checked, and views of the tables and slabs in it.

One array for each column of the slot table, all writable: `pool` is their only writer. What they say of each other, and
of the state in memory, is held together by `integrity`.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from colibri_mp.errors import PoolError
from colibri_mp.shm.layout import (
    HEADER,
    MAGIC,
    SLOT,
    LayerSlots,
    Layout,
    SlotFlag,
    header_of,
    layer_table_of,
    plan_layout,
    read_layout,
    slot_table_of,
)
from colibri_mp.shm.segment import Segment


class PoolTables:
    """Tables and slabs of the pool in `segment`; valid until `close`, which must come before the segment's."""

    def __init__(self, segment: Segment, layers: Sequence[LayerSlots], fingerprint: str) -> None:
        """Format a fresh segment, or check that a used one is of the same model, layers and slots (else `PoolError`)."""
        self.segment = segment
        self.layout = plan_layout(layers)
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
        """Commit a slab's pages on its first use; only a FREE slot can be without them."""
        if not self.flags[slot] & SlotFlag.PAGES_RESERVED:
            self.segment.reserve(self._slab_offset(slot), nbytes)
            self.flags[slot] |= SlotFlag.PAGES_RESERVED

    def close(self) -> None:
        """Drop the views, so that the segment can be unmapped; the tables cannot be used afterwards."""
        del self.slots, self.experts, self.generations, self.states, self.flags, self.last_use

    def _slab_offset(self, slot: int) -> int:
        return int(self.addresses[slot]) - self.segment.address

    def _format(self) -> None:
        """Write header and tables of a fresh segment; the magic number last, so that a crash leaves it fresh."""
        self.segment.reserve(0, self.layout.slabs_offset)
        header = header_of(self.layout, self.fingerprint).view(np.uint8)
        tables = np.concatenate([layer_table_of(self.layout).view(np.uint8), slot_table_of(self.layout).view(np.uint8)])
        buffer = self.segment.buffer
        buffer[HEADER.itemsize : HEADER.itemsize + tables.nbytes] = tables
        buffer[len(MAGIC) : HEADER.itemsize] = header[len(MAGIC) :]
        buffer[: len(MAGIC)] = header[: len(MAGIC)]

    def _map(self) -> None:
        """Views of the columns of the slot table [num_slots], and the address of each slab, i64 [num_slots]."""
        layout, buffer = self.layout, self.segment.buffer
        buffer[: HEADER.itemsize].view(HEADER)["generation"] += 1
        self.slots = slot_table_in(buffer, layout)
        self.experts, self.generations = self.slots["expert"], self.slots["generation"]
        self.states, self.flags, self.last_use = self.slots["state"], self.slots["flags"], self.slots["last_use"]
        slabs = [
            self.segment.address + offset + np.arange(entry.num_slots, dtype=np.int64) * entry.slab_bytes
            for entry, offset in zip(layout.layers, layout.slabs_offsets, strict=True)
        ]
        self.addresses: NDArray[np.int64] = np.concatenate(slabs)


def slot_table_in(buffer: NDArray[np.uint8], layout: Layout) -> NDArray[np.void]:
    """The slot table [num_slots] in a segment's bytes, as a view."""
    return buffer[layout.slot_table_offset :][: SLOT.itemsize * layout.num_slots].view(SLOT)
