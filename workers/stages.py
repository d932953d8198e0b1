"""What computes a worker's experts: a stage for each layer, made by the backend that the worker has been told of.

cpu    the compiled kernels, on slabs as they lie in the pool; layers of one shape share a stage
mlx    MLX, on experts that it holds on its device, in a tier above the pool; layers of one shape share a tier
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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
    num_threads: int
    planes: int
    device_bytes: int


class Computing(Protocol):
    """What computes for a worker. `stages`: of each layer; `notes`: the choices made at start."""

    @property
    def stages(self) -> Mapping[int, Stage]:
        """The stage of each layer."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What is to be said of it at launch."""

    def expect(self) -> None:
        """A step is on its way: the moment to wake threads."""

    def close(self) -> None:
        """End the threads. Idempotent."""


class CpuComputing:
    """Compiled stages; layers of one shape share one, buffers included."""

    notes: tuple[str, ...] = ()

    def __init__(self, layers: Sequence[ExpertLayer], limits: ExpertLimits) -> None:
        self._team = ThreadTeam(limits.num_threads)
        self.expect, self.close = self._team.expect, self._team.close
        most: Counter[ExpertShape] = Counter()
        for layer in layers:
            most[layer.shape] = max(most[layer.shape], layer.num_experts)
        by_shape = {
            shape: ExpertStage(self._team, shape, num_experts, limits.max_tokens, limits.top_k, limits.planes)
            for shape, num_experts in most.items()
        }
        self.stages: Mapping[int, Stage] = {layer.layer: by_shape[layer.shape] for layer in layers}


def _mlx(layers: Sequence[ExpertLayer], limits: ExpertLimits) -> Computing:
    from colibri_mp.mlx_backend.computing import MlxComputing

    return MlxComputing(layers, limits)


MAKERS: dict[BackendName, Callable[[Sequence[ExpertLayer], ExpertLimits], Computing]] = {
    "cpu": CpuComputing,
    "mlx": _mlx,
}
