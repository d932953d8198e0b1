"""What a row more costs in a step of decoding, measured while decoding: as a share of a step that has one row a sequence.

Steps are compared with plain ones of as many sequences. A plain step is asked for where none is known, and now and then, since
steps become faster as the cache fills.
"""

from typing import Any

_FIRST_GUESS = 0.5
_NEW_SHARE = 0.2  # of an average that a new measurement is
_FEW_STEPS = 3  # plain ones before anything is compared,
_OUTLIER = 3.0  # times the average: what took longer was held up by something else
_PLAIN_EVERY = 16  # steps


class RowCost:
    """See the module docstring. `share` is the estimate, 0 to 2."""

    def __init__(self) -> None:
        self.share = _FIRST_GUESS
        self.saved_s = 0.0
        self._plain_s: dict[int, _Average] = {}  # by number of sequences
        self._guessing_s = _Average()
        self._since_plain = 0

    def wants_plain_step(self, num_sequences: int) -> bool:
        """Whether the next step should have no guesses, to be measured."""
        known = self._plain_s.get(num_sequences)
        return known is None or known.count < _FEW_STEPS or self._since_plain >= _PLAIN_EVERY

    def step_ended(self, num_sequences: int, num_guesses: int, seconds: float, num_accepted: int) -> None:
        """A step of decoding took so long: one row for each sequence, and the guesses."""
        plain = self._plain_s.setdefault(num_sequences, _Average())
        if not num_guesses:
            self._since_plain = 0
            plain.add(seconds)
            return
        self._since_plain += 1
        self._guessing_s.add(seconds)
        if plain.count:
            self.saved_s += plain.value * (1 + num_accepted / num_sequences) - seconds
            excess = (min(seconds, _OUTLIER * plain.value) / plain.value - 1) / num_guesses
            self.share += _NEW_SHARE * (min(max(excess * num_sequences, 0.0), 2.0) - self.share)

    def describe(self) -> dict[str, Any]:
        """For `status`: seconds of a step by sequences, without guesses and with, what a row costs, and the time saved."""
        return {
            "row_cost": self.share,
            "plain_step_s": {str(count): average.value for count, average in self._plain_s.items() if average.count},
            "drafted_step_s": self._guessing_s.value,
            "saved_s": self.saved_s,
        }


class _Average:
    """A moving average that begins with the first value; a value far above it counts as the largest that is believed."""

    def __init__(self) -> None:
        self.value = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        believed = min(value, _OUTLIER * self.value) if self.count else value
        self.value += (believed - self.value) * max(_NEW_SHARE, 1 / (self.count + 1))
        self.count += 1
