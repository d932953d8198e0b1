"""Which states are kept, which are taken, and what becomes of slots: bookkeeping alone."""

from colibri_mp.kvcache import BlockAllocator
from colibri_mp.scheduler import Rows, Scheduler, Sequence

BLOCK = 4
PROMPT = list(range(100, 118))  # four whole blocks and two tokens


def make(num_slots: int = 6, max_rows: int = 64, num_blocks: int = 40) -> Scheduler:
    """A scheduler of a model with recurrent layers."""
    return Scheduler(BlockAllocator(num_blocks, BLOCK), max_rows, None, "root", num_state_slots=num_slots)


def add(scheduler: Scheduler, tokens: list[int], room: int = 12) -> Sequence:
    """A request."""
    sequence = Sequence(list(tokens), len(tokens) + room, 64)
    scheduler.add(sequence)
    return sequence


def step(scheduler: Scheduler, *generated: int) -> list[Rows]:
    """One step; each sequence that reached its end gets the next of `generated`."""
    rows = scheduler.schedule()
    scheduler.advance(rows)
    tokens = list(generated)
    for part in rows:
        if part.reaches_end and tokens:
            part.sequence.token_ids.append(tokens.pop(0))
    scheduler.check_integrity()
    return rows


def test_a_prompt_is_cut_where_it_could_be_taken_again() -> None:
    """At the end of the last block before the last token; the same prompt begins there."""
    scheduler = make()
    first = add(scheduler, PROMPT)
    ((_, source, middle), (_, again, _)) = step(scheduler)[0].state_runs
    assert (source, again) == (-1, middle)
    scheduler.remove(first)
    second = add(scheduler, PROMPT)
    (part,) = step(scheduler)
    assert (part.start, second.num_taken) == (16, 16)
    assert part.state_runs[0][:2] == (2, middle)


def test_the_next_turn_goes_on_where_the_answer_ended() -> None:
    """While it generates, the state at the end of the last whole block is kept, and only that."""
    scheduler = make()
    first = add(scheduler, PROMPT)
    for token in range(9):
        step(scheduler, token)
    assert first.num_computed == 26
    scheduler.remove(first)
    assert scheduler.states.slots.num_kept == 2  # the prompt's, and the one after 24 tokens
    second = add(scheduler, [*first.token_ids, 50, 51])
    step(scheduler)
    assert second.num_taken == 24


def test_cached_blocks_are_of_no_use_without_a_state() -> None:
    """Where tokens part in the middle, the first computes all and keeps the state there; the next one takes it."""
    scheduler = make()
    for tail, taken in (([1] * 9, 0), ([2] * 9, 0), ([3] * 9, 8)):
        sequence = add(scheduler, PROMPT[:8] + tail)
        step(scheduler)
        assert sequence.num_taken == taken
        scheduler.remove(sequence)
    scheduler.check_integrity()


def test_the_same_prompt_is_computed_once() -> None:
    """Of two that come together one waits for the state of the other; of two that part they do not wait."""
    scheduler = make()
    twins = [add(scheduler, PROMPT), add(scheduler, PROMPT)]
    assert [part.sequence for part in step(scheduler)] == twins[:1]
    step(scheduler)
    assert [twin.num_taken for twin in twins] == [0, 16]
    scheduler = make()
    others = [add(scheduler, PROMPT), add(scheduler, PROMPT[:8] + [9] * 9)]
    assert {id(part.sequence) for part in step(scheduler)} == {id(other) for other in others}


def test_without_a_free_slot_nothing_is_kept_and_nobody_is_admitted() -> None:
    """Two slots: two run, each in its own, and the third waits until one has gone."""
    scheduler = make(num_slots=2)
    running = [add(scheduler, [n] * 10) for n in range(2)]
    third = add(scheduler, [7] * 10)
    for part in step(scheduler, 1, 1):
        assert len(part.state_runs) == 1
    assert third.is_waiting
    assert scheduler.states.slots.num_kept == 0
    scheduler.remove(running[0])
    step(scheduler)
    assert not third.is_waiting


def test_kept_states_give_way_least_recently_used_first() -> None:
    """What a sequence starts from stays; the oldest of the others goes."""
    scheduler = make(num_slots=3)
    for token in (1, 2):
        sequence = add(scheduler, [token] * 10)
        step(scheduler)
        scheduler.remove(sequence)
    assert scheduler.states.slots.num_kept == 2
    taker, newcomer = add(scheduler, [1] * 10), add(scheduler, [5] * 10)
    scheduler.schedule()
    assert taker.num_taken == 8
    assert newcomer.state.slots
    assert scheduler.states.slots.num_evicted == 1
    assert scheduler.states.slots.num_kept == 1
    scheduler.check_integrity()


def test_guesses_are_in_the_state_all_or_none() -> None:
    """Where some were wrong, the right ones are computed again with the next token, from the state before them; no slot is lost."""
    scheduler = make()
    scheduler.max_guessing = 8
    sequence = add(scheduler, [1] * 6)
    step(scheduler, 50)
    for right, runs, then in ((1, [1, 3], (2, 7)), (3, [1, 1, 3], (1, 12))):  # the second is cut where a block ends
        sequence.draft = [60, 61, 62]
        (part,) = scheduler.schedule()
        assert [count for count, _, _ in part.state_runs] == runs
        scheduler.advance([part])
        for guess in [*part.draft[:right], 70]:
            sequence.token_ids.append(guess)
            if guess != 70:
                scheduler.accept(sequence)
        scheduler.settle([part])
        scheduler.check_integrity()
        sequence.draft = []
        assert (sequence.num_pending, sequence.num_computed) == then
