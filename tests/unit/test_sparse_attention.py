"""Latent attention with an indexer: layers that choose and layers that share the choice, against plain numpy and to the bit."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from attention_cases import BF16, MAX_CONTEXT, batch_of, random_matrix
from mla_cases import MAX_TOKENS, LatentBlock, make_latent_block

from colibri_mp.kernels import reference_indexer, reference_mla
from colibri_mp.kernels.attention_inputs import Batch, Chosen
from colibri_mp.kernels.indexer import IndexerWeights
from colibri_mp.kernels.latent_cache import LATENT_CACHES, LatentCache
from colibri_mp.kernels.mla import MlaStage
from colibri_mp.kernels.mla_weights import MlaWeights
from colibri_mp.kernels.paged_cache import num_blocks_for
from colibri_mp.kernels.reference_attention import linear, rms_norm
from colibri_mp.kernels.team import ThreadTeam
from colibri_mp.specs import IndexerSpec

TOP_K = 12


@dataclass
class SparseLayers:
    """A layer with an indexer, and one that shares its choice."""

    block: LatentBlock
    full: MlaWeights

    def stage(self, team: ThreadTeam) -> MlaStage:
        """The compiled stage of both."""
        return MlaStage(team, self.block.spec, self.block.tables, MAX_TOKENS, MAX_CONTEXT, kv_bits=self.block.kv_bits)

    def caches(self, num_blocks: int) -> tuple[LatentCache, LatentCache]:
        """Of the first layer, with index keys, and of the second."""
        spec, kind = self.block.spec, LATENT_CACHES[self.block.kv_bits]
        assert spec.indexer is not None
        shape = (1, num_blocks, spec.kv_lora_rank, spec.rope_dim)
        return kind(*shape, spec.indexer.head_dim), kind(*shape)

    def run(self, stage: MlaStage, x: np.ndarray, caches: tuple[LatentCache, LatentCache], batch: Batch) -> None:
        """Both layers, in place."""
        stage(x, self.full, caches[0], 0, batch)
        stage(x, self.block.weights, caches[1], 0, batch)

    def plain(self, x: np.ndarray, caches: tuple[LatentCache, LatentCache], batch: Batch) -> None:
        """As `run`, in plain numpy."""
        spec, full = self.block.spec, self.full
        assert spec.indexer is not None
        assert full.indexer is not None
        assert full.q_a is not None
        assert full.q_a_norm is not None
        h = rms_norm(x, full.norm, spec.norm_eps)
        sources = rms_norm(linear(h, full.q_a), full.q_a_norm, spec.lora_eps)
        keys, tables = caches[0].index_keys, self.block.tables
        chosen = as_chosen(
            reference_indexer.choose(h, sources, full.indexer, spec.indexer, tables, keys, 0, batch), spec.indexer.top_k
        )
        for weights, cache in ((full, caches[0]), (self.block.weights, caches[1])):
            reference_mla.mla(x, weights, self.block.kv_b, spec, tables, cache, 0, batch, chosen)


def as_chosen(rows: list[np.ndarray], top_k: int) -> Chosen:
    """Lists of positions as one array."""
    positions = np.zeros((len(rows), top_k), np.int32)
    for t, row in enumerate(rows):
        positions[t, : len(row)] = row
    return Chosen(positions, np.array([len(row) for row in rows], np.int32))


def make_layers(kv_bits: int = 32) -> SparseLayers:
    """Two layers whose rows read 12 positions at most."""
    block = make_latent_block(5)
    spec = IndexerSpec(64, 32, num_heads=6, head_dim=32, rotary_dim=16, top_k=TOP_K)
    block.spec, block.kv_bits = replace(block.spec, indexer=spec), kv_bits
    rng = block.rng
    indexer = IndexerWeights(
        random_matrix(rng, BF16, spec.q_width, 32),
        random_matrix(rng, BF16, spec.head_dim, 64),
        random_matrix(rng, BF16, spec.num_heads, 64),
        (1 + 0.1 * rng.standard_normal(spec.head_dim)).astype(np.float32),
        (0.1 * rng.standard_normal(spec.head_dim)).astype(np.float32),
    )
    return SparseLayers(block, replace(block.weights, indexer=indexer))


def run_in_chunks(layers: SparseLayers, stage: MlaStage, x: np.ndarray, size: int, table: np.ndarray) -> np.ndarray:
    """A prompt in chunks; the outputs [T, D]."""
    out, caches = x.copy(), layers.caches(int(table.max()) + 1)
    for start in range(0, len(x), size):
        positions = range(start, min(len(x), start + size))
        layers.run(stage, out[start : start + size], caches, batch_of([(p, 0) for p in positions], table[None, :]))
    return out


@pytest.mark.parametrize("kv_bits", [32, 8])
def test_both_layers_equal_the_plain_reference(kv_bits: int) -> None:
    """A prompt of more than top_k positions, in one piece; what the second layer reads is the first one's choice."""
    layers = make_layers(kv_bits)
    x, table = layers.block.rows(MAX_TOKENS), np.arange(2)
    want, batch = x.copy(), batch_of([(p, 0) for p in range(MAX_TOKENS)], table[None, :])
    layers.plain(want, layers.caches(2), batch)
    with ThreadTeam(2) as team:
        got = run_in_chunks(layers, layers.stage(team), x, MAX_TOKENS, table)
    assert np.abs(got - want).max() < (1e-4 if kv_bits == 32 else 0.05)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_chunks_and_blocks_do_not_matter(num_threads: int) -> None:
    """Chunks of any size, over shuffled blocks, give the bits of one token at a time."""
    layers = make_layers()
    x = layers.block.rows(50)
    with ThreadTeam(1) as team:
        alone = run_in_chunks(layers, layers.stage(team), x, 1, np.arange(4))
    with ThreadTeam(num_threads) as team:
        stage = layers.stage(team)
        for size in (3, 7, MAX_TOKENS):
            assert np.array_equal(run_in_chunks(layers, stage, x, size, np.array([6, 1, 4, 0])), alone)


def test_another_step_between_two_layers_does_not_matter() -> None:
    """A step that is computed between a layer and the one that shares its choice leaves the choice as it was."""
    layers, table = make_layers(), np.arange(4).reshape(2, 2)
    x, other = layers.block.rows(MAX_TOKENS), layers.block.rows(MAX_TOKENS)
    first, second = (batch_of([(p, s) for p in range(MAX_TOKENS)], table) for s in (0, 1))
    with ThreadTeam(2) as team:
        stage = layers.stage(team)
        want, got = x.copy(), x.copy()
        layers.run(stage, want, layers.caches(4), first)
        caches = layers.caches(4)
        stage(got, layers.full, caches[0], 0, first)
        layers.run(stage, other, caches, second)
        stage(got, layers.block.weights, caches[1], 0, first)
        assert np.array_equal(got, want)
        with pytest.raises(AssertionError, match="no layer before this one has chosen"):
            stage(got, layers.block.weights, caches[1], 0, replace(first))


def test_blocks_take_their_index_keys_along() -> None:
    """What `copy_block` gives `set_block` puts into another block, and the plain reader finds it there."""
    cache = make_layers().caches(num_blocks_for(64))[0]
    cache.tiles[:] = np.random.default_rng(0).standard_normal(cache.tiles.shape)
    cache.set_block(3, cache.copy_block(1))
    keys = cache.index_keys.read(0, [1, 3], 32)
    assert np.array_equal(keys[:16], keys[16:])
    assert cache.block_bytes == 16 * 4 * (64 + 16 + 32)
