"""From logits to the next token: penalty, temperature, top-k, top-p, min-p, and a seeded draw.

The order is that of `transformers.GenerationConfig`: repetition penalty, then temperature, top-k, top-p, min-p. All
arithmetic is float64 on the host in an order that depends on nothing but the row, so a seed gives the same text whatever
else is in the batch. References: Holtzman et al. 2019 (top-p), Nguyen et al. 2024 (min-p), Keskar et al. 2019 (penalty).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from colibri_mp.errors import RequestError
from colibri_mp.messages import Floats, Sampling


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Complete sampling settings of one request. `temperature` 0 takes the largest logit (the lowest id of a tie)."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        checks = (
            ("temperature", self.temperature >= 0 and math.isfinite(self.temperature), ">= 0"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("top_k", self.top_k >= 0, ">= 0 (0: off)"),
            ("min_p", 0 <= self.min_p < 1, "in [0, 1)"),
            ("repetition_penalty", self.repetition_penalty > 0 and math.isfinite(self.repetition_penalty), "> 0"),
            ("seed", 0 <= self.seed < 2**64, "in [0, 2^64)"),
        )
        for name, good, wanted in checks:
            if not good:
                raise RequestError(f"{name} must be {wanted}, not {getattr(self, name)}")


def resolve(asked: Sampling, defaults: dict[str, Any], random_seed: int) -> SamplingParams:
    """Fill what a request leaves open from the checkpoint's generation_config (`defaults`), then from ours.

    A checkpoint that says `do_sample: false` is greedy unless a temperature is asked for.

    Raises:
        RequestError: a value out of its range.
    """
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    values: dict[str, Any] = {}
    for name in names:
        value = getattr(asked, name)
        if value is None:
            value = defaults.get(name)
        if value is not None:
            values[name] = value
    if asked.temperature is None and not defaults.get("do_sample", False):
        values["temperature"] = 0.0
    return SamplingParams(**values, seed=random_seed if asked.seed is None else asked.seed)


class Sampler:
    """Draws the tokens of one request; holds its random generator and the ids seen so far (for the penalty)."""

    def __init__(self, params: SamplingParams, prompt_ids: Iterable[int] = ()) -> None:
        self.params = params
        self._random = np.random.Generator(np.random.PCG64(params.seed))
        self._seen = set(prompt_ids) if params.repetition_penalty != 1.0 else set()

    def next_token(self, logits: Floats) -> int:
        """The next token id for logits float32 [V]; advances the generator by one draw unless greedy."""
        params = self.params
        if params.temperature == 0.0 and params.repetition_penalty == 1.0:
            return int(np.argmax(logits))
        scores = logits.astype(np.float64)
        if params.repetition_penalty != 1.0 and self._seen:
            _penalise(scores, self._seen, params.repetition_penalty)
        if params.temperature == 0.0:
            token = int(np.argmax(scores))
        else:
            token = self._draw(scores / params.temperature)
        if params.repetition_penalty != 1.0:
            self._seen.add(token)
        return token

    def _draw(self, scores: np.ndarray[Any, np.dtype[np.float64]]) -> int:
        """One draw from the kept tokens, in order of falling probability, the lower id first among equals."""
        order = np.lexsort((np.arange(scores.size), -scores))
        if 0 < self.params.top_k < scores.size:
            order = order[: self.params.top_k]
        weights = np.exp(scores[order] - scores[order[0]])
        cumulative = np.cumsum(weights)
        keep = len(order)
        if self.params.top_p < 1.0:  # the token that crosses top_p is kept
            keep = int(np.searchsorted(cumulative, self.params.top_p * cumulative[-1])) + 1
        if self.params.min_p > 0.0:
            keep = min(keep, int(np.searchsorted(-weights, -self.params.min_p * weights[0], side="right")))
        keep = max(1, min(keep, len(order)))
        point = self._random.random() * cumulative[keep - 1]
        return int(order[min(int(np.searchsorted(cumulative[:keep], point, side="right")), keep - 1)])


def _penalise(scores: np.ndarray[Any, np.dtype[np.float64]], seen: set[int], penalty: float) -> None:
    """Divide positive scores of seen tokens by `penalty`, multiply negative ones, in place."""
    ids = np.fromiter(seen, np.int64, len(seen))
    kept = scores[ids]
    scores[ids] = np.where(kept > 0, kept / penalty, kept * penalty)
