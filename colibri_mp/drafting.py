"""Speculative decoding: guess the next tokens, compute them in the same step, keep those that turn out right.

    propose     what may follow a sequence's last token: `Sequence.draft`
    schedule    the last token and the guesses are rows of one step, as a chunk of a prompt is; each row gives logits
    verify      draw from the first row; as long as the drawn token is the one that was guessed, draw from the next row too

Every token is drawn from the model's own logits, with the request's own generator, penalties and constraint: the answer is that of
plain decoding, bit for bit, because what a row gives does not depend on its batch. (With guesses that are certain, this is the
acceptance rule of Leviathan et al. 2023, arXiv 2211.17192.) Rejected rows leave KV that the next step overwrites.

A row more is not free: it may need other experts. So what it costs is measured, and a sequence guesses only as far as its guesses
are likely enough to be right.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

from colibri_mp.row_cost import RowCost
from colibri_mp.scheduler import Rows, Sequence

_FORGET = 0.9  # weight of what a sequence's guesses were before, each time they are verified
_PRIOR_RIGHT, _PRIOR_ALL = 1.0, 1.25  # guesses right, and made, that every sequence is credited with
_RETRY_STEPS = 48  # after so many steps without a guess one is tried again


class Source(Protocol):
    """Where guesses come from."""

    name: str

    def begin(self, sequence: Sequence) -> None:
        """A sequence will be guessed for."""

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        """For each sequence at most so many tokens that may follow its last one. Called before every step, if only with none."""

    def forget(self, sequence: Sequence) -> None:
        """A sequence has ended."""


@dataclass(eq=False)
class _Record:
    """How the guesses of one sequence have fared."""

    most: int
    right: float = _PRIOR_RIGHT
    all: float = _PRIOR_ALL
    idle_steps: int = 0

    def add(self, num_proposed: int, num_accepted: int) -> None:
        """`num_accepted` of the guesses were right; after the first wrong one nothing is known."""
        self.idle_steps = 0
        self.right = _FORGET * (self.right - _PRIOR_RIGHT) + num_accepted + _PRIOR_RIGHT
        is_rejected = num_accepted < num_proposed
        self.all = _FORGET * (self.all - _PRIOR_ALL) + num_accepted + is_rejected + _PRIOR_ALL

    def worthwhile(self, row_cost: float) -> int:
        """How many guesses are each likelier to be right, all before them too, than what their row costs."""
        count, likelihood = 0, 1.0
        while count < self.most and (likelihood := likelihood * self.right / self.all) > row_cost:
            count += 1
        return count


@dataclass(eq=False)
class Drafting:
    """The guesses of all sequences. `most`: guesses of one sequence in a step."""

    most: int
    source: Source
    cost: RowCost = field(default_factory=RowCost)
    num_steps: int = 0
    num_proposed: int = 0
    num_accepted: int = 0
    _records: dict[int, _Record] = field(default_factory=dict)  # by id() of the sequence

    def begin(self, sequence: Sequence, most: int) -> None:
        """A sequence that may have at most so many guesses a step."""
        if most > 0:
            self._records[id(sequence)] = _Record(most)
            self.source.begin(sequence)

    def forget(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        if self._records.pop(id(sequence), None) is not None:
            self.source.forget(sequence)

    def propose(self, running: list[Sequence]) -> bool:
        """Set the drafts for the next step; whether there are any."""
        decoding = [sequence for sequence in running if sequence.is_decoding]
        is_plain = self.cost.wants_plain_step(len(decoding))
        wanted = []
        for sequence in decoding:
            sequence.draft = []
            record = self._records.get(id(sequence))
            if record is None or is_plain:
                continue
            count = record.worthwhile(self.cost.share) or int(record.idle_steps >= _RETRY_STEPS)
            record.idle_steps += not count
            room = sequence.projected_tokens - len(sequence.token_ids) - 1
            if min(count, room) > 0:
                wanted.append((sequence, min(count, room)))
        for (sequence, _), draft in zip(wanted, self.source.propose(wanted), strict=True):
            sequence.draft = draft
        return any(sequence.draft for sequence, _ in wanted)

    def verified(self, sequence: Sequence, num_proposed: int, num_accepted: int) -> None:
        """So many guesses of a sequence have been computed, and so many of them were right."""
        self.num_proposed += num_proposed
        self.num_accepted += num_accepted
        record = self._records.get(id(sequence))
        if record is not None:
            record.add(num_proposed, num_accepted)

    def step_ended(self, rows: list[Rows], seconds: float, num_accepted: int) -> None:
        """A step took so long; `num_accepted` guesses in it were right. Steps with prompts say nothing of what a row costs."""
        num_guesses = sum(len(part.draft) for part in rows)
        self.num_steps += num_guesses > 0
        if not any(part.is_prefill for part in rows):
            self.cost.step_ended(len(rows), num_guesses, seconds, num_accepted)

    def describe(self) -> dict[str, Any]:
        """What `status` says: how often guesses were right, what they cost, and the seconds that they saved (below 0: lost)."""
        return {
            "most": self.most,
            "source": self.source.name,
            "steps": self.num_steps,
            "proposed_tokens": self.num_proposed,
            "accepted_tokens": self.num_accepted,
            "accepted_per_step": self.num_accepted / self.num_steps if self.num_steps else 0.0,
            **self.cost.describe(),
        }
