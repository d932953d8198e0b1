"""Seeded blocks of latent attention, caches and batches for the tests of its stage."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from attention_cases import BF16, F32, MAX_CONTEXT, MAX_TOKENS, Q4, Q8, batch_of, random_matrix, random_parts

from colibri_mp.formats import Encoding
from colibri_mp.kernels import reference
from colibri_mp.kernels.latent_cache import LATENT_CACHES, LatentCache
from colibri_mp.kernels.mla import MlaStage
from colibri_mp.kernels.mla_weights import MlaWeights, absorb
from colibri_mp.kernels.paged_cache import num_blocks_for
from colibri_mp.kernels.rope import RopeTables, rope_tables
from colibri_mp.kernels.team import ThreadTeam
from colibri_mp.specs import MlaSpec, RopeSpec

__all__ = ["BF16", "F32", "MAX_TOKENS", "Q4", "Q8", "batch_of", "make_latent_block"]


@dataclass
class LatentBlock:
    """A block of latent attention with everything to run it; `kv_b`: the values that were absorbed."""

    spec: MlaSpec
    weights: MlaWeights
    kv_b: np.ndarray
    tables: RopeTables
    rng: np.random.Generator
    kv_bits: int = 32

    def stage(self, team: ThreadTeam, max_tokens: int = MAX_TOKENS) -> MlaStage:
        """The compiled stage."""
        return MlaStage(team, self.spec, self.tables, max_tokens, MAX_CONTEXT, kv_bits=self.kv_bits)

    def cache(self, num_tokens: int) -> LatentCache:
        """An empty cache of two layers."""
        kind = LATENT_CACHES[self.kv_bits]
        return kind(2, num_blocks_for(num_tokens), self.spec.kv_lora_rank, self.spec.rope_dim)

    def rows(self, num_tokens: int) -> np.ndarray:
        """Random activations [T, D]."""
        return self.rng.standard_normal((num_tokens, self.spec.hidden)).astype(np.float32)


def kv_b_parts(rng: np.random.Generator, encoding: Encoding, rows: int, cols: int) -> list[np.ndarray]:
    """Stored parts; floating-point codes without the two that are no numbers, scales of about 1 / 8."""
    if encoding.kind == "affine" or not encoding.group_size:
        return random_parts(rng, encoding, rows, cols)
    codes, *scales = (rng.integers(0, 256, size, np.uint8) for size in encoding.part_bytes(rows, cols))
    if encoding.bits == 8:
        codes[codes & 127 == 127] = 1
    if encoding.scale == "f32":
        return [codes, rng.uniform(0.001, 0.002, scales[0].size // 4).astype(np.float32).view(np.uint8)]
    ones = {"nvfp4": 0x20, "mxfp4": 124, "mxfp8": 117}[encoding.kind]
    return [codes, (ones + scales[0] % 3).astype(np.uint8)]


def make_latent_block(
    seed: int = 0, encoding: Encoding = BF16, kv_b: Encoding | None = None, **changes: Any
) -> LatentBlock:
    """A block of 64 -> 4 heads of 32 + 16, latents of 64, with changes to the spec. `kv_b`: its encoding, where it is another one."""
    spec = MlaSpec(64, 4, 32, 64, nope_dim=32, rope_dim=16, v_dim=32, scale=48**-0.5, norm_eps=1e-5)
    spec = replace(spec, **changes)
    rng = np.random.default_rng(seed)

    def vector(size: int) -> np.ndarray:
        return (1 + 0.1 * rng.standard_normal(size)).astype(np.float32)

    rank, latent = spec.q_lora_rank, spec.kv_lora_rank
    kv_b, rows = kv_b or encoding, spec.num_heads * (spec.nope_dim + spec.v_dim)
    parts = kv_b_parts(rng, kv_b, rows, latent)
    weights = MlaWeights(
        norm=vector(spec.hidden),
        q_a=None if rank is None else random_matrix(rng, encoding, rank, spec.hidden),
        q_a_norm=None if rank is None else vector(rank),
        q=random_matrix(rng, encoding, spec.q_width, rank or spec.hidden),
        kv_a=random_matrix(rng, encoding, latent + spec.rope_dim, spec.hidden),
        kv_a_norm=vector(latent),
        o=random_matrix(
            rng, BF16 if spec.num_heads * spec.v_dim % 32 else encoding, spec.hidden, spec.num_heads * spec.v_dim
        ),
        **absorb(kv_b, parts, spec),
    )
    values = reference.dequantise(kv_b, rows, latent, parts)
    return LatentBlock(spec, weights, values, rope_tables(RopeSpec(1e4, spec.rope_dim), MAX_CONTEXT), rng)


def run_latent_chunks(
    stage: MlaStage,
    block: LatentBlock,
    x: np.ndarray,
    chunk: int,
    table: np.ndarray | None = None,
    cache: LatentCache | None = None,
) -> np.ndarray:
    """The stage over a prompt x [T, D] in chunks; the outputs [T, D]."""
    table = np.arange(num_blocks_for(len(x))) if table is None else table
    cache, out = cache or block.cache(len(x)), x.copy()
    for start in range(0, len(x), chunk):
        positions = range(start, min(len(x), start + chunk))
        batch = batch_of([(p, 0) for p in positions], table[None, :])
        stage(out[start : start + chunk], block.weights, cache, 1, batch)
    return out
