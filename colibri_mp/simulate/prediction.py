"""Tokens/s of decode with another number of misses, from what they cost in the run.

    seconds a token = busy + (latency * visits that miss + bytes read / bandwidth) / tokens

A visit is a layer in a step. Latency and bandwidth are those that the steps felt: the least-squares fit of the time that a
layer took over its misses, at equal rows and experts asked, without visits that took thrice as long as others alike. So what
overlaps costs less, and what a miss costs beside reading (calls, bookkeeping, colder processor caches) is in it. `busy` is the
rest of the measured time, so that the run itself is predicted as it was.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from colibri_mp.simulate.workload import Workload

_HELD_UP = 3  # times the median of visits with as many misses: what took longer was held up by something else
FORMULA = "seconds a token = busy + (latency * visits that miss + bytes read / bandwidth) / tokens"
Doubles = NDArray[np.float64]


@dataclass(frozen=True)
class Costs:
    """What a token of decode costs, from `num_reads` reads. `bandwidth`, bytes/s, is None if there were none."""

    num_tokens: int
    num_reads: int
    busy_s: float
    latency_s: float
    bandwidth: float | None

    def tokens_per_s(self, visits_missing: int, bytes_read: float) -> float | None:
        """Predicted speed for all the decode tokens of the trace; None without a bandwidth, or without decode."""
        if not self.num_tokens or (self.bandwidth is None and bytes_read):
            return None
        wait_s = self.latency_s * visits_missing + (bytes_read / self.bandwidth if self.bandwidth else 0.0)
        return 1 / (self.busy_s + wait_s / self.num_tokens)


def decode_seconds(workload: Workload) -> float:
    """How long the decode steps took, with the usual pause between two of them (a cluster may also have been idle)."""
    steps = workload.decode_steps
    return (
        float(steps["seconds"].sum(dtype=np.float64) + len(steps) * np.median(steps["pause_s"])) if len(steps) else 0.0
    )


def measure_costs(workload: Workload, disk: int | None) -> Costs:
    """The costs in the decode steps of a trace. `disk`: bytes/s of another disk."""
    num_tokens = workload.num_decode_tokens
    misses = workload.decode_field("misses")
    num_reads = int(misses.sum())
    if not num_tokens or not num_reads:
        busy_s = decode_seconds(workload) / num_tokens if num_tokens else 0.0
        return Costs(num_tokens, num_reads, busy_s, 0.0, disk)
    latency_s, read_s = _fit_misses(workload)
    bytes_read = sum(int(part.visits["misses"][part.is_decode].sum()) * part.bytes_a_read for part in workload.layers)
    spent_s = latency_s * np.count_nonzero(misses) + read_s * num_reads
    least_s = float(workload.decode_field("compute_s").sum())
    busy_s = max(least_s, decode_seconds(workload) - spent_s) / num_tokens
    return Costs(num_tokens, num_reads, busy_s, latency_s, disk or bytes_read / (read_s * num_reads))


def _fit_misses(workload: Workload) -> tuple[float, float]:
    """Seconds that a layer takes longer if anything is missing, and for each expert that is; the second is above zero."""
    misses, seconds = workload.decode_field("misses"), workload.decode_field("seconds")
    usual = _is_usual(misses, seconds)
    others = [np.ones(len(misses)), workload.decode_field("num_rows"), workload.decode_asked]
    for columns in ([misses > 0, misses], [misses]):
        fit = np.linalg.lstsq(np.column_stack([*others, *columns])[usual], seconds[usual], rcond=None)[0]
        offset, slope = fit[len(others) :] if len(columns) > 1 else (0.0, fit[-1])
        if slope > 0 and offset >= 0:
            return float(offset), float(slope)
    wait_s = float(workload.decode_field("wait_s").sum())
    return 0.0, max(wait_s, 1e-9) / float(misses.sum())


def _is_usual(misses: Doubles, seconds: Doubles) -> NDArray[np.bool_]:
    """Which visits took not much more than the median of those with as many misses: others were held up by something else."""
    counts, group = np.unique(misses, return_inverse=True)
    medians = np.array([np.median(seconds[group == idx]) for idx in range(len(counts))])
    return np.asarray(seconds < _HELD_UP * medians[group])
