"""A worker's computing on MLX: a tier of experts on the device for each shape, a stage for each layer (`workers.stages`)."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from colibri_mp.checkpoint.experts import ExpertLayer
from colibri_mp.kernels.layout import ExpertShape
from colibri_mp.mlx_backend import device
from colibri_mp.mlx_backend.expert_stage import MlxExpertStage
from colibri_mp.mlx_backend.expert_tier import ExpertTier, tier_slots
from colibri_mp.workers.stages import ExpertLimits, Stage


class MlxComputing:
    """Implements `workers.stages.Computing`. MLX keeps its own threads."""

    def __init__(self, layers: Sequence[ExpertLayer], limits: ExpertLimits) -> None:
        device.prepare()
        groups: defaultdict[ExpertShape, list[ExpertLayer]] = defaultdict(list)
        for layer in layers:
            groups[layer.shape].append(layer)
        totals = {shape: sum(layer.num_experts for layer in group) for shape, group in groups.items()}
        slots = tier_slots(totals, limits.device_bytes)
        stages: dict[int, Stage] = {}
        for shape, group in groups.items():
            num_experts = {layer.layer: layer.num_experts for layer in group}
            tier = ExpertTier(shape, num_experts, slots[shape], limits.top_k)
            stages |= {x: MlxExpertStage(tier, x, limits.max_tokens, limits.top_k) for x in num_experts}
        self.stages: Mapping[int, Stage] = stages
        first, last = layers[0].layer, layers[-1].layer
        self.notes: tuple[str, ...] = (
            f"layers {first}..{last}: {sum(slots.values())} of {sum(totals.values())} experts on the device at a time",
        )

    def expect(self) -> None:
        """Nothing to wake."""

    def close(self) -> None:
        """Nothing to end."""
