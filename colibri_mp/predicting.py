"""Guesses by the model's own predictor (MTP): a layer more, which gets the last layer's output and the next token.

    row p of a sequence     input: hidden state of position p, token p + 1     output: the token at p + 2, guessed

Its KV is kept at position p of the sequence's blocks. (Its rotary position is p too, where training counted p + 1: attention looks at
differences of positions only.) Rows that a step has computed are noted, and computed by the predictor before the next guesses; after
these, guesses are made from guesses: the token that the predictor gave, its own output for the hidden state. What it writes for those is
overwritten when the true rows come. So all that may be wrong in its KV costs guesses, never an answer: where blocks are shared, their
last position was written for another next token, and blocks taken from a request without guesses hold nothing of it.

Reference: transformers/modeling_layers.py `MtpModel`; DeepSeek-V3, arXiv 2412.19437, section 2.2.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from colibri_mp.backend import Backend
from colibri_mp.errors import ColibriError
from colibri_mp.messages import Floats
from colibri_mp.scheduler import Rows, Sequence

MOST_WAITING = 64
"""Rows of all sequences that may wait for the predictor, beside those of prompts and of whom guesses are wanted for."""

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Waiting:
    """Rows of a sequence that the predictor has not computed: `hidden` [n, D] of the positions from `start` on."""

    sequence: Sequence
    start: int
    hidden: Floats

    @property
    def num_ready(self) -> int:
        """Those of tokens that stand, so that the next one is known."""
        return max(0, min(len(self.hidden), self.sequence.num_computed - self.start))


class Predicting:
    """See the module docstring. Implements `drafting.Source`.

    `compute(rows, x)`: the predictor's layer over x [T, D], in place. At most `max_rows` rows a call, logits of at most `max_logits`.
    """

    name = "mtp"

    def __init__(
        self, backend: Backend, compute: Callable[[list[Rows], Floats], None], max_rows: int, max_logits: int
    ) -> None:
        self._backend, self._compute = backend, compute
        self._max_rows, self._max_logits = max_rows, max_logits
        self._begun: set[int] = set()  # by id() of the sequence
        self._waiting: dict[int, _Waiting] = {}

    def begin(self, sequence: Sequence) -> None:
        """See `Source`."""
        self._begun.add(id(sequence))

    def forget(self, sequence: Sequence) -> None:
        """See `Source`."""
        self._begun.discard(id(sequence))
        self._waiting.pop(id(sequence), None)

    def note(self, rows: list[Rows], x: Floats) -> None:
        """A step has computed these rows, x [T, D] after the last layer: keep what the predictor needs of them."""
        end = 0
        for part in rows:
            end += part.count
            if id(part.sequence) in self._begun:
                self._add(part, self._backend.final_norm(x[end - part.count : end]))

    def _add(self, part: Rows, hidden: Floats) -> None:
        """Rows that are wanted no more, those of wrong guesses, give way to the new ones."""
        old = self._waiting.get(id(part.sequence))
        if old is not None and old.start <= part.start <= old.start + len(old.hidden):
            hidden = np.concatenate([old.hidden[: part.start - old.start], hidden])
            self._waiting[id(part.sequence)] = _Waiting(part.sequence, old.start, hidden)
        else:
            self._waiting[id(part.sequence)] = _Waiting(part.sequence, part.start, hidden)

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        """See `Source`. Without guesses where an expert of the predictor cannot be read: the answer does without them."""
        try:
            return self._propose(wanted)
        except ColibriError as error:
            if error.kind == "worker_died":
                raise
            _log.warning("no guesses, the predictor has failed: %s", error)
            self._waiting.clear()
            return [[] for _ in wanted]

    def _propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        # A sequence that goes back for its recurrent states has more than one token to compute: the predictor cannot be ahead of it.
        mine = {id(sequence) for sequence, _ in wanted[: self._max_logits] if sequence.num_pending == 1}
        is_much = sum(waiting.num_ready for waiting in self._waiting.values()) > MOST_WAITING
        due = [w for key, w in self._waiting.items() if is_much or key in mine or w.sequence.num_pending > 1]
        last = self._catch_up([waiting for waiting in due if waiting.num_ready])
        drafts: list[list[int]] = [[] for _ in wanted]
        open_ones = [idx for idx, (sequence, _) in enumerate(wanted) if id(sequence) in mine and id(sequence) in last]
        x = np.array([last[id(wanted[idx][0])] for idx in open_ones], np.float32)
        while open_ones:
            for idx, token in zip(open_ones, np.argmax(self._backend.predictor_head(x), axis=1).tolist(), strict=True):
                drafts[idx].append(token)
            goes_on = [len(drafts[idx]) < wanted[idx][1] for idx in open_ones]
            open_ones = [idx for idx, more in zip(open_ones, goes_on, strict=True) if more]
            if open_ones:
                x = self._guess_from_guesses(x[goes_on], [(wanted[idx][0], drafts[idx]) for idx in open_ones])
        return drafts

    def _catch_up(self, due: list[_Waiting]) -> dict[int, Floats]:
        """Compute the ready rows of these; what each one's last row gives [D], by id() of its sequence."""
        last: dict[int, Floats] = {}
        for batch in self._batches(due):
            tokens = [w.sequence.token_ids[first + 1 : first + 1 + count] for w, first, count in batch]
            hidden = np.concatenate([w.hidden[first - w.start :][:count] for w, first, count in batch])
            x = self._backend.merge(np.array([t for part in tokens for t in part], np.int32), hidden)
            self._compute([Rows(w.sequence, first, count) for w, first, count in batch], x)
            end = 0
            for waiting, _, count in batch:
                end += count
                last[id(waiting.sequence)] = x[end - 1].copy()
        for waiting in due:
            del self._waiting[id(waiting.sequence)]
        return last

    def _batches(self, due: list[_Waiting]) -> Iterator[list[tuple[_Waiting, int, int]]]:
        """(rows, first position, count), of at most `max_rows` rows together; those of a sequence in order."""
        batch: list[tuple[_Waiting, int, int]] = []
        room = self._max_rows
        for waiting in due:
            first, left = waiting.start, waiting.num_ready
            while left:
                count = min(left, room)
                batch.append((waiting, first, count))
                first, left, room = first + count, left - count, room - count
                if not room:
                    yield batch
                    batch, room = [], self._max_rows
        if batch:
            yield batch

    def _guess_from_guesses(self, x: Floats, drafts: list[tuple[Sequence, list[int]]]) -> Floats:
        """One row more for each: its last guess, on what the predictor gave before it, x [S, D]."""
        tokens = np.array([draft[-1] for _, draft in drafts], np.int32)
        x = self._backend.merge(tokens, self._backend.predictor_norm(np.ascontiguousarray(x)))
        rows = [Rows(sequence, len(sequence.token_ids) - 2 + len(draft), 1) for sequence, draft in drafts]
        self._compute(rows, x)
        return x
