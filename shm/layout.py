"""Byte layout of a pool segment: header, tables, slabs (docs/pool-layout.md has the rules).

    0            128                                                               slabs_offset (4096-aligned)
    ├─ HEADER ───┼─ LAYER x num_layers ─┼─ CLASS x num_classes ─┼─ SLOT x num_slots ─┼─ slabs of the 1st class ─ ...

Slots whose slabs have one size are a class, so that a slot can pass from one layer to another, or to staging, without a
copy. A slot table entry and a slab belong together: slot i of a class has its slab i. All numbers are little-endian.
Only sizes and dtypes here; who may write what, and when, is in `slots`.
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
VERSION = 2
SLAB_ALIGNMENT = 4096  # bytes: a page, and what O_DIRECT asks for
NO_LAYER = 0xFFFFFFFF
NO_EXPERT = -1

HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("header_bytes", "<u4"),
        ("fingerprint", "S64"),
        ("num_layers", "<u4"),
        ("num_classes", "<u4"),
        ("num_slots", "<u4"),
        ("num_staging", "<u4"),
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
        ("limit", "<u4"),
        ("class_idx", "<u4"),
        ("padding", "V4"),
        ("slab_bytes", "<u8"),
    ]
)
CLASS = np.dtype(
    [
        ("slab_bytes", "<u8"),
        ("slabs_offset", "<u8"),
        ("first_slot", "<u4"),
        ("num_slots", "<u4"),
        ("staging_limit", "<u4"),
        ("padding", "V4"),
    ]
)
SLOT = np.dtype(
    [
        ("layer", "<u4"),
        ("expert", "<i4"),
        ("generation", "<u4"),
        ("state", "u1"),
        ("flags", "u1"),
        ("padding", "V2"),
        ("last_use", "<u8"),
    ]
)


class SlotState(IntEnum):
    """What a slab holds. PINNED is a READY slot that is never evicted."""

    FREE = 0
    LOADING = 1
    READY = 2
    PINNED = 3


class SlotFlag(IntFlag):
    """PAGES_RESERVED: the slab has pages, so writing it cannot fail. STAGED: the slot does not belong to its layer yet."""

    PAGES_RESERVED = 1
    STAGED = 2


class LayerSlots(NamedTuple):
    """The part of a pool that serves one MoE layer: `num_slots` slabs of `slab_bytes` (a multiple of 4096) each."""

    layer: int
    num_experts: int
    num_slots: int
    slab_bytes: int


class ClassSlots(NamedTuple):
    """All slots of one slab size, staging included: `num_slots` from `first_slot` on, their slabs one after the other."""

    slab_bytes: int
    slabs_offset: int
    first_slot: int
    num_slots: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything is. Offsets are bytes from the start of the segment; slots are numbered through all classes.

    `num_staging` slots of each class belong to no layer; `class_of_layer` [num_layers] are indices of `classes`.
    """

    layers: tuple[LayerSlots, ...]
    num_staging: int
    classes: tuple[ClassSlots, ...]
    class_of_layer: tuple[int, ...]
    num_slots: int
    slot_table_offset: int
    slabs_offset: int
    nbytes: int


def plan_layout(layers: Sequence[LayerSlots], num_staging: int = 0) -> Layout:
    """Lay out a segment for `layers` (ascending, at least one), and `num_staging` more slots for each slab size.

    Raises `PoolError` for numbers that make no pool.
    """
    _check(layers, num_staging)
    sizes = sorted({entry.slab_bytes for entry in layers})
    counts = [num_staging + sum(e.num_slots for e in layers if e.slab_bytes == size) for size in sizes]
    slot_table_offset = HEADER.itemsize + LAYER.itemsize * len(layers) + CLASS.itemsize * len(sizes)
    first_slots = list(itertools.accumulate(counts, initial=0))
    slabs_offset = _round_up(slot_table_offset + SLOT.itemsize * first_slots[-1])
    class_bytes = [size * count for size, count in zip(sizes, counts, strict=True)]
    offsets = list(itertools.accumulate(class_bytes, initial=slabs_offset))
    return Layout(
        layers=tuple(layers),
        num_staging=num_staging,
        classes=tuple(map(ClassSlots, sizes, offsets, first_slots, counts)),
        class_of_layer=tuple(sizes.index(entry.slab_bytes) for entry in layers),
        num_slots=first_slots[-1],
        slot_table_offset=slot_table_offset,
        slabs_offset=slabs_offset,
        nbytes=offsets[-1],
    )


def pool_bytes(layers: Sequence[LayerSlots], num_staging: int = 0) -> int:
    """Size of the segment that a pool of these slots needs, tables included."""
    return plan_layout(layers, num_staging).nbytes


def overhead_bytes(num_layers: int, num_classes: int, num_slots: int) -> int:
    """Bytes of a segment that are not slabs; `num_slots` with staging."""
    tables = LAYER.itemsize * num_layers + CLASS.itemsize * num_classes + SLOT.itemsize * num_slots
    return _round_up(HEADER.itemsize + tables)


def header_of(layout: Layout, fingerprint: str) -> NDArray[np.void]:
    """The header record [1] of a fresh segment (generation 0) of the model with this fingerprint (ASCII, <= 64)."""
    header = np.zeros(1, dtype=HEADER)
    header[0] = (
        MAGIC,
        VERSION,
        HEADER.itemsize,
        fingerprint.encode("ascii"),
        len(layout.layers),
        len(layout.classes),
        layout.num_slots,
        layout.num_staging,
        layout.slot_table_offset,
        layout.slabs_offset,
        layout.nbytes,
        0,
    )
    return header


def layer_table_of(layout: Layout) -> NDArray[np.void]:
    """The layer table [num_layers] of a pool at its full size."""
    table = np.zeros(len(layout.layers), dtype=LAYER)
    for row, entry, class_idx in zip(table, layout.layers, layout.class_of_layer, strict=True):
        for name in LayerSlots._fields:
            row[name] = getattr(entry, name)
        row["limit"], row["class_idx"] = entry.num_slots, class_idx
    return table


def class_table_of(layout: Layout) -> NDArray[np.void]:
    """The class table [num_classes] of a pool at its full size."""
    table = np.zeros(len(layout.classes), dtype=CLASS)
    for row, entry in zip(table, layout.classes, strict=True):
        for name in ClassSlots._fields:
            row[name] = getattr(entry, name)
        row["staging_limit"] = layout.num_staging
    return table


def slot_table_of(layout: Layout) -> NDArray[np.void]:
    """The slot table [num_slots] of a fresh segment: every slot FREE."""
    table = np.zeros(layout.num_slots, dtype=SLOT)
    table["layer"], table["expert"] = NO_LAYER, NO_EXPERT
    return table


def layer_table_in(buffer: NDArray[np.uint8], num_layers: int) -> NDArray[np.void]:
    """The layer table [num_layers] in a segment's bytes, as a view."""
    return buffer[HEADER.itemsize :][: LAYER.itemsize * num_layers].view(LAYER)


def class_table_in(buffer: NDArray[np.uint8], layout: Layout) -> NDArray[np.void]:
    """The class table [num_classes] in a segment's bytes, as a view."""
    start = HEADER.itemsize + LAYER.itemsize * len(layout.layers)
    return buffer[start : layout.slot_table_offset].view(CLASS)


def slot_table_in(buffer: NDArray[np.uint8], layout: Layout) -> NDArray[np.void]:
    """The slot table [num_slots] in a segment's bytes, as a view."""
    return buffer[layout.slot_table_offset :][: SLOT.itemsize * layout.num_slots].view(SLOT)


def read_layout(buffer: NDArray[np.uint8]) -> tuple[Layout, str]:
    """The layout and the fingerprint that a segment states. `PoolError` for anything that is not such a segment."""
    if buffer.nbytes < HEADER.itemsize:
        raise PoolError(f"a segment of {buffer.nbytes} bytes holds no expert pool")
    header = buffer[: HEADER.itemsize].view(HEADER)[0]
    if header["magic"] != MAGIC:
        raise PoolError("the segment holds no expert pool (no magic number)")
    if header["version"] != VERSION:
        raise PoolError(f"the pool has layout version {header['version']}, this program reads version {VERSION}")
    num_layers = int(header["num_layers"])
    if HEADER.itemsize + LAYER.itemsize * num_layers > buffer.nbytes:
        raise PoolError(f"the pool's header states {num_layers} layers: the segment is damaged")
    rows = layer_table_in(buffer, num_layers)
    entries = [LayerSlots(*(int(row[name]) for name in LayerSlots._fields)) for row in rows]
    layout = plan_layout(entries, int(header["num_staging"]))
    fingerprint = bytes(header["fingerprint"])
    is_sound = layout.nbytes <= buffer.nbytes and fingerprint.isascii()
    if not is_sound or not _tables_agree(buffer, layout, fingerprint.decode("ascii")):
        raise PoolError("the pool's header, layer table and class table disagree: the segment is damaged")
    return layout, fingerprint.decode("ascii")


def _tables_agree(buffer: NDArray[np.uint8], layout: Layout, fingerprint: str) -> bool:
    """Whether header, layers and classes are those of `layout`, but for what changes: generation and limits."""
    header = buffer[: HEADER.itemsize].view(HEADER).copy()
    layers, classes = layer_table_in(buffer, len(layout.layers)).copy(), class_table_in(buffer, layout).copy()
    if (layers["limit"] > layers["num_slots"]).any() or (classes["staging_limit"] > layout.num_staging).any():
        return False
    header["generation"] = 0
    layers["limit"], classes["staging_limit"] = layers["num_slots"], layout.num_staging
    stated = b"".join(table.tobytes() for table in (header, layers, classes))
    expected = (header_of(layout, fingerprint), layer_table_of(layout), class_table_of(layout))
    return stated == b"".join(table.tobytes() for table in expected)


def _check(layers: Sequence[LayerSlots], num_staging: int) -> None:
    if num_staging < 0:
        raise PoolError(f"a pool cannot have {num_staging} staging slots")
    if not layers or any(a.layer >= b.layer for a, b in itertools.pairwise(layers)):
        raise PoolError("a pool needs at least one layer, in ascending order")
    for entry in layers:
        if not 1 <= entry.num_slots <= entry.num_experts:
            raise PoolError(f"layer {entry.layer}: {entry.num_slots} slots for {entry.num_experts} experts")
        if entry.slab_bytes <= 0 or entry.slab_bytes % SLAB_ALIGNMENT:
            raise PoolError(f"layer {entry.layer}: slabs of {entry.slab_bytes} bytes, not a multiple of 4096")


def _round_up(nbytes: int) -> int:
    return -(-nbytes // SLAB_ALIGNMENT) * SLAB_ALIGNMENT
