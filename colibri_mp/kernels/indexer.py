"""The indexer of one shape: its weights, buffers and frames, for the stage of the attention that asks it.

    indexer = Indexer(spec, tables, max_tokens, max_context, num_threads)
    frame = indexer.frame(weights, keys, layer_idx, batch)      # a record of `index_stage.FRAME` for the attention's frame
    choice = indexer.choice(batch)                              # the same object for all layers of a step

The phases, and what a row's choice depends on: `index_stage`. The same in plain numpy: `reference_indexer`.
"""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from colibri_mp.kernels.attention_inputs import Batch, Chosen, check_plain
from colibri_mp.kernels.index_keys import IndexKeys
from colibri_mp.kernels.index_select import HISTOGRAM_BYTES
from colibri_mp.kernels.index_stage import FRAME, ROWS_A_CHUNK, SPLIT_TILES, STEP_FIELDS
from colibri_mp.kernels.index_tiles import WIDTH
from colibri_mp.kernels.layout import PackedMatrix, num_blocks
from colibri_mp.kernels.linear import DEFAULT_PLANES, describe, row_table
from colibri_mp.kernels.paged_cache import BLOCK_TOKENS
from colibri_mp.kernels.prepared_rows import largest_prepared
from colibri_mp.kernels.rope import RopeTables
from colibri_mp.kernels.team import aligned_bytes
from colibri_mp.specs import IndexerSpec

F32Array = NDArray[np.float32]
I32Array = NDArray[np.int32]

_SHARED_ROWS_A_THREAD = 2
"""Rows for each thread up to which the positions of one row are shared among threads."""


@dataclass(frozen=True, eq=False)
class IndexerWeights:
    """q [num_heads * head_dim, query_rank], k [head_dim, D], gates [num_heads, D]; k_norm and k_bias [head_dim] float32."""

    q: PackedMatrix
    k: PackedMatrix
    gates: PackedMatrix
    k_norm: F32Array
    k_bias: F32Array

    def check(self, spec: IndexerSpec) -> None:
        """Our own invariant: the loader has compared the checkpoint with its configuration."""
        shapes = {"q": (spec.q_width, spec.query_rank), "k": (spec.head_dim, spec.hidden)}
        shapes["gates"] = (spec.num_heads, spec.hidden)
        for name, shape in shapes.items():
            matrix = getattr(self, name)
            assert (matrix.rows, matrix.cols) == shape, f"{name} is [{matrix.rows}, {matrix.cols}], not {shape}"
        for vector in (self.k_norm, self.k_bias):
            assert vector.shape == (spec.head_dim,)
            check_plain(vector, np.float32)


@dataclass(frozen=True, eq=False)
class Choice:
    """Which positions the rows of a batch read; `chosen` is None if they read all.

    `sparse_rows`: rows that do not, ascending. Their positions are written by each layer that has an indexer; `step`: fields of its frame.
    """

    sparse_rows: I32Array
    chosen: Chosen | None
    step: tuple[int, ...]


class Indexer:
    """See the module docstring. One call at a time; weights met in a call are kept (some kB each) until this object goes."""

    def __init__(
        self,
        spec: IndexerSpec,
        tables: RopeTables,
        max_tokens: int,
        max_context: int,
        num_threads: int,
        planes: int = DEFAULT_PLANES,
    ) -> None:
        assert tables.cos.shape[0] >= max_context
        assert tables.rotary_dim == spec.rotary_dim
        self.spec, self.max_tokens, self.max_context = spec, max_tokens, max_context
        self._tables, self._planes = tables, planes
        sizes = _Sizes(spec, max_context, num_threads)
        self._max_shared = sizes.max_shared
        self._shared_scores = aligned_bytes(sizes.scores_bytes * sizes.max_shared)
        self._rows = {name: aligned_bytes(max_tokens * stride) for name, stride in sizes.strides.items()}
        self._tables_of_rows = {
            name: row_table(self._rows[name].ctypes.data, stride, max_tokens) for name, stride in sizes.strides.items()
        }
        self._prepared = {
            name: aligned_bytes(max_tokens * largest_prepared(cols)) for name, cols in sizes.columns.items()
        }
        self._template = self._make_template(sizes)
        self._frames: dict[
            int, tuple[IndexerWeights, NDArray[np.void], NDArray[np.int64], list[NDArray[np.int64]]]
        ] = {}
        self._choices: WeakKeyDictionary[Batch, Choice] = WeakKeyDictionary()

    @staticmethod
    def thread_scratch_bytes(spec: IndexerSpec, max_context: int, num_threads: int) -> int:
        """Bytes of scratch memory that the stage has to give each thread."""
        return _Sizes(spec, max_context, num_threads).scratch_bytes

    @staticmethod
    def scratch_bytes(spec: IndexerSpec, max_tokens: int, max_context: int, num_threads: int) -> int:
        """Bytes that an indexer and its choices allocate, at most; without the scratch memory of threads."""
        sizes = _Sizes(spec, max_context, num_threads)
        rows = sum(sizes.strides.values()) + 6 * 8 + sum(largest_prepared(cols) for cols in sizes.columns.values())
        choice = 4 * (spec.top_k + 2)
        return max_tokens * (rows + choice) + sizes.scores_bytes * sizes.max_shared

    def choice(self, batch: Batch) -> Choice:
        """The choice of a batch that `frame` has been asked for."""
        assert batch in self._choices, "no layer before this one has chosen for the same batch"
        return self._choices[batch]

    def _planned(self, batch: Batch) -> Choice:
        known = self._choices.get(batch)
        if known is None:
            sparse = np.flatnonzero(batch.positions >= self.spec.top_k).astype(np.int32)
            chosen = self._chosen(batch) if sparse.size else None
            self._choices[batch] = known = Choice(sparse, chosen, self._step(batch, sparse, chosen))
        return known

    def _chosen(self, batch: Batch) -> Chosen:
        """Room for the choice of rows that make one; the others read all positions."""
        top_k = self.spec.top_k
        counts = np.minimum(batch.positions + 1, top_k).astype(np.int32)
        positions = np.empty((batch.positions.size, top_k), np.int32)
        positions[batch.positions < top_k] = np.arange(top_k, dtype=np.int32)
        return Chosen(positions, counts)

    def _step(self, batch: Batch, sparse: I32Array, chosen: Chosen | None) -> tuple[int, ...]:
        """The step fields of a batch, all but those of the keys."""
        last = int(batch.positions[sparse].max()) if sparse.size else 0
        num_splits = last // (SPLIT_TILES * BLOCK_TOKENS) + 1
        shares = int(num_splits > 1 and sparse.size <= self._max_shared)
        arrays = [array.ctypes.data for array in (batch.positions, batch.sequence_idx, batch.block_table)]
        sizes = (batch.positions.size, *arrays, batch.block_table.shape[1])
        room = 0 if chosen is None else chosen.positions.ctypes.data
        return (*sizes, sparse.size, sparse.ctypes.data, num_splits, shares, room)

    def frame(self, weights: IndexerWeights, keys: IndexKeys, layer_idx: int, batch: Batch) -> NDArray[np.void]:
        """The frame of a layer's indexer, shape (1,); valid until the next call with these weights.

        `layer_idx` counts the layers of the cache. The caller has seen to it that the batch's positions are in blocks that exist.
        """
        assert 1 <= batch.positions.size <= self.max_tokens
        assert 0 <= layer_idx < keys.cache.num_layers
        assert keys.head_dim == self.spec.head_dim
        frame, step = self._bound(weights)
        step[:] = (*self._planned(batch).step, keys.address(layer_idx), keys.tile_bytes)
        return frame

    def _bound(self, weights: IndexerWeights) -> tuple[NDArray[np.void], NDArray[np.int64]]:
        """The frame for these weights, and a view of its step fields."""
        known = self._frames.get(id(weights))
        if known is None:
            weights.check(self.spec)
            frame = self._template.copy()
            tables = self._bind_matrices(frame, weights)
            frame["k_norm"], frame["k_bias"] = weights.k_norm.ctypes.data, weights.k_bias.ctypes.data
            known = (weights, frame, frame.view(np.int64)[: len(STEP_FIELDS)], tables)
            self._frames[id(weights)] = known
        return known[1:3]

    def _bind_matrices(self, frame: NDArray[np.void], weights: IndexerWeights) -> list[NDArray[np.int64]]:
        """Describe q, k and gates and give each its prepared rows; those of k and the gates are one if their forms are."""
        tables = []
        for name, weight in (("q", weights.q), ("k", weights.k), ("g", weights.gates)):
            matrix = describe(weight, self._planes)
            buffer = name
            if name == "g" and matrix["form"] == frame["k_matrix"]["form"]:
                buffer = "k"
            prepared, row_bytes = self._prepared[buffer], int(matrix["prepared_bytes"][0])
            tables.append(row_table(prepared.ctypes.data, row_bytes, self.max_tokens))
            frame[f"{name}_matrix"] = matrix
            frame[f"{name}_prepared"], frame[f"{name}_xs"] = prepared.ctypes.data, tables[-1].ctypes.data
        return tables

    def _make_template(self, sizes: "_Sizes") -> NDArray[np.void]:
        """A frame with everything that is the same for all layers."""
        frame, spec = np.zeros(1, FRAME), self.spec
        frame["num_heads"], frame["head_dim"], frame["top_k"] = spec.num_heads, spec.head_dim, spec.top_k
        frame["num_groups"], frame["rotary_half"] = sizes.num_groups, spec.rotary_dim // 2
        frame["interleaved"], frame["eps"] = spec.interleaved, spec.norm_eps
        frame["cos"], frame["sin"] = self._tables.cos.ctypes.data, self._tables.sin.ctypes.data
        frame["shared_scores"] = self._shared_scores.ctypes.data
        for name in ("queries_bytes", "scores_bytes", "scores_offset", "histogram_offset"):
            frame[name] = getattr(sizes, name)
        for name, stride in sizes.strides.items():
            frame[name], frame[f"{name}_stride"] = self._rows[name].ctypes.data, stride
            frame[f"{name}_rows"] = self._tables_of_rows[name].ctypes.data
        return frame


class _Sizes:
    """Sizes and offsets in bytes (see `index_stage`)."""

    def __init__(self, spec: IndexerSpec, max_context: int, num_threads: int) -> None:
        self.strides = {name: num_blocks(rows) * 64 for name, rows in _widths(spec).items()}
        self.columns = {"q": spec.query_rank, "k": spec.hidden, "g": spec.hidden}
        self.num_groups = -(-spec.num_heads // WIDTH)
        self.queries_bytes = self.num_groups * WIDTH * spec.head_dim * 4
        self.scores_bytes = -(-max_context // BLOCK_TOKENS) * BLOCK_TOKENS * 4
        self.scores_offset = ROWS_A_CHUNK * self.queries_bytes
        self.histogram_offset = self.scores_offset + ROWS_A_CHUNK * self.scores_bytes
        self.scratch_bytes = self.histogram_offset + HISTOGRAM_BYTES
        has_splits = num_threads > 1 and max_context > SPLIT_TILES * BLOCK_TOKENS
        self.max_shared = _SHARED_ROWS_A_THREAD * num_threads if has_splits else 0


def _widths(spec: IndexerSpec) -> dict[str, int]:
    return {"q": spec.q_width, "k": spec.head_dim, "g": spec.num_heads}
