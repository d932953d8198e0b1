"""The bytes of a pool segment, written out by hand: a change of them needs a new layout version."""

import struct

import numpy as np
import pytest
from segments import fresh_name

from colibri_mp.errors import PoolError
from colibri_mp.shm.layout import (
    CLASS,
    HEADER,
    LAYER,
    SLOT,
    LayerSlots,
    overhead_bytes,
    plan_layout,
    pool_bytes,
    read_layout,
)
from colibri_mp.shm.pool import ExpertPool
from colibri_mp.shm.segment import Segment

LAYERS = (LayerSlots(3, 64, 2, 8192), LayerSlots(7, 32, 1, 4096), LayerSlots(9, 16, 3, 8192))
NUM_STAGING = 1
NO_LAYER = 0xFFFFFFFF
FINGERPRINT = "0123456789abcdef" * 4


def expected_tables() -> bytes:
    """Header and tables after: layer 3 used experts 9 and 5, then 9, which is pinned; 4 is staged for 9; a shrunk pool.

    The two slots of 4096 bytes are 0 and 1, the six of 8192 bytes are 2 to 7.
    """
    header = struct.pack("<8sII64sIIIIQQQQ", b"COLIPOOL", 2, 128, FINGERPRINT.encode(), 3, 2, 8, 1, 288, 4096, 61440, 1)
    layers = (
        struct.pack("<IIIII4xQ", 3, 64, 2, 2, 1, 8192)
        + struct.pack("<IIIII4xQ", 7, 32, 1, 1, 0, 4096)
        + struct.pack("<IIIII4xQ", 9, 16, 3, 2, 1, 8192)
    )
    classes = struct.pack("<QQIII4x", 4096, 4096, 0, 2, 1) + struct.pack("<QQIII4x", 8192, 12288, 2, 6, 1)
    free = struct.pack("<IiIBB2xQ", NO_LAYER, -1, 0, 0, 0, 0)
    slots = (
        2 * free
        + struct.pack("<IiIBB2xQ", 3, 9, 1, 3, 1, 3)
        + struct.pack("<IiIBB2xQ", 3, 5, 1, 2, 1, 1)
        + struct.pack("<IiIBB2xQ", 9, 4, 1, 1, 3, 0)
        + 3 * free
    )
    return header + layers + classes + slots


def test_bytes_of_a_used_pool() -> None:
    """Header and tables are these bytes exactly, and the rest up to the slabs is zero."""
    with Segment.create(fresh_name(), pool_bytes(LAYERS, NUM_STAGING)) as segment:
        pool = ExpertPool(segment, LAYERS, FINGERPRINT, floor=1, staging=NUM_STAGING)
        for experts in ([9, 5], [9]):
            held = pool.acquire(3, experts)
            for slot, generation in zip(held.miss_slots, held.generations, strict=True):
                pool.mark_ready(slot, generation)
            pool.release(held)
        assert pool.pin(3, 9)
        assert pool.stage(9, 4) == (4, 1)
        assert pool.resize(6 * 8192) == 2 * 4096 + 5 * 8192
        expected = expected_tables()
        assert segment.buffer[: len(expected)].tobytes() == expected
        assert segment.buffer[len(expected) : 4096].max() == 0
        assert read_layout(segment.buffer) == (plan_layout(LAYERS, NUM_STAGING), FINGERPRINT)
        pool.check_integrity()


def test_sizes_of_the_records() -> None:
    """The records have the sizes that docs/pool-layout.md states."""
    assert (HEADER.itemsize, LAYER.itemsize, CLASS.itemsize, SLOT.itemsize) == (128, 32, 32, 24)
    assert overhead_bytes(2, 1, 3) == 4096
    assert overhead_bytes(48, 2, 48 * 128 + 16) == 151_552
    assert overhead_bytes(3, 2, 8) == plan_layout(LAYERS, NUM_STAGING).slabs_offset


@pytest.mark.parametrize(
    ("offset", "message"),
    [
        (0, "no magic"),
        (8, "version"),
        (12, "disagree"),  # header_bytes
        (16, "disagree"),  # fingerprint, not ASCII any more
        (83, "layers: the segment is damaged"),
        (84, "disagree"),  # num_classes
        (88, "disagree"),  # num_slots
        (92, "disagree"),  # num_staging
        (96, "disagree"),  # slot_table_offset
        (128, "ascending"),  # layer
        (140, "disagree"),  # limit above the slots
        (144, "disagree"),  # class_idx
        (128 + 3 * 32 + 16, "disagree"),  # first_slot of a class
        (128 + 3 * 32 + 24, "disagree"),  # staging_limit above the staging
    ],
)
def test_damaged_header_is_refused(offset: int, message: str) -> None:
    """Flipped bits in the magic number, version, sizes or layer table is an error that says so."""
    with Segment.create(fresh_name(), pool_bytes(LAYERS, NUM_STAGING)) as segment:
        ExpertPool(segment, LAYERS, FINGERPRINT, staging=NUM_STAGING)
        segment.buffer[offset] ^= 0x81
        with pytest.raises(PoolError, match=message):
            read_layout(segment.buffer)


@pytest.mark.parametrize(
    "layers",
    [
        (),
        (LayerSlots(1, 4, 2, 4096), LayerSlots(1, 4, 2, 4096)),
        (LayerSlots(1, 4, 5, 4096),),
        (LayerSlots(1, 4, 0, 4096),),
        (LayerSlots(1, 4, 2, 4000),),
    ],
)
def test_numbers_that_make_no_pool_are_refused(layers: tuple[LayerSlots, ...]) -> None:
    """No layer, a layer twice, more slots than experts, no slot, an unaligned slab."""
    with pytest.raises(PoolError):
        plan_layout(layers)


def test_less_than_no_staging_is_refused() -> None:
    """The number of staging slots is not negative."""
    with pytest.raises(PoolError, match="-1 staging slots"):
        plan_layout(LAYERS, -1)


def test_slots_are_grouped_by_slab_size() -> None:
    """Layers with slabs of one size share a class, staging is added to each, and slabs lie one after the other."""
    layout = plan_layout(LAYERS, 4)
    assert layout.class_of_layer == (1, 0, 1)
    assert [entry.num_slots for entry in layout.classes] == [1 + 4, 5 + 4]
    assert [entry.first_slot for entry in layout.classes] == [0, 5]
    assert [entry.slabs_offset for entry in layout.classes] == [4096, 4096 + 5 * 4096]
    assert layout.nbytes == 4096 + 5 * 4096 + 9 * 8192


def test_arbitrary_bytes_never_crash_the_reader() -> None:
    """Random bytes behind a right magic and version are refused with a PoolError, whatever they say."""
    rng = np.random.default_rng(1)
    for _ in range(300):
        buffer = rng.integers(0, 256, 4096, dtype=np.uint8)
        buffer[:12] = np.frombuffer(b"COLIPOOL" + struct.pack("<I", 2), np.uint8)
        buffer[80:84] = np.frombuffer(struct.pack("<I", int(rng.integers(0, 200))), np.uint8)
        with pytest.raises(PoolError):
            read_layout(buffer)
