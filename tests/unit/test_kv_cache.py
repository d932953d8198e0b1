"""The layout of the key-value cache."""

import numpy as np

from colibri_mp.kernels.kv_cache import KVCache
from colibri_mp.kernels.paged_cache import BLOCK_TOKENS, PagedCaches, num_blocks_for


def test_cache_gives_back_what_was_written_through_a_shuffled_table() -> None:
    """Keys and values come back exactly, other layers and blocks stay zero."""
    rng = np.random.default_rng(0)
    keys, values = rng.standard_normal((2, 50, 3, 24)).astype(np.float32)
    cache, block_ids = KVCache(2, 7, 3, 24), [5, 0, 3, 6]
    cache.write(1, block_ids, 0, keys[:9], values[:9])
    cache.write(1, block_ids, 9, keys[9:], values[9:])
    got_keys, got_values = cache.read(1, block_ids, 50)
    assert np.array_equal(got_keys, keys)
    assert np.array_equal(got_values, values)
    assert not cache.tiles[0].any()
    assert not cache.tiles[1, [1, 2, 4]].any()


def test_tiles_are_laid_out_as_documented() -> None:
    """A tile is keys [head_dim][position], then values [part][position][element]."""
    cache = KVCache(1, 1, 1, 24)
    key, value = np.arange(24, dtype=np.float32), np.arange(100, 124, dtype=np.float32)
    cache.write(0, [0], 5, key.reshape(1, 1, 24), value.reshape(1, 1, 24))
    tile = cache.tiles[0, 0, 0]
    assert np.array_equal(tile[: 24 * 16].reshape(24, 16)[:, 5], key)
    assert np.array_equal(tile[24 * 16 :].reshape(2, 16, 16)[:, 5].reshape(32)[:24], value)
    assert cache.address(0) == tile.ctypes.data
    assert tile.ctypes.data % 64 == 0


def test_planned_bytes_and_blocks() -> None:
    """`nbytes` is what the tiles take; tokens are rounded up to blocks."""
    cache = KVCache(2, 3, 4, 80)
    assert KVCache.nbytes(2, 3, 4, 80) == cache.tiles.nbytes
    assert cache.num_tokens == 3 * BLOCK_TOKENS
    assert [num_blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
    assert cache.address(1) == cache.tiles[1].ctypes.data


def test_several_caches_are_copied_block_by_block_as_one() -> None:
    """A block of all caches comes back under another id, bit for bit, and touches no other block."""
    rng = np.random.default_rng(0)
    caches = [KVCache(2, 4, 3, 24), KVCache(1, 4, 1, 16)]
    for cache in caches:
        cache.tiles[:] = rng.standard_normal(cache.tiles.shape)
    before = [cache.tiles.copy() for cache in caches]
    both = PagedCaches(caches, 4, 32)
    data = both.copy_block(1)
    assert data.nbytes == both.block_bytes == sum(cache.tiles.nbytes // 4 for cache in caches)
    both.set_block(3, data)
    for cache, old in zip(caches, before, strict=True):
        np.testing.assert_array_equal(cache.tiles[:, [0, 1, 2]], old[:, [0, 1, 2]])
        np.testing.assert_array_equal(cache.tiles[:, 3], old[:, 1])
