"""From logits to the next token: penalties, biases, temperature, top-k, top-p, min-p, and a seeded draw.

The order is that of `transformers.GenerationConfig`: repetition penalty, then what is added, then temperature, top-k, top-p,
min-p. Presence and frequency penalties are OpenAI's: both look at the tokens generated so far, not at the prompt. All
arithmetic is float64 on the host in an order that depends on nothing but the row, so a seed gives the same text whatever
else is in the batch. References: Holtzman et al. 2019 (top-p), Nguyen et al. 2024 (min-p), Keskar et al. 2019 (penalty).
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np

from colibri_mp.errors import RequestError
from colibri_mp.logprobs import likeliest
from colibri_mp.messages import Floats, Sampling

MOST_BIAS = 1000.0  # of either sign: far beyond any logit, and far from what overflows
_NUCLEUS_GUESS = 256  # tokens that top-p looks at first

Ids: TypeAlias = np.ndarray[Any, np.dtype[np.intp]]
Scores: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Complete sampling settings of one request. `temperature` 0 takes the largest logit (the lowest id of a tie)."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks = (
            ("temperature", self.temperature >= 0 and math.isfinite(self.temperature), ">= 0"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("top_k", self.top_k >= 0, ">= 0 (0: off)"),
            ("min_p", 0 <= self.min_p < 1, "in [0, 1)"),
            ("repetition_penalty", 0.01 <= self.repetition_penalty <= 100, "in [0.01, 100]"),
            ("seed", 0 <= self.seed < 2**64, "in [0, 2^64)"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "in [-2, 2]"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "in [-2, 2]"),
            ("logit_bias", all(abs(bias) <= MOST_BIAS for bias in self.logit_bias.values()), f"within {MOST_BIAS:g}"),
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
    for name in ("presence_penalty", "frequency_penalty", "logit_bias"):
        if (value := getattr(asked, name)) is not None:
            values[name] = value
    return SamplingParams(**values, seed=random_seed if asked.seed is None else asked.seed)


class Sampler:
    """Draws the tokens of one request; holds its random generator and the tokens that penalties look at."""

    def __init__(
        self, params: SamplingParams, prompt_ids: Iterable[int] = (), mask: "Adjustment | None" = None
    ) -> None:
        """`mask` says what may be drawn at all, and applies first."""
        self.params = params
        self._random = np.random.Generator(np.random.PCG64(params.seed))
        self._adjustments = ([mask] if mask is not None else []) + _adjustments(params, prompt_ids)
        self._is_plain = params.temperature == 0.0 and not self._adjustments

    def next_token(self, logits: Floats) -> int:
        """The next token id for logits float32 [V]; advances the generator by one draw unless greedy."""
        if self._is_plain:
            return int(np.argmax(logits))
        scores = logits.astype(np.float64)
        for adjustment in self._adjustments:
            adjustment.apply(scores)
        token = int(np.argmax(scores)) if self.params.temperature == 0.0 else self._draw(scores)
        for adjustment in self._adjustments:
            adjustment.add(token)
        return token

    def _draw(self, scores: Scores) -> int:
        """One draw from the tokens that the filters keep."""
        weights = np.exp((scores - scores.max()) / self.params.temperature)
        ids = kept_ids(weights, self.params)
        cumulative = np.cumsum(weights[ids])
        point = self._random.random() * cumulative[-1]
        return int(ids[min(int(np.searchsorted(cumulative, point, side="right")), len(ids) - 1)])


def kept_ids(weights: Scores, params: SamplingParams) -> Ids:
    """Ids that top-k, top-p and min-p keep of unnormalised probabilities [V], whose largest is 1.

    With top-k or top-p in order of falling probability, the lower id first among equals; without, in order of id, since sorting
    a large vocabulary costs more than all else.
    """
    least = max(params.min_p, np.finfo(np.float64).tiny)
    if params.top_k:
        ids = likeliest(weights, params.top_k)
        ids = _nucleus(weights, ids, params.top_p, weights[ids].sum())
    elif params.top_p < 1.0:
        total, count = weights.sum(), _NUCLEUS_GUESS
        while weights[ids := likeliest(weights, count)].sum() < params.top_p * total and count < weights.size:
            count *= 8
        ids = _nucleus(weights, ids, params.top_p, total)
    else:
        return np.flatnonzero(weights >= least)
    kept: Ids = ids[weights[ids] >= least]
    return kept


def _nucleus(weights: Scores, ids: Ids, top_p: float, total: float) -> Ids:
    """The first of `ids` that have `top_p` of `total` together; the token that crosses it is kept."""
    if top_p == 1.0:
        return ids
    return ids[: int(np.searchsorted(np.cumsum(weights[ids]), top_p * total)) + 1]


class Adjustment(Protocol):
    """A change of scores float64 [V] in place, which may depend on the tokens drawn so far."""

    def apply(self, scores: Scores) -> None:
        """Change the scores of the next token."""

    def add(self, token: int) -> None:
        """A token has been drawn."""


def _adjustments(params: SamplingParams, prompt_ids: Iterable[int]) -> list[Adjustment]:
    """Those that `params` asks for, in the order in which they apply."""
    found: list[Adjustment] = []
    if params.repetition_penalty != 1.0:
        found.append(RepetitionPenalty(params.repetition_penalty, prompt_ids))
    if params.presence_penalty or params.frequency_penalty:
        found.append(OccurrencePenalty(params.presence_penalty, params.frequency_penalty))
    if params.logit_bias:
        found.append(Bias(params.logit_bias))
    return found


class RepetitionPenalty:
    """Divides positive scores of tokens that have occurred, in the prompt too, and multiplies negative ones."""

    def __init__(self, penalty: float, prompt_ids: Iterable[int]) -> None:
        self._penalty = penalty
        self._seen = set(prompt_ids)

    def apply(self, scores: Scores) -> None:
        """See `Adjustment`."""
        ids = np.fromiter(self._seen, np.int64, len(self._seen))
        kept = scores[ids]
        scores[ids] = np.where(kept > 0, kept / self._penalty, kept * self._penalty)

    def add(self, token: int) -> None:
        """See `Adjustment`."""
        self._seen.add(token)


class OccurrencePenalty:
    """Subtracts `presence` from each token that was generated, and `frequency` for each time it was."""

    def __init__(self, presence: float, frequency: float) -> None:
        self._presence = presence
        self._frequency = frequency
        self._counts = Counter[int]()

    def apply(self, scores: Scores) -> None:
        """See `Adjustment`."""
        ids = np.fromiter(self._counts.keys(), np.int64, len(self._counts))
        counts = np.fromiter(self._counts.values(), np.float64, len(self._counts))
        scores[ids] -= self._presence + self._frequency * counts

    def add(self, token: int) -> None:
        """See `Adjustment`."""
        self._counts[token] += 1


class Bias:
    """Adds a constant to each of some tokens."""

    def __init__(self, bias: Mapping[int, float]) -> None:
        self._ids = np.array(list(bias), np.int64)
        self._values = np.array(list(bias.values()), np.float64)

    def apply(self, scores: Scores) -> None:
        """See `Adjustment`."""
        scores[self._ids] += self._values

    def add(self, token: int) -> None:
        """See `Adjustment`."""
