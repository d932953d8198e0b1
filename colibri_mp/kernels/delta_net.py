"""One gated delta net as one compiled call: x += out(gated_norm(recurrence(conv(projections(norm(x)))))).

    stage = DeltaNetStage(team, spec, max_tokens)
    stage(x, weights, states, layer_idx, Batch(positions, sequence_idx, block_table, state_runs))

What a row gives depends on the rows before it in its sequence and the weights alone, to the bit: not on the other sequences, the chunks
of a prompt, or the number of threads. Phases: `delta_stage`; the recurrence: `delta_rows`; states: `delta_inputs`; the same in
plain numpy: `reference_delta`.
"""

import numpy as np
from numpy.typing import NDArray

from colibri_mp.kernels import delta_stage
from colibri_mp.kernels.attention_inputs import Batch, check_plain
from colibri_mp.kernels.delta_inputs import TILE_VALUES, DeltaNetWeights, DeltaStates, num_tiles
from colibri_mp.kernels.delta_rows import BLOCK_ROWS
from colibri_mp.kernels.delta_stage import FRAME, MATRICES, STEP_FIELDS
from colibri_mp.kernels.layout import num_blocks
from colibri_mp.kernels.linear import DEFAULT_PLANES
from colibri_mp.kernels.prepared_rows import PreparedRows, largest_prepared
from colibri_mp.kernels.row_buffer import RowBuffer
from colibri_mp.kernels.team import ThreadTeam, aligned_bytes
from colibri_mp.specs import DeltaNetSpec

__all__ = ["DeltaNetStage", "DeltaNetWeights", "DeltaStates"]

F32Array = NDArray[np.float32]
I32Array = NDArray[np.int32]


class DeltaNetStage:
    """Gated delta nets of one shape, with their scratch memory; for all layers of that shape, one call at a time.

    `planes`: see `linear`. Weights met in a call are kept (a few kB each) until the stage goes.
    """

    block, block_dtype = delta_stage.BLOCK, delta_stage.BLOCK_FRAME

    def __init__(self, team: ThreadTeam, spec: DeltaNetSpec, max_tokens: int, planes: int = DEFAULT_PLANES) -> None:
        self.spec, self.max_tokens = spec, max_tokens
        self._team, self._planes = team, planes
        self._sizes = _Sizes(spec)
        self._activations = {name: RowBuffer(max_tokens, width) for name, width in self._sizes.widths.items()}
        self._scratch = aligned_bytes(self._sizes.scratch_bytes * team.num_threads)
        self._prepared = PreparedRows(max_tokens, max(spec.hidden, spec.value_width))
        self._template = self._make_template()
        self._planned: tuple[Batch, I32Array, tuple[int, ...]] | None = None
        self._frames: dict[int, tuple[DeltaNetWeights, NDArray[np.void], NDArray[np.int64]]] = {}

    @staticmethod
    def scratch_bytes(spec: DeltaNetSpec, max_tokens: int, num_threads: int, num_forms: int = 1) -> int:
        """Bytes a stage allocates, at most. `num_forms`: group sizes (dense counting as one) that qkv, z, b, a of a layer mix."""
        sizes = _Sizes(spec)
        rows = sum(num_blocks(width) * 64 + 8 for width in sizes.widths.values())
        prepared = (
            num_forms * (largest_prepared(max(spec.hidden, spec.value_width)) + 8) + 8
        )  # out has a table of its own
        return max_tokens * (rows + prepared) + sizes.scratch_bytes * num_threads

    def __call__(
        self, x: F32Array, weights: DeltaNetWeights, states: DeltaStates, layer_idx: int, batch: Batch
    ) -> None:
        """x [T, D] float32, C-contiguous, 1 <= T <= max_tokens: x += delta_net(norm(x)) in place; states advance.

        `layer_idx` counts the layers of `states`.
        """
        self._team.run(delta_stage.STAGE, self.frame(x, weights, states, layer_idx, batch))

    def frame(
        self, x: F32Array, weights: DeltaNetWeights, states: DeltaStates, layer_idx: int, batch: Batch
    ) -> NDArray[np.void]:
        """The frame of a call, as for `__call__`; valid until the next call with these weights."""
        num_tokens = batch.positions.size
        assert x.shape == (num_tokens, self.spec.hidden), f"x is {x.shape} for {num_tokens} tokens"
        check_plain(x, np.float32)
        assert 0 <= layer_idx < states.num_layers
        frame, step = self._bound(weights)
        step[:] = (*self._plan(batch, states), *states.addresses(layer_idx), x.ctypes.data)
        return frame

    def _plan(self, batch: Batch, states: DeltaStates) -> tuple[int, ...]:
        """The step fields of a batch, the same for all layers."""
        if self._planned is None or self._planned[0] is not batch:
            assert 1 <= batch.positions.size <= self.max_tokens
            assert states.spec == self.spec
            chains = find_chains(batch, states.num_slots)
            addresses = (batch.state_runs.ctypes.data, chains.ctypes.data)
            self._planned = (batch, chains, (batch.positions.size, *addresses, chains.size - 1))
        return self._planned[2]

    def _bound(self, weights: DeltaNetWeights) -> tuple[NDArray[np.void], NDArray[np.int64]]:
        """The frame for these weights, and a view of its step fields."""
        known = self._frames.get(id(weights))
        if known is None:
            weights.check(self.spec)
            frame = self._template.copy()
            self._prepared.bind(frame, weights, MATRICES, self._planes)
            frame["norm_weight"] = weights.norm.ctypes.data
            for name in ("conv", "rate", "dt_bias", "head_norm"):
                frame[name] = getattr(weights, name).ctypes.data
            known = (weights, frame, frame.view(np.int64)[: len(STEP_FIELDS)])
            self._frames[id(weights)] = known
        return known[1:]

    def _make_template(self) -> NDArray[np.void]:
        """A frame with everything that is the same for all layers."""
        spec, sizes, frame = self.spec, self._sizes, np.zeros(1, FRAME)
        for name in ("hidden", "num_key_heads", "num_value_heads", "key_dim", "value_dim", "group_size", "conv_tokens"):
            frame[name] = getattr(spec, name)
        frame["num_tiles"], frame["tile_row_bytes"] = num_tiles(spec), sizes.value_row_bytes
        frame["head_bytes"] = num_tiles(spec) * spec.key_dim * TILE_VALUES * 4
        frame["slot_bytes"], frame["conv_bytes"] = frame["head_bytes"] * spec.num_value_heads, spec.conv_width * 4
        for name, offset in sizes.offsets.items():
            frame[name] = offset
        for name, rows in self._activations.items():
            frame[name], frame[f"{name}_rows"] = rows.data.ctypes.data, rows.table.ctypes.data
        for name in ("qkv", "z", "out"):
            frame[f"{name}_stride"] = self._activations[name].stride
        frame["gate_stride"] = self._activations["a"].stride
        frame["scratch"], frame["scratch_bytes"] = self._scratch.ctypes.data, sizes.scratch_bytes
        frame["num_scratches"] = self._team.num_threads
        frame["eps"], frame["scale"] = spec.norm_eps, spec.key_dim**-0.5
        return frame


def find_chains(batch: Batch, num_slots: int) -> I32Array:
    """Where the runs of each sequence begin, and at the end the number of runs, int32 [sequences + 1].

    Our own invariant: the runs cover the batch's rows in order, and are of slots that exist.
    """
    first, count, source, target = batch.state_runs.T
    assert count.min() > 0
    assert np.array_equal(first, np.cumsum(count) - count), "the runs of states leave rows out"
    assert count.sum() == batch.positions.size, "the runs of states leave rows out"
    assert source.max() < num_slots, f"state slot {source.max()} of {num_slots}"
    assert 0 <= target.min() <= target.max() < num_slots, f"state slots {target} of {num_slots}"
    sequences = batch.sequence_idx[first]
    starts = np.flatnonzero(np.diff(sequences, prepend=-1))
    return np.append(starts, len(first)).astype(np.int32)


class _Sizes:
    """Widths of the rows of activations, sizes and offsets in bytes of a thread's scratch: q, k, v, gates and o of a block of rows."""

    def __init__(self, spec: DeltaNetSpec) -> None:
        heads = spec.num_value_heads
        self.widths = {"qkv": spec.conv_width, "z": spec.value_width, "b": heads, "a": heads, "out": spec.hidden}
        self.value_row_bytes = num_tiles(spec) * TILE_VALUES * 4
        keys = BLOCK_ROWS * spec.key_dim * 4
        parts = {"q_offset": keys, "k_offset": keys, "v_offset": spec.group_size * BLOCK_ROWS * self.value_row_bytes}
        parts |= {"decay_offset": 64, "beta_offset": 64, "head_offset": BLOCK_ROWS * self.value_row_bytes}
        self.offsets: dict[str, int] = {}
        end = 0
        for name, size in parts.items():
            self.offsets[name], end = end, end + size
        self.scratch_bytes = max(end, num_blocks(spec.hidden) * 64)
