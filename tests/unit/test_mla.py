"""Latent attention: the compiled stage against plain numpy, to the bit whatever a row is computed with, and the forms of kv_b."""

from typing import Any

import numpy as np
import pytest
from mla_cases import BF16, F32, MAX_TOKENS, Q4, Q8, LatentBlock, batch_of, make_latent_block, run_latent_chunks

from colibri_mp.errors import CheckpointError, RequestError
from colibri_mp.formats import Encoding
from colibri_mp.kernels import reference_mla
from colibri_mp.kernels.attention_inputs import Chosen
from colibri_mp.kernels.latent_cache import LATENT_CACHES, LatentCache, LatentCache8
from colibri_mp.kernels.layout import gather_rows
from colibri_mp.kernels.mla import MlaStage
from colibri_mp.kernels.mla_weights import Absorbed
from colibri_mp.kernels.team import ThreadTeam
from colibri_mp.specs import MlaSpec

KV_B = [
    *(
        BF16,
        F32,
        Q4,
        Q8,
        Encoding("affine", 3, 32, "bf16"),
        Encoding("mxfp4", 4, 32, "u8"),
        Encoding("mxfp8", 8, 32, "u8"),
    ),
    *(Encoding("nvfp4", 4, 16, "u8"), Encoding("fp8", 8, 128, "f32")),
    *(Encoding("grouped", 4, 32, "f32"), Encoding("row", 8, 64, "f32"), Encoding("row", 4, 64, "f32")),
]
KINDS: list[dict[str, Any]] = [
    {},
    {"encoding": Q4},
    {"encoding": Q8, "v_dim": 24},
    {"q_lora_rank": None, "interleaved": False, "rope_dim": 8},
    {"encoding": F32, "nope_dim": 16, "num_heads": 2, "kv_b": Q4},
]
IDS = ["bf16", "q4", "q8, v 24", "no query rank, halves", "f32, q4 kv_b of narrow heads"]


def reference_of(block: LatentBlock, x: np.ndarray, chosen: Chosen | None = None) -> np.ndarray:
    """A prompt x [T, D] through the plain form, in one piece."""
    want, table = x.copy(), np.arange(-(-len(x) // 16))[None]
    batch = batch_of([(p, 0) for p in range(len(x))], table)
    reference_mla.mla(want, block.weights, block.kv_b, block.spec, block.tables, block.cache(len(x)), 1, batch, chosen)
    return want


@pytest.mark.parametrize("kind", KINDS, ids=IDS)
def test_stage_equals_the_reference(kind: dict[str, Any]) -> None:
    """A prompt in chunks gives what unfolded keys and values give in numpy, and the same bits in chunks of another size."""
    block = make_latent_block(**kind)
    x = block.rows(45)
    with ThreadTeam(2) as team:
        stage = block.stage(team)
        got = run_latent_chunks(stage, block, x, 7)
        assert np.array_equal(run_latent_chunks(stage, block, x, 1), got)
    np.testing.assert_allclose(got, reference_of(block, x), rtol=0, atol=3e-5)


def test_stage_with_a_cache_of_8_bits_equals_the_reference() -> None:
    """Codes and scales are those of the plain form, but for one that rounds to its neighbour here and there."""
    block = make_latent_block(3)
    exact, block.kv_bits = reference_of(block, x := block.rows(45)), 8
    with ThreadTeam(2) as team:
        got = run_latent_chunks(block.stage(team), block, x, 7)
    want = reference_of(block, x)
    assert np.abs(got - want).max() < 0.5 * np.abs(want - exact).max()
    assert np.abs(want - exact).max() > 1e-3


@pytest.mark.parametrize("bits", [32, 8])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_chunks_threads_and_blocks_do_not_matter(bits: int, num_threads: int) -> None:
    """Chunks, threads, and blocks anywhere with the remains of others, not-a-numbers even, give the bits of one token at a time."""
    block = make_latent_block(encoding=Q4)
    block.kv_bits = bits
    x = block.rows(60)
    with ThreadTeam(1) as team:
        alone = run_latent_chunks(block.stage(team), block, x, 1)
    dirty = LATENT_CACHES[bits](2, 9, block.spec.kv_lora_rank, block.spec.rope_dim)
    dirty.tiles[:] = np.nan if bits == 32 else 255
    with ThreadTeam(num_threads) as team:
        stage = block.stage(team)
        for chunk in (3, MAX_TOKENS):
            got = run_latent_chunks(stage, block, x, chunk, np.array([8, 2, 5, 0]), dirty)
            assert np.array_equal(got, alone), f"chunk {chunk}"


def test_batches_do_not_matter() -> None:
    """Rows of several sequences in one batch give the bits they give alone."""
    block = make_latent_block()
    prompts, table = [block.rows(n) for n in (9, 17)], np.array([[0, 1], [3, 2]])
    with ThreadTeam(2) as team:
        stage, cache = block.stage(team), block.cache(64)
        alone = [run_latent_chunks(stage, block, prompt, MAX_TOKENS) for prompt in prompts]
        for first, last in ((0, 9), (9, 17)):
            rows = [(p, s) for s in (1, 0) for p in range(first, min(last, len(prompts[s])))]
            x = np.stack([prompts[s][p] for p, s in rows])
            stage(x, block.weights, cache, 1, batch_of(rows, table))
            for (p, s), row in zip(rows, x, strict=True):
                assert np.array_equal(row, alone[s][p])


def long_run(block: LatentBlock, num_threads: int, chunk: int, chosen: Chosen | None = None) -> np.ndarray:
    """Six rows after 1090 positions that are in the cache already."""
    rng = np.random.default_rng(5)
    latents, keys = (rng.standard_normal((1090, n)).astype(np.float32) for n in (64, 16))
    out, table = rng.standard_normal((6, 64)).astype(np.float32), np.arange(69)[None, :]
    cache = block.cache(1104)
    cache.write(1, table[0], 0, latents, keys)
    with ThreadTeam(num_threads) as team:
        stage = block.stage(team)
        for start in range(0, 6, chunk):
            batch = batch_of([(1090 + p, 0) for p in range(start, start + chunk)], table)
            part = slice(start, start + chunk)
            some = None if chosen is None else Chosen(chosen.positions[part], chosen.counts[part])
            stage(out[part], block.weights, cache, 1, batch, some)
    return out


def test_shared_splits_do_not_matter() -> None:
    """A long context whose splits several threads share gives the bits of one thread, row by row."""
    block = make_latent_block()
    alone = long_run(block, 1, 6)
    for num_threads, chunk in ((2, 6), (3, 2), (2, 1)):
        assert np.array_equal(long_run(block, num_threads, chunk), alone)


@pytest.mark.parametrize("bits", [32, 8])
def test_a_list_of_all_positions_gives_the_bits_of_no_list(bits: int) -> None:
    """Reading by list is the same computation, whatever is in a list beyond its end."""
    block = make_latent_block()
    block.kv_bits = bits
    positions = np.where(np.arange(1100) < 1096, np.arange(1100), -5).astype(np.int32)
    everything = Chosen(np.tile(positions, (6, 1)), np.arange(1091, 1097, dtype=np.int32))
    assert np.array_equal(long_run(block, 2, 3, everything), long_run(block, 1, 6))


def test_rows_read_the_positions_that_were_chosen_for_them() -> None:
    """Lists of different lengths in one step give what the plain form gives for them."""
    block = make_latent_block()
    x, rng = block.rows(20), np.random.default_rng(1)
    lists = [np.sort(rng.permutation(t + 1)[: rng.integers(1, t + 2)]) for t in range(20)]
    chosen = Chosen(np.full((20, 20), -1, np.int32), np.array([len(some) for some in lists], np.int32))
    for row, some in zip(chosen.positions, lists, strict=True):
        row[: len(some)] = some
    got, table = x.copy(), np.arange(2)[None]
    with ThreadTeam(2) as team:
        batch = batch_of([(p, 0) for p in range(20)], table)
        block.stage(team)(got, block.weights, block.cache(20), 1, batch, chosen)
    want = reference_of(block, x, chosen)
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-5)
    assert np.abs(want - reference_of(block, x)).max() > 0.01


@pytest.mark.parametrize("kv_b", KV_B, ids=lambda encoding: encoding.describe())
@pytest.mark.parametrize("sizes", [{}, {"v_dim": 24}, {"nope_dim": 48}, {"nope_dim": 20}], ids=str)
def test_absorbed_matrices_hold_the_values_of_kv_b(kv_b: Encoding, sizes: dict[str, int]) -> None:
    """uk with its scales, and uv, are kv_b's halves of each head exactly, and take the bytes that the plan says."""
    block = make_latent_block(kv_b=kv_b, **sizes)
    spec, weights = block.spec, block.weights
    heads = block.kv_b.reshape(spec.num_heads, spec.nope_dim + spec.v_dim, spec.kv_lora_rank)
    uk, uv = (gather_rows(m, np.arange(m.rows, dtype=np.int32)) for m in (weights.uk, weights.uv))
    uk = uk.reshape(spec.num_heads, weights.num_scales, -1, spec.nope_dim)
    if weights.uk_scales is not None:
        uk = uk * weights.uk_scales[:, :, None]
    if weights.uk_biases is not None:
        uk = uk + weights.uk_biases[:, :, None]
    turned = uk.reshape(spec.num_heads, spec.kv_lora_rank, spec.nope_dim).transpose(0, 2, 1)
    np.testing.assert_array_equal(turned, heads[:, : spec.nope_dim])
    uv = uv.reshape(spec.num_heads, -1, spec.kv_lora_rank)
    np.testing.assert_array_equal(uv[:, : spec.v_dim], heads[:, spec.nope_dim :])
    assert not uv[:, spec.v_dim :].any()
    kept = (weights.uk.data, weights.uv.data, weights.uk_scales, weights.uk_biases)
    assert Absorbed.of(kv_b, spec).nbytes(spec) == sum(a.nbytes for a in kept if a is not None)


@pytest.mark.parametrize("kind", [LatentCache, LatentCache8])
def test_cache_gives_back_what_was_written(kind: type[LatentCache]) -> None:
    """Latents and rope keys come back through a shuffled table, in 8 bits within half a step; other blocks stay as they were."""
    rng = np.random.default_rng(0)
    latents, keys = (rng.standard_normal((50, n)).astype(np.float32) for n in (32, 24))
    cache, block_ids = kind(2, 7, 32, 24), [5, 0, 3, 6]
    cache.write(1, block_ids, 0, latents, keys)
    for got, want in zip(cache.read(1, block_ids, 50), (latents, keys), strict=True):
        step = np.abs(want).max(axis=1, keepdims=True) / 127 if kind.bits == 8 else 0.0
        assert (np.abs(got - want) <= 0.501 * step).all()
    assert not cache.tiles[0].any()
    assert not cache.tiles[1, [1, 2, 4]].any()
    assert cache.tiles[0, 0].nbytes == kind.tile_bytes(32, 24)


def test_scratch_is_what_is_planned() -> None:
    """What a stage allocates is within `scratch_bytes`, and not far below."""
    block = make_latent_block(encoding=Q4)
    with ThreadTeam(2) as team:
        stage = block.stage(team)
        run_latent_chunks(stage, block, block.rows(20), 20)
        arrays = [stage._scratch, stage._partials, stage._places, *stage._prepared, *stage._tables_of_rows.values()]
        arrays += [array for rows in stage._rows.values() for array in (rows.data, rows.table)]
        held = sum(array.nbytes for array in arrays)
    assert held <= MlaStage.scratch_bytes(block.spec, MAX_TOKENS, 1100, 2) <= 1.5 * held


def test_rows_outside_their_blocks_are_refused() -> None:
    """A block that does not exist is found before anything is touched."""
    block = make_latent_block()
    x, cache = block.rows(1), block.cache(32)
    with ThreadTeam(1) as team, pytest.raises(RequestError, match="row 0 of a step"):
        block.stage(team)(x, block.weights, cache, 0, batch_of([(3, 0)], np.array([[2]])))
    assert not cache.tiles.any()


def test_impossible_shapes_are_refused() -> None:
    """Sizes that no kernel has are named."""
    with pytest.raises(CheckpointError, match="multiple of 16, not 40"):
        MlaSpec(64, 4, None, 40, 16, 16, 16, scale=1.0, norm_eps=1e-6)
    with pytest.raises(CheckpointError, match="impossible"):
        MlaSpec(64, 4, 0, 48, 16, 16, 16, scale=1.0, norm_eps=1e-6)
