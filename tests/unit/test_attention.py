"""The compiled attention block against plain numpy."""

from dataclasses import replace

import numpy as np
import pytest
from attention_cases import BF16, F32, MAX_CONTEXT, MAX_TOKENS, Q4, Q8, Block, batch_of, make_block, run_chunked

from colibri_mp.errors import RequestError
from colibri_mp.formats import Encoding
from colibri_mp.kernels import reference_attention as reference
from colibri_mp.kernels.attention import AttentionStage
from colibri_mp.kernels.team import ThreadTeam

BLOCKS: dict[str, dict[str, object]] = {
    "grouped heads": {},
    "one head": {"num_heads": 1, "num_kv_heads": 1, "head_dim": 128},
    "many heads on one": {"num_heads": 40, "num_kv_heads": 1},
    "window, odd head_dim": {"head_dim": 24, "window": 8},
    "norm of the projection, clip": {"qk_norm": "full", "clip_qkv": 0.5, "num_kv_heads": 4},
    "norm of heads, biases": {"qk_norm": "head", "head_dim": 32, "qkv_bias": True, "o_bias": True},
    "sinks": {"sinks": True, "o_bias": True, "qkv_bias": True},
    "sinks and window, one head": {"sinks": True, "window": 5, "num_heads": 1, "num_kv_heads": 1},
    "mixed formats, partial rotary": {"encodings": {"q": Q4, "k": BF16, "v": Q8, "o": Q4}, "rotary_dim": 8},
    "gate": {"gated": True, "qk_norm": "head", "rotary_dim": 8},
    "gate, odd head_dim": {"gated": True, "head_dim": 10, "num_heads": 3, "num_kv_heads": 1},
    "rows that fill no block": {"hidden": 96, "num_heads": 3, "num_kv_heads": 1, "head_dim": 10, "encodings": dict.fromkeys("qkvo", F32)},
}  # fmt: skip


def expected(block: Block, x: np.ndarray) -> np.ndarray:
    """Plain numpy over the whole prompt."""
    out, kv = x.copy(), block.cache(len(x))
    batch = batch_of([(p, 0) for p in range(len(x))], np.arange(kv.num_blocks)[None, :])
    reference.attention(out, block.weights, block.spec, block.tables, kv, 1, batch)
    return out


@pytest.mark.parametrize("name", BLOCKS)
def test_attention_equals_the_reference(name: str) -> None:
    """Every kind of block gives the numbers of plain numpy, and changes x only by the attention's output."""
    block = make_block(**BLOCKS[name])  # type: ignore[arg-type]
    x = block.rows(40)
    with ThreadTeam(1) as team:
        assert np.allclose(run_chunked(block.stage(team), block, x, MAX_TOKENS), expected(block, x), rtol=0, atol=2e-5)


def test_long_context_equals_the_reference() -> None:
    """Rows that see several splits of the context are merged correctly, with and without a window."""
    for window, sinks in ((None, False), (600, True)):
        block = make_block(window=window, sinks=sinks)
        kv, table = block.cache(1088), np.random.default_rng(1).permutation(68)
        past = block.rng.standard_normal((2, 1080, 2, 16)).astype(np.float32)
        kv.write(1, table, 0, *past)
        batch = batch_of([(1080, 0), (1081, 0)], table[None, :])
        x = block.rows(2)
        want = x.copy()
        reference.attention(want, block.weights, block.spec, block.tables, kv, 1, batch)
        with ThreadTeam(2) as team:
            block.stage(team)(x, block.weights, kv, 1, batch)
        assert np.allclose(x, want, rtol=0, atol=1e-5)


def test_a_layer_may_have_a_narrower_window() -> None:
    """Weights with a window of their own see less; those without see all; the stage is the same."""
    block, x = make_block(), make_block().rows(40)
    narrow = replace(block, weights=replace(block.weights, window=3))
    with ThreadTeam(2) as team:
        stage = block.stage(team)
        seen = [run_chunked(stage, which, x, MAX_TOKENS) for which in (block, narrow, block)]
    assert np.allclose(seen[1], expected(narrow, x), rtol=0, atol=2e-5)
    assert not np.allclose(seen[1][10:], seen[0][10:], rtol=0, atol=1e-3)
    np.testing.assert_array_equal(seen[0], seen[2])
    windowed = make_block(window=3)
    assert np.allclose(seen[1], expected(windowed, x), rtol=0, atol=2e-5)


def test_blocks_beyond_the_window_are_not_read() -> None:
    """What lies more than a window back, in blocks of its own, may be anything: here it is not even a number."""
    block = make_block(sinks=True)
    narrow = replace(block, weights=replace(block.weights, window=20))
    kv, table = narrow.cache(112), np.arange(7)
    past = block.rng.standard_normal((2, 100, 2, 16)).astype(np.float32)
    kv.write(1, table, 0, *past)
    x, batch = block.rows(1), batch_of([(100, 0)], table[None, :])
    seen = []
    with ThreadTeam(2) as team:
        stage = narrow.stage(team)
        for hidden in (0.0, np.nan):
            kv.tiles[1, :5] = hidden  # positions 0 to 79: the window begins at 81
            seen.append(x.copy())
            stage(seen[-1], narrow.weights, kv, 1, batch)
    assert np.isfinite(seen[0]).all()
    np.testing.assert_array_equal(seen[0], seen[1])


def test_keys_and_values_are_stored_first() -> None:
    """The cache holds the new rows as the reference stores them, and nothing else changes."""
    block = make_block()
    got, want, x = block.cache(32), block.cache(32), block.rows(5)
    batch = batch_of([(p, 0) for p in range(14, 19)], np.array([[1, 0]]))
    reference.attention(x.copy(), block.weights, block.spec, block.tables, want, 1, batch)
    with ThreadTeam(1) as team:
        block.stage(team)(x.copy(), block.weights, got, 1, batch)
    assert np.allclose(got.tiles, want.tiles, rtol=0, atol=1e-6)
    assert np.array_equal(got.tiles != 0, want.tiles != 0)


@pytest.mark.parametrize(
    ("row", "table"),
    [
        ((MAX_CONTEXT, 0), [0, 1]),
        ((-1, 0), [0, 1]),
        ((3, 1), [0, 1]),
        ((32, 0), [0, 1]),
        ((20, 0), [0, 2]),
        ((16, 0), [0, -1]),
    ],
)
def test_rows_outside_the_cache_are_request_errors(row: tuple[int, int], table: list[int]) -> None:
    """A position, sequence or block that does not exist is refused before anything is written."""
    block = make_block()
    kv, x = block.cache(32), block.rows(2)
    before = x.copy()
    with ThreadTeam(1) as team, pytest.raises(RequestError, match="row 1"):
        block.stage(team)(x, block.weights, kv, 1, batch_of([(0, 0), row], np.array([table])))
    assert np.array_equal(x, before)
    assert not kv.tiles.any()


def test_refused_batch_does_not_change_the_next_step() -> None:
    """A batch that was used before a refused one gives the same again."""
    block = make_block()
    kv, x = block.cache(32), block.rows(4)
    good = batch_of([(p, 0) for p in range(4)], np.array([[0, 1]]))
    bad = batch_of([(0, 0), (5, 0), (32, 0)], np.array([[0, 1]]))
    first, second = x.copy(), x.copy()
    with ThreadTeam(1) as team:
        stage = block.stage(team)
        stage(first, block.weights, kv, 0, good)
        with pytest.raises(RequestError):
            stage(x[:3].copy(), block.weights, kv, 0, bad)
        stage(second, block.weights, kv, 0, good)
    assert np.array_equal(first, second)


@pytest.mark.parametrize(
    "encodings", [dict.fromkeys("qkvo", BF16), {"q": Q4, "k": BF16, "v": Encoding("affine", 4, 64, "bf16"), "o": F32}]
)
def test_stages_allocate_no_more_than_planned(encodings: dict[str, Encoding]) -> None:
    """`scratch_bytes` bounds what a stage holds after use, with one and with three forms of prepared rows."""
    block = make_block(encodings=encodings)
    with ThreadTeam(2) as team:
        stage = block.stage(team)
        run_chunked(stage, block, block.rows(20), 20)
        arrays = [
            stage._scratch,
            stage._partials,
            stage._places,
            *stage._prepared.arrays,
        ]
        arrays += [a for rows in stage._activations.values() for a in (rows.data, rows.table)]
        held = sum({a.ctypes.data: a.nbytes for a in arrays}.values())
        forms = len({e.group_size for e in encodings.values()})
        planned = AttentionStage.scratch_bytes(block.spec, MAX_TOKENS, MAX_CONTEXT, 2, forms)
    assert held <= planned <= 1.5 * held
