"""One attention block as one compiled call: x += o(attention(norm(x))), keys and values of the new rows stored first.

    stage = AttentionStage(team, spec, tables, max_tokens, max_context)
    stage(x, weights, kv, layer_idx, Batch(positions, sequence_idx, block_table))

What a row gives depends on its position, its sequence's cache and the weights alone, to the bit: not on the other rows, the
chunks of a prompt, the number of threads, or where the blocks lie. Phases: `attention_stage`; inner loops:
`attention_core`, `attention_tiles`; cache: `kv_cache`; the same in plain numpy: `reference_attention`.
"""

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from colibri_mp.kernels import attention_stage
from colibri_mp.kernels.attention_inputs import AttentionWeights, Batch, check_plain
from colibri_mp.kernels.attention_plan import PLACE, PLAN, cut_to_places
from colibri_mp.kernels.attention_rows import NORM_FULL, NORM_HEAD, NORM_NONE
from colibri_mp.kernels.attention_stage import FRAME, STEP_FIELDS
from colibri_mp.kernels.attention_tiles import SCORE_STRIDE, SPLIT_TOKENS
from colibri_mp.kernels.kv_cache import KVCache, padded_head_dim
from colibri_mp.kernels.kv_cache8 import CACHES
from colibri_mp.kernels.linear import DEFAULT_PLANES
from colibri_mp.kernels.paged_cache import BLOCK_TOKENS
from colibri_mp.kernels.prepared_rows import PreparedRows, largest_prepared
from colibri_mp.kernels.rope import RopeTables
from colibri_mp.kernels.row_buffer import RowBuffer
from colibri_mp.kernels.team import ThreadTeam, aligned_bytes
from colibri_mp.specs import AttentionSpec

__all__ = ["AttentionStage", "AttentionWeights", "Batch"]

F32Array = NDArray[np.float32]

CHUNK_QUERIES = 32
"""Query vectors that share a pass over the cache (more if a key-value head has more query heads)."""

MAX_PARTIALS_BYTES = 4 << 20
"""Room for partials when the splits of one chunk are shared among threads; a longer context is not shared."""

_ITEMS_A_THREAD = 4
_NO_WINDOW = 1 << 40
_QK_NORM = {"none": NORM_NONE, "head": NORM_HEAD, "full": NORM_FULL}


class AttentionStage:
    """Attention of one shape, with its scratch memory; for all layers of that shape, one call at a time.

    `planes`: see `linear`; `kv_bits`: of the caches, see `kv_cache8`. Weights met in a call are kept (a few kB each) until the stage goes.
    """

    block, block_dtype = attention_stage.BLOCK, attention_stage.BLOCK_FRAME

    def __init__(
        self,
        team: ThreadTeam,
        spec: AttentionSpec,
        tables: RopeTables,
        max_tokens: int,
        max_context: int,
        planes: int = DEFAULT_PLANES,
        kv_bits: int = 32,
    ) -> None:
        assert tables.cos.shape[0] >= max_context
        assert tables.rotary_dim <= spec.head_dim
        self.spec, self.max_tokens, self.max_context = spec, max_tokens, max_context
        self._team, self._tables, self._planes, self._kv_bits = team, tables, planes, kv_bits
        self._sizes = _Sizes(spec, max_context, team.num_threads)
        self._rows_a_place = max(1, self._sizes.max_queries // spec.group_size)
        self._activations = {name: RowBuffer(max_tokens, width) for name, width in self._sizes.widths.items()}
        self._scratch = aligned_bytes(self._sizes.scratch_bytes * team.num_threads)
        self._partials = aligned_bytes(self._sizes.partial_bytes * self._sizes.num_partials)
        self._places = np.zeros(max_tokens, PLACE)
        self._plan_record = self._make_plan_record()
        self._prepared = PreparedRows(max_tokens, max(spec.hidden, spec.q_width))
        self._template = self._make_template()
        self._planned: tuple[Batch, KVCache, tuple[int, ...]] | None = None
        self._frames: dict[int, tuple[AttentionWeights, NDArray[np.void], NDArray[np.int64]]] = {}

    @staticmethod
    def scratch_bytes(
        spec: AttentionSpec, max_tokens: int, max_context: int, num_threads: int, num_forms: int = 1
    ) -> int:
        """Bytes a stage allocates, at most. `num_forms`: group sizes (dense counting as one) that q, k, v of a layer mix."""
        sizes = _Sizes(spec, max_context, num_threads)
        rows = sum(-(-width // 16) * 16 * 4 for width in sizes.widths.values())
        prepared = num_forms * largest_prepared(max(spec.hidden, spec.q_width))
        tables = 8 * (len(sizes.widths) + num_forms) + PLACE.itemsize
        fixed = sizes.scratch_bytes * num_threads + sizes.partial_bytes * sizes.num_partials
        return max_tokens * (rows + prepared + tables) + fixed

    def __call__(self, x: F32Array, weights: AttentionWeights, kv: KVCache, layer_idx: int, batch: Batch) -> None:
        """x [T, D] float32, C-contiguous, 1 <= T <= max_tokens: x += attention(norm(x)) in place.

        `layer_idx` counts the layers of `kv`. Raises RequestError when a position is not in the context or in its blocks.
        """
        self._team.run(attention_stage.STAGE, self.frame(x, weights, kv, layer_idx, batch))

    def frame(
        self, x: F32Array, weights: AttentionWeights, kv: KVCache, layer_idx: int, batch: Batch
    ) -> NDArray[np.void]:
        """The frame of a call, as for `__call__`; valid until the next call with these weights."""
        num_tokens = batch.positions.size
        assert x.shape == (num_tokens, self.spec.hidden), f"x is {x.shape} for {num_tokens} tokens"
        check_plain(x, np.float32)
        assert 0 <= layer_idx < kv.num_layers
        frame, step = self._bound(weights)
        step[:] = (*self._plan(batch, kv), kv.address(layer_idx), x.ctypes.data)
        return frame

    def _plan(self, batch: Batch, kv: KVCache) -> tuple[int, ...]:
        """The step fields of a batch, the same for all layers; its places are left in `self._places`."""
        if self._planned is None or self._planned[0] is not batch or self._planned[1] is not kv:
            assert 1 <= batch.positions.size <= self.max_tokens
            spec = self.spec
            assert (kv.num_kv_heads, kv.head_dim, kv.bits) == (spec.num_kv_heads, spec.head_dim, self._kv_bits)
            self._planned = None  # the places are overwritten, even should that fail
            self._planned = (batch, kv, self._cut_to_places(batch, kv))
        return self._planned[2]

    def _cut_to_places(self, batch: Batch, kv: KVCache) -> tuple[int, ...]:
        arrays, num_places, last_position = cut_to_places(self._plan_record, batch, kv.num_blocks)
        num_items, num_splits = num_places * self.spec.num_kv_heads, last_position // SPLIT_TOKENS + 1
        num_shared = num_items if self._shares_splits(num_items, num_splits) else 0
        return (*arrays, num_places, num_items, num_splits, num_shared)

    def _shares_splits(self, num_items: int, num_splits: int) -> bool:
        """Whether several threads should work on one item: too few items to go round, and room for the partials."""
        few = num_items < _ITEMS_A_THREAD * self._team.num_threads
        return num_splits > 1 and few and num_items * num_splits <= self._sizes.num_partials

    def _bound(self, weights: AttentionWeights) -> tuple[NDArray[np.void], NDArray[np.int64]]:
        """The frame for these weights, and a view of its step fields."""
        known = self._frames.get(id(weights))
        if known is None:
            weights.check(self.spec)
            frame = self._template.copy()
            self._prepared.bind(frame, weights, ("q", "k", "v", "o"), self._planes)
            for name in ("q_norm", "k_norm", "q_bias", "k_bias", "v_bias", "o_bias", "sinks"):
                frame[name] = _address(getattr(weights, name))
            frame["norm_weight"] = _address(weights.norm)
            if weights.window is not None:
                frame["window"] = weights.window
            known = (weights, frame, frame.view(np.int64)[: len(STEP_FIELDS)])
            self._frames[id(weights)] = known
        return known[1:]

    def _make_plan_record(self) -> NDArray[np.void]:
        plan = np.zeros(1, PLAN)
        plan["max_context"], plan["window"] = self.max_context, self.spec.window or _NO_WINDOW
        plan["group_size"], plan["rows_a_place"] = self.spec.group_size, self._rows_a_place
        plan["places"] = self._places.ctypes.data
        return plan

    def _make_template(self) -> NDArray[np.void]:
        """A frame with everything that is the same for all layers."""
        spec, sizes, frame = self.spec, self._sizes, np.zeros(1, FRAME)
        for name in ("hidden", "num_heads", "num_kv_heads", "head_dim", "group_size", "scale"):
            frame[name] = getattr(spec, name)
        for name in _Sizes.FRAME_FIELDS:
            frame[name] = getattr(sizes, name)
        for name, rows in self._activations.items():
            frame[name], frame[f"{name}_rows"] = rows.data.ctypes.data, rows.table.ctypes.data
            if name != "v":
                frame[f"{name}_stride"] = rows.stride
        frame["context"], frame["context_stride"] = frame["q"], frame["q_stride"]
        frame["gate_offset"] = spec.q_width * 4 if spec.gated else 0
        frame["cos"], frame["sin"] = _address(self._tables.cos), _address(self._tables.sin)
        frame["rotary_half"] = self._tables.rotary_dim // 2
        frame["eps"], frame["clip"] = spec.norm_eps, spec.clip_qkv or 0.0
        frame["qk_norm"], frame["window"] = _QK_NORM[spec.qk_norm], spec.window or _NO_WINDOW
        layout = CACHES[self._kv_bits]
        frame["tile_bytes"], frame["values_offset"] = (
            layout.tile_bytes(spec.head_dim),
            layout.values_offset(spec.head_dim),
        )
        frame["kv_bits"], frame["part_bytes"] = self._kv_bits, BLOCK_TOKENS * 16 * self._kv_bits // 8
        frame["scratch"], frame["num_scratches"] = self._scratch.ctypes.data, self._team.num_threads
        frame["places"], frame["partials"] = self._places.ctypes.data, self._partials.ctypes.data
        return frame


def _address(array: F32Array | None) -> int:
    return 0 if array is None else int(array.ctypes.data)


class _Sizes:
    """Sizes and offsets in bytes of a stage's scratch memory (see `attention_core` for the layouts)."""

    FRAME_FIELDS: ClassVar[tuple[str, ...]] = (
        *("max_queries", "value_parts", "scores_offset", "largest_offset", "partial_offset", "merged_offset"),
        *("factors_offset", "scratch_bytes", "partial_bytes"),
    )

    def __init__(self, spec: AttentionSpec, max_context: int, num_threads: int) -> None:
        self.widths = {"q": spec.q_rows, "k": spec.kv_width, "v": spec.kv_width, "out": spec.hidden}
        self.max_queries = -(-max(CHUNK_QUERIES, spec.group_size) // 16) * 16
        padded = padded_head_dim(spec.head_dim)
        self.value_parts = padded // 16
        self.largest_offset = self.max_queries * padded * 4
        self.partial_bytes = self.largest_offset + self.max_queries * 8
        self.scores_offset = -(-max(self.max_queries * spec.head_dim, spec.hidden) // 16) * 64
        self.partial_offset = self.scores_offset + self.max_queries * SCORE_STRIDE * 4
        self.merged_offset = self.partial_offset + self.partial_bytes
        self.factors_offset = self.merged_offset + self.partial_bytes
        self.scratch_bytes = self.factors_offset + self.max_queries * 8
        num_splits = -(-max_context // SPLIT_TOKENS)
        wanted = _ITEMS_A_THREAD * num_threads * num_splits if num_threads > 1 and num_splits > 1 else 0
        self.num_partials = min(wanted, MAX_PARTIALS_BYTES // self.partial_bytes)
