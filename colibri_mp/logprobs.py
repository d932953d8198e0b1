"""Logarithms of probabilities that a model gave its tokens: float64 log-softmax of the raw logits.

Raw: before penalties, biases, constraints, temperature and filters, so the figures say what the model thinks and do not
depend on how the token was chosen. Equal logits are ordered by token id.
"""

from typing import Any

import numpy as np

from colibri_mp.errors import RequestError
from colibri_mp.messages import Floats, TokenLogprob

MOST_TOP = 20
_BLOCK = 32


def check_num_top(name: str, num_top: int | None) -> None:
    """Refuse a number of alternatives out of 0..`MOST_TOP`; None means that no logprobs are asked for."""
    if num_top is not None and not 0 <= num_top <= MOST_TOP:
        raise RequestError(f"{name} must be in 0..{MOST_TOP} (alternatives to each token), not {num_top}")


def token_logprob(logits: Floats, token_id: int, num_top: int) -> TokenLogprob:
    """What logits float32 [V] say of `token_id`, and of the `num_top` likeliest tokens, the likeliest first."""
    scores = logits.astype(np.float64)
    largest = scores.max()
    norm = largest + np.log(np.exp(scores - largest).sum())
    top = [(int(idx), float(scores[idx] - norm)) for idx in likeliest(scores, num_top)]
    return TokenLogprob(token_id, float(scores[token_id] - norm), top)


def likeliest(scores: np.ndarray[Any, np.dtype[np.float64]], count: int) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Ids of the `count` largest of scores [V], the largest first, the lower id first among equals."""
    if count == 0:
        return np.empty(0, np.intp)
    ids = np.flatnonzero(scores >= _bound(scores, count))
    return ids[np.argsort(-scores[ids], kind="stable")[:count]]


def _bound(scores: np.ndarray[Any, np.dtype[np.float64]], count: int) -> float:
    """A score that at least `count` tokens reach, and few more: the `count`th largest among the maxima of short blocks."""
    maxima = scores[: scores.size // _BLOCK * _BLOCK].reshape(-1, _BLOCK).max(axis=1)
    if count > len(maxima):
        return float(scores.min())
    return float(np.partition(maxima, len(maxima) - count)[len(maxima) - count])


def prompt_logprobs(logits: Floats, token_ids: list[int], start: int, num_top: int) -> list[TokenLogprob | None]:
    """What rows of a prompt say of the tokens after them.

    Row r of logits [R, V] belongs to position `start` + r of the prompt and speaks of the token at the next position; a row of the
    last position speaks of none. The first token of a prompt has no row before it: with `start` 0 a None comes first.
    """
    first: list[TokenLogprob | None] = [None] if start == 0 else []
    following = token_ids[start + 1 : start + 1 + len(logits)]
    return first + [token_logprob(row, token, num_top) for row, token in zip(logits, following, strict=False)]
