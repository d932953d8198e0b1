"""Experts on MLX: slabs become its rows exactly, the stage sums what the plain reference does, hot experts stay."""

import numpy as np
import pytest
from expert_checkpoint import Q4, Q8

pytest.importorskip("mlx.core", reason="mlx is not installed: pip install 'colibri-mp[mlx]'")

import mlx.core as mx

from colibri_mp.formats import Encoding
from colibri_mp.kernels import reference
from colibri_mp.kernels.layout import ExpertShape, fill_bias, pack, packed_bytes
from colibri_mp.kernels.team import aligned_bytes
from colibri_mp.mlx_backend.expert_stage import MlxExpertStage
from colibri_mp.mlx_backend.expert_tier import ExpertTier, slot_bytes
from colibri_mp.mlx_backend.slabs import SlabMatrix
from colibri_mp.specs import ClampedSwiGLU

ENCODINGS = [
    *(
        Encoding("affine", bits, group, "bf16")
        for bits, group in ((4, 32), (4, 128), (2, 32), (3, 64), (5, 32), (8, 32), (6, 64))
    ),
    Encoding("affine", 4, 64, "f32"),
    Encoding("fp8", 8, 128, "bf16"),
    Encoding("grouped", 4, 64, "f32"),
    Encoding("row", 4, 128, "f32"),
    Encoding("row", 8, 128, "f32"),
    Encoding("mxfp4", 4, 32, "u8"),
    Encoding("nvfp4", 4, 16, "u8"),
    Encoding("mxfp8", 8, 32, "u8"),
    *(Encoding(kind) for kind in ("bf16", "f16", "f32")),
]


def random_parts(encoding: Encoding, rows: int, cols: int) -> list[np.ndarray]:
    """Stored parts of a matrix: any codes, scales of about 1 / 16, as bytes."""
    rng = np.random.default_rng([rows, cols, encoding.bits])
    sizes = encoding.part_bytes(rows, cols)
    if not encoding.group_size:
        return [_stored(rng.standard_normal(rows * cols), encoding.kind)]
    codes = rng.integers(0, 256, sizes[0], dtype=np.uint8)
    match encoding.kind:
        case "affine":
            num_groups = rows * cols // encoding.group_size
            return [codes, *(_stored(rng.standard_normal(num_groups) / 16, encoding.scale) for _ in range(2))]
        case "grouped" | "row":
            return [codes, _stored(rng.uniform(0.5, 1.5, encoding.groups(rows, cols)).ravel(), "f32")]
        case "fp8":
            codes[codes & 0x7F == 0x7F] = 0
            return [codes, _stored(rng.uniform(0.5, 1.5, encoding.groups(rows, cols)).ravel(), encoding.scale)]
        case "nvfp4":
            return [codes, rng.integers(0, 64, sizes[1], dtype=np.uint8)]
    codes[codes & 0x7F == 0x7F] = 0  # no number in mxfp8
    return [codes, rng.integers(120, 126, sizes[1], dtype=np.uint8)]


def _stored(values: np.ndarray, kind: str) -> np.ndarray:
    wide = values.astype(np.float32)
    narrow = {"bf16": wide.view(np.uint16)[1::2], "f16": wide.astype(np.float16), "f32": wide}
    return np.ascontiguousarray(narrow[kind]).view(np.uint8)


@pytest.mark.parametrize("encoding", ENCODINGS, ids=Encoding.describe)
def test_slab_becomes_rows(encoding: Encoding) -> None:
    """What MLX is given of a packed matrix has the values of the stored one, also of rows that are no whole block."""
    rows, cols = 40, 320 if encoding.group_size == 32 else 256
    parts = random_parts(encoding, rows, cols)
    slab = aligned_bytes(64 + packed_bytes(encoding.format, rows, cols))
    pack(encoding, rows, cols, parts, slab[64:])
    matrix = SlabMatrix(encoding.format, rows, cols, 64)
    arrays = matrix.unpack(slab)
    assert [(array.shape, array.dtype) for array in arrays] == matrix.shapes()
    assert sum(array.nbytes for array in arrays) == matrix.device_bytes
    values = arrays[0]
    assert bool(matrix.mode) == (encoding.kind not in ("fp8", "bf16", "f16", "f32"))
    if matrix.mode:
        settings = {"group_size": encoding.group_size, "bits": matrix.bits, "mode": matrix.mode}
        values = mx.dequantize(*arrays, **settings, dtype=mx.float32)
    expected = reference.dequantise(encoding, rows, cols, parts)
    tolerance = 2e-7 * np.abs(expected).max() if encoding.kind in ("grouped", "row") else 0.0  # their bias is a product
    np.testing.assert_allclose(np.array(values), expected, rtol=0, atol=tolerance)


def stage_and_reference(shape: ExpertShape, encodings: list[Encoding], num_slots: int):
    """A stage over six random experts, their slabs, and their matrices for `reference.experts`."""
    slabs, matrices = [], []
    rng = np.random.default_rng(3)
    for _ in range(6):
        slab, values = aligned_bytes(shape.slab_bytes), []
        sizes = ((shape.width, shape.hidden), (shape.width, shape.hidden), (shape.hidden, shape.width))
        offsets = (shape.gate_offset, shape.up_offset, shape.down_offset)
        for encoding, (rows, cols), offset in zip(encodings, sizes, offsets, strict=True):
            parts = random_parts(encoding, rows, cols)
            parts[0] = rng.permutation(parts[0].view(np.uint16)).view(np.uint8)
            pack(encoding, rows, cols, parts, slab[offset : offset + packed_bytes(encoding.format, rows, cols)])
            values.append(reference.dequantise(encoding, rows, cols, parts))
        if shape.has_bias:
            biases = tuple(rng.standard_normal(rows).astype(np.float32) for rows, _ in sizes)
            ends = (*shape.bias_offsets[1:], shape.nbytes)
            for bias, start, end in zip(biases, shape.bias_offsets, ends, strict=True):
                fill_bias("f32", bias.view(np.uint8), slab[start:end])
            values.append(biases)
        slabs.append(slab)
        matrices.append(tuple(values))
    tier = ExpertTier(shape, {2: 6, 5: 6}, num_slots, 2)
    return MlxExpertStage(tier, 5, 8, 2), slabs, matrices


@pytest.mark.parametrize("kind", ["q4", "mixed", "biased"])
def test_stage_is_the_reference(kind: str) -> None:
    """In any order of arrival, with fewer slots than experts, tokens without some expert: the sums of `reference.experts`."""
    bf16 = Encoding("bf16")
    encodings = {"q4": [Q4] * 3, "mixed": [Q8, bf16, Q4], "biased": [bf16] * 3}[kind]
    clamp = ClampedSwiGLU(1.5) if kind == "biased" else None
    shape = ExpertShape(128, 64, *(e.format for e in encodings), has_bias=kind == "biased", clamp=clamp)
    stage, slabs, matrices = stage_and_reference(shape, encodings, 2)
    rng = np.random.default_rng(1)
    x = rng.standard_normal((7, 128)).astype(np.float32) / 8
    ids = np.array([[0, 3], [1, 3], [-1, 5], [2, 4], [0, 5], [-1, -1], [3, 4]], np.int32)
    weights = rng.uniform(0.1, 1, ids.shape).astype(np.float32)
    expected = reference.experts(x, ids, weights, matrices, clamp)
    addresses = np.array([slab.ctypes.data for slab in slabs], np.int64)
    out = np.full_like(x, np.nan)
    stage.begin(x, ids, weights)
    for some in ([5, 0], [3], [1, 2, 4]):
        stage.compute(np.array(some, np.int32), addresses[some])
    stage.finish(out)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    again = np.full_like(x, np.nan)
    stage.bind(x, ids, weights, again).run([*range(6)], addresses)
    np.testing.assert_array_equal(again, out)


def test_hot_experts_stay() -> None:
    """An expert that is asked for again and again outlives those that come by once, and is brought to the device once."""
    encodings = [Q4] * 3
    shape = ExpertShape(128, 64, *(e.format for e in encodings))
    stage, slabs, _ = stage_and_reference(shape, encodings, 2)
    tier = stage._tier
    addresses = np.array([slab.ctypes.data for slab in slabs], np.int64)
    for expert in (0, 0, 0, 1, 2, 0, 3, 4, 0):
        stage.compute(np.array([expert], np.int32), addresses[[expert]])
    assert (tier.num_hits, tier.num_uploads) == (4, 5)
    held = sum(array.nbytes for bank in (tier.gate, tier.up, tier.down) for array in bank._arrays)
    assert held == tier.num_slots * slot_bytes(shape)
