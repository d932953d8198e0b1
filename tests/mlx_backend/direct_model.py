"""A model on MLX without processes: the coordinator's part and the experts' stages in one, for tests of numbers."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from colibri_mp.checkpoint.source import Checkpoint
from colibri_mp.kernels.attention_inputs import Batch
from colibri_mp.kernels.layout import pack
from colibri_mp.kernels.team import aligned_bytes
from colibri_mp.mlx_backend.expert_stage import MlxExpertStage
from colibri_mp.mlx_backend.expert_tier import ExpertTier
from colibri_mp.mlx_backend.mixer import Choice, Room
from colibri_mp.mlx_backend.model import MlxModel
from colibri_mp.models import load_model
from colibri_mp.models.structure import MoeSpec
from colibri_mp.workers.copies import Copy, ExpertCopies
from colibri_mp.workers.expert_files import aligned_buffer
from colibri_mp.workers.expert_reader import ExpertReader

MAX_ROWS, NUM_BLOCKS, NUM_SLOTS = 128, 24, 4


class DirectModel:
    """`blocks` of a sequence are the caller's choice; half of the experts fit the device."""

    def __init__(self, folder: Path) -> None:
        checkpoint = Checkpoint.open(folder)
        self.spec = load_model(checkpoint)
        self.model = MlxModel(checkpoint, self.spec, MAX_ROWS, Room(NUM_BLOCKS, NUM_SLOTS, Choice()))
        reader = ExpertReader(ExpertCopies((Copy(checkpoint.files),)), self.spec.expert_layers, pack)
        scratch = aligned_buffer(reader.scratch_bytes)
        self._slabs, self._stages, self._addresses = [], {}, {}
        for layer in self.spec.expert_layers:
            top_k = self.spec.router.top_k
            tier = ExpertTier(layer.shape, {layer.layer: layer.num_experts}, max(top_k, layer.num_experts // 2), top_k)
            self._stages[layer.layer] = MlxExpertStage(tier, layer.layer, MAX_ROWS, top_k)
            slabs = [aligned_bytes(layer.shape.slab_bytes) for _ in range(layer.num_experts)]
            for expert, slab in enumerate(slabs):
                reader.read(layer.layer, expert, slab, scratch)
            self._slabs += slabs
            self._addresses[layer.layer] = np.array([slab.ctypes.data for slab in slabs], np.int64)
        reader.close()

    def forward(self, *parts: tuple[Sequence[int], int, Sequence[int]]) -> NDArray[np.float32]:
        """Logits of all rows of a step; parts: token ids, the first one's position, the sequence's blocks."""
        tokens = np.concatenate([np.array(ids, np.int32) for ids, _, _ in parts])
        positions = np.concatenate([np.arange(start, start + len(ids), dtype=np.int32) for ids, start, _ in parts])
        sequence = np.repeat(np.arange(len(parts), dtype=np.int32), [len(ids) for ids, _, _ in parts])
        table = np.zeros((len(parts), max(len(blocks) for _, _, blocks in parts)), np.int32)
        for row, (_, _, blocks) in zip(table, parts, strict=True):
            row[: len(blocks)] = blocks
        batch, model = Batch(positions, sequence, table, _state_runs(parts)), self.model
        x = model.embed(tokens)
        for idx, layer in enumerate(self.spec.layers):
            if not isinstance(layer.mlp, MoeSpec):
                model.mix(idx, x, batch)
                x += model.resident_expert(idx, model.mlp_norm(idx, x))
                continue
            h, ids, weights = model.mix_and_route(idx, x, batch)
            union = np.unique(ids[ids >= 0]).astype(np.int32)
            y = np.empty_like(h)
            self._stages[idx].run(h, ids, weights, union, self._addresses[idx][union], y)
            if layer.resident_expert is not None:
                x += model.resident_expert(idx, h)
            x += y
        return np.array(model.head(x))


def _state_runs(parts: Sequence[tuple[Sequence[int], int, Sequence[int]]]) -> NDArray[np.int32]:
    """Each sequence's recurrent state is in the slot that its first block names, modulo their number."""
    runs, first = [], 0
    for ids, start, blocks in parts:
        slot = blocks[0] % NUM_SLOTS
        runs.append((first, len(ids), slot if start else -1, slot))
        first += len(ids)
    return np.array(runs, np.int32)
