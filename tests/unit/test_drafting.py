"""Guessing tokens: what is proposed, how far it is worth it, and that the engine's answers stay what they are."""

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_mp.drafting import Drafting
from colibri_mp.engine import Engine
from colibri_mp.kvcache import BlockAllocator
from colibri_mp.messages import Failed, Finished, Floats, Generate, Message, Piece, Sampling
from colibri_mp.prompt_lookup import PromptLookup, continuation
from colibri_mp.row_cost import RowCost
from colibri_mp.scheduler import Look, Rows, Scheduler, Sequence

VOCAB = 12
BLOCK = 4


class Free(RowCost):
    """Guesses cost nothing and no plain step is wanted: every guess that there is is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.share = 0.0

    def wants_plain_step(self, num_sequences: int) -> bool:
        """See the class."""
        return False

    def step_ended(self, num_sequences: int, num_guesses: int, seconds: float, num_accepted: int) -> None:
        """See the class."""


class Remembering:
    """A model whose logits depend on the last tokens that its cache holds for a row, as it wrote them: no other ones."""

    max_context = 64
    vocab_size = VOCAB
    max_logit_rows = 16
    can_be_joined = True
    fetch_wait_s = 0.0

    def __init__(self, num_blocks: int) -> None:
        self.cache = np.full((num_blocks, BLOCK), -1)
        self.num_steps = 0

    def forward(self, rows: list[Rows], look: Look) -> Floats:
        """Write each row's token at its position, then look back over three of them."""
        self.num_steps += 1
        logits = []
        for part in rows:
            found = []
            for position, token in enumerate(part.token_ids, part.start):
                blocks = part.sequence.blocks
                self.cache[blocks[position // BLOCK], position % BLOCK] = token
                seen = self.cache[blocks].reshape(-1)[max(0, position - 2) : position + 1]
                assert (seen >= 0).all(), "a row looks at a position that was not computed"
                found.append(np.random.default_rng([int(t) for t in seen]).normal(size=VOCAB).astype(np.float32) * 2)
            logits += found[len(found) - part.num_logits :]
        return np.array(logits, np.float32).reshape(-1, VOCAB)

    def forward_groups(self, *_: object) -> None:
        """Steps come one after the other here."""
        raise AssertionError("groups that were not asked for")

    def cache_counters(self) -> dict[str, float]:
        """Nothing is cached."""
        return {"hits": 0.0, "misses": 0.0, "promoted": 0.0}


def run(requests: list[Generate], most: int, max_guessing: int = 16) -> tuple[dict[int, list[Message]], Engine, int]:
    """The messages of each request, the engine, and the steps that it took; `most` 0 is plain decoding."""
    sent: defaultdict[int, list[Message]] = defaultdict(list)
    model = Remembering(64)

    def emit(client: bytes, message: Message) -> None:
        assert isinstance(message, Piece | Finished | Failed)
        sent[message.request_id].append(message)

    scheduler = Scheduler(BlockAllocator(64, BLOCK), 16, 16, "root", max_guessing)
    drafting = Drafting(most, PromptLookup(), Free()) if most else None
    engine = Engine(model, scheduler, None, {}, frozenset(), emit, None, drafting)
    for request in requests:
        engine.submit(b"a", request)
    while not engine.is_idle:
        engine.step()
        scheduler.check_integrity()
        assert model.num_steps < 1000
    return dict(sent), engine, model.num_steps


def ask(
    request_id: int, prompt: list[int], max_tokens: int = 30, seed: int = 0, temperature: float = 0.0, **more: Any
) -> Generate:
    """A request with a seed."""
    return Generate(request_id, prompt, max_tokens, Sampling(temperature=temperature, seed=seed), **more)


def pieces(messages: list[Message]) -> list[tuple[list[int], list[Any]]]:
    """Tokens and logprobs as they came."""
    return [(message.token_ids, message.logprobs) for message in messages if isinstance(message, Piece)]


PROMPTS = st.lists(st.integers(0, 3), min_size=1, max_size=20)


@settings(max_examples=25, deadline=None)
@given(
    prompts=st.lists(PROMPTS, min_size=1, max_size=4), most=st.integers(1, 6), max_guessing=st.integers(1, 12),
    temperature=st.sampled_from([0.0, 0.7]), seed=st.integers(0, 9),
)  # fmt: skip
def test_answers_are_those_of_plain_decoding(
    prompts: list[list[int]], most: int, max_guessing: int, temperature: float, seed: int
) -> None:
    """Greedy or sampled, alone or together, tokens, logprobs and ends are the same, whatever is guessed and rejected."""
    requests = [
        ask(idx, prompt, 24, seed + idx, temperature, logprobs=2, stop_ids=(11,)) for idx, prompt in enumerate(prompts)
    ]
    plain, _, _ = run(requests, 0)
    drafted, engine, _ = run(requests, most, max_guessing)
    for request in requests:
        assert pieces(drafted[request.request_id]) == pieces(plain[request.request_id])
        ends = [found[request.request_id][-1] for found in (plain, drafted)]
        assert [(end.finish_reason, end.stopped_by) for end in ends if isinstance(end, Finished)] != []
        assert ends[0].finish_reason == ends[1].finish_reason  # type: ignore[union-attr]
    allocator = engine.scheduler.allocator
    assert allocator.num_free == allocator.num_blocks


def test_repetition_takes_fewer_steps_and_is_reported() -> None:
    """A greedy answer that has fallen into a loop is computed several tokens a step; the counts are those of the steps."""
    request = ask(1, [1, 2, 3], 50)
    _, _, plain_steps = run([request], 0)
    sent, engine, steps = run([request], 4)
    assert steps < plain_steps
    end = sent[1][-1]
    assert isinstance(end, Finished)
    assert engine.drafting is not None
    said = engine.drafting.describe()
    assert end.stats["accepted_tokens"] == said["accepted_tokens"] == plain_steps - steps
    assert end.stats["drafted_tokens"] == said["proposed_tokens"] >= said["accepted_tokens"]
    assert said["accepted_per_step"] == said["accepted_tokens"] / said["steps"]


def test_later_requests_find_accepted_tokens_only() -> None:
    """What a drafted answer leaves in the prefix cache gives the next turn the same answer as without."""
    first = ask(1, [1, 2, 3], 30)
    sent, engine, _ = run([first], 4)
    conversation = [1, 2, 3, *(token for tokens, _ in pieces(sent[1]) for token in tokens)]
    engine.submit(b"a", ask(2, [*conversation, 5], 20))
    more: list[Message] = []
    engine._emit = lambda _client, message: more.append(message)
    while not engine.is_idle:
        engine.step()
    end = more[-1]
    assert isinstance(end, Finished)
    assert end.stats["cached_tokens"] == len(conversation) // BLOCK * BLOCK
    alone, _, _ = run([ask(2, [*conversation, 5], 20)], 0)
    assert pieces(more) == pieces(alone[2])


def test_request_says_how_much_is_guessed() -> None:
    """0 is plain decoding beside others that are guessed for; more than the launch allows is refused with the cure."""
    request = ask(1, [1, 2, 3], 40, draft=0)
    sent, _, _ = run([request, ask(2, [1, 2, 3], 40), ask(3, [1], draft=5)], 4)
    ends = {request_id: messages[-1] for request_id, messages in sent.items()}
    assert ends[1].stats["drafted_tokens"] == 0 < ends[2].stats["drafted_tokens"]  # type: ignore[union-attr]
    assert isinstance(ends[3], Failed)
    assert "draft must be from 0 to 4, not 5: launch with a larger --draft" in ends[3].message


@pytest.mark.parametrize(
    ("tokens", "most", "expected"),
    [
        ([7, 8, 9, 1, 7, 8], 2, [9, 1]),
        ([7, 8, 9, 5, 8, 2, 7, 8], 1, [9]),  # the longer match, not the later one
        ([1, 2, 6, 1, 2, 7, 1, 2], 3, [7, 1, 2]),  # of equal ones the later
        ([4, 5, 4, 5], 5, [4, 5, 4, 5, 4]),  # goes on with what it has copied
        ([3, 3, 3], 4, [3, 3, 3, 3]),
        ([1, 2, 3, 4], 4, []),
        ([1, 1], 4, []),
        ([5], 4, []),
    ],
)
def test_lookup_continues_the_longest_last_occurrence(tokens: list[int], most: int, expected: list[int]) -> None:
    """Two tokens at least must match; of the longest matches the last one counts."""
    assert continuation(np.array(tokens, np.int32), most) == expected


def test_sequence_stops_guessing_where_it_does_not_pay() -> None:
    """Rejected guesses lower the likelihood below what a row costs; then there are none, but for one now and then."""
    drafting = Drafting(4, PromptLookup())
    sequence = Sequence([1, 2, 1, 2], 500, 8, num_computed=3)
    drafting.begin(sequence, 4)
    drafted = []
    for _ in range(200):
        drafting.propose([sequence])
        drafted.append(len(sequence.draft))
        rows = [Rows(sequence, 3, 1 + len(sequence.draft), tuple(sequence.draft))]
        drafting.step_ended(rows, 1.0 + 0.6 * len(sequence.draft), 0)
        if sequence.draft:
            drafting.verified(sequence, len(sequence.draft), 0)
    assert drafted[:3] == [0, 0, 0]  # plain steps, to be measured
    assert max(drafted) >= 2
    assert sum(drafted[20:]) <= 5
    assert sum(drafted[60:]) >= 1
    assert drafting.describe()["saved_s"] < 0


def test_row_cost_is_what_the_steps_say() -> None:
    """With two sequences a guess costs its share of a step times two, since a step brings two tokens; plain steps come again."""
    cost = RowCost()
    for _ in range(3):
        assert cost.wants_plain_step(2)
        cost.step_ended(2, 0, 1.0, 0)
    for _ in range(40):
        cost.step_ended(2, 4, 1.4, 3)
    assert cost.wants_plain_step(2)
    assert cost.share == pytest.approx(0.2, rel=0.01)
    assert cost.saved_s == pytest.approx(40 * (2.5 - 1.4))
    assert cost.describe()["plain_step_s"] == {"2": pytest.approx(1.0)}


def test_guesses_leave_room_for_prompts_and_for_the_pool() -> None:
    """Guesses share what the limit leaves, each its part; a prompt keeps half of a step at least."""
    scheduler = Scheduler(BlockAllocator(64, BLOCK), 8, 8, None, 6)
    for start in (0, 1):
        sequence = Sequence([start] * 5, 40, 8)
        scheduler.add(sequence)
    scheduler.advance(scheduler.schedule())
    for sequence in scheduler.running:
        sequence.num_computed = 4
        sequence.draft = [1] * 8
    assert [(part.count, len(part.draft)) for part in scheduler.schedule()] == [(3, 2), (3, 2)]
    assert not any(sequence.draft for sequence in scheduler.running), "they were for one step"
    for sequence in scheduler.running:
        sequence.draft = [1] * 8
    scheduler.add(Sequence([9] * 30, 40, 8))
    assert [part.count for part in scheduler.schedule()] == [2, 2, 4]
