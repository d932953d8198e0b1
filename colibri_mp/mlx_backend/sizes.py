"""What a cluster on MLX is made of, for the memory plan: the sizes of `plan_terms`, where they are not those of the kernels."""

from collections.abc import Sequence
from typing import ClassVar

from colibri_mp.checkpoint.experts import ExpertLayer
from colibri_mp.kernels.layout import ExpertShape
from colibri_mp.mlx_backend import expert_stage
from colibri_mp.mlx_backend.device import cache_bytes
from colibri_mp.mlx_backend.expert_tier import slot_bytes
from colibri_mp.mlx_backend.matrices import device_bytes, widened_bytes
from colibri_mp.mlx_backend.mixers import KINDS
from colibri_mp.plan_terms import LIBRARY_BYTES, ExpertRoom, Sizes, top_k, vector_bytes

DEVICE_SHARE = 0.25
"""Of what is left for experts: what they take on the device, beside the pools that save reads. More where the pools hold all of them
with less, and at least what one token needs of layers of one shape."""

_WITH_TABLES = 1.02  # a pool with its tables, over its slabs


class MlxSizes(Sizes):
    """See the module docstring. Processes were measured with MLX 0.32 on its CPU device (docs/log.md)."""

    library_bytes: ClassVar[int] = LIBRARY_BYTES + 12_000_000
    process_bytes: ClassVar[int] = 3_000_000

    def resident(self) -> int:
        """Matrices as they are on the device, and vectors."""
        matrices = (device_bytes(m.encoding, m.rows, m.cols) for m in self.model.resident_matrices())
        return vector_bytes(self.model) + sum(matrices)

    def kv(self, num_tokens: int) -> int:
        """The paged arrays of all layers."""
        return sum(KINDS[type(spec)].kv_bytes(spec, num_tokens) for spec in self._mixers)

    def device_bytes(self, groups: Sequence[Sequence[ExpertLayer]], left: ExpertRoom) -> tuple[int, ...]:
        """A share of what is left for experts, divided as they are."""
        whole = [sum(layer.num_experts * slot_bytes(layer.shape) for layer in group) for group in groups]
        wanted = min(max(left.left * DEVICE_SHARE, left.left - _WITH_TABLES * left.most), left.left - left.floor)
        share = min(1.0, max(0.0, wanted) / sum(whole))
        return tuple(max(int(nbytes * share), self._least(group)) for nbytes, group in zip(whole, groups, strict=True))

    def _least(self, group: Sequence[ExpertLayer]) -> int:
        """One token's experts of each shape."""
        shapes: dict[ExpertShape, int] = {layer.shape: top_k(self.model, layer) for layer in group}
        return sum(num_chosen * slot_bytes(shape) for shape, num_chosen in shapes.items())

    def logits(self) -> int:
        """Logits, and a copy on their way to the client."""
        return 2 * self.logit_rows * self.model.vocab_size * 4

    def coordinator_scratch(self) -> int:
        """What a layer takes while it is computed, rotary tables, of a 16-bit matrix what is widened at a time, messages."""
        model, rows = self.model, self.chunk
        widths = [layer.resident_expert.gate.rows for layer in model.layers if layer.resident_expert is not None]
        mixer = max(KINDS[type(spec)].scratch_bytes(spec, rows, self.ctx_tokens) for spec in self._mixers)
        router = 8 * 4 * rows * model.router.num_experts
        tables = 4 * self.ctx_tokens * model.rope.rotary_dim
        experts = 4 * rows * 4 * max(widths, default=0)
        widened = max(widened_bytes(m.encoding, m.rows, m.cols) for m in model.resident_matrices())
        return mixer + router + experts + 2 * tables + widened + cache_bytes() + self.message_bytes()

    def worker_scratch(self, group: Sequence[ExpertLayer]) -> int:
        """A step's rows and partial results of the shape that takes most, one expert on its way, messages."""
        shapes = {layer.shape: top_k(self.model, layer) for layer in group}
        step = max(expert_stage.scratch_bytes(shape, self.chunk, num) for shape, num in shapes.items())
        return step + 2 * max(map(slot_bytes, shapes)) + cache_bytes() + self.message_bytes()

    @property
    def _mixers(self) -> list[object]:
        return [layer.attention for layer in self.model.layers]
