"""Which rows the next step computes: decode tokens first, then prompt chunks, within a number of rows.

Pure bookkeeping, no arrays and no processes, so it is tested alone. A `Sequence` is one run of tokens with its KV blocks;
`schedule` picks rows, `advance` says that they were computed. Prompts share the rows that decoding leaves: equal shares, and
what a short one does not need goes to the longer ones, so that a prompt within its share is computed in the very next step.

Waiting sequences are admitted in order of arrival as soon as KV blocks for their whole projected length are free; what others
have computed of their tokens they take (`prefix`). Where layers have recurrent states, a slot for one must be free too. One
that does not fit yet lets later ones that do overtake it, `MOST_OVERTAKEN` at most: then all behind it wait with it.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TypeAlias

from colibri_mp.errors import ColibriError
from colibri_mp.kvcache import BlockAllocator
from colibri_mp.messages import Floats
from colibri_mp.prefix import PrefixSharing
from colibri_mp.sequence_states import SequenceState, SequenceStates, StateRun

MOST_OVERTAKEN = 8
"""Later sequences that may be admitted before a waiting one: blocks are not left idle for long, and nobody starves."""


MOST_JOINING = 8
"""A step is interrupted for newcomers of an eighth of the rows that it may have, together, and if it has half of these itself."""


@dataclass(eq=False)
class Sequence:
    """Tokens of one request. `token_ids` grows while generating; the first `num_computed` have their KV stored.

    `max_chunk` limits prompt rows a step; `projected_tokens` is the most it can grow to. `all_logits`: logits of every
    row are wanted, not only of the last. `num_overtaken`: later ones that were admitted while it waited. `num_taken`:
    computed by others; `keys`: of its blocks, as far as needed, of which the first `num_published` may be found by others.
    `draft`: what may come next, guessed for the next step (see `drafting`). `state`: where those of recurrent layers are.
    """

    token_ids: list[int]
    projected_tokens: int
    max_chunk: int
    all_logits: bool = False
    num_computed: int = 0
    num_overtaken: int = 0
    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    num_published: int = 0
    num_taken: int = 0
    draft: list[int] = field(default_factory=list)
    num_prompt: int = field(init=False)
    state: SequenceState = field(default_factory=SequenceState)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.token_ids)

    @property
    def is_waiting(self) -> bool:
        """Whether it has not been admitted yet."""
        return not (self.blocks or self.num_computed)

    @property
    def num_pending(self) -> int:
        """Tokens that are known but not computed."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether what is pending is to be computed at once: a token, or a few that were guessed right and did not get into a state."""
        return self.num_pending == 1 or (self.num_pending > 1 and self.num_computed >= self.num_prompt)


@dataclass(frozen=True)
class Rows:
    """`count` tokens of `sequence` from position `start` on, computed in one step; `draft` are the last of them, if any are guessed.

    `state_runs`: where recurrent states are and go.
    """

    sequence: Sequence
    start: int
    count: int
    draft: tuple[int, ...] = ()
    state_runs: tuple[StateRun, ...] = ()

    @property
    def num_known(self) -> int:
        """Rows of tokens that are not guessed."""
        return self.count - len(self.draft)

    @property
    def token_ids(self) -> list[int]:
        """The tokens of these rows."""
        return [*self.sequence.token_ids[self.start : self.start + self.num_known], *self.draft]

    @property
    def is_prefill(self) -> bool:
        """Whether this is a part of a prompt, of several tokens."""
        return self.num_known > 1 and self.start < self.sequence.num_prompt

    @property
    def reaches_end(self) -> bool:
        """Whether the logits of the last row, and of each guessed one, choose new tokens."""
        return self.start + self.num_known == len(self.sequence.token_ids)

    @property
    def num_logits(self) -> int:
        """How many of the rows, counted from the last, need logits."""
        if self.sequence.all_logits:
            return self.count
        return 1 + len(self.draft) if self.reaches_end else 0


Look: TypeAlias = Callable[[], list[Rows] | None]
"""Called between two layers of a step: the parts that are still wanted, None if it is all of them."""

GroupLook: TypeAlias = Callable[[int], list[Rows] | None]
"""The same for steps of several groups at once, with the index of the group."""

GroupEnded: TypeAlias = Callable[[int, Floats | ColibriError], Iterable[list[Rows]]]
"""Called when a step of a group has ended, with its logits or its error: the rows of that group's next step, if there is to be one."""


class Scheduler:
    """Sequences waiting, and running with KV blocks in hand. While `admits` is false those that wait go on waiting.

    A step has at most `max_rows` rows, and at most `max_logits` of them need logits (None: no matter how many).
    `prefix_root`: see `PrefixSharing`. `max_guessing`: rows of decoding sequences in a step where tokens are guessed, these included
    (more would need experts that the pools cannot hold together). `num_state_slots`: see `SequenceStates`.
    """

    def __init__(
        self, allocator: BlockAllocator, max_rows: int, max_logits: int | None = None, prefix_root: str | None = None,
        max_guessing: int = 0, num_state_slots: int = 0,
    ) -> None:  # fmt: skip
        self.allocator = allocator
        self.states = SequenceStates(num_state_slots, allocator.block_tokens, keeps=prefix_root is not None)
        self.prefix = PrefixSharing(allocator, self.states, prefix_root)
        self.max_rows = max_rows
        self.max_logits = max_rows if max_logits is None else min(max_rows, max_logits)
        self.max_guessing = max_guessing
        self.admits = True
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._refused: tuple[int, int, int] | None = None  # what there was when no more could be admitted: `_supply`

    @property
    def has_work(self) -> bool:
        """Whether `schedule` would find rows."""
        return bool(self.running or (self.admits and self.waiting))

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence.

        Raises:
            RequestError: it can never fit the KV memory.
        """
        self.allocator.check(sequence.projected_tokens)
        self.waiting.append(sequence)
        self._refused = None

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is, and free its blocks."""
        if sequence.is_waiting and sequence in self.waiting:
            self.waiting.remove(sequence)
            self._refused = None
        if sequence in self.running:
            self.running.remove(sequence)
        self.allocator.release(sequence.blocks)
        self.states.end(sequence)

    def schedule(self) -> list[Rows]:
        """Rows of the next step; empty if there is nothing to do. Admits waiting sequences first."""
        self.admit()
        decoding = [s for s in self.running if s.is_decoding]
        prompts = [s for s in self.running if s.num_pending and not s.is_decoding]
        for sequence in prompts:
            self.prefix.skip_computed(sequence)
        decoding += [s for s in prompts if s.is_decoding]
        prompts = self.prefix.leaders([s for s in prompts if not s.is_decoding])
        prompts.sort(key=lambda s: s.num_pending)
        most = max(1, self.max_logits - bool(prompts))  # one row is left for prompts, however many decode
        rows = self._decode(decoding, most, min(most, self.max_guessing, self.max_rows // (1 + bool(prompts))))
        num_decoding = sum(part.count for part in rows)
        rows += self._share(prompts, self.max_rows - num_decoding, self.max_logits - num_decoding)
        self._rotate(rows)
        return [self.states.plan(part) for part in rows]

    def _decode(self, decoding: list[Sequence], most: int, most_guessing: int) -> list[Rows]:
        """What is pending of as many as fit into `most` rows, and for guesses what `most_guessing` rows leave, in equal shares."""
        ends = list(accumulate(s.num_pending for s in decoding))
        decoding = decoding[: sum(end <= most for end in ends)]
        rows, left = [], max(0, most_guessing - sum(s.num_pending for s in decoding))
        for num_before, sequence in enumerate(decoding):
            share = -(-left // (len(decoding) - num_before))
            draft, sequence.draft = tuple(sequence.draft[:share]), []
            rows.append(Rows(sequence, sequence.num_computed, sequence.num_pending + len(draft), draft))
            left -= len(draft)
        return rows

    def schedule_newcomers(self, sequences: list[Sequence]) -> list[Rows]:
        """All that is pending of those sequences, just added, that are admitted at once and are short; see `MOST_JOINING`."""
        self.admit()
        rows, left = [], self.max_rows // MOST_JOINING
        for sequence in sequences:
            if not sequence.is_waiting and sequence.num_pending <= left and not sequence.all_logits:
                rows.append(Rows(sequence, sequence.num_computed, sequence.num_pending))
                left -= sequence.num_pending
        return [self.states.plan(part) for part in rows[: self.max_logits]]

    def schedule_again(self, rows: list[Rows]) -> list[Rows]:
        """The next token of the sequences of some rows that have just been computed."""
        return [self.states.plan(Rows(part.sequence, part.sequence.num_computed, 1)) for part in rows]

    def _share(self, prompts: list[Sequence], left: int, logits_left: int) -> list[Rows]:
        """Equal shares of `left` rows for prompts, the shortest first, so that what these leave goes to the longer ones."""
        rows = []
        for num_before, sequence in enumerate(prompts):
            share = -(-left // (len(prompts) - num_before))
            part = Rows(sequence, sequence.num_computed, min(share, sequence.num_pending, sequence.max_chunk))
            if part.num_logits > logits_left:  # its end comes in a later step
                part = replace(part, count=min(logits_left, part.count) if sequence.all_logits else part.count - 1)
            if part.count > 0:
                rows.append(part)
                left -= part.count
                logits_left -= part.num_logits
        return rows

    def advance(self, rows: list[Rows]) -> None:
        """Mark rows as computed, and their KV as complete: what fills a block may be taken by others from now on.

        Not those of guesses: their positions are computed again, but for those that `accept` says were right.
        """
        for part in rows:
            part.sequence.num_computed += part.num_known
            self.prefix.publish(part.sequence)
            self.states.advance(part)

    def accept(self, sequence: Sequence) -> None:
        """The next guess of the last step has turned out right: its KV stands."""
        assert sequence.num_pending == 1
        sequence.num_computed += 1
        self.prefix.publish(sequence)

    def settle(self, rows: list[Rows]) -> None:
        """What guesses of the last step were right has been said. Where layers have recurrent states they are all in, or computed again."""
        for part in rows:
            self.states.settle(part)

    def admit(self) -> None:
        """Let waiting sequences run, as far as KV blocks, slots for states and `admits` allow."""
        if not self.admits or self._refused == self._supply():
            return
        self._admit_in_order()
        self._refused = self._supply()

    def _supply(self) -> tuple[int, int, int]:
        """Free blocks, slots to be had, and how many wait for them."""
        return self.allocator.num_free, self.states.slots.num_takeable(), len(self.waiting)

    def _admit_in_order(self) -> None:
        passed: list[Sequence] = []
        for sequence in list(self.waiting):
            if self.prefix.admit(sequence):
                self.waiting.remove(sequence)
                self.running.append(sequence)
                for other in passed:
                    other.num_overtaken += 1
            else:
                passed.append(sequence)
            if any(other.num_overtaken >= MOST_OVERTAKEN for other in passed):
                return

    def _rotate(self, rows: list[Rows]) -> None:
        """Move served sequences behind those left out, so that nobody starves when rows are short."""
        served = {id(part.sequence) for part in rows}
        if len(served) < len(self.running):
            self.running.sort(key=lambda s: id(s) in served)

    def check_integrity(self) -> None:
        """Assert that blocks are held by running sequences only, as often as counted, and suffice."""
        self.allocator.check_integrity([s.blocks for s in self.running])
        self.states.check_integrity(self.running)
        for sequence in self.running:
            assert len(sequence.blocks) == self.allocator.blocks_for(sequence.projected_tokens)
            assert sequence.num_computed <= len(sequence.token_ids) <= sequence.projected_tokens
