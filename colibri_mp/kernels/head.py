"""The head: logits = norm(x) W^T for the rows whose next token is wanted."""

import numpy as np
from numpy.typing import NDArray

from colibri_mp.kernels.jit import Native
from colibri_mp.kernels.layout import PackedMatrix
from colibri_mp.kernels.linear import DEFAULT_PLANES
from colibri_mp.kernels.normed_linear import FRAME, NormedLinear, multiply_phase, norm_phase
from colibri_mp.kernels.team import PHASE_0, PHASE_1, ThreadTeam
from colibri_mp.kernels.vectors import record_at

F32Array = NDArray[np.float32]


def _head_stage(frame: int, control: int, tag: int) -> None:
    job = record_at(frame, FRAME)
    if norm_phase(job, control, tag, PHASE_0):
        multiply_phase(job, control, tag, PHASE_1)


STAGE = Native(_head_stage)


class HeadStage:
    """Final norm and head for up to `max_rows` rows a call."""

    def __init__(
        self, team: ThreadTeam, hidden: int, vocab: int, norm_eps: float, max_rows: int, planes: int = DEFAULT_PLANES
    ) -> None:
        self._team = team
        self._linear = NormedLinear(hidden, vocab, norm_eps, max_rows, planes)

    @staticmethod
    def scratch_bytes(hidden: int, vocab: int, max_rows: int) -> int:
        """Bytes a stage allocates, at most."""
        return NormedLinear.scratch_bytes(hidden, vocab, max_rows)

    def __call__(self, x: F32Array, norm: F32Array, weight: PackedMatrix) -> F32Array:
        """x [R, D] float32, C-contiguous; norm [D]; weight [V, D] -> logits [R, V].

        The result is a view of a buffer of the stage, valid until the next call; its rows may be further apart than V.
        """
        self._linear.run(self._team, STAGE, x, norm, weight)
        return self._linear.y[: x.shape[0], : self._linear.num_outputs]
