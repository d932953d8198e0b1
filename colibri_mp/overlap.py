"""Whether sessions that decode are computed as one group or as two whose steps are under way at once.

    one group    step ─ layer: coordinator, worker reads, worker computes ─ layer ─ ...       an expert is read once for everybody
    two groups   while a worker reads or computes for one, the coordinator or another worker computes for the other

Two groups hide reads behind computing, but what both need is computed, and where the pool is small also read, twice. Which is
quicker depends on the disk, the pool and the number of sessions: with "auto" it is tried, where steps wait for reads at all.
"""

from typing import Any, Literal

from colibri_mp.trial import Trial

OverlapMode = Literal["auto", "off", "on"]

NUM_GROUPS = 2
GROUP_STEPS = 16
"""Steps of each group until all is one group again, so that what has come meanwhile is admitted and scheduled."""

_LEAST_WAIT_SHARE = 0.05


class Overlap:
    """See the module docstring."""

    def __init__(self, mode: OverlapMode = "off") -> None:
        self.mode = mode
        self.num_steps = 0  # computed for groups
        self._trial = Trial(block=GROUP_STEPS)

    @property
    def is_on(self) -> bool:
        """Whether the next steps are to be computed in groups."""
        return self.mode == "on" or (self.mode == "auto" and self._trial.is_on)

    def note(self, seconds: float, wait_s: float, num_rows: int, num_steps: float = 1.0) -> None:
        """Steps in which each of `num_rows` sessions got a token took so long, `wait_s` of it waiting for reads; in groups: as many as
        all sessions together got tokens, by `num_rows`."""
        if self.mode != "auto" or (not self._trial.is_on and wait_s < _LEAST_WAIT_SHARE * seconds):
            return
        for _ in range(round(num_steps)):
            self._trial.note(seconds / num_steps, num_rows, 0)

    def describe(self) -> dict[str, Any]:
        """What `status` says; `gain`: of the last trial, time in one group over time in two."""
        return {"mode": self.mode, "is_on": self.is_on, "gain": self._trial.gain, "steps": self.num_steps}
