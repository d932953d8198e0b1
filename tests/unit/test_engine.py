"""The engine over a stand-in model: what requests get, whatever else is in the batch."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from colibri_mp.constraints import TokenMask
from colibri_mp.engine import Engine
from colibri_mp.errors import ColibriError, ReadError, RequestError, WorkerDied
from colibri_mp.kvcache import BlockAllocator
from colibri_mp.messages import (
    Constraint,
    Failed,
    Finished,
    Floats,
    Generate,
    Message,
    Piece,
    Progress,
    PromptLogprobs,
    Sampling,
    Score,
    Scores,
)
from colibri_mp.overlap import Overlap
from colibri_mp.sampling import Scores as Weights
from colibri_mp.scheduler import GroupEnded, GroupLook, Look, Rows, Scheduler

VOCAB = 50
EOS = 49
NUM_LAYERS = 4


class Counting:
    """A model whose next token is the last one plus 1; it remembers the rows of each step."""

    max_context = 40
    vocab_size = VOCAB
    max_logit_rows = 6
    can_be_joined = True
    fetch_wait_s = 0.0

    def __init__(self) -> None:
        self.steps: list[list[int]] = []
        self.num_layers_of_rows = 0
        self.error: Exception | None = None

    def forward(self, rows: list[Rows], look: Look) -> Floats:
        if self.error is not None:
            raise self.error
        self.steps.append([part.count for part in rows])
        for _ in range(NUM_LAYERS):
            if (left := look()) is not None:
                rows = left
            self.num_layers_of_rows += sum(part.count for part in rows)
        return self._logits(rows)

    def forward_groups(self, groups: list[list[Rows]], look: GroupLook, ended: GroupEnded) -> None:
        """A layer of one, a layer of the other."""
        under_way = {idx: (rows, 0) for idx, rows in enumerate(groups)}
        while under_way:
            for idx, (rows, layer) in list(under_way.items()):
                if layer == 0:
                    self.steps.append([part.count for part in rows])
                left = look(idx)
                kept = rows if left is None else left
                under_way[idx] = (kept, layer + 1)
                self.num_layers_of_rows += len(kept)
                if layer + 1 == NUM_LAYERS or not kept:
                    del under_way[idx]
                    error = self.error if idx == 1 and isinstance(self.error, ColibriError) else None
                    for following in ended(idx, error or self._logits(kept)):
                        under_way[idx] = (following, 0)

    def _logits(self, rows: list[Rows]) -> Floats:
        picked = [t for part in rows for t in part.token_ids[len(part.token_ids) - part.num_logits :]]
        logits = np.zeros((len(picked), VOCAB), np.float32)
        logits[np.arange(len(picked)), [(t + 1) % VOCAB for t in picked]] = 1.0
        return logits

    def cache_counters(self) -> dict[str, float]:
        return {"hits": 3.0 * len(self.steps), "misses": 0.5 * len(self.steps), "promoted": 0.5 * len(self.steps)}


class Bench:
    """An engine, its model and what it has emitted for each client."""

    def __init__(
        self, num_blocks: int = 40, max_rows: int = 8, max_waiting: int | None = None, overlap: Overlap | None = None
    ) -> None:
        self.model = Counting()
        self.sent: defaultdict[bytes, list[Message]] = defaultdict(list)
        scheduler = Scheduler(BlockAllocator(num_blocks, 4), max_rows)
        self.engine = Engine(
            self.model,
            scheduler,
            None,
            {},
            frozenset({EOS}),
            lambda client, m: self.sent[client].append(m),
            max_waiting,
            overlap=overlap,
        )

    def run(self) -> None:
        for _ in range(200):
            if self.engine.is_idle:
                break
            self.engine.step()
        assert self.engine.is_idle
        self.engine.scheduler.check_integrity()
        assert self.engine.scheduler.allocator.num_free == self.engine.scheduler.allocator.num_blocks

    def tokens(self, client: bytes = b"a") -> list[int]:
        return [t for m in self.sent[client] if isinstance(m, Piece) for t in m.token_ids]

    def last(self, client: bytes = b"a") -> Message:
        return self.sent[client][-1]


def ask(prompt: list[int], max_tokens: int | None = 5, request_id: int = 1, **more: Any) -> Generate:
    """A greedy request."""
    return Generate(request_id, prompt, max_tokens, Sampling(temperature=0.0), **more)


def finish_reason(message: Message) -> str:
    """Why a request ended."""
    assert isinstance(message, Finished)
    return message.finish_reason


def test_generates_until_max_tokens() -> None:
    """Tokens come one by one and the end says `length`."""
    bench = Bench()
    bench.engine.submit(b"a", ask([3, 4]))
    bench.run()
    assert bench.tokens() == [5, 6, 7, 8, 9]
    assert finish_reason(bench.last()) == "length"


def test_stops_at_end_of_text_and_leaves_it_out() -> None:
    """The end-of-text token ends the answer and is no part of it; `ignore_eos` goes on."""
    bench = Bench()
    bench.engine.submit(b"a", ask([46]))
    bench.engine.submit(b"b", ask([46], ignore_eos=True))
    bench.run()
    assert bench.tokens(b"a") == [47, 48]
    assert finish_reason(bench.last(b"a")) == "stop"
    assert bench.tokens(b"b") == [47, 48, 49, 0, 1]


def test_stops_at_tokens_of_the_request() -> None:
    """A token of `stop_ids` ends the answer, is no part of it, and is named; with `ignore_eos` too."""
    bench = Bench()
    bench.engine.submit(b"a", ask([3], stop_ids=(6, 9), ignore_eos=True))
    bench.run()
    assert bench.tokens() == [4, 5]
    end = bench.last()
    assert isinstance(end, Finished)
    assert (end.finish_reason, end.stopped_by) == ("stop", 6)


def test_progress_of_a_prompt() -> None:
    """Asked for, it comes after each step of the prompt but the last; not asked for, it does not."""
    bench = Bench(max_rows=4)
    bench.engine.submit(b"a", ask([1] * 10, max_tokens=1, progress=True))
    bench.run()
    told = [m for m in bench.sent[b"a"] if isinstance(m, Progress)]
    assert told == [Progress(1, 4, 10), Progress(1, 8, 10)]
    bench.engine.submit(b"b", ask([1] * 10, max_tokens=1))
    bench.run()
    assert len(bench.sent[b"b"]) == 2


def test_logprobs_of_the_answer() -> None:
    """One for each token, with as many alternatives as asked for; none if not asked for."""
    bench = Bench()
    bench.engine.submit(b"a", ask([3], max_tokens=3, logprobs=2))
    bench.engine.submit(b"b", ask([3], max_tokens=3))
    bench.run()
    found = [entry for m in bench.sent[b"a"] if isinstance(m, Piece) for entry in m.logprobs]
    assert [entry.token_id for entry in found] == bench.tokens() == [4, 5, 6]
    likely = 1.0 - np.log(np.e + VOCAB - 1)
    for entry in found:
        assert entry.logprob == pytest.approx(likely)
        assert [idx for idx, _ in entry.top] == [entry.token_id, 0]
    assert not any(m.logprobs for m in bench.sent[b"b"] if isinstance(m, Piece))


def test_logprobs_of_the_prompt() -> None:
    """They come in parts within the bound of logits, in order, before the first token, and cover the prompt."""
    bench = Bench()
    prompt = [3, 4, 9, 10, 11, 12, 13, 30, 31]
    bench.engine.submit(b"a", ask(prompt, max_tokens=2, prompt_logprobs=0))
    bench.engine.submit(b"b", ask([20]))
    bench.run()
    parts = [m for m in bench.sent[b"a"] if isinstance(m, PromptLogprobs)]
    assert [m.start for m in parts] == list(itertools.accumulate((len(m.entries) for m in parts[:-1]), initial=0))
    assert bench.sent[b"a"][: len(parts)] == parts
    entries = [entry for m in parts for entry in m.entries]
    assert entries[0] is None
    assert [entry.token_id for entry in entries[1:] if entry] == prompt[1:]
    likely, unlikely = 1.0 - np.log(np.e + VOCAB - 1), -np.log(np.e + VOCAB - 1)
    wanted = [likely if after == before + 1 else unlikely for before, after in itertools.pairwise(prompt)]
    assert [entry.logprob for entry in entries[1:] if entry] == pytest.approx(wanted)
    assert bench.tokens(b"a") == [32, 33]
    assert bench.tokens(b"b") == [21, 22, 23, 24, 25]


def test_logprobs_of_a_prompt_alone() -> None:
    """With `max_tokens` 0 nothing is generated, also where the prompt fills the context."""
    bench = Bench()
    bench.engine.submit(b"a", ask([3] * 40, max_tokens=0, prompt_logprobs=1))
    bench.run()
    assert bench.tokens() == []
    assert finish_reason(bench.last()) == "length"
    assert sum(len(m.entries) for m in bench.sent[b"a"] if isinstance(m, PromptLogprobs)) == 40


class OddMask(TokenMask):
    """Stands in for a constraint: odd tokens only, ended by `last` or with an error at `bad`."""

    def __init__(self, last: int, bad: int = -1) -> None:
        self.eos_ids = frozenset({33})
        self._last, self._bad, self._is_finished = last, bad, False

    @property
    def is_finished(self) -> bool:
        return self._is_finished

    def apply(self, scores: Weights) -> None:
        scores[::2] = -np.inf

    def add(self, token: int) -> None:
        if token == self._bad:
            raise RequestError("too much")
        self._is_finished = token == self._last


def test_constrained_answers() -> None:
    """A mask rules what is drawn, ends the answer, has its own end tokens, and its error fails its request only."""
    bench = Bench()
    asked = {"max_tokens": 9, "constraint": Constraint("regex", "odd")}
    bench.engine.submit(b"a", ask([3], **asked), OddMask(last=1))
    bench.engine.submit(b"b", ask([32], ignore_eos=True, **asked), OddMask(last=1))
    bench.engine.submit(b"c", ask([4], **asked), OddMask(last=1, bad=5))
    bench.engine.submit(b"d", ask([20]))
    bench.run()
    assert bench.tokens(b"a") == [1]
    assert bench.tokens(b"b") == []
    assert finish_reason(bench.last(b"a")) == finish_reason(bench.last(b"b")) == "stop"
    failed = bench.last(b"c")
    assert isinstance(failed, Failed)
    assert failed.message == "too much"
    assert bench.tokens(b"d") == [21, 22, 23, 24, 25]


def test_statistics_cover_the_request() -> None:
    """Counts, and the cache's counters over the time of the request."""
    bench = Bench()
    bench.engine.submit(b"a", ask([1, 2, 3], max_tokens=2))
    bench.run()
    end = bench.last()
    assert isinstance(end, Finished)
    assert (end.stats["prompt_tokens"], end.stats["completion_tokens"]) == (3, 2)
    assert end.stats["cache"] == {"hits": 6.0, "misses": 1.0, "promoted": 1.0, "hit_rate": 0.75}
    assert end.stats["ttft_s"] > 0


def test_sessions_do_not_mix() -> None:
    """Several requests of two clients share steps, and each gets its own tokens."""
    bench = Bench()
    for client, start in ((b"a", 1), (b"b", 11), (b"c", 21)):
        bench.engine.submit(client, ask([start]))
    bench.run()
    assert [bench.tokens(client)[0] for client in (b"a", b"b", b"c")] == [2, 12, 22]
    assert max(map(len, bench.model.steps)) == 3


def test_max_tokens_is_clamped_to_the_context() -> None:
    """Without a limit, or with one beyond the context, an answer ends where the context does."""
    bench = Bench()
    bench.engine.submit(b"a", ask([0] * 37, max_tokens=1000))
    bench.engine.submit(b"b", ask([0] * 37, max_tokens=None))
    bench.run()
    assert len(bench.tokens(b"a")) == len(bench.tokens(b"b")) == 3


@pytest.mark.parametrize(
    ("request_", "what"),
    [
        (ask([]), "empty"),
        (ask([VOCAB]), "outside the vocabulary 0..49"),
        (ask([1] * 41), "41 tokens, the context holds 40"),
        (ask([1] * 40), "no room"),
        (ask([1], max_tokens=0), "max_tokens"),
        (ask([1], max_tokens=-1, prompt_logprobs=0), "max_tokens must be at least 0"),
        (ask([1] * 40, max_tokens=1, prompt_logprobs=0), "no room"),
        (ask([1], stop=("x",)), "tokenizer"),
        (ask([1], logprobs=21), "logprobs must be in 0..20"),
        (ask([1], prompt_logprobs=-1), "prompt_logprobs must be in 0..20"),
        (Generate(1, [1], 5, Sampling(logit_bias={-1: 1.0})), "logit_bias: token id -1 is outside"),
        (ask([1], stop_ids=(3, VOCAB)), "stop_ids: token id 50 is outside the vocabulary"),
        (Generate(1, "text", 5, Sampling()), "--prompt-ids"),
        (Generate(1, [1], 5, Sampling(top_p=2.0)), "top_p"),
        (Score(1, []), "no prompt"),
        (Score(1, [[1], []]), "empty"),
        (Score(1, [[1]], chunk=0), "chunk"),
    ],
)
def test_bad_requests_are_answered_and_forgotten(request_: Generate | Score, what: str) -> None:
    """A bad request gets one `Failed` of kind request; nothing of it stays."""
    bench = Bench()
    bench.engine.submit(b"a", request_)
    assert bench.engine.is_idle
    answer = bench.last()
    assert isinstance(answer, Failed)
    assert answer.kind == "request"
    assert what in answer.message


def test_request_id_in_use_is_refused() -> None:
    """A second request of the same id is refused; the first goes on."""
    bench = Bench()
    bench.engine.submit(b"a", ask([1]))
    bench.engine.submit(b"a", ask([2]))
    refusal = bench.last()
    assert isinstance(refusal, Failed)
    bench.run()
    assert bench.tokens() == [2, 3, 4, 5, 6]


def test_scores_are_complete_and_in_order() -> None:
    """Each prompt's logits come once, a row a position, in order, as chunks that respect the limits are computed."""
    bench = Bench()
    prompts = [[7, 8, 9, 10, 11], [30]]
    bench.engine.submit(b"a", Score(1, prompts, chunk=2))
    bench.run()
    parts = [m for m in bench.sent[b"a"] if isinstance(m, Scores)]
    found = {idx: np.concatenate([m.logits for m in parts if m.prompt_idx == idx]) for idx in range(len(prompts))}
    for idx, prompt in enumerate(prompts):
        np.testing.assert_array_equal(np.argmax(found[idx], axis=1), np.array(prompt) + 1)
    assert max(count for step in bench.model.steps for count in step) == 2
    assert max(len(m.logits) for m in parts) == 2


def test_requests_wait_while_none_is_admitted() -> None:
    """With admission closed what runs goes on, a new request waits and costs no steps, and is served afterwards."""
    bench = Bench()
    bench.engine.submit(b"a", ask([1]))
    bench.engine.step()
    bench.engine.scheduler.admits = False
    bench.engine.submit(b"b", ask([20]))
    while bench.engine.can_step:
        bench.engine.step()
    assert (len(bench.tokens(b"a")), bench.tokens(b"b")) == (5, [])
    assert not bench.engine.is_idle
    bench.engine.scheduler.admits = True
    bench.run()
    assert bench.tokens(b"b") == [21, 22, 23, 24, 25]


def test_cancel_frees_everything() -> None:
    """A cancelled request ends with `cancelled`, its blocks come back, the others go on."""
    bench = Bench()
    bench.engine.submit(b"a", ask([1], max_tokens=30))
    bench.engine.submit(b"b", ask([1]))
    bench.engine.step()
    bench.engine.cancel(b"a", 1)
    bench.engine.cancel(b"a", 1)
    assert finish_reason(bench.last(b"a")) == "cancelled"
    bench.run()
    assert len(bench.tokens(b"b")) == 5


def test_a_client_that_has_gone_is_dropped() -> None:
    """Nothing of it is computed any more."""
    bench = Bench()
    bench.engine.submit(b"a", ask([1], max_tokens=30))
    bench.engine.step()
    bench.engine.forget_client(b"a")
    assert bench.engine.is_idle


def test_a_failed_step_fails_its_requests_only() -> None:
    """An error of a step is the answer to the requests in it; a waiting one is served afterwards."""
    bench = Bench(num_blocks=3)
    bench.engine.submit(b"a", ask([1], max_tokens=8))
    bench.engine.submit(b"b", ask([20], max_tokens=8))
    bench.model.error = ReadError("disk on fire")
    bench.engine.step()
    answer = bench.last(b"a")
    assert isinstance(answer, Failed)
    assert (answer.kind, answer.message) == ("read", "disk on fire")
    bench.model.error = None
    bench.run()
    assert bench.tokens(b"b")[0] == 21


def test_a_dead_worker_ends_the_engine() -> None:
    """A worker's death is raised out of the step, for the service to end the cluster with."""
    bench = Bench()
    bench.engine.submit(b"a", ask([1]))
    bench.model.error = WorkerDied("worker 0")
    with pytest.raises(WorkerDied):
        bench.engine.step()
    bench.engine.fail_all(WorkerDied("worker 0"))
    answer = bench.last()
    assert isinstance(answer, Failed)
    assert answer.kind == "worker_died"


class At:
    """A `listen` that acts once, at its n-th call."""

    def __init__(self, call: int, action: Callable[[], None]) -> None:
        self._left, self._action = call, action

    def __call__(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._action()


@pytest.mark.parametrize("how", ["cancel", "vanish"])
def test_a_request_is_dropped_between_two_layers(how: str) -> None:
    """Rows that nobody wants any more are not computed further, blocks come back at once, and the others get their tokens."""
    bench = Bench()
    bench.engine.submit(b"a", ask([1, 2, 3, 4]))
    bench.engine.submit(b"b", ask([20, 21]))
    engine = bench.engine
    gone = At(3, lambda: engine.cancel(b"a", 1) if how == "cancel" else engine.forget_client(b"a"))
    engine.step(gone)
    assert bench.model.num_layers_of_rows == 2 * 6 + 2 * 2
    assert engine.scheduler.allocator.num_free == 40 - 2
    assert [type(message) for message in bench.sent[b"a"]] == ([Finished] if how == "cancel" else [])
    bench.run()
    assert bench.tokens(b"b") == [22, 23, 24, 25, 26]


def test_a_step_that_nobody_wants_is_abandoned() -> None:
    """With the last request gone between two layers there is nothing left of the step, and the next request is served."""
    bench = Bench()
    bench.engine.submit(b"a", Score(1, [[1, 2], [3]]))
    bench.engine.step(At(2, lambda: bench.engine.cancel(b"a", 1)))
    assert (bench.model.num_layers_of_rows, bench.engine.num_tokens) == (3, 0)
    assert bench.engine.is_idle
    bench.engine.submit(b"b", ask([20]))
    bench.run()
    assert len(bench.tokens(b"b")) == 5


def test_a_request_that_comes_between_two_layers_is_in_the_next_step() -> None:
    """It does not disturb the step under way, not even with the id of a request that ends there."""
    bench = Bench()
    bench.engine.submit(b"a", ask([1, 2]))

    def replace() -> None:
        bench.engine.cancel(b"a", 1)
        bench.engine.submit(b"a", ask([30, 31, 32]))

    bench.engine.step(At(2, replace))
    bench.run()
    assert bench.model.steps[:2] == [[2], [3]]
    assert bench.tokens() == [33, 34, 35, 36, 37]


def test_a_short_request_is_computed_in_the_middle_of_a_long_step() -> None:
    """It has its first token before the long step ends, once a step; whoever comes later is in the next one."""
    bench = Bench(num_blocks=80, max_rows=16)
    engine = bench.engine
    engine.submit(b"a", ask(list(range(1, 17))))
    found = []
    moments: Iterator[Callable[[], None]] = iter(
        [
            lambda: engine.submit(b"b", ask([30, 31], max_tokens=2)),
            lambda: engine.submit(b"c", ask([40])),
            lambda: found.append((bench.tokens(b"b"), bench.tokens(b"c"))),
            lambda: engine.cancel(b"b", 1),
        ]
    )

    def listen() -> None:
        next(moments)()

    engine.step(listen)
    assert found == [([32], [])]
    assert bench.model.steps == [[16], [2]]
    bench.run()
    assert (bench.tokens(b"a"), bench.tokens(b"b")) == ([17, 18, 19, 20, 21], [32])
    assert bench.tokens(b"c") == [41, 42, 43, 44, 45]


@pytest.mark.parametrize("error", [ReadError("disk on fire"), WorkerDied("worker 0")])
def test_an_error_in_the_middle_of_a_step(error: Exception) -> None:
    """What fails for a newcomer is its own affair, but for the death of a worker."""
    bench = Bench(num_blocks=80, max_rows=16)
    bench.engine.submit(b"a", ask(list(range(1, 17))))

    def come() -> None:
        bench.engine.submit(b"b", ask([30]))
        bench.model.error = error

    if isinstance(error, WorkerDied):
        with pytest.raises(WorkerDied):
            bench.engine.step(At(1, come))
        return
    bench.engine.step(At(1, come))
    bench.model.error = None
    assert isinstance(bench.last(b"b"), Failed)
    bench.run()
    assert len(bench.tokens(b"a")) == 5


def test_a_full_queue_refuses_with_the_numbers() -> None:
    """Beyond the limit a request fails as overloaded, and says what is in the way; those that wait are served."""
    bench = Bench(num_blocks=4, max_waiting=1)
    bench.engine.submit(b"a", ask([1], max_tokens=12))
    bench.engine.submit(b"b", ask([11], max_tokens=12))  # the first fits: only this one waits
    bench.engine.submit(b"c", ask([21], max_tokens=12))
    refusal = bench.last(b"c")
    assert isinstance(refusal, Failed)
    assert refusal.kind == "overloaded"
    assert "--queue 1 allows" in refusal.message
    assert "0 of 4 blocks of 4 tokens are free" in refusal.message
    assert (bench.engine.num_waiting, bench.engine.num_refused) == (1, 1)
    bench.run()
    assert (len(bench.tokens(b"a")), len(bench.tokens(b"b")), bench.engine.waits_for) == (12, 12, "")


def test_waiting_for_memory_is_said() -> None:
    """While admission is closed the reason says so; the time in the queue is part of the statistics."""
    bench = Bench()
    bench.engine.scheduler.admits = False
    bench.engine.submit(b"a", ask([1]))
    assert "memory, which is short" in bench.engine.waits_for
    bench.engine.scheduler.admits = True
    bench.run()
    end = bench.last()
    assert isinstance(end, Finished)
    assert 0 < end.stats["queue_s"] <= end.stats["ttft_s"]
    assert bench.engine.num_waiting == 0


def test_cancel_while_waiting() -> None:
    """A request that is cancelled in the queue leaves it."""
    bench = Bench(num_blocks=4)
    bench.engine.submit(b"a", ask([1], max_tokens=12))
    bench.engine.submit(b"b", ask([11], max_tokens=12))
    bench.engine.step()
    assert bench.engine.num_waiting == 1
    bench.engine.cancel(b"b", 1)
    assert (bench.engine.num_waiting, finish_reason(bench.last(b"b"))) == (0, "cancelled")
    bench.run()


# -- two groups --------------------------------------------------------------------------------------------------------


def grouped_bench(num_sessions: int, max_tokens: int = 12) -> Bench:
    """Sessions with a token each, of which two groups are made."""
    bench = Bench(num_blocks=80, overlap=Overlap("on"))
    for idx in range(num_sessions):
        bench.engine.submit(b"%d" % idx, ask([idx], max_tokens))
    return bench


@pytest.mark.parametrize("num_sessions", [1, 2, 5])
def test_two_groups_give_what_one_gives(num_sessions: int) -> None:
    """Every session gets its tokens; steps are of halves; a session alone is in no group."""
    bench = grouped_bench(num_sessions)
    bench.run()
    for idx in range(num_sessions):
        assert bench.tokens(b"%d" % idx) == [idx + 1 + n for n in range(12)]
    half = num_sessions // 2
    assert bench.engine.overlap.num_steps == (24 if half else 0)
    assert sorted(map(len, bench.model.steps[:2])) == ([half, num_sessions - half] if half else [1, 1])
    assert bench.engine.num_tokens == sum(map(len, bench.model.steps))


def test_sessions_of_two_groups_can_leave_at_any_time() -> None:
    """Cancelled between two layers of either group: no row of it is computed further, and nobody else notices."""
    bench = grouped_bench(4)
    num_looks = itertools.count()
    bench.engine.step(lambda: bench.engine.cancel(b"2", 1) if next(num_looks) == 13 else None)
    bench.run()
    assert finish_reason(bench.last(b"2")) == "cancelled"
    assert 0 < len(bench.tokens(b"2")) < 12
    for idx in (0, 1, 3):
        assert bench.tokens(b"%d" % idx) == [idx + 1 + n for n in range(12)]


def test_an_error_of_one_group_is_not_the_others() -> None:
    """The second group's step fails: its requests get the error, the first group's their answers."""
    bench = grouped_bench(4)
    bench.model.error = ReadError("disk on fire")
    bench.engine.step()
    bench.model.error = None
    bench.run()
    for idx in (1, 3):
        assert bench.last(b"%d" % idx) == Failed(1, "read", "disk on fire")
    for idx in (0, 2):
        assert bench.tokens(b"%d" % idx) == [idx + 1 + n for n in range(12)]


def test_a_request_that_comes_as_another_ends() -> None:
    """As many requests as before, but not the same: the one that ended is in no further step."""
    bench = Bench(num_blocks=80, overlap=Overlap("on"))
    for idx in range(4):
        bench.engine.submit(b"%d" % idx, ask([idx], max_tokens=5 if idx else 1))
    submitted = []

    def listen() -> None:
        if not submitted:
            submitted.append(bench.engine.submit(b"new", ask([20])))

    bench.engine.step(listen)
    assert bench.model.steps == [[1, 1], [1, 1]]
    bench.run()
    assert [bench.tokens(client) for client in (b"0", b"2", b"new")] == [[1], [3, 4, 5, 6, 7], [21, 22, 23, 24, 25]]


def test_a_request_ends_the_groups() -> None:
    """One that comes meanwhile is scheduled as soon as the steps under way have ended."""
    bench = grouped_bench(2, max_tokens=30)
    submitted = []

    def listen() -> None:
        if not submitted:
            submitted.append(bench.engine.submit(b"new", ask([20])))

    bench.engine.step(listen)
    assert bench.model.steps == [[1], [1]]
    bench.engine.step()
    assert sorted(map(len, bench.model.steps[2:4])) == [1, 2]
    bench.run()
    assert bench.tokens(b"new") == [21, 22, 23, 24, 25]


def test_groups_are_tried_only_where_steps_wait_for_reads() -> None:
    """Without waits never; with waits some steps are tried, and the quicker way is kept."""
    overlap = Overlap("auto")
    for _ in range(100):
        overlap.note(1.0, 0.01, 4)
        assert not overlap.is_on
    while not overlap.is_on:
        overlap.note(1.0, 0.5, 4)
    while overlap.describe()["gain"] is None:
        overlap.note(*((0.8, 0.0) if overlap.is_on else (1.0, 0.5)), 4)
    assert (overlap.is_on, overlap.describe()["gain"]) == (True, pytest.approx(1.25))
