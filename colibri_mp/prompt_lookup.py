"""Guesses from the text itself: what followed the last tokens when they last occurred, in the prompt or in the answer.

Costs no model and no memory to speak of, and is right where text repeats: code, quotations, tables, a document that is being edited.
(Prompt lookup decoding, Saxena 2023.)
"""

from array import array

import numpy as np

from colibri_mp.scheduler import Sequence

LONGEST_MATCH, SHORTEST_MATCH = 4, 2


class PromptLookup:
    """Implements `drafting.Source`. Keeps each sequence's tokens as an array, 4 bytes a token, to be searched at memory speed."""

    name = "lookup"

    def __init__(self) -> None:
        self._tokens: dict[int, array[int]] = {}  # by id() of the sequence

    def begin(self, sequence: Sequence) -> None:
        """See `Source`."""
        self._tokens[id(sequence)] = array("i")

    def forget(self, sequence: Sequence) -> None:
        """See `Source`."""
        self._tokens.pop(id(sequence), None)

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        """See `Source`."""
        return [self._continuation(sequence, most) for sequence, most in wanted]

    def _continuation(self, sequence: Sequence, most: int) -> list[int]:
        tokens = self._tokens[id(sequence)]
        tokens.extend(sequence.token_ids[len(tokens) :])
        return continuation(np.frombuffer(tokens, np.int32), most)


def continuation(tokens: "np.ndarray[tuple[int], np.dtype[np.int32]]", most: int) -> list[int]:
    """At most `most` tokens that may follow `tokens` [T]: those after the last earlier occurrence of the longest of its ends.

    Where the copy reaches the end of the text it goes on with what it has copied: a text with a period goes on with it.
    """
    last = len(tokens) - 1
    ends = np.flatnonzero(tokens[:last] == tokens[last]) if last >= SHORTEST_MATCH else np.empty(0, np.intp)
    found = -1
    for length in range(2, LONGEST_MATCH + 1):
        ends = ends[ends >= length - 1]
        ends = ends[tokens[ends - (length - 1)] == tokens[last - (length - 1)]] if last >= length - 1 else ends[:0]
        if not len(ends):
            break
        if length >= SHORTEST_MATCH:
            found = int(ends[-1])
    if found < 0:
        return []
    period = last - found
    return [int(tokens[found + 1 + idx % period]) for idx in range(most)]
