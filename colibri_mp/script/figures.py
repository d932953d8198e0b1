"""When tokens came, as the script saw it, and what follows: time to first token, tokens/s, time between tokens.

Times include whatever a session waited for: the queue, other sessions' tokens in the same steps, the way to this process.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Times:
    """Seconds of a monotonic clock: when a request was asked, and when each token of its answer came."""

    asked_s: float
    tokens_s: list[float] = field(default_factory=list)
    num_refused: int = 0  # times that the cluster was overloaded and the request was asked again

    def heard(self, now_s: float, num_tokens: int) -> None:
        """Tokens have come."""
        self.tokens_s += [now_s] * num_tokens

    @property
    def first_s(self) -> float | None:
        """From asking to the first token; None if none has come."""
        return self.tokens_s[0] - self.asked_s if self.tokens_s else None

    @property
    def gaps_s(self) -> list[float]:
        """Between each token and the next."""
        return [later - sooner for sooner, later in zip(self.tokens_s, self.tokens_s[1:], strict=False)]


def spread(values: Sequence[float], *percentiles: int) -> dict[str, float | None]:
    """Percentiles by name ("p50") and the largest value; all None if there are no values."""
    found: dict[str, float | None] = {f"p{p}": float(np.percentile(values, p)) if values else None for p in percentiles}
    return {**found, "max": max(values, default=None)}


def speed(times: Iterable[Times]) -> float | None:
    """Tokens/s from the first token of each answer to its last; None where no answer has two."""
    gaps = [gap for one in times for gap in one.gaps_s]
    total_s = sum(gaps)
    return len(gaps) / total_s if total_s > 0 else None


_COUNTS = ("hits", "misses", "promoted", "bytes_read", "disk_s")


def cache_counts(*caches: dict[str, Any]) -> dict[str, float | None]:
    """Sums of expert counters, and the share of the experts asked for that were in memory."""
    sums: dict[str, float | None] = {name: sum(cache.get(name, 0) for cache in caches) for name in _COUNTS}
    asked = sum(sums[name] or 0 for name in ("hits", "misses", "promoted"))
    return {**sums, "hit_rate": (sums["hits"] or 0) / asked if asked else None}


def cache_between(before: dict[str, Any], after: dict[str, Any]) -> dict[str, float | None]:
    """The counters of what happened between two statuses of a cluster."""
    return cache_counts({name: after.get(name, 0) - before.get(name, 0) for name in _COUNTS})
