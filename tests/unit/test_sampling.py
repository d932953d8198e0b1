"""Sampling: greedy, the filters, the seed, and what a request leaves open."""

from typing import Any

import numpy as np
import pytest

from colibri_mp.errors import RequestError
from colibri_mp.messages import Sampling
from colibri_mp.sampling import Sampler, SamplingParams, resolve


def draws(count: int, logits: list[float], **params: Any) -> list[int]:
    """Tokens of `count` draws from the same logits."""
    sampler = Sampler(SamplingParams(**{"temperature": 1.0, "seed": 1, **params}))
    return [sampler.next_token(np.array(logits, np.float32)) for _ in range(count)]


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    """Temperature 0 is the largest logit, the lowest id among equals."""
    assert draws(3, [0.0, 2.0, 2.0], temperature=0.0) == [1, 1, 1]


def test_frequencies_follow_the_probabilities() -> None:
    """Many draws come near the softmax of the logits."""
    logits = np.log([0.6, 0.3, 0.1])
    counts = np.bincount(draws(4000, list(logits)), minlength=3) / 4000
    np.testing.assert_allclose(counts, [0.6, 0.3, 0.1], atol=0.03)


def test_temperature_sharpens() -> None:
    """A low temperature moves probability to the likeliest token: p^(1/t), normalised."""
    counts = np.bincount(draws(4000, list(np.log([0.6, 0.4])), temperature=0.5), minlength=2) / 4000
    np.testing.assert_allclose(counts[0], 0.36 / 0.52, atol=0.03)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 0}, {0, 1, 2, 3}),
        ({"top_p": 0.49}, {0}),
        ({"top_p": 0.51}, {0, 1}),
        ({"top_p": 1.0}, {0, 1, 2, 3}),
        ({"min_p": 0.49}, {0, 1}),
        ({"min_p": 0.51}, {0}),
        ({"top_k": 3, "min_p": 0.3}, {0, 1, 2}),
    ],
)
def test_filters_keep_exactly(params: dict[str, Any], kept: set[int]) -> None:
    """Of probabilities 1/2, 1/4, 3/16, 1/16 each filter keeps these tokens, and each of them occurs."""
    assert set(draws(800, [float(np.log(p)) for p in (0.5, 0.25, 0.1875, 0.0625)], **params)) == kept


def test_same_seed_same_tokens() -> None:
    """The seed decides the draws; another seed gives others."""
    flat = [0.0] * 50
    assert draws(20, flat, seed=7) == draws(20, flat, seed=7)
    assert draws(20, flat, seed=7) != draws(20, flat, seed=8)


def test_penalty_reaches_prompt_and_answer() -> None:
    """A token that has occurred is divided down (or multiplied, if negative) and another wins."""
    params = SamplingParams(repetition_penalty=2.0)
    sampler = Sampler(params, prompt_ids=[0])
    logits = np.array([3.0, 2.0, 1.2], np.float32)
    assert [sampler.next_token(logits) for _ in range(3)] == [1, 0, 0]
    negative = Sampler(params, prompt_ids=[0])
    assert negative.next_token(np.array([-1.0, -1.5], np.float32)) == 1


def test_defaults_of_the_checkpoint_fill_the_gaps() -> None:
    """What a request leaves open comes from generation_config; what it says wins."""
    defaults = {"do_sample": True, "temperature": 0.7, "top_p": 0.9}
    assert resolve(Sampling(top_p=0.5), defaults, 3) == SamplingParams(temperature=0.7, top_p=0.5, seed=3)


def test_checkpoint_that_does_not_sample_is_greedy() -> None:
    """Without do_sample a checkpoint's temperature does not count, a request's does."""
    assert resolve(Sampling(), {"temperature": 0.7}, 3).temperature == 0.0
    assert resolve(Sampling(temperature=0.4, seed=9), {}, 3) == SamplingParams(temperature=0.4, seed=9)


@pytest.mark.parametrize(
    "bad",
    [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -1},
     {"min_p": 1.0}, {"repetition_penalty": 0.0}, {"seed": -1}],
)  # fmt: skip
def test_values_out_of_range_are_refused(bad: dict[str, Any]) -> None:
    """Each value out of its range is an error that names it."""
    with pytest.raises(RequestError, match=next(iter(bad))):
        SamplingParams(**bad)
