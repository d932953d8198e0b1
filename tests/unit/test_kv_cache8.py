"""The key-value cache in 8 bits: its layout, the compiled attention over it, and that it is as independent as the exact one."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attention_cases import MAX_TOKENS, Q4, Block, batch_of, make_block, run_chunked

from colibri_mp.kernels import reference_attention as reference
from colibri_mp.kernels.kv_cache import KVCache
from colibri_mp.kernels.kv_cache8 import KVCache8, quantise
from colibri_mp.kernels.team import ThreadTeam

KINDS: list[dict[str, Any]] = [
    {},
    {"head_dim": 24, "window": 8},
    {"num_kv_heads": 4, "encodings": dict.fromkeys("qkvo", Q4)},
    {"num_heads": 40, "num_kv_heads": 1, "qkv_bias": True},
]


class Written(KVCache8):
    """A cache that keeps what has been stored in it."""

    def write(self, *_: Any) -> None:
        """Nothing."""


def block8(**kind: Any) -> Block:
    """A block over a cache of 8 bits."""
    return replace(make_block(**kind), kv_bits=8)


def test_codes_come_back_within_half_a_step() -> None:
    """What is read differs from what was written by half of a 127th of the greatest value of its position and head."""
    rng = np.random.default_rng(0)
    keys, values = rng.standard_normal((2, 50, 3, 24)).astype(np.float32)
    keys[7] = 0
    cache, block_ids = KVCache8(2, 7, 3, 24), [5, 0, 3, 6]
    cache.write(1, block_ids, 0, keys, values)
    for got, want in zip(cache.read(1, block_ids, 50), (keys, values), strict=True):
        step = np.abs(want).max(axis=-1, keepdims=True) / 127
        assert (np.abs(got - want) <= step * 0.5001).all()
        assert np.abs(got - want).max() > 0
    assert not cache.tiles[0].any()
    assert not cache.tiles[1, [1, 2, 4]].any()


def test_tiles_are_laid_out_as_documented() -> None:
    """Codes of the keys, their scales, codes of the values, their scales; a quarter of the exact cache and the scales."""
    cache = KVCache8(1, 1, 1, 24)
    key, value = np.linspace(-2, 1, 24, dtype=np.float32), np.linspace(0, 254, 24, dtype=np.float32)
    cache.write(0, [0], 5, key.reshape(1, 1, 24), value.reshape(1, 1, 24))
    tile = cache.tiles[0, 0, 0]
    assert tile.nbytes == 24 * 16 + 64 + 32 * 16 + 64
    assert KVCache8.nbytes(1, 1, 1, 24) * 4 == KVCache.nbytes(1, 1, 1, 24) + 4 * 128
    codes, scale = quantise(key)
    assert np.array_equal(tile[: 24 * 16].view(np.int8).reshape(24, 16)[:, 5], codes)
    assert tile[24 * 16 : 24 * 16 + 64].view(np.float32)[5] == scale == np.float32(2) / np.float32(127)
    values = tile[24 * 16 + 64 : -64].view(np.int8).reshape(2, 16, 16)[:, 5].reshape(32)
    assert np.array_equal(values[:24], np.rint(value / 2))
    assert tile[-64:].view(np.float32)[5] == 2


@pytest.mark.parametrize("kind", KINDS)
def test_stores_what_numpy_would_store(kind: dict[str, Any]) -> None:
    """The compiled stage stores the codes and scales of the keys and values that it stores exactly in 32 bits."""
    exact = make_block(**kind)
    x, batch = exact.rows(20), batch_of([(p, 0) for p in range(20)], np.array([[1, 0]]))
    floats, codes, wanted = exact.cache(32), block8(**kind).cache(32), block8(**kind).cache(32)
    with ThreadTeam(1) as team:
        exact.stage(team)(x.copy(), exact.weights, floats, 1, batch)
        replace(exact, kv_bits=8).stage(team)(x.copy(), exact.weights, codes, 1, batch)
    wanted.write(1, [1, 0], 0, *floats.read(1, [1, 0], 20))
    assert np.array_equal(codes.tiles, wanted.tiles)
    assert codes.tiles.any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_past", [0, 1060])
def test_attention_equals_the_reference(kind: dict[str, Any], num_past: int) -> None:
    """Over the codes that are stored, new rows and several splits of past ones, the numbers are those of plain numpy."""
    block = block8(**kind)
    kv, table = Written(2, 68, block.spec.num_kv_heads, block.spec.head_dim), np.random.default_rng(1).permutation(68)
    past = block.rng.standard_normal((2, num_past, block.spec.num_kv_heads, block.spec.head_dim)).astype(np.float32)
    KVCache8.write(kv, 1, table, 0, *past)
    batch = batch_of([(num_past + p, 0) for p in range(20)], table[None, :])
    x = block.rows(20)
    want = x.copy()
    with ThreadTeam(2) as team:
        block.stage(team)(x, block.weights, kv, 1, batch)
    reference.attention(want, block.weights, block.spec, block.tables, kv, 1, batch)
    assert np.allclose(x, want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_chunks_threads_and_blocks_do_not_matter(kind: dict[str, Any], num_threads: int) -> None:
    """Any chunks on any threads, in shuffled blocks with other sequences' remains, give the bits of one token at a time."""
    block = block8(**kind)
    x = block.rows(2 * MAX_TOKENS)
    with ThreadTeam(1) as team:
        alone = run_chunked(block.stage(team), block, x, 1)
    dirty = KVCache8(2, 9, block.spec.num_kv_heads, block.spec.head_dim)
    dirty.tiles[:] = 255
    with ThreadTeam(num_threads) as team:
        stage = block.stage(team)
        for chunk in (3, 7, MAX_TOKENS):
            assert np.array_equal(run_chunked(stage, block, x, chunk), alone)
            assert np.array_equal(run_chunked(stage, block, x, chunk, np.array([8, 2, 5, 0]), dirty), alone)


def test_shared_splits_do_not_matter() -> None:
    """A long context whose splits several threads share gives the bits of one thread."""
    block = block8()
    past = block.rng.standard_normal((2, 1090, 2, 16)).astype(np.float32)
    x, table = block.rows(6), np.arange(69)[None, :]
    results = []
    for num_threads, chunk in ((1, 6), (2, 6), (3, 2)):
        kv, out = block.cache(1104), x.copy()
        kv.write(1, table[0], 0, *past)
        with ThreadTeam(num_threads) as team:
            stage = block.stage(team)
            for start in range(0, 6, chunk):
                rows = [(1090 + p, 0) for p in range(start, start + chunk)]
                stage(out[start : start + chunk], block.weights, kv, 1, batch_of(rows, table))
        results.append(out)
    assert all(np.array_equal(result, results[0]) for result in results)
