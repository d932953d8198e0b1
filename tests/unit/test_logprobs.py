"""Logprobs against a plain log-softmax, and the choice of the likeliest tokens against a full sort."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibri_mp.logprobs import likeliest, prompt_logprobs, token_logprob


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Plain, in extended precision."""
    scores = logits.astype(np.longdouble)
    return (scores - np.log(np.exp(scores).sum())).astype(np.float64)


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 5, 64, 1000, 1001]), st.integers(0, 30), st.booleans())
def test_likeliest_are_those_of_a_full_sort(seed: int, vocab: int, count: int, has_ties: bool) -> None:
    """The largest scores in falling order, the lower id first among equals, for any size and number."""
    random = np.random.default_rng(seed)
    scores = random.standard_normal(vocab)
    if has_ties:
        scores = np.round(scores)
        scores[random.random(vocab) < 0.3] = -np.inf
    wanted = np.lexsort((np.arange(vocab), -scores))[:count]
    np.testing.assert_array_equal(likeliest(scores, count), wanted)


def test_logprob_of_a_token_and_the_likeliest() -> None:
    """The chosen token's logprob and the alternatives are those of a log-softmax of the logits."""
    logits = np.random.default_rng(0).standard_normal(500).astype(np.float32) * 5
    wanted = log_softmax(logits)
    found = token_logprob(logits, 7, 3)
    assert found.token_id == 7
    assert found.logprob == pytest.approx(wanted[7], abs=1e-12)
    assert [idx for idx, _ in found.top] == np.argsort(-logits)[:3].tolist()
    assert [value for _, value in found.top] == pytest.approx(np.sort(wanted)[::-1][:3], abs=1e-12)
    assert token_logprob(logits, 7, 0).top == []


def test_huge_logits_do_not_overflow() -> None:
    """Probabilities near 1 and near 0 have finite logarithms."""
    found = token_logprob(np.array([3e4, -3e4], np.float32), 1, 1)
    assert found.logprob == -6e4
    assert found.top == [(0, 0.0)]


def test_rows_of_a_prompt_speak_of_the_next_token() -> None:
    """The first token has none; a row of the last position speaks of no token of the prompt."""
    prompt, logits = [3, 1, 2], np.random.default_rng(1).standard_normal((3, 5)).astype(np.float32)
    whole = prompt_logprobs(logits, prompt, 0, 1)
    assert whole[0] is None
    assert whole[1:] == [token_logprob(logits[0], 1, 1), token_logprob(logits[1], 2, 1)]
    parts = prompt_logprobs(logits[:2], prompt, 0, 1) + prompt_logprobs(logits[2:], prompt, 2, 1)
    assert parts == whole
