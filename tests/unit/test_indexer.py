"""The indexer: the same choice as in plain numpy, and the same to the bit whatever it is computed together with."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from attention_cases import BF16, Q4, batch_of, random_matrix
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_mp.errors import CheckpointError
from colibri_mp.kernels import reference_indexer
from colibri_mp.kernels.attention_inputs import Batch
from colibri_mp.kernels.index_alone import IndexerAlone
from colibri_mp.kernels.index_keys import IndexKeys, index_tile_bytes
from colibri_mp.kernels.index_select import HISTOGRAM_BYTES, select_largest
from colibri_mp.kernels.indexer import Indexer, IndexerWeights
from colibri_mp.kernels.paged_cache import PagedCache, num_blocks_for
from colibri_mp.kernels.rope import rope_tables
from colibri_mp.kernels.team import ThreadTeam
from colibri_mp.specs import IndexerSpec, RopeSpec

MAX_TOKENS, MAX_CONTEXT = 24, 2200
SPEC = IndexerSpec(hidden=64, query_rank=32, num_heads=12, head_dim=24, rotary_dim=8, top_k=8)
TABLES = rope_tables(RopeSpec(1e4, 8), MAX_CONTEXT)


@dataclass
class Case:
    """An indexer with random weights, and rows for it."""

    spec: IndexerSpec
    weights: IndexerWeights
    rng: np.random.Generator

    def alone(self, team: ThreadTeam) -> IndexerAlone:
        """The compiled stage."""
        return IndexerAlone(team, Indexer(self.spec, TABLES, MAX_TOKENS, MAX_CONTEXT, team.num_threads))

    def cache(self, num_tokens: int) -> IndexKeys:
        """A cache of two layers in whose tiles the keys come after 64 other bytes."""
        tile_bytes = 64 + index_tile_bytes(self.spec.head_dim)
        return IndexKeys(PagedCache(2, num_blocks_for(num_tokens), 1, tile_bytes), 64, self.spec.head_dim)

    def rows(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Normed inputs and query sources."""
        shapes = ((count, self.spec.hidden), (count, self.spec.query_rank))
        h, sources = (self.rng.standard_normal(shape).astype(np.float32) for shape in shapes)
        return h, sources


def make_case(seed: int = 0, quantised: bool = False, **changes: object) -> Case:
    """An indexer, bf16 or q and k in 4 bits."""
    spec, rng = replace(SPEC, **changes), np.random.default_rng(seed)  # type: ignore[arg-type]
    encoding = Q4 if quantised else BF16
    weights = IndexerWeights(
        random_matrix(rng, encoding, spec.q_width, spec.query_rank),
        random_matrix(rng, encoding, spec.head_dim, spec.hidden),
        random_matrix(rng, BF16, spec.num_heads, spec.hidden),
        (1 + 0.1 * rng.standard_normal(spec.head_dim)).astype(np.float32),
        (0.1 * rng.standard_normal(spec.head_dim)).astype(np.float32),
    )
    return Case(spec, weights, rng)


def run_chunked(
    alone: IndexerAlone, case: Case, rows: tuple[np.ndarray, np.ndarray], size: int, table: np.ndarray
) -> tuple[list[list[int]], np.ndarray]:
    """A prompt in chunks: the choices of all rows, and the keys in the cache."""
    h, sources = rows
    cache = case.cache(16 * (int(table.max()) + 1))
    cache.cache.tiles[:] = np.nan
    chosen: list[list[int]] = []
    for start in range(0, len(h), size):
        end = min(len(h), start + size)
        batch = batch_of([(p, 0) for p in range(start, end)], table[None])
        found = alone(
            np.ascontiguousarray(h[start:end]), np.ascontiguousarray(sources[start:end]), case.weights, cache, 1, batch
        )
        chosen += [row.tolist() for row in found]
    return chosen, cache.read(1, table, len(h))


@pytest.mark.parametrize("changes", [{}, {"interleaved": False}, {"quantised": True}, {"norm_eps": 0.5}])
def test_choices_are_those_of_the_plain_reference(changes: dict[str, object]) -> None:
    """Each row's positions and all keys agree with plain numpy, rows below top_k and above it in one batch."""
    case = make_case(**changes)  # type: ignore[arg-type]
    h, sources = case.rows(MAX_TOKENS)
    cache, plain = case.cache(MAX_TOKENS), case.cache(MAX_TOKENS)
    batch = batch_of([(p, 0) for p in range(MAX_TOKENS)], np.array([[1, 0]]))
    with ThreadTeam(2) as team:
        chosen = case.alone(team)(h, sources, case.weights, cache, 1, batch)
    expected = reference_indexer.choose(h, sources, case.weights, case.spec, TABLES, plain, 1, batch)
    assert [row.tolist() for row in chosen] == [row.tolist() for row in expected]
    assert np.abs(cache.cache.tiles - plain.cache.tiles).max() < 1e-5


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_chunks_threads_and_blocks_do_not_matter(num_threads: int) -> None:
    """Chunks of any size on any number of threads, over shuffled blocks, give the choices and keys of one token at a time."""
    case = make_case(1)
    rows = case.rows(60)
    with ThreadTeam(1) as team:
        choices, keys = run_chunked(case.alone(team), case, rows, 1, np.arange(4))
    with ThreadTeam(num_threads) as team:
        alone = case.alone(team)
        for size in (3, 7, MAX_TOKENS):
            again, same_keys = run_chunked(alone, case, rows, size, np.array([8, 2, 5, 0]))
            assert again == choices
            assert np.array_equal(same_keys, keys)


def test_long_rows_choose_the_same_alone_and_together() -> None:
    """Rows of two long sequences whose splits are shared by threads choose as each of many rows on one thread, and as plain numpy."""
    case = make_case(2, top_k=300)
    cache, table = case.cache(276 * 16), np.random.default_rng(5).permutation(276).reshape(2, 138).astype(np.int32)
    for sequence in (0, 1):
        cache.write(0, table[sequence], 0, case.rng.standard_normal((MAX_CONTEXT, 24)).astype(np.float32))
    places = [(2000 + i, 0) for i in range(6)] + [(1500, 1), (20, 1), (2199, 1)]
    h, sources = case.rows(len(places))
    with ThreadTeam(1) as team:
        together = case.alone(team)(h, sources, case.weights, cache, 0, batch_of(places, table))
    plain = reference_indexer.choose(h, sources, case.weights, case.spec, TABLES, cache, 0, batch_of(places, table))
    assert [row.tolist() for row in together] == [row.tolist() for row in plain]
    with ThreadTeam(3) as team:
        alone = case.alone(team)
        for t, place in enumerate(places):
            one = alone(h[t : t + 1], sources[t : t + 1], case.weights, cache, 0, batch_of([place], table))
            assert one[0].tolist() == together[t].tolist()


def test_a_choice_lasts_as_long_as_its_batch() -> None:
    """A layer that reuses a choice finds it although another batch has been computed in between."""
    case = make_case(3)
    (h, sources), cache = case.rows(MAX_TOKENS), case.cache(2 * 32)
    first = batch_of([(p, 0) for p in range(MAX_TOKENS)], np.array([[0, 1], [2, 3]]))
    second = batch_of([(p, 1) for p in range(MAX_TOKENS)], np.array([[0, 1], [2, 3]]))
    with ThreadTeam(2) as team:
        alone = case.alone(team)
        alone(h, sources, case.weights, cache, 0, first)
        before = chosen_of(alone, first).copy()
        alone(h[::-1].copy(), sources, case.weights, cache, 0, second)
        assert np.array_equal(chosen_of(alone, first)[8:], before[8:])
        assert not np.array_equal(chosen_of(alone, second)[8:], before[8:])


def chosen_of(alone: IndexerAlone, batch: Batch) -> np.ndarray:
    """The positions that the rows of a batch read."""
    chosen = alone.indexer.choice(batch).chosen
    assert chosen is not None
    return chosen.positions


def select(scores: np.ndarray, top_k: int) -> list[int]:
    """`select_largest` on a copy."""
    keys, chosen = scores.copy(), np.zeros(top_k, np.int32)
    histogram = np.zeros(HISTOGRAM_BYTES, np.uint8)
    select_largest(keys.ctypes.data, len(scores), top_k, chosen.ctypes.data, histogram.ctypes.data)
    return chosen.tolist()


@given(
    st.lists(st.sampled_from([0.0, 1.0, -1.0, 1e-30, -3e8, 3e8, 1.0000001, 2.0]), min_size=1, max_size=60), st.data()
)
@settings(max_examples=50, deadline=None)
def test_ties_go_to_the_lowest_positions(values: list[float], data: st.DataObject) -> None:
    """The largest scores in ascending order of position, however many are equal."""
    scores, top_k = np.array(values, np.float32), data.draw(st.integers(1, len(values)))
    assert select(scores, top_k) == reference_indexer.largest(scores.astype(np.float64), top_k).tolist()


def test_many_scores_are_chosen_from() -> None:
    """2,048 of 20,000 random scores."""
    scores = np.random.default_rng(4).standard_normal(20_000).astype(np.float32)
    assert select(scores, 2048) == reference_indexer.largest(scores.astype(np.float64), 2048).tolist()


def test_impossible_indexers_are_refused() -> None:
    """A spec says what is wrong with its numbers."""
    with pytest.raises(CheckpointError, match="elements of an indexer's heads turn"):
        replace(SPEC, rotary_dim=26)
    with pytest.raises(CheckpointError, match="head_dim of an indexer"):
        replace(SPEC, head_dim=15)
    with pytest.raises(CheckpointError, match="chooses 0 positions"):
        replace(SPEC, top_k=0)
