"""Seeded matrices, experts and batches for the tests of the kernels; as a script, outputs of all of them for one instruction set.

python kernel_cases.py out.npz            products of each format in ISA_FORMATS and an expert step, of this process's instruction set
"""

import sys
from pathlib import Path

import numpy as np

from colibri_mp.formats import Encoding
from colibri_mp.kernels import isa, reference
from colibri_mp.kernels.expert import ExpertStage
from colibri_mp.kernels.layout import ExpertShape, PackedMatrix, pack, packed_bytes
from colibri_mp.kernels.linear import linear
from colibri_mp.kernels.team import ThreadTeam, aligned_bytes


def affine(bits: int, group_size: int, scale: str) -> Encoding:
    """An MLX encoding."""
    return Encoding("affine", bits, group_size, scale)  # type: ignore[arg-type]  # tests pass known names


BF16, F16, F32 = Encoding("bf16"), Encoding("f16"), Encoding("f32")
NVFP4, MXFP4, MXFP8 = Encoding("nvfp4", 4, 16, "u8"), Encoding("mxfp4", 4, 32, "u8"), Encoding("mxfp8", 8, 32, "u8")
FP8 = Encoding("fp8", 8, 128, "f32")
INT8, INT4 = Encoding("row", 8, 32, "f32"), Encoding("row", 4, 64, "f32")


def int4(group_size: int) -> Encoding:
    """colibrì's."""
    return Encoding("grouped", 4, group_size, "f32")


FORMATS = (
    affine(4, 64, "bf16"),
    affine(4, 32, "f16"),
    affine(8, 64, "bf16"),
    affine(8, 128, "f32"),
    NVFP4,
    BF16,
    F16,
    F32,
    MXFP4,
    MXFP8,
    FP8,
    affine(2, 32, "bf16"),
    affine(3, 32, "f16"),
    affine(5, 32, "bf16"),
    affine(6, 32, "bf16"),
    INT8,
    INT4,
    int4(32),
)
"""Each group size, scale type, code width and dense type at least once: every one costs a compilation."""

ISA_FORMATS = (NVFP4, BF16, F16, MXFP8, FP8, affine(3, 32, "f16"), affine(6, 32, "bf16"), INT8, int4(32))
"""Those that all instruction sets compute, beside what the expert step has: every way to take codes out of words, every type of scale."""
NEON_FORMATS = (affine(8, 64, "bf16"), NVFP4, affine(3, 32, "f16"))
"""Those that `neon_on_x86` computes."""


def stored(values: np.ndarray, kind: str) -> np.ndarray:
    """float32 -> bytes of bf16 (truncated), f16 or f32 elements."""
    values = np.ascontiguousarray(values, np.float32)
    match kind:
        case "bf16":
            values = (values.view(np.uint32) >> 16).astype(np.uint16)
        case "f16":
            values = values.astype(np.float16)
    return values.reshape(-1).view(np.uint8)


def random_parts(rng: np.random.Generator, encoding: Encoding, rows: int, cols: int) -> list[np.ndarray]:
    """Stored parts of a matrix whose values have a variance of about 1 / cols."""
    sizes = encoding.part_bytes(rows, cols)
    if not encoding.group_size:
        return [stored(rng.standard_normal((rows, cols)) / np.sqrt(cols), encoding.kind)]
    codes = rng.integers(0, 256, sizes[0], np.uint8)
    if encoding.kind in ("mxfp8", "fp8"):
        codes &= 0xF7  # no NaN
    if encoding.kind == "fp8":
        scales = rng.uniform(0.5, 1.5, encoding.groups(rows, cols)) / 100 / np.sqrt(cols)
        return [codes, stored(scales, encoding.scale)]
    if encoding.kind in ("grouped", "row"):
        scales = rng.uniform(0.5, 1.5, encoding.groups(rows, cols)) * 4 / 2**encoding.bits / np.sqrt(cols)
        return [codes, stored(scales, "f32")]
    if encoding.scale == "u8":
        low = {"mxfp4": 118, "nvfp4": 20, "mxfp8": 116}[encoding.kind]
        return [codes, rng.integers(low, low + 6, sizes[1]).astype(np.uint8)]
    scales = rng.uniform(0.5, 1.5, (rows, cols // encoding.group_size)) * 4 / 2**encoding.bits / np.sqrt(cols)
    return [codes, stored(scales, encoding.scale), stored(scales * -(2 ** (encoding.bits - 1)), encoding.scale)]


def unaligned(part: np.ndarray) -> np.ndarray:
    """A copy at an odd address."""
    buffer = np.empty(part.nbytes + 2, np.uint8)
    start = 1 - buffer.ctypes.data % 2
    buffer[start : start + part.nbytes] = part
    return buffer[start : start + part.nbytes]


def packed(encoding: Encoding, rows: int, cols: int, parts: list[np.ndarray]) -> PackedMatrix:
    """The packed matrix of stored parts."""
    data = aligned_bytes(packed_bytes(encoding.format, rows, cols))
    data[:] = 0xA5
    pack(encoding, rows, cols, [unaligned(part) for part in parts], data)
    return PackedMatrix(encoding.format, rows, cols, data)


def random_matrix(
    rng: np.random.Generator, encoding: Encoding, rows: int, cols: int
) -> tuple[PackedMatrix, np.ndarray]:
    """A packed matrix and its values."""
    parts = random_parts(rng, encoding, rows, cols)
    return packed(encoding, rows, cols, parts), reference.dequantise(encoding, rows, cols, parts)


class Experts:
    """Slabs of some experts of one shape, their values, and a batch routed to them."""

    def __init__(
        self, encodings: tuple[Encoding, Encoding, Encoding], hidden: int, width: int, num_experts: int = 6
    ) -> None:
        rng = np.random.default_rng(hidden * 1000 + width)
        gate, up, down = encodings
        self.shape = shape = ExpertShape(hidden, width, gate.format, up.format, down.format)
        self.slabs = aligned_bytes(num_experts * shape.slab_bytes).reshape(num_experts, -1)
        self.matrices = []
        places = (
            (gate, width, hidden, shape.gate_offset),
            (up, width, hidden, shape.up_offset),
            (down, hidden, width, shape.down_offset),
        )
        for slab in self.slabs:
            values = []
            for encoding, rows, cols, start in places:
                parts = random_parts(rng, encoding, rows, cols)
                pack(encoding, rows, cols, parts, slab[start : start + packed_bytes(encoding.format, rows, cols)])
                values.append(reference.dequantise(encoding, rows, cols, parts))
            self.matrices.append(tuple(values))
        self.ids = np.arange(num_experts, dtype=np.int32)

    def batch(self, num_tokens: int, top_k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """x, ids, weights; ids in no order, some of them negative."""
        rng = np.random.default_rng(num_tokens)
        x = rng.standard_normal((num_tokens, self.shape.hidden)).astype(np.float32)
        ids = np.array([rng.permutation(len(self.ids))[:top_k] for _ in range(num_tokens)], np.int32)
        ids[rng.random(ids.shape) < 0.1] = -1
        return x, ids, rng.random(ids.shape, np.float32)

    def addresses(self, ids: np.ndarray) -> np.ndarray:
        """Addresses of the slabs of these experts."""
        return np.array([self.slabs[expert].ctypes.data for expert in ids], np.int64)

    def step(
        self,
        stage: ExpertStage,
        batch: tuple[np.ndarray, np.ndarray, np.ndarray],
        order: np.ndarray,
        num_calls: int = 1,
    ) -> np.ndarray:
        """One step with the experts computed in that order, in some calls."""
        stage.begin(*batch)
        for ids in np.array_split(order.astype(np.int32), num_calls):
            stage.compute(ids, self.addresses(ids))
        out = np.full_like(batch[0], np.nan)
        stage.finish(out)
        return out


EXPERT_ENCODINGS = (affine(4, 64, "bf16"), affine(8, 64, "bf16"), affine(4, 32, "f16"))
"""gate, up, down of the expert step in `outputs`."""


def product(team: ThreadTeam, encoding: Encoding) -> np.ndarray:
    """y [6, 32] of a seeded matrix and seeded activations."""
    rng = np.random.default_rng(7)
    matrix, _ = random_matrix(rng, encoding, 32, 256)
    y = np.empty((6, 32), np.float32)
    linear(team, rng.standard_normal((6, 256)).astype(np.float32), matrix, None, y)
    return y


def outputs() -> dict[str, np.ndarray]:
    """Products of each format, and out of an expert step, by name."""
    with ThreadTeam(2) as team:
        results = {"/".join(map(str, encoding.format)): product(team, encoding) for encoding in ISA_FORMATS}
        experts = Experts(EXPERT_ENCODINGS, 128, 96)
        results["experts"] = experts.step(
            ExpertStage(team, experts.shape, len(experts.ids), 6, 2), experts.batch(6, 2), experts.ids
        )
    return results


if __name__ == "__main__":
    np.savez(Path(sys.argv[1]), **outputs())
    print(isa.current().value)
