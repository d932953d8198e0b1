"""The bytes of a pool segment, written out by hand: a change of them needs a new layout version."""

import secrets
import struct

import numpy as np
import pytest

from colibri_mp.errors import PoolError
from colibri_mp.shm.layout import HEADER, LAYER, SLOT, LayerSlots, overhead_bytes, plan_layout, pool_bytes, read_layout
from colibri_mp.shm.pool import ExpertPool
from colibri_mp.shm.segment import Segment, segment_name

LAYERS = (LayerSlots(3, 64, 2, 8192), LayerSlots(7, 32, 1, 4096))
FINGERPRINT = "0123456789abcdef" * 4


def expected_tables() -> bytes:
    """Header, layer table and slot table after: experts 9 and 5 into layer 3, then 9 again; nothing in layer 7."""
    header = struct.pack(
        "<8sII64sIIIIQQQQ", b"COLIPOOL", 1, 128, FINGERPRINT.encode(), 3, 7, 2, 3, 192, 4096, 4096 + 2 * 8192 + 4096, 1
    )
    layers = struct.pack("<IIIIQQ", 3, 64, 2, 0, 8192, 4096) + struct.pack("<IIIIQQ", 7, 32, 1, 2, 4096, 20480)
    slots = (
        struct.pack("<IiIIQBB6x", 3, 5, 1, 0, 1, 2, 1)
        + struct.pack("<IiIIQBB6x", 3, 9, 1, 0, 3, 2, 1)
        + struct.pack("<IiIIQBB6x", 7, -1, 0, 0, 0, 0, 0)
    )
    return header + layers + slots


def test_bytes_of_a_used_pool() -> None:
    """Header, layer table and slot table are these bytes exactly, and the rest up to the slabs is zero."""
    with Segment.create(segment_name(secrets.token_hex(4), 0), pool_bytes(LAYERS)) as segment:
        pool = ExpertPool(segment, LAYERS, FINGERPRINT)
        for experts in ([9, 5], [9]):
            held = pool.acquire(3, experts)
            for slot, generation in zip(held.miss_slots, held.generations, strict=True):
                pool.mark_ready(slot, generation)
            pool.release(held)
        expected = expected_tables()
        assert segment.buffer[: len(expected)].tobytes() == expected
        assert segment.buffer[len(expected) : 4096].max() == 0
        assert read_layout(segment.buffer) == (plan_layout(LAYERS), FINGERPRINT)


def test_sizes_of_the_records() -> None:
    """The records have the sizes that docs/pool-layout.md states."""
    assert (HEADER.itemsize, LAYER.itemsize, SLOT.itemsize) == (128, 32, 32)
    assert overhead_bytes(2, 3) == 4096
    assert overhead_bytes(48, 48 * 128) == 200_704


@pytest.mark.parametrize(
    ("offset", "message"),
    [(0, "no magic"), (8, "version"), (12, "disagree"), (92, "disagree"), (96, "disagree"), (128, "disagree")],
)
def test_damaged_header_is_refused(offset: int, message: str) -> None:
    """A flipped byte in the magic number, version, sizes or layer table is an error that says so."""
    with Segment.create(segment_name(secrets.token_hex(4), 0), pool_bytes(LAYERS)) as segment:
        ExpertPool(segment, LAYERS, FINGERPRINT)
        segment.buffer[offset] ^= 1
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


def test_arbitrary_bytes_never_crash_the_reader() -> None:
    """Random bytes behind a right magic and version are refused with a PoolError, whatever they say."""
    rng = np.random.default_rng(1)
    for _ in range(300):
        buffer = rng.integers(0, 256, 4096, dtype=np.uint8)
        buffer[:12] = np.frombuffer(b"COLIPOOL" + struct.pack("<I", 1), np.uint8)
        buffer[88:92] = np.frombuffer(struct.pack("<I", int(rng.integers(0, 200))), np.uint8)
        with pytest.raises(PoolError):
            read_layout(buffer)
