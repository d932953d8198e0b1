"""Sampling: greedy, the filters, the seed, and what a request leaves open."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibri_mp.errors import RequestError
from colibri_mp.messages import Sampling
from colibri_mp.sampling import Sampler, SamplingParams, kept_ids, resolve


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


@given(
    st.integers(0, 2**32 - 1), st.sampled_from([10, 3000]), st.sampled_from([0, 1, 7, 5000]),
    st.sampled_from([0.01, 0.5, 0.999, 1.0]), st.sampled_from([0.0, 0.01, 0.5]), st.sampled_from([0.3, 6.0]),
)  # fmt: skip
def test_filters_are_those_of_a_full_sort(
    seed: int, vocab: int, top_k: int, top_p: float, min_p: float, spread: float
) -> None:
    """The kept tokens are what sorting everything and applying the filters one after the other keeps."""
    scores = np.random.default_rng(seed).standard_normal(vocab) * spread
    weights = np.exp(scores - scores.max())
    order = np.argsort(-weights)[: top_k or vocab]
    cumulative = np.cumsum(weights[order])
    wanted = {
        idx
        for idx, before in zip(order, [0.0, *cumulative[:-1]], strict=True)
        if (top_p == 1.0 or before <= top_p * cumulative[-1]) and weights[idx] >= min_p
    }
    found = kept_ids(weights, SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p))
    assert len(set(found)) == len(found)
    assert set(found) == wanted


def test_impossible_tokens_are_never_drawn() -> None:
    """A token of probability 0 is not kept by any filter."""
    weights = np.array([0.0, 1.0, 0.0, 0.5])
    for params in (SamplingParams(), SamplingParams(top_k=4), SamplingParams(top_p=0.9999), SamplingParams(min_p=0.1)):
        assert set(kept_ids(weights, params)) == {1, 3}


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


def test_presence_and_frequency() -> None:
    """Tokens of the answer, not of the prompt, lose `presence` once and `frequency` for each time they came."""
    logits = np.array([3.0, 2.5, 0.0], np.float32)
    once = Sampler(SamplingParams(presence_penalty=1.0), prompt_ids=[0])
    assert [once.next_token(logits) for _ in range(4)] == [0, 1, 0, 0]
    each = Sampler(SamplingParams(frequency_penalty=1.0), prompt_ids=[0])
    assert [each.next_token(logits) for _ in range(6)] == [0, 1, 0, 1, 0, 1]
    wanted = Sampler(SamplingParams(frequency_penalty=-1.0, presence_penalty=0.5))
    assert [wanted.next_token(np.array([1.0, 0.9], np.float32)) for _ in range(3)] == [0, 0, 0]


def test_bias_moves_tokens() -> None:
    """A bias makes a token win, or keeps it away, with sampling too."""
    assert draws(2, [1.0, 0.0, 0.5], temperature=0.0, logit_bias={1: 1.5}) == [1, 1]
    assert set(draws(50, [0.0, 0.0, 0.0], logit_bias={1: -100.0})) == {0, 2}


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
     {"min_p": 1.0}, {"repetition_penalty": 0.0}, {"repetition_penalty": 1e-300}, {"logit_bias": {1: 1e300}},
     {"seed": -1}, {"presence_penalty": 2.1}, {"frequency_penalty": -3.0},
     {"logit_bias": {1: float("inf")}}],
)  # fmt: skip
def test_values_out_of_range_are_refused(bad: dict[str, Any]) -> None:
    """Each value out of its range is an error that names it."""
    with pytest.raises(RequestError, match=next(iter(bad))):
        SamplingParams(**bad)
