"""Byte layout of a pool segment: header, layer table, slot table, slabs (docs/pool-layout.md has the rules).

    0            128                                       slabs_offset (4096-aligned)
    ├─ HEADER ───┼─ LAYER x num_layers ─┼─ SLOT x num_slots ─┼─ slabs of the first layer ─┼─ slabs of the next ─ ...

All numbers are little-endian. A slot table entry and a slab belong together: slot i of a layer has its slab i.
Only sizes and dtypes here; who may write what, and when, is in `pool`.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from colibri_mp.errors import PoolError

MAGIC = b"COLIPOOL"
VERSION = 1
SLAB_ALIGNMENT = 4096  # bytes: a page, and what O_DIRECT asks for
NO_EXPERT = -1

HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("header_bytes", "<u4"),
        ("fingerprint", "S64"),
        ("first_layer", "<u4"),
        ("last_layer", "<u4"),
        ("num_layers", "<u4"),
        ("num_slots", "<u4"),
        ("slot_table_offset", "<u8"),
        ("slabs_offset", "<u8"),
        ("segment_bytes", "<u8"),
        ("generation", "<u8"),
    ]
)
LAYER = np.dtype(
    [
        ("layer", "<u4"),
        ("num_experts", "<u4"),
        ("num_slots", "<u4"),
        ("first_slot", "<u4"),
        ("slab_bytes", "<u8"),
        ("slabs_offset", "<u8"),
    ]
)
SLOT = np.dtype(
    [
        ("layer", "<u4"),
        ("expert", "<i4"),
        ("generation", "<u4"),
        ("heat", "<u4"),
        ("last_use", "<u8"),
        ("state", "u1"),
        ("flags", "u1"),
        ("padding", "V6"),
    ]
)


class SlotState(IntEnum):
    """What a slab holds. PINNED is a READY slot that is never evicted; nothing sets it yet."""

    FREE = 0
    LOADING = 1
    READY = 2
    PINNED = 3


class SlotFlag(IntFlag):
    """Facts about a slot that survive its contents."""

    PAGES_RESERVED = 1


class LayerSlots(NamedTuple):
    """The part of a pool that serves one MoE layer: `num_slots` slabs of `slab_bytes` (a multiple of 4096) each."""

    layer: int
    num_experts: int
    num_slots: int
    slab_bytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything is. Offsets are bytes from the start of the segment; slots are numbered through all layers."""

    layers: tuple[LayerSlots, ...]
    first_slots: tuple[int, ...]
    slabs_offsets: tuple[int, ...]
    num_slots: int
    slot_table_offset: int
    slabs_offset: int
    nbytes: int


def plan_layout(layers: Sequence[LayerSlots]) -> Layout:
    """Lay out a segment for `layers` (ascending, at least one). `PoolError` for numbers that make no pool."""
    _check(layers)
    slot_table_offset = HEADER.itemsize + LAYER.itemsize * len(layers)
    num_slots = sum(entry.num_slots for entry in layers)
    slabs_offset = _round_up(slot_table_offset + SLOT.itemsize * num_slots)
    first_slots, slabs_offsets = [], []
    slot, offset = 0, slabs_offset
    for entry in layers:
        first_slots.append(slot)
        slabs_offsets.append(offset)
        slot += entry.num_slots
        offset += entry.num_slots * entry.slab_bytes
    return Layout(
        tuple(layers), tuple(first_slots), tuple(slabs_offsets), num_slots, slot_table_offset, slabs_offset, offset
    )


def pool_bytes(layers: Sequence[LayerSlots]) -> int:
    """Size of the segment that a pool of these slots needs, tables included."""
    return plan_layout(layers).nbytes


def overhead_bytes(num_layers: int, num_slots: int) -> int:
    """Bytes of a segment that are not slabs."""
    return _round_up(HEADER.itemsize + LAYER.itemsize * num_layers + SLOT.itemsize * num_slots)


def header_of(layout: Layout, fingerprint: str) -> NDArray[np.void]:
    """The header record [1] of a fresh segment (generation 0) of the model with this fingerprint (ASCII, <= 64)."""
    header = np.zeros(1, dtype=HEADER)
    header[0] = (
        MAGIC,
        VERSION,
        HEADER.itemsize,
        fingerprint.encode("ascii"),
        layout.layers[0].layer,
        layout.layers[-1].layer,
        len(layout.layers),
        layout.num_slots,
        layout.slot_table_offset,
        layout.slabs_offset,
        layout.nbytes,
        0,
    )
    return header


def layer_table_of(layout: Layout) -> NDArray[np.void]:
    """The layer table [num_layers]."""
    table = np.zeros(len(layout.layers), dtype=LAYER)
    for idx, entry in enumerate(layout.layers):
        table[idx] = (
            entry.layer,
            entry.num_experts,
            entry.num_slots,
            layout.first_slots[idx],
            entry.slab_bytes,
            layout.slabs_offsets[idx],
        )
    return table


def slot_table_of(layout: Layout) -> NDArray[np.void]:
    """The slot table [num_slots] of a fresh segment: every slot FREE."""
    table = np.zeros(layout.num_slots, dtype=SLOT)
    table["layer"] = np.repeat([e.layer for e in layout.layers], [e.num_slots for e in layout.layers])
    table["expert"] = NO_EXPERT
    return table


def read_layout(buffer: NDArray[np.uint8]) -> tuple[Layout, str]:
    """The layout and the fingerprint that a segment states. `PoolError` for anything that is not such a segment."""
    if buffer.nbytes < HEADER.itemsize:
        raise PoolError(f"a segment of {buffer.nbytes} bytes holds no expert pool")
    header = buffer[: HEADER.itemsize].view(HEADER)[0]
    if header["magic"] != MAGIC:
        raise PoolError("the segment holds no expert pool (no magic number)")
    if header["version"] != VERSION:
        raise PoolError(f"the pool has layout version {header['version']}, this program reads version {VERSION}")
    end = HEADER.itemsize + LAYER.itemsize * int(header["num_layers"])
    table = buffer[HEADER.itemsize : end].view(LAYER) if end <= buffer.nbytes else np.zeros(0, LAYER)
    layout = plan_layout([LayerSlots(*(int(row[name]) for name in LayerSlots._fields)) for row in table])
    fingerprint = bytes(header["fingerprint"]).decode("ascii", "replace")
    expected = header_of(layout, fingerprint)
    expected["generation"] = header["generation"]
    if layout.nbytes > buffer.nbytes or expected[0] != header or not np.array_equal(layer_table_of(layout), table):
        raise PoolError("the pool's header and layer table disagree: the segment is damaged")
    return layout, fingerprint


def _check(layers: Sequence[LayerSlots]) -> None:
    if not layers or any(a.layer >= b.layer for a, b in itertools.pairwise(layers)):
        raise PoolError("a pool needs at least one layer, in ascending order")
    for entry in layers:
        if not 1 <= entry.num_slots <= entry.num_experts:
            raise PoolError(f"layer {entry.layer}: {entry.num_slots} slots for {entry.num_experts} experts")
        if entry.slab_bytes <= 0 or entry.slab_bytes % SLAB_ALIGNMENT:
            raise PoolError(f"layer {entry.layer}: slabs of {entry.slab_bytes} bytes, not a multiple of 4096")


def _round_up(nbytes: int) -> int:
    return -(-nbytes // SLAB_ALIGNMENT) * SLAB_ALIGNMENT
