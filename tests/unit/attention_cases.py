"""Seeded attention blocks, caches and batches for the tests of the attention, router and head stages."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from colibri_mp.formats import Encoding
from colibri_mp.kernels.attention import AttentionStage, AttentionWeights, Batch
from colibri_mp.kernels.kv_cache import KVCache
from colibri_mp.kernels.kv_cache8 import CACHES
from colibri_mp.kernels.layout import PackedMatrix, pack, packed_bytes
from colibri_mp.kernels.paged_cache import num_blocks_for
from colibri_mp.kernels.rope import RopeTables, rope_tables
from colibri_mp.kernels.team import ThreadTeam, aligned_bytes
from colibri_mp.specs import AttentionSpec, RopeSpec

F32 = Encoding("f32")
BF16 = Encoding("bf16")
Q4 = Encoding("affine", 4, 32, "bf16")
Q8 = Encoding("affine", 8, 32, "f16")
MAX_TOKENS = 24
MAX_CONTEXT = 1100


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """float32 -> bf16 by truncation, as uint16."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def random_parts(rng: np.random.Generator, encoding: Encoding, rows: int, cols: int) -> list[np.ndarray]:
    """Stored parts whose values have a variance of about 1 / cols."""
    if encoding.kind != "affine":
        values = (rng.standard_normal((rows, cols)) / np.sqrt(cols)).astype(np.float32)
        return [(bf16_bits(values) if encoding.kind == "bf16" else values).reshape(-1).view(np.uint8)]
    sizes = encoding.part_bytes(rows, cols)
    step = 4.0 / 2**encoding.bits / np.sqrt(cols)
    scales = step * rng.uniform(0.5, 1.5, (rows, cols // encoding.group_size)).astype(np.float32)
    biases = -scales * 2 ** (encoding.bits - 1)
    stored = [bf16_bits(a) if encoding.scale == "bf16" else a.astype(np.float16) for a in (scales, biases)]
    return [rng.integers(0, 256, sizes[0], np.uint8), *[a.reshape(-1).view(np.uint8) for a in stored]]


def random_matrix(rng: np.random.Generator, encoding: Encoding, rows: int, cols: int) -> PackedMatrix:
    """A packed matrix [rows, cols]."""
    out = aligned_bytes(packed_bytes(encoding.format, rows, cols))
    pack(encoding, rows, cols, random_parts(rng, encoding, rows, cols), out)
    return PackedMatrix(encoding.format, rows, cols, out)


def random_weights(rng: np.random.Generator, spec: AttentionSpec, encodings: dict[str, Encoding]) -> AttentionWeights:
    """Weights of the given encodings (keys q, k, v, o)."""

    def vector(size: int, centre: float = 0.0) -> np.ndarray:
        return (centre + 0.1 * rng.standard_normal(size)).astype(np.float32)

    shapes = {"q": (spec.q_rows, spec.hidden), "k": (spec.kv_width, spec.hidden), "v": (spec.kv_width, spec.hidden)}
    shapes["o"] = (spec.hidden, spec.q_width)
    optional: dict[str, Any] = {}
    if spec.qkv_bias:
        optional = {"q_bias": vector(spec.q_width), "k_bias": vector(spec.kv_width), "v_bias": vector(spec.kv_width)}
    if spec.o_bias:
        optional["o_bias"] = vector(spec.hidden)
    if spec.qk_norm != "none":
        per_head = spec.qk_norm == "head"
        optional["q_norm"] = vector(spec.head_dim if per_head else spec.q_width, 1.0)
        optional["k_norm"] = vector(spec.head_dim if per_head else spec.kv_width, 1.0)
    if spec.sinks:
        optional["sinks"] = vector(spec.num_heads, 1.0)
    matrices = {name: random_matrix(rng, encodings[name], *shapes[name]) for name in shapes}
    return AttentionWeights(norm=vector(spec.hidden, 1.0), **matrices, **optional)


@dataclass
class Block:
    """An attention block with everything to run it."""

    spec: AttentionSpec
    weights: AttentionWeights
    tables: RopeTables
    rng: np.random.Generator
    kv_bits: int = 32

    def stage(self, team: ThreadTeam, max_tokens: int = MAX_TOKENS) -> AttentionStage:
        """The compiled stage."""
        return AttentionStage(team, self.spec, self.tables, max_tokens, MAX_CONTEXT, kv_bits=self.kv_bits)

    def cache(self, num_tokens: int) -> KVCache:
        """An empty cache of two layers."""
        return CACHES[self.kv_bits](2, num_blocks_for(num_tokens), self.spec.num_kv_heads, self.spec.head_dim)

    def rows(self, num_tokens: int) -> np.ndarray:
        """Random activations [T, D]."""
        return self.rng.standard_normal((num_tokens, self.spec.hidden)).astype(np.float32)


def make_block(
    seed: int = 0, encodings: dict[str, Encoding] | None = None, rotary_dim: int | None = None, **changes: Any
) -> Block:
    """A block of 64 -> 4 heads of 16 over 2 key-value heads, bf16, with changes to the spec."""
    values: dict[str, Any] = {
        "hidden": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "norm_eps": 1e-5,
    } | changes
    spec = AttentionSpec(scale=values["head_dim"] ** -0.5, **values)
    rng = np.random.default_rng(seed)
    weights = random_weights(rng, spec, encodings or dict.fromkeys("qkvo", BF16))
    return Block(spec, weights, rope_tables(RopeSpec(1e4, rotary_dim or spec.head_dim), MAX_CONTEXT), rng)


def batch_of(rows: list[tuple[int, int]], block_table: np.ndarray) -> Batch:
    """A batch from (position, sequence) pairs."""
    positions, sequences = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    return Batch(positions, sequences, np.ascontiguousarray(block_table, np.int32))


def run_chunked(
    stage: AttentionStage,
    block: Block,
    x: np.ndarray,
    chunk: int,
    table: np.ndarray | None = None,
    kv: KVCache | None = None,
) -> np.ndarray:
    """The stage over a prompt x [T, D] in chunks; the outputs [T, D]."""
    table = np.arange(num_blocks_for(len(x))) if table is None else table
    kv, out = kv or block.cache(len(x)), x.copy()
    for start in range(0, len(x), chunk):
        positions = range(start, min(len(x), start + chunk))
        stage(out[start : start + chunk], block.weights, kv, 1, batch_of([(p, 0) for p in positions], table[None, :]))
    return out
