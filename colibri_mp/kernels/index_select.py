"""The positions of the largest scores, exactly: a radix selection on the bits of the floats, in compiled code.

Of equal scores those at the lowest positions are taken (torch.topk leaves that open). Time is linear in the number of scores.
"""

import numpy as np

from colibri_mp.kernels.jit import compiled
from colibri_mp.kernels.vectors import get_i32, set_f32, set_i32

HISTOGRAM_BYTES = 4 * 2048
"""Scratch memory of a selection."""

_DIGITS = 2048
_SIGN = np.int64(0x80000000)
_WORD = np.int64(0xFFFFFFFF)
_ZERO = np.float32(0.0)


@compiled
def select_largest(scores: int, num_scores: int, top_k: int, chosen: int, histogram: int) -> None:
    """Write the positions of the top_k largest of float32 scores as int32 [top_k], ascending; the scores are overwritten.

    num_scores >= top_k >= 1; histogram: scratch of HISTOGRAM_BYTES. No not-a-numbers are expected; they are ordered by their bits.
    """
    _make_keys(scores, num_scores)
    prefix, wanted = 0, top_k
    for shift, bits in ((21, 11), (10, 11), (0, 10)):
        _count(scores, num_scores, histogram, prefix, shift, bits)
        digit = (1 << bits) - 1
        while get_i32(histogram + 4 * digit) < wanted:
            wanted -= get_i32(histogram + 4 * digit)
            digit -= 1
        prefix = (prefix << bits) | digit
    _write(scores, num_scores, prefix, wanted, chosen)


@compiled
def _make_keys(scores: int, num_scores: int) -> None:
    """Floats to unsigned words of the same order."""
    for i in range(num_scores):
        bits = get_i32(scores + 4 * i)
        set_i32(scores + 4 * i, bits ^ ((bits >> 63) | _SIGN))


@compiled
def _count(keys: int, num_keys: int, histogram: int, prefix: int, shift: int, bits: int) -> None:
    """How many keys have each digit, of those that begin with the digits found so far."""
    for digit in range(_DIGITS):
        set_f32(histogram + 4 * digit, _ZERO)
    mask = (1 << bits) - 1
    for i in range(num_keys):
        key = (get_i32(keys + 4 * i) & _WORD) >> shift
        if key >> bits == prefix:
            place = histogram + 4 * (key & mask)
            set_i32(place, get_i32(place) + 1)


@compiled
def _write(keys: int, num_keys: int, threshold: int, num_equal: int, chosen: int) -> None:
    """Positions of keys above the threshold, and of the first `num_equal` at it."""
    place = chosen
    for i in range(num_keys):
        key = get_i32(keys + 4 * i) & _WORD
        if key > threshold or (key == threshold and num_equal > 0):
            num_equal -= key == threshold
            set_i32(place, i)
            place += 4
