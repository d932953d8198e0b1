"""Packing of every stored form: exact, of any shape and alignment, and looked up row by row."""

import hashlib

import numpy as np
import pytest
from kernel_cases import (
    BF16,
    F16,
    F32,
    FP8,
    INT4,
    INT8,
    MXFP4,
    MXFP8,
    NVFP4,
    affine,
    int4,
    packed,
    random_matrix,
    random_parts,
)

from colibri_mp.formats import Encoding, Format
from colibri_mp.kernels import layout, reference
from colibri_mp.kernels.team import aligned_bytes

ENCODINGS = (
    BF16, F16, F32, NVFP4, MXFP4, MXFP8, FP8, Encoding("fp8", 8, 128, "bf16"), INT8, INT4, int4(16), int4(64),
    affine(4, 64, "bf16"), affine(4, 32, "f16"), affine(4, 128, "f32"), affine(8, 64, "bf16"), affine(8, 32, "f32"),
    affine(2, 64, "bf16"), affine(3, 32, "bf16"), affine(5, 64, "f16"), affine(6, 32, "bf16"),
)  # fmt: skip
UNCHANGED = tuple(e for e in ENCODINGS if not e.group_size or (e.kind == "affine" and e.bits in (4, 8)))
"""What is packed as before: containers of the first layout with such experts are still read."""
SHAPES = ((16, 128), (40, 384), (1, 256), (33, 128))
TILED_SHAPES = (*SHAPES, (160, 64), (72, 320), (257, 136))
DENSE_SHAPES = (*SHAPES, (5, 20), (17, 65), (3, 1))


def _shapes(encoding: Encoding) -> tuple[tuple[int, int], ...]:
    if encoding.kind == "fp8":
        return TILED_SHAPES
    return SHAPES if encoding.group_size else DENSE_SHAPES


CASES = [(encoding, shape) for encoding in ENCODINGS for shape in _shapes(encoding)]


@pytest.mark.parametrize(("encoding", "shape"), CASES, ids=str)
def test_packing_keeps_every_value(encoding: Encoding, shape: tuple[int, int]) -> None:
    """Unpacking a packed matrix gives the values of the stored one, bit for bit (but for the sign of zero of FP4)."""
    parts = random_parts(np.random.default_rng(1), encoding, *shape)
    matrix = packed(encoding, *shape, parts)
    np.testing.assert_array_equal(
        reference.unpack(matrix.format, *shape, matrix.data), reference.dequantise(encoding, *shape, parts)
    )


@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
def test_gathered_rows_are_those_of_the_matrix(encoding: Encoding) -> None:
    """The embedding lookup gives the rows of the values, in any order and repeated."""
    matrix, values = random_matrix(np.random.default_rng(2), encoding, 40, 128)
    ids = np.array([39, 0, 17, 17, 31], np.int32)
    np.testing.assert_array_equal(layout.gather_rows(matrix, ids), values[ids])


def test_row_ids_outside_the_matrix_are_refused() -> None:
    """A token id that the embedding does not have is an error and not a read of other memory."""
    matrix, _ = random_matrix(np.random.default_rng(2), F32, 16, 16)
    for bad in (-1, 16):
        with pytest.raises(IndexError, match="16 rows"):
            layout.gather_rows(matrix, np.array([0, bad], np.int32))


def test_padding_is_zero() -> None:
    """Rows and columns that fill up blocks are zeros, whatever was in the buffer."""
    matrix = packed(F32, 3, 5, random_parts(np.random.default_rng(3), F32, 3, 5))
    values = matrix.data.view(np.float32).reshape(8, 16)
    assert np.count_nonzero(values[:5, :3]) == 15
    assert np.count_nonzero(values) == 15


def test_bytes_are_pinned() -> None:
    """Containers on users' disks hold these bytes: to change one is to change `LAYOUT_VERSION`, and then this."""
    digests = {}
    for version, encodings in (("R16S-1", UNCHANGED), ("R16S-2", ENCODINGS)):
        digest = hashlib.sha256()
        for encoding, rows, cols in [*((encoding, 40, 128) for encoding in encodings), (BF16, 17, 65)]:
            parts = [(40 + 37 * np.arange(size) % 50).astype(np.uint8) for size in encoding.part_bytes(rows, cols)]
            digest.update(packed(encoding, rows, cols, parts).data)
        digests[version] = digest.hexdigest()[:16]
    assert layout.READABLE_LAYOUTS == ("R16S-1", "R16S-2")
    assert digests == {"R16S-1": "f347b53ce8aad0c6", "R16S-2": "3ca15b8250a3d1f6"}


def test_sizes_of_a_known_matrix() -> None:
    """4 bit, groups of 64, bf16: 576 bytes for 16 rows of a group; a slab is the three matrices, rounded up to pages."""
    q4 = Format("q4", 64, "bf16")
    assert layout.packed_bytes(q4, 1024, 2048) == 64 * 32 * 576
    shape = layout.ExpertShape(2048, 1024, q4, q4, q4)
    assert (shape.gate_offset, shape.up_offset, shape.down_offset) == (0, 64 * 32 * 576, 2 * 64 * 32 * 576)
    assert shape.nbytes == 3 * 64 * 32 * 576
    assert shape.slab_bytes % 4096 == 0
    assert 0 <= shape.slab_bytes - shape.nbytes < 4096


def test_columns_that_do_not_divide_into_groups_are_refused() -> None:
    """Such a matrix cannot be grouped."""
    with pytest.raises(ValueError, match="96 columns do not divide into groups of 64"):
        layout.packed_bytes(Format("q4", 64, "bf16"), 16, 96)


def test_float16_specials_survive() -> None:
    """Subnormals, infinities and NaN of IEEE halves come out of the embedding as they are."""
    halves = np.array([[0x0001, 0x03FF, 0x8001, 0x7C00, 0xFC00, 0x7E00, 0x7BFF, 0x8000]], np.uint16)
    data = aligned_bytes(layout.packed_bytes(F16.format, 1, 8))
    layout.pack(F16, 1, 8, [halves.reshape(-1).view(np.uint8)], data)
    rows = layout.gather_rows(layout.PackedMatrix(F16.format, 1, 8, data), np.zeros(1, np.int32))
    np.testing.assert_array_equal(rows, halves.view(np.float16).astype(np.float32))
