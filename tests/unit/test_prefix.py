"""Shared prefixes: what is found, what is computed once, what goes first."""

import pytest

from colibri_mp.kvcache import BlockAllocator, PrefixKeys
from colibri_mp.scheduler import Scheduler, Sequence

BLOCK = 4


def scheduler(num_blocks: int = 16, max_rows: int = 8, root: str | None = "root") -> Scheduler:
    """Blocks of 4 tokens."""
    return Scheduler(BlockAllocator(num_blocks, BLOCK), max_rows, None, root)


def run(sched: Scheduler, prompt: list[int], all_logits: bool = False) -> Sequence:
    """Compute a prompt, alone, and let it go; `num_taken` tells what was not computed."""
    sequence = Sequence(prompt, len(prompt), 100, all_logits)
    sched.add(sequence)
    while sequence.num_pending:
        sched.advance(sched.schedule())
    sched.remove(sequence)
    sched.check_integrity()
    return sequence


def test_keys_name_tokens_and_all_before_them() -> None:
    """Equal blocks have equal keys only after equal beginnings and under one root; keys made in parts are the same."""
    keys: list[bytes] = []
    PrefixKeys("a", BLOCK).extend(keys, [1, 2, 3, 4, 1, 2, 3, 4, 9], 2)
    in_parts: list[bytes] = []
    for num_blocks in (1, 2):
        PrefixKeys("a", BLOCK).extend(in_parts, [1, 2, 3, 4, 1, 2, 3, 4], num_blocks)
    other: list[bytes] = []
    PrefixKeys("b", BLOCK).extend(other, [1, 2, 3, 4], 1)
    assert in_parts == keys
    assert len({*keys, *other}) == 3


@pytest.mark.parametrize(("num_prompt", "num_taken"), [(4, 0), (5, 4), (8, 4), (9, 8), (11, 8)])
def test_takes_whole_blocks_but_never_the_last_token(num_prompt: int, num_taken: int) -> None:
    """A prompt that was computed before is computed again from its last whole block on, one token at least."""
    sched = scheduler()
    run(sched, list(range(12)))
    assert run(sched, list(range(num_prompt))).num_taken == num_taken
    assert sched.prefix.describe()["hit_tokens"] == num_taken


def test_only_what_begins_alike_is_shared() -> None:
    """A different first token means that nothing is taken; a different later one, the blocks before it."""
    sched = scheduler()
    run(sched, [0, 1, 2, 3, 4, 5, 6, 7, 8])
    assert run(sched, [9, 1, 2, 3, 4, 5, 6, 7, 8]).num_taken == 0
    assert run(sched, [0, 1, 2, 3, 9, 5, 6, 7, 8]).num_taken == 4


def test_off_and_all_logits_take_nothing() -> None:
    """Without a root nothing is kept; a sequence that wants all its logits computes all its rows, and others may take them."""
    off = scheduler(root=None)
    run(off, list(range(9)))
    assert run(off, list(range(9))).num_taken == 0
    assert off.prefix.describe()["cached_blocks"] == 0
    sched = scheduler()
    run(sched, list(range(9)))
    assert run(sched, list(range(9)), all_logits=True).num_taken == 0
    assert run(sched, [*range(9), 0, 0]).num_taken == 8


def test_generated_tokens_are_shared_too() -> None:
    """The next turn of a conversation takes prompt and answer."""
    sched = scheduler()
    first = Sequence([1, 2, 3], 12, 100)
    sched.add(first)
    for token in range(7):
        sched.advance(sched.schedule())
        first.token_ids.append(token)
    sched.remove(first)
    assert run(sched, [1, 2, 3, *range(7), 5, 5, 5]).num_taken == 8


def test_concurrent_prompts_compute_a_common_beginning_once() -> None:
    """Of several that begin alike one computes at a time; the others take its blocks as they come, and then go on beside it."""
    sched = scheduler(num_blocks=40, max_rows=6)
    common = list(range(100, 117))
    sequences = [Sequence([*common, idx, idx], len(common) + 2, 100) for idx in range(4)]
    for sequence in sequences:
        sched.add(sequence)
    num_rows = 0
    for _ in range(20):
        rows = sched.schedule()
        num_rows += sum(part.count for part in rows)
        sched.advance(rows)
        for part in rows:
            if part.sequence.num_pending == 0:
                sched.remove(part.sequence)
        sched.check_integrity()
    assert not sched.running
    assert sum(sequence.num_taken for sequence in sequences) == 16 * 3
    assert num_rows == 16 + 4 * 3


def test_another_goes_on_when_the_one_that_computes_is_cancelled() -> None:
    """A sequence that waited for blocks of one that has gone computes them itself, from where the other's ended."""
    sched = scheduler(max_rows=4)
    prompts = [Sequence([*range(9), idx], 10, 100) for idx in range(2)]
    for sequence in prompts:
        sched.add(sequence)
    sched.advance(sched.schedule())
    sched.remove(prompts[0])
    while prompts[1].num_pending:
        sched.advance(sched.schedule())
    assert prompts[1].num_taken == 4


def test_cached_blocks_count_as_free_and_go_least_recently_used_first() -> None:
    """A new request gets the memory of what was not used for longest, and of a chain the end goes before the beginning."""
    sched = scheduler(num_blocks=6)
    old, used, other = [1] * 9, [2] * 9, [3] * 9
    run(sched, old)  # two full blocks of its three are kept
    run(sched, used)
    run(sched, old)
    assert (sched.allocator.num_free, sched.allocator.num_cached) == (6, 4)
    run(sched, other)  # takes the two that are free, and the end of `used`
    assert sched.prefix.describe()["evicted_blocks"] == 1
    assert run(sched, [2] * 5).num_taken == 4
    assert run(sched, old).num_taken == 8
    assert run(sched, used).num_taken == 4


def test_what_is_held_is_not_evicted() -> None:
    """A request that needs the blocks of a running one waits, whoever else may find them."""
    sched = scheduler(num_blocks=4)
    holder = Sequence([1] * 8, 12, 100)
    sched.add(holder)
    sched.advance(sched.schedule())
    waiting = Sequence([2] * 8, 8, 100)
    sched.add(waiting)
    holder.token_ids.append(1)
    assert [part.sequence for part in sched.schedule()] == [holder]
    sharing = Sequence([1] * 6, 6, 100)
    sched.remove(waiting)
    sched.add(sharing)
    assert [part.sequence for part in sched.schedule()] == [holder, sharing]
    assert sharing.blocks[0] == holder.blocks[0]
    sched.check_integrity()
