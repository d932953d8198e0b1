"""The scheduler's choice of rows and the KV blocks behind it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_mp.errors import RequestError
from colibri_mp.kvcache import BlockAllocator
from colibri_mp.scheduler import MOST_OVERTAKEN, Scheduler, Sequence


def scheduler(num_blocks: int = 16, max_rows: int = 8) -> Scheduler:
    """Blocks of 4 tokens."""
    return Scheduler(BlockAllocator(num_blocks, 4), max_rows)


def sequence(num_prompt: int, max_new: int = 4, max_chunk: int = 100) -> Sequence:
    """A prompt of that many tokens."""
    return Sequence(list(range(num_prompt)), num_prompt + max_new, max_chunk)


def run_step(sched: Scheduler) -> list[tuple[int, int]]:
    """One step that samples a token for each sequence that reached its end; (start, count) of each part."""
    rows = sched.schedule()
    sched.advance(rows)
    for part in rows:
        if part.sequence.num_pending == 0 and len(part.sequence.token_ids) < part.sequence.projected_tokens:
            part.sequence.token_ids.append(0)
    return [(part.start, part.count) for part in rows]


def test_prompt_then_single_tokens() -> None:
    """A prompt goes in chunks of at most max_rows, then one token a step."""
    sched = scheduler()
    sched.add(sequence(10))
    assert [run_step(sched) for _ in range(4)] == [[(0, 8)], [(8, 2)], [(10, 1)], [(11, 1)]]


def test_decoding_comes_before_prefill() -> None:
    """A long prompt gets only the rows that decoding sequences leave."""
    sched = scheduler()
    sched.add(sequence(2))
    run_step(sched)
    sched.add(sequence(20))
    assert run_step(sched) == [(2, 1), (0, 7)]


def test_prefills_share_rows() -> None:
    """No prompt waits for the whole of another; what a short one leaves goes to the next."""
    sched = scheduler()
    sched.add(sequence(3, max_new=1))
    sched.add(sequence(20))
    assert run_step(sched) == [(0, 3), (0, 5)]


def test_chunk_limit_of_a_sequence() -> None:
    """A sequence's own chunk limit holds."""
    sched = scheduler()
    sched.add(sequence(7, max_chunk=3))
    assert [run_step(sched) for _ in range(3)] == [[(0, 3)], [(3, 3)], [(6, 1)]]


def test_waits_for_blocks_and_starts_when_they_come_back() -> None:
    """A sequence that does not fit waits and is not refused; it starts when another ends."""
    sched = scheduler(num_blocks=3)
    first, second = sequence(8), sequence(4)
    sched.add(first)
    sched.add(second)
    assert run_step(sched) == [(0, 8)]
    assert list(sched.waiting) == [second]
    sched.remove(first)
    assert run_step(sched) == [(0, 4)]
    sched.check_integrity()


def test_refuses_what_can_never_fit() -> None:
    """A request larger than the whole cache is an error with both numbers."""
    with pytest.raises(RequestError, match=r"13 tokens.*12"):
        scheduler(num_blocks=3).add(sequence(9))


def test_nobody_starves_when_rows_are_short() -> None:
    """With fewer rows than sequences, each gets its turn."""
    sched = scheduler(num_blocks=64, max_rows=2)
    sequences = [sequence(1, max_new=30) for _ in range(5)]
    for item in sequences:
        sched.add(item)
    for _ in range(15):
        run_step(sched)
    assert {item.num_computed for item in sequences} == {6}


@settings(deadline=None)  # a busy machine is no defect
@given(st.data())
def test_random_lives_keep_integrity(data: st.DataObject) -> None:
    """Whatever is added, computed and removed, blocks are held once and rows stay within the limit."""
    sched = scheduler(num_blocks=12, max_rows=5)
    alive: list[Sequence] = []
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["add", "step", "remove"]))
        if action == "add":
            alive.append(sequence(data.draw(st.integers(1, 20)), max_new=data.draw(st.integers(1, 8))))
            sched.add(alive[-1])
        elif action == "step":
            rows = run_step(sched)
            assert sum(count for _, count in rows) <= 5
        elif alive:
            sched.remove(alive.pop(data.draw(st.integers(0, len(alive) - 1))))
        sched.check_integrity()
    for item in alive:
        sched.remove(item)
    assert sched.allocator.num_free == 12


def serve(sched: Scheduler, newcomer: Sequence, at_step: int, num_steps: int) -> list[list[tuple[Sequence, int]]]:
    """What each step computes, with `newcomer` added before one of them: (sequence, rows) of each part."""
    steps = []
    for step in range(num_steps):
        if step == at_step:
            sched.add(newcomer)
        rows = sched.schedule()
        steps.append([(part.sequence, part.count) for part in rows])
        sched.advance(rows)
        for part in rows:
            if part.sequence.num_pending == 0 and len(part.sequence.token_ids) < part.sequence.projected_tokens:
                part.sequence.token_ids.append(0)
    return steps


@pytest.mark.parametrize("num_long", [1, 3])
def test_a_short_prompt_is_computed_in_the_very_next_step(num_long: int) -> None:
    """While long prompts are computed, a short one gets all its rows at once, decoding goes on, and no step is longer for it."""
    sched = scheduler(num_blocks=4096, max_rows=512)
    decoding = [sequence(1, max_new=30) for _ in range(4)]
    for item in [*decoding, *(sequence(2000, max_chunk=512) for _ in range(num_long))]:
        sched.add(item)
    short = sequence(60)
    steps = serve(sched, short, 2, 5)
    assert (short, 60) in steps[2]
    for step in steps[:3]:
        assert sum(count for _, count in step) == 512
        assert {item for item, _ in step} >= set(decoding)
    assert (short, 1) in steps[3]


def test_rows_that_short_prompts_leave_are_not_wasted() -> None:
    """Whatever the order of arrival, what a short prompt does not need goes to the long ones."""
    sched = scheduler(num_blocks=64, max_rows=8)
    sched.add(sequence(50))
    sched.add(sequence(2, max_new=1))
    assert sorted(run_step(sched)) == [(0, 2), (0, 6)]


def test_rows_with_logits_are_limited() -> None:
    """A step never needs more logits than there is room for, and everything is served in the end."""
    sched = Scheduler(BlockAllocator(64, 4), 16, max_logits=3)
    scored = Sequence(list(range(9)), 9, 100, all_logits=True)
    sequences = [sequence(count, max_new=3) for count in (1, 2, 5, 5, 6)]
    for item in [*sequences, scored]:
        sched.add(item)
    for _ in range(40):
        rows = sched.schedule()
        assert sum(part.num_logits for part in rows) <= 3
        sched.advance(rows)
        for part in rows:
            ended = part.sequence.num_pending == 0
            if ended and (part.sequence is scored or len(part.sequence.token_ids) == part.sequence.projected_tokens):
                sched.remove(part.sequence)
            elif ended:
                part.sequence.token_ids.append(0)
    assert not sched.running


def test_small_ones_overtake_a_large_one_a_few_times() -> None:
    """Blocks that a large sequence waits for are used meanwhile, but not for ever: then it is the next to run."""
    sched = scheduler(num_blocks=4)
    running = sequence(8)
    sched.add(running)
    sched.admit()
    large = sequence(10)
    sched.add(large)
    for _ in range(MOST_OVERTAKEN):
        small = sequence(3, max_new=1)
        sched.add(small)
        sched.admit()
        assert small in sched.running
        sched.remove(small)
    late = sequence(3, max_new=1)
    sched.add(late)
    sched.admit()
    assert list(sched.waiting) == [large, late]
    sched.remove(running)
    sched.admit()
    assert sched.running == [large]


def test_nothing_is_admitted_while_memory_is_short() -> None:
    """With admission closed a sequence waits though blocks are free."""
    sched = scheduler()
    sched.admits = False
    sched.add(sequence(2))
    assert (sched.schedule(), sched.has_work, len(sched.waiting)) == ([], False, 1)
