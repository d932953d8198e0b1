"""Random lives of sequences over shared blocks and kept states: what a sequence finds in them is always its own tokens."""

from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from colibri_mp.kvcache import BlockAllocator
from colibri_mp.scheduler import Rows, Scheduler, Sequence

BLOCK = 4
GARBAGE = -1
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=24)


class SharedPrefixes(RuleBasedStateMachine):
    """The scheduler over a memory that holds, in place of keys and values, the token of each position, and in place of a state all tokens
    that have gone into it."""

    @initialize(
        num_blocks=st.integers(8, 20), max_rows=st.integers(1, 12), shares=st.booleans(), num_slots=st.integers(0, 5)
    )
    def start(self, num_blocks: int, max_rows: int, shares: bool, num_slots: int) -> None:
        """Few blocks and slots, so that what is cached or kept is evicted."""
        root = "root" if shares else None
        self.scheduler = Scheduler(BlockAllocator(num_blocks, BLOCK), max_rows, None, root, max_rows, num_slots)
        self.states: list[list[int]] = [[GARBAGE]] * num_slots
        self.memory = np.full((num_blocks, BLOCK), GARBAGE)
        self.ended: list[list[int]] = []

    @rule(prompt=TOKENS, max_new=st.integers(1, 8), all_logits=st.booleans())
    def add(self, prompt: list[int], max_new: int, all_logits: bool) -> None:
        """A prompt of two different tokens: most begin like another."""
        self.scheduler.add(Sequence(prompt, len(prompt) + max_new, 100, all_logits))

    @precondition(lambda self: self.ended)
    @rule(data=st.data(), more=TOKENS)
    def continue_an_ended_one(self, data: st.DataObject, more: list[int]) -> None:
        """The next turn: what a sequence had become, and a few tokens more."""
        prompt = [*data.draw(st.sampled_from(self.ended)), *more][:28]
        self.scheduler.add(Sequence(prompt, len(prompt) + 2, 100))

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Every row's token goes to its block; then a sequence that has reached its end gets those that were guessed right and one more, or
        has ended.
        """
        for sequence in self.scheduler.running:
            room = sequence.projected_tokens - len(sequence.token_ids) - 1
            guesses = st.lists(st.integers(0, 1), max_size=min(room, 6)) if room > 0 else st.just([])
            sequence.draft = data.draw(guesses) if sequence.is_decoding and not sequence.all_logits else []
        rows = self.scheduler.schedule()
        assert sum(part.count for part in rows) <= self.scheduler.max_rows
        assert bool(rows) == bool(self.scheduler.running)
        assert not (self.scheduler.waiting and not rows)
        for part in rows:
            self.write(part, part.token_ids)
            self.run_states(part, part.token_ids)
        self.scheduler.advance(rows)
        for part in [part for part in rows if part.reaches_end]:
            self.draw_tokens(part.sequence, part.draft, data)
        self.scheduler.settle(rows)

    def draw_tokens(self, sequence: Sequence, draft: tuple[int, ...], data: st.DataObject) -> None:
        """As the engine does."""
        for guess in (*draft, None):
            if len(sequence.token_ids) == sequence.projected_tokens or sequence.all_logits:
                self.ended.append(sequence.token_ids)
                self.scheduler.remove(sequence)
                return
            sequence.token_ids.append(data.draw(st.integers(0, 1)))
            if guess != sequence.token_ids[-1]:
                return
            self.scheduler.accept(sequence)

    @precondition(lambda self: self.scheduler.running)
    @rule()
    def fail_in_the_middle(self) -> None:
        """A step that fails has written nonsense, and its sequences go."""
        rows = self.scheduler.schedule()
        for part in rows:
            self.write(part, [GARBAGE] * part.count)
            self.run_states(part, [GARBAGE] * part.count)
            self.scheduler.remove(part.sequence)

    @precondition(lambda self: self.scheduler.running or self.scheduler.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """A sequence goes, running or waiting."""
        self.scheduler.remove(data.draw(st.sampled_from([*self.scheduler.running, *self.scheduler.waiting])))

    @invariant()
    def blocks_are_accounted_for(self) -> None:
        """Each block is free, cached or held, as often as counted."""
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()

    @invariant()
    def blocks_hold_what_was_computed(self) -> None:
        """The positions that count as computed hold the sequence's tokens, and one token at least is left to compute."""
        for sequence in self.scheduler.running if hasattr(self, "scheduler") else []:
            found = self.memory[sequence.blocks].reshape(-1)[: sequence.num_computed]
            assert found.tolist() == sequence.token_ids[: sequence.num_computed]
            assert sequence.num_pending >= 1
            assert not (sequence.all_logits and sequence.num_taken)

    @invariant()
    def states_hold_what_was_computed(self) -> None:
        """Where a sequence goes on from, exactly its computed tokens have gone in; slots are owned by running sequences only."""
        for sequence in self.scheduler.running if hasattr(self, "scheduler") and self.states else []:
            if sequence.num_computed:
                state, slots = sequence.state, self.scheduler.states.slots
                slot = state.slots[-1] if state.source is None else slots.slot_of(state.source)
                assert self.states[slot] == sequence.token_ids[: sequence.num_computed]

    def teardown(self) -> None:
        """When all have gone, every block is to be had."""
        if not hasattr(self, "scheduler"):
            return
        for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
            self.scheduler.remove(sequence)
        allocator = self.scheduler.allocator
        assert allocator.num_free == allocator.num_blocks
        everything: Any = allocator.acquire(allocator.num_blocks * BLOCK)
        assert sorted(everything[0]) == list(range(allocator.num_blocks))
        assert allocator.num_cached == 0
        allocator.check_integrity([everything[0]])

    def run_states(self, part: Rows, tokens: list[int]) -> None:
        """As the recurrent layers would: each run from its slot to its slot, the first of a sequence from nothing."""
        start = 0
        assert sum(count for count, _, _ in part.state_runs) == (part.count if self.states else 0)
        for count, source, target in part.state_runs:
            before = [] if source < 0 else self.states[source]
            self.states[target] = before + tokens[start : start + count]
            start += count

    def write(self, part: Rows, tokens: list[int]) -> None:
        for position, token in enumerate(tokens, part.start):
            self.memory[part.sequence.blocks[position // BLOCK], position % BLOCK] = token


TestSharedPrefixes = SharedPrefixes.TestCase
TestSharedPrefixes.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
