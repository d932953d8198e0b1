"""Which slots the recurrent states of sequences are in, and which of them are kept for others; see `state_slots`.

Attention finds what it needs of a prefix in KV blocks. A recurrent layer knows a prefix only as its state after the last token of it, so a
prefix can be taken as far as a state was *kept* at the end of one of its blocks. Kept are, for each sequence:

- the state at the end of the prompt's last block that the same prompt could take again;
- the state where its tokens part from those that others have computed, which the next one that parts there can take;
- while it generates, the state at the end of its last full block: where the conversation's next turn goes on.

Guesses (`drafting`) go on in a slot of their own. If all are right, so is the state there. If not, the sequence goes back to its state
after the last token that was known, and computes the right ones again with its next rows: what went into a state cannot be taken out.

Nothing is copied for that: a run that starts from a kept slot goes on in another one (`Batch.state_runs`). A sequence that finds no free
slot keeps nothing and goes on in its own.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from colibri_mp.state_slots import StateSlots

if TYPE_CHECKING:
    from colibri_mp.scheduler import Rows, Sequence

NOTHING = -1
"""In place of a slot: the state before the first token."""

StateRun = tuple[int, int, int]
"""Number of rows, the slot with the state before them, the slot for the state after them."""


@dataclass(eq=False)
class SequenceState:
    """Of one sequence. `slots`: its own, the last is where the state is after the step under way; `source`: key of the kept state that it
    starts from, held; `cuts`: numbers of tokens after which the state is to be kept; `newest`: key of the last that was kept of what it
    generated; `guessed`: the slot with the state after guesses, until they are settled."""

    slots: list[int] = field(default_factory=list)
    source: bytes | None = None
    cuts: set[int] = field(default_factory=set)
    newest: bytes | None = None
    guessed: int | None = None


class SequenceStates:
    """The states of all sequences. With no slots (a model without recurrent layers) everything here does nothing.

    `keeps`: whether blocks have keys, so that states can be kept.
    """

    def __init__(self, num_slots: int, block_tokens: int, keeps: bool) -> None:
        self.slots = StateSlots(num_slots)
        self._block_tokens, self._keeps = block_tokens, keeps

    @property
    def exist(self) -> bool:
        """Whether the model has recurrent layers."""
        return self.slots.num_slots > 0

    def usable(self, keys: Items[bytes], num_blocks: int) -> int:
        """How many of the first `num_blocks` blocks, which are cached, can be taken: as far as a state is kept."""
        if not self.exist:
            return num_blocks
        return next((count for count in range(num_blocks, 0, -1) if keys[count - 1] in self.slots), 0)

    def can_begin(self, source: bytes | None) -> bool:
        """Whether a sequence that starts from a kept state could have a slot now."""
        return not self.exist or self.slots.num_takeable(besides=source) > 0

    def begin(self, sequence: "Sequence", source: bytes | None) -> None:
        """Give an admitted sequence a slot; it starts from the kept state `source`, or from nothing."""
        if self.exist:
            self._start_from(sequence.state, source)
            slot = self.slots.take()
            assert slot is not None, "admitted without a slot"
            sequence.state.slots.append(slot)

    def skip_to(self, sequence: "Sequence", source: bytes) -> None:
        """The sequence goes on from a kept state that is further than its own."""
        if self.exist:
            self._start_from(sequence.state, source)

    def keep_after(self, sequence: "Sequence", num_tokens: int) -> None:
        """Keep the state after so many tokens, the end of a block, when they are computed."""
        if self.exist and num_tokens > sequence.num_computed:
            sequence.state.cuts.add(num_tokens)

    def plan(self, part: "Rows") -> "Rows":
        """The rows with their runs: which state they start from, where it goes, where it is cut. Guesses need a free slot."""
        if not self.exist:
            return part
        state = part.sequence.state
        if part.draft and (following := self.slots.take()) is not None:
            known = tuple(self._runs(part, part.num_known))
            state.guessed = following
            return replace(part, state_runs=(*known, (len(part.draft), state.slots[-1], following)))
        return replace(part, count=part.num_known, draft=(), state_runs=tuple(self._runs(part, part.num_known)))

    def _runs(self, part: "Rows", count: int) -> Iterator[StateRun]:
        """The runs of the first `count` rows."""
        state, start, end = part.sequence.state, part.start, part.start + count
        source = state.slots[-1] if start else NOTHING
        if state.source is not None:
            source = self.slots.slot_of(state.source)
        for cut in sorted(cut for cut in self._cuts(part.sequence, end) if start < cut < end):
            following = self.slots.take()
            if following is None:
                break
            yield cut - start, source, state.slots[-1]
            source, start = state.slots[-1], cut
            state.slots.append(following)
        yield end - start, source, state.slots[-1]

    def _cuts(self, sequence: "Sequence", end: int) -> set[int]:
        """Numbers of tokens, up to `end`, after which the state is to be kept."""
        last = end - end % self._block_tokens
        return sequence.state.cuts | ({last} if self._keeps and last >= sequence.num_prompt else set())

    def advance(self, part: "Rows") -> None:
        """The rows have been computed, and their blocks have keys: what was cut off is kept. Guesses are for `settle`."""
        if not self.exist:
            return
        sequence, state = part.sequence, part.sequence.state
        self._let_go(state)
        known = part.state_runs[: -1 if part.draft else None]
        end = part.start
        for count, _, target in known[:-1]:
            end += count
            state.slots.remove(target)
            self._keep(sequence, target, end)
        if not part.draft:
            self._keep_at_end(sequence)
        state.cuts = {cut for cut in state.cuts if cut > sequence.num_computed}

    def settle(self, part: "Rows") -> None:
        """The guesses of the rows have been judged: all are in the state, or none."""
        sequence, state = part.sequence, part.sequence.state
        if state.guessed is None:
            return
        certain = part.start + part.num_known
        guessed, state.guessed = state.guessed, None
        if sequence.num_computed < part.start + part.count:
            self.slots.release(guessed)
            sequence.num_computed = certain
        else:
            before = state.slots.pop()
            state.slots.append(guessed)
            if certain in self._cuts(sequence, certain):
                self._keep(sequence, before, certain)
            else:
                self.slots.release(before)
        self._keep_at_end(sequence)

    def _keep_at_end(self, sequence: "Sequence") -> None:
        """Where a step ends with a block, keep the state and go on from it in another slot."""
        state, num_computed = sequence.state, sequence.num_computed
        if num_computed not in self._cuts(sequence, num_computed):
            return
        if num_computed >= sequence.num_prompt:
            self._drop_newest(state)  # its slot is to be had
        following = self.slots.take()
        if following is None:
            return
        key = self._keep(sequence, state.slots.pop(), num_computed)
        state.slots.append(following)
        self._start_from(state, key)

    def _keep(self, sequence: "Sequence", slot: int, num_tokens: int) -> bytes:
        """Let a state be found; of those that come while a sequence generates only the last."""
        key = sequence.keys[num_tokens // self._block_tokens - 1]
        self.slots.keep(slot, key)
        if num_tokens >= sequence.num_prompt:
            self._drop_newest(sequence.state)
            sequence.state.newest = key
        return key

    def _drop_newest(self, state: SequenceState) -> None:
        if state.newest is not None:
            self.slots.drop(state.newest)
            state.newest = None

    def end(self, sequence: "Sequence") -> None:
        """The sequence needs its slots no more; what was kept can still be found."""
        state = sequence.state
        self._let_go(state)
        while state.slots:
            self.slots.release(state.slots.pop())
        if state.guessed is not None:
            self.slots.release(state.guessed)
            state.guessed = None

    def _start_from(self, state: SequenceState, source: bytes | None) -> None:
        self._let_go(state)
        if source is not None:
            self.slots.hold(source)
            state.source = source

    def _let_go(self, state: SequenceState) -> None:
        if state.source is not None:
            self.slots.let_go(state.source)
            state.source = None

    def check_integrity(self, sequences: Items["Sequence"]) -> None:
        """Assert that slots are owned and held by running sequences only, as often as counted."""
        states = [sequence.state for sequence in sequences]
        owned = [slot for state in states for slot in (*state.slots, state.guessed) if slot is not None]
        self.slots.check_integrity(owned, [state.source for state in states if state.source is not None])
