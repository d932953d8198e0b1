"""What computes a worker's experts: a stage for each layer, made by the backend that the worker has been told of.

cpu    the compiled kernels, on slabs as they lie in the pool; layers of one shape share a stage
mlx    MLX, on experts that it holds on its device, in a tier above the pool; layers of one shape share a tier
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from colibri_mp.checkpoint.experts import ExpertLayer
from colibri_mp.config import BackendName
from colibri_mp.kernels.expert import ExpertStage
from colibri_mp.kernels.layout import ExpertShape
from colibri_mp.kernels.team import ThreadTeam

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Addresses = NDArray[np.int64]


class BoundStep(Protocol):
    """A step on arrays that stay where they are."""

    def run(self, expert_ids: Sequence[int], slab_addresses: Addresses, /) -> None:
        """Compute it with these experts, all that the bound ids name."""


class Stage(Protocol):
    """The experts of a layer: the calls of `kernels.expert.ExpertStage`, which says what they mean."""

    def begin(self, x: Floats, ids: Ints, weights: Floats, /) -> None:
        """Start a step."""

    def compute(self, expert_ids: Ints, slab_addresses: Addresses, /) -> None:
        """Partial results of some experts."""

    def finish(self, out: Floats, /) -> None:
        """The weighted sums."""

    def run(
        self, x: Floats, ids: Ints, weights: Floats, expert_ids: Ints, slab_addresses: Addresses, out: Floats, /
    ) -> None:
        """All of it."""

    def bind(self, x: Floats, ids: Ints, weights: Floats, out: Floats, /) -> BoundStep:
        """`run` for arrays that stay where they are."""


@dataclass(frozen=True, slots=True)
class ExpertLimits:
    """What stages are made for. `device_bytes`: what experts may take on a device, beside the pool."""

    max_tokens: int
    top_k: int
    planes: int
    device_bytes: int


Maker = Callable[[ThreadTeam, Sequence[ExpertLayer], ExpertLimits], dict[int, Stage]]


def cpu_stages(team: ThreadTeam, layers: Sequence[ExpertLayer], limits: ExpertLimits) -> dict[int, Stage]:
    """Compiled stages, by layer; layers of one shape share one, buffers included."""
    most: Counter[ExpertShape] = Counter()
    for layer in layers:
        most[layer.shape] = max(most[layer.shape], layer.num_experts)
    by_shape = {
        shape: ExpertStage(team, shape, num_experts, limits.max_tokens, limits.top_k, limits.planes)
        for shape, num_experts in most.items()
    }
    return {layer.layer: by_shape[layer.shape] for layer in layers}


def mlx_stages(_team: ThreadTeam, layers: Sequence[ExpertLayer], limits: ExpertLimits) -> dict[int, Stage]:
    """Stages on MLX, by layer. Imports it."""
    from colibri_mp.mlx_backend import device
    from colibri_mp.mlx_backend.expert_stage import MlxExpertStage
    from colibri_mp.mlx_backend.expert_tier import ExpertTier, tier_slots

    device.prepare()
    groups: defaultdict[ExpertShape, list[ExpertLayer]] = defaultdict(list)
    for layer in layers:
        groups[layer.shape].append(layer)
    slots = tier_slots(
        {shape: sum(x.num_experts for x in group) for shape, group in groups.items()}, limits.device_bytes
    )
    stages: dict[int, Stage] = {}
    for shape, group in groups.items():
        tier = ExpertTier(shape, {x.layer: x.num_experts for x in group}, slots[shape], limits.top_k)
        stages |= {x.layer: MlxExpertStage(tier, x.layer, limits.max_tokens, limits.top_k) for x in group}
    return stages


MAKERS: dict[BackendName, Maker] = {"cpu": cpu_stages, "mlx": mlx_stages}
