"""Everything that a layer does before its experts, as one compiled call: the mixer, then the router.

Between two answers of a worker the coordinator makes one such call, so that the threads are woken once for each layer. Each kind of
mixer compiles its own, of its phases and `finish_block` (for the pattern see the end of `attention_stage`): neither a function nor the
number of a phase may come from a frame (`team`).
"""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from colibri_mp.kernels import atomic, normed_linear
from colibri_mp.kernels.attention_inputs import Batch
from colibri_mp.kernels.jit import Native, compiled, fixed
from colibri_mp.kernels.router import RouterStage, RouterWeights, router_phases
from colibri_mp.kernels.team import ThreadTeam, barrier, done, take

F32Array = NDArray[np.float32]
I32Array = NDArray[np.int32]

_ONE_CHUNK = fixed(1)


def block_frame(mixer_frame: "np.dtype[np.void]") -> "np.dtype[np.void]":
    """The frame of a mixer and a router together."""
    return np.dtype([("mixer", mixer_frame), ("router", normed_linear.FRAME), ("time", np.int64)])


@compiled
def finish_block(router: Any, time: int, control: int, tag: int, first_phase: int) -> None:
    """The phases after those of the mixer, numbered from `first_phase` on; `time`: address for when the mixer had ended."""
    if take(control, tag, first_phase, _ONE_CHUNK) >= 0:
        atomic.clock_gettime(atomic.PERF_COUNTER_CLOCK, time)
        done(control, first_phase)
    if barrier(control, tag, first_phase, _ONE_CHUNK):
        router_phases(router, control, tag, first_phase + 1)


class MixerStage(Protocol):
    """A compiled mixer of one shape, with its scratch memory; for all layers of that shape, one call at a time."""

    @property
    def block(self) -> Native:
        """The mixer and the router, of a frame of `block_dtype`."""

    @property
    def block_dtype(self) -> "np.dtype[np.void]":
        """See `block_frame`."""

    def __call__(self, x: F32Array, weights: Any, cache: Any, layer_idx: int, batch: Batch, /) -> None:
        """x [T, D] float32, C-contiguous: x += mixer(norm(x)) in place.

        `cache`: what the mixer keeps of earlier positions, of which this is layer `layer_idx`.
        """

    def frame(self, x: F32Array, weights: Any, cache: Any, layer_idx: int, batch: Batch, /) -> NDArray[np.void]:
        """The frame of a call; valid until the next call with these weights."""


class BlockStage:
    """`mixer` and `router` in one call, with the buffers and the bits of the two; they can still be called alone."""

    def __init__(self, team: ThreadTeam, mixer: MixerStage, router: RouterStage) -> None:
        self._team, self._mixer, self._router = team, mixer, router
        self._frame, self._time = np.zeros(1, mixer.block_dtype), np.zeros(2, np.int64)
        self._frame["time"] = self._time.ctypes.data
        self._num_tokens = 0
        self._bytes = self._frame.view(np.uint8)
        self._router_start = mixer.block_dtype["mixer"].itemsize
        self._router_end = self._router_start + normed_linear.FRAME.itemsize

    def __call__(
        self, x: F32Array, weights: Any, cache: Any, layer_idx: int, batch: Batch,
        mlp_norm: F32Array, router: RouterWeights,
    ) -> tuple[F32Array, I32Array, F32Array]:  # fmt: skip
        """`bind` and `run`."""
        self.bind(x, weights, cache, layer_idx, batch, mlp_norm, router)
        return self.run()

    def bind(
        self, x: F32Array, weights: Any, cache: Any, layer_idx: int, batch: Batch,
        mlp_norm: F32Array, router: RouterWeights,
    ) -> None:  # fmt: skip
        """What the next `run` works on: x [T, D] float32, whose values may still change. Arguments and errors: `MixerStage`.

        Valid until mixer or router are used for something else.
        """
        self._num_tokens = x.shape[0]
        mixer_frame = self._mixer.frame(x, weights, cache, layer_idx, batch)
        router_frame = self._router.frame(x, mlp_norm, router)
        self._bytes[: self._router_start] = mixer_frame.view(np.uint8)
        self._bytes[self._router_start : self._router_end] = router_frame.view(np.uint8)

    def run(self) -> tuple[F32Array, I32Array, F32Array]:
        """x += mixer(norm(x)) in place; then h = mlp_norm(x) [T, D], ids [T, K] and weights [T, K], views as `RouterStage` gives them."""
        self._team.run(self._mixer.block, self._frame)
        return self._router.results(self._num_tokens)

    @property
    def mixer_ended_s(self) -> float:
        """When the mixer of the last call ended, by `time.perf_counter`."""
        seconds, nanoseconds = self._time.tolist()
        return float(seconds + nanoseconds * 1e-9)
