"""One block of multi-head latent attention as one compiled call: x += o(attention(norm(x))), latents of the new rows stored first.

    stage = MlaStage(team, spec, tables, max_tokens, max_context)
    stage(x, weights, cache, layer_idx, batch)

What a row gives depends on its position, its sequence's cache and the weights alone, to the bit. Decode and prefill both attend to
latents (absorbed form), so that they agree. With an indexer (DSA) rows that see more than its top_k positions read those that it chooses:
`indexer`. Phases: `mla_stage`, `mla_heads`; inner loops: `mla_core`, `mla_tiles`; memory: `mla_sizes`; cache: `latent_cache`;
weights: `mla_weights`; the same in plain numpy: `reference_mla`.
"""

import numpy as np
from numpy.typing import NDArray

from colibri_mp.kernels import mla_stage
from colibri_mp.kernels.attention_inputs import Batch, Chosen, check_plain
from colibri_mp.kernels.attention_plan import PLACE, PLAN, cut_to_places
from colibri_mp.kernels.attention_tiles import SPLIT_TOKENS
from colibri_mp.kernels.indexer import Indexer
from colibri_mp.kernels.latent_cache import LatentCache
from colibri_mp.kernels.layout import num_blocks
from colibri_mp.kernels.linear import DEFAULT_PLANES, describe, row_table
from colibri_mp.kernels.mla_sizes import ITEMS_A_THREAD, MlaSizes
from colibri_mp.kernels.mla_stage import FRAME, MATRICES, STEP_FIELDS
from colibri_mp.kernels.mla_tiles import WIDTH
from colibri_mp.kernels.mla_weights import MlaWeights
from colibri_mp.kernels.rope import RopeTables
from colibri_mp.kernels.row_buffer import RowBuffer
from colibri_mp.kernels.team import ThreadTeam, aligned_bytes
from colibri_mp.specs import MlaSpec

F32Array = NDArray[np.float32]

_EVERYTHING = 1 << 40


class MlaStage:
    """Latent attention of one shape, with its scratch memory; for all layers of that shape, one call at a time.

    `planes`: see `linear`; `kv_bits`: of the caches, see `latent_cache`. Weights met in a call are kept (a few kB each) until the
    stage goes.
    """

    block, block_dtype = mla_stage.BLOCK, mla_stage.BLOCK_FRAME

    def __init__(
        self,
        team: ThreadTeam,
        spec: MlaSpec,
        tables: RopeTables,
        max_tokens: int,
        max_context: int,
        planes: int = DEFAULT_PLANES,
        kv_bits: int = 32,
    ) -> None:
        assert tables.cos.shape[0] >= max_context
        assert tables.rotary_dim == spec.rope_dim
        self.spec, self.max_tokens, self.max_context = spec, max_tokens, max_context
        self._team, self._tables, self._planes, self._kv_bits = team, tables, planes, kv_bits
        self._indexer = (
            None
            if spec.indexer is None
            else Indexer(spec.indexer, tables, max_tokens, max_context, team.num_threads, planes)
        )
        self._sizes = MlaSizes(spec, max_tokens, max_context, team.num_threads)
        self._rows = {name: RowBuffer(max_tokens, width) for name, width in self._sizes.widths.items()}
        self._prepared = [aligned_bytes(max_tokens * size) for size in self._sizes.prepared_bytes]
        self._scratch = aligned_bytes(self._sizes.scratch_bytes * team.num_threads)
        self._partials = aligned_bytes(self._sizes.partial_bytes * self._sizes.num_partials)
        self._places = np.zeros(max_tokens, PLACE)
        self._tables_of_rows: dict[tuple[int, int], NDArray[np.int64]] = {}
        self._plan_record = self._make_plan_record()
        self._template = self._make_template()
        self._planned: tuple[Batch, int, Chosen | None, tuple[int, ...]] | None = None
        self._frames: dict[int, tuple[MlaWeights, NDArray[np.void], NDArray[np.int64]]] = {}

    @staticmethod
    def scratch_bytes(spec: MlaSpec, max_tokens: int, max_context: int, num_threads: int) -> int:
        """Bytes a stage allocates, at most."""
        sizes = MlaSizes(spec, max_tokens, max_context, num_threads)
        rows = sum(num_blocks(width) * 64 for width in sizes.widths.values()) + sum(sizes.prepared_bytes)
        tables = 8 * (len(sizes.widths) + len(MATRICES)) + PLACE.itemsize
        fixed = sizes.scratch_bytes * num_threads + sizes.partial_bytes * sizes.num_partials
        indexer = (
            0 if spec.indexer is None else Indexer.scratch_bytes(spec.indexer, max_tokens, max_context, num_threads)
        )
        return max_tokens * (rows + tables) + fixed + indexer

    def __call__(
        self,
        x: F32Array,
        weights: MlaWeights,
        cache: LatentCache,
        layer_idx: int,
        batch: Batch,
        chosen: Chosen | None = None,
    ) -> None:
        """x [T, D] float32, C-contiguous, 1 <= T <= max_tokens: x += attention(norm(x)) in place.

        `layer_idx` counts the layers of `cache`; `chosen`: where rows read some positions only and there is no indexer to say so. With one,
        a layer whose weights have no indexer reads what was chosen last for this very `batch`. Raises RequestError when a position
        is not in the context or in its blocks.
        """
        self._team.run(mla_stage.STAGE, self.frame(x, weights, cache, layer_idx, batch, chosen))

    def frame(
        self,
        x: F32Array,
        weights: MlaWeights,
        cache: LatentCache,
        layer_idx: int,
        batch: Batch,
        chosen: Chosen | None = None,
    ) -> NDArray[np.void]:
        """The frame of a call, as for `__call__`; valid until the next call with these weights."""
        num_tokens = batch.positions.size
        assert x.shape == (num_tokens, self.spec.hidden), f"x is {x.shape} for {num_tokens} tokens"
        check_plain(x, np.float32)
        assert 0 <= layer_idx < cache.num_layers
        frame, step = self._bound(weights)
        if self._indexer is not None:
            if weights.indexer is not None:
                frame["index"] = self._indexer.frame(weights.indexer, cache.index_keys, layer_idx, batch)
            chosen = self._indexer.choice(batch).chosen
        step[:] = (
            *self._plan(batch, cache, chosen),
            *(cache.address(layer_idx), cache.tiles.strides[1], x.ctypes.data),
        )
        return frame

    def _plan(self, batch: Batch, cache: LatentCache, chosen: Chosen | None) -> tuple[int, ...]:
        """The step fields of a batch, the same for all layers; its places are left in `self._places`."""
        shape = (cache.latent_dim, cache.rope_dim, cache.bits)
        assert shape == (self.spec.kv_lora_rank, self.spec.rope_dim, self._kv_bits)
        known = self._planned
        if known is None or known[0] is not batch or known[1] != cache.num_blocks or known[2] is not chosen:
            assert 1 <= batch.positions.size <= self.max_tokens
            self._planned = None  # the places are overwritten, even should that fail
            self._planned = known = (batch, cache.num_blocks, chosen, self._cut_to_places(batch, cache, chosen))
        return known[3]

    def _cut_to_places(self, batch: Batch, cache: LatentCache, chosen: Chosen | None) -> tuple[int, ...]:
        self._plan_record["rows_a_place"] = self._sizes.rows_a_place if chosen is None else 1
        arrays, num_places, last_position = cut_to_places(self._plan_record, batch, cache.num_blocks)
        most_read = last_position + 1 if chosen is None else int(chosen.counts.max())
        num_items, num_splits = num_places * self._sizes.head_chunks, -(-most_read // SPLIT_TOKENS)
        num_shared = num_items if self._shares_splits(num_items, num_splits) else 0
        reads = (
            (0, 0, 0)
            if chosen is None
            else (chosen.positions.ctypes.data, chosen.counts.ctypes.data, chosen.positions.strides[0])
        )
        return (*arrays, num_places, num_items, num_splits, num_shared, *reads)

    def _shares_splits(self, num_items: int, num_splits: int) -> bool:
        """Whether several threads should work on one item: too few items to go round, and room for the partials."""
        few = num_items < ITEMS_A_THREAD * self._team.num_threads
        return num_splits > 1 and few and num_items * num_splits <= self._sizes.num_partials

    def _bound(self, weights: MlaWeights) -> tuple[NDArray[np.void], NDArray[np.int64]]:
        """The frame for these weights, and a view of its step fields."""
        known = self._frames.get(id(weights))
        if known is None:
            weights.check(self.spec)
            frame = self._template.copy()
            self._bind_matrices(frame, weights)
            for name in ("q_a_norm", "kv_a_norm", "uk_scales", "uk_biases"):
                frame[name] = _address(getattr(weights, name))
            frame["norm_weight"], frame["num_scales"] = _address(weights.norm), weights.num_scales
            known = (weights, frame, frame.view(np.int64)[: len(STEP_FIELDS)])
            self._frames[id(weights)] = known
        return known[1:]

    def _bind_matrices(self, frame: NDArray[np.void], weights: MlaWeights) -> None:
        """Describe the matrices and give those with rows of a step a buffer of prepared rows.

        Buffer 0 holds what one phase writes and the next reads: h for the first matrix, then q_a's row for q, then the context for o.
        kv_a reads h too, from the same rows where its form is that of the first matrix, else from buffer 1.
        """
        for name in MATRICES:
            matrix = getattr(weights, name)
            if matrix is not None:
                frame[f"{name}_matrix"] = describe(matrix, self._planes)
        first = "q_a" if weights.q_a is not None else "q"
        forms = [
            (int(frame[f"{name}_matrix"]["form"][0]), int(frame[f"{name}_matrix"]["prepared_bytes"][0]))
            for name in (first, "kv_a")
        ]
        slots = {"q_a": 0, "kv_a": 0 if forms[0] == forms[1] else 1, "q": 0, "o": 0}
        for name, slot in slots.items():
            row_bytes = int(frame[f"{name}_matrix"]["prepared_bytes"][0])
            frame[f"{name}_prepared"] = self._prepared[slot].ctypes.data
            frame[f"{name}_xs"] = self._table(slot, row_bytes).ctypes.data
        for name in ("uk", "uv"):
            assert frame[f"{name}_matrix"]["prepared_bytes"][0] <= self._sizes.head_row_bytes

    def _table(self, slot: int, row_bytes: int) -> NDArray[np.int64]:
        """Addresses of prepared rows of this size."""
        if (slot, row_bytes) not in self._tables_of_rows:
            address = self._prepared[slot].ctypes.data
            self._tables_of_rows[slot, row_bytes] = row_table(address, row_bytes, self.max_tokens)
        return self._tables_of_rows[slot, row_bytes]

    def _make_plan_record(self) -> NDArray[np.void]:
        plan, sizes = np.zeros(1, PLAN), self._sizes
        plan["max_context"], plan["window"], plan["width"] = self.max_context, _EVERYTHING, WIDTH
        plan["group_size"], plan["places"] = sizes.group_size, self._places.ctypes.data
        return plan

    def _make_template(self) -> NDArray[np.void]:
        """A frame with everything that is the same for all layers."""
        spec, sizes, frame = self.spec, self._sizes, np.zeros(1, FRAME)
        for name in ("hidden", "num_heads", "rope_dim", "nope_dim", "v_dim", "interleaved", "scale"):
            frame[name] = getattr(spec, name)
        for name in MlaSizes.FRAME_FIELDS:
            frame[name] = getattr(sizes, name)
        for name, rows in self._rows.items():
            frame[name], frame[f"{name}_rows"] = rows.data.ctypes.data, rows.table.ctypes.data
            frame[f"{name}_stride"] = rows.stride
        frame["q_lora"], frame["latent_dim"] = spec.q_lora_rank or 0, spec.kv_lora_rank
        frame["cos"], frame["sin"] = _address(self._tables.cos), _address(self._tables.sin)
        frame["rotary_half"] = spec.rope_dim // 2
        frame["eps"], frame["lora_eps"] = spec.norm_eps, spec.lora_eps
        frame["kv_bits"] = self._kv_bits
        frame["scratch"], frame["num_scratches"] = self._scratch.ctypes.data, self._team.num_threads
        frame["places"], frame["partials"] = self._places.ctypes.data, self._partials.ctypes.data
        return frame


def _address(array: F32Array | None) -> int:
    return 0 if array is None else int(array.ctypes.data)
