"""The Python API over real processes: answers, streams, seeds, batches, statistics."""

import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from colibri_mp import Cluster, Completion
from colibri_mp.errors import ConfigError, RequestError
from colibri_mp.messages import Failed, Finished, Piece, Progress

MODEL = Path(__file__).parents[1] / "golden" / "tiny" / "olmoe"
PROMPTS = [[9, 8, 7], [100, 3], [42] * 11, [5]]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One small cluster for the module; two threads, a pool of half the experts, little KV."""
    with Cluster.launch(MODEL, num_workers=2, num_threads=2, ctx=192, slots=4, name="api") as running:
        yield running


def greedy(cluster: Cluster, prompt: list[int], max_tokens: int = 12) -> Completion:
    """A greedy answer of a fixed length."""
    return cluster.generate(prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def test_greedy_answer_is_the_argmax_of_the_logits(cluster: Cluster) -> None:
    """Generation and teacher-forced logits agree at every step."""
    answer = greedy(cluster, PROMPTS[0])
    logits = cluster.logits(PROMPTS[0] + answer.token_ids)
    assert answer.token_ids == logits[2:-1].argmax(axis=1).tolist()
    assert answer.finish_reason == "length"


def test_seed_decides_the_text(cluster: Cluster) -> None:
    """The same seed gives the same tokens again, another seed others; the seed used is reported."""
    options = {"max_tokens": 20, "temperature": 1.5, "ignore_eos": True}
    first = cluster.generate(PROMPTS[0], seed=5, **options)
    assert cluster.generate(PROMPTS[0], seed=5, **options).token_ids == first.token_ids
    assert cluster.generate(PROMPTS[0], seed=6, **options).token_ids != first.token_ids
    unseeded = cluster.generate(PROMPTS[0], **options)
    assert cluster.generate(PROMPTS[0], seed=unseeded.stats["seed"], **options).token_ids == unseeded.token_ids


def test_interleaved_streams_are_those_of_each_alone(cluster: Cluster) -> None:
    """Several answers at once, on one connection, taken in turns: each is the same as alone."""
    alone = [greedy(cluster, prompt).token_ids for prompt in PROMPTS]
    streams = [cluster.events(p, max_tokens=12, temperature=0.0, ignore_eos=True) for p in PROMPTS]
    together: list[list[int]] = [[] for _ in PROMPTS]
    for events in itertools.zip_longest(*streams):
        for idx, event in enumerate(events):
            if event is not None and not isinstance(event, Finished):
                together[idx] += event.token_ids
    assert together == alone


def test_many_requests_over_one_connection(cluster: Cluster) -> None:
    """Submitted requests answer in any order, each as it would alone and with one end; a cancelled one ends too."""
    alone = [greedy(cluster, prompt).token_ids for prompt in PROMPTS]
    options = {"temperature": 0.0, "ignore_eos": True}
    ids = [cluster.submit(prompt, max_tokens=12, **options) for prompt in PROMPTS]
    endless, refused = cluster.submit([1], max_tokens=150, **options), cluster.submit([1], top_p=7.0)
    tokens: dict[int, list[int]] = {request_id: [] for request_id in [*ids, endless, refused]}
    ends: dict[int, str] = {}
    cluster.cancel(endless)
    assert cluster.stats()["requests"]["active"] >= 0  # a question in between does not disturb them
    while (found := cluster.next_event()) is not None:
        request_id, event = found
        match event:
            case Piece(token_ids=token_ids):
                tokens[request_id] += token_ids
            case Finished(finish_reason=reason):
                ends[request_id] = reason
            case Failed(kind=kind, message=message):
                ends[request_id] = f"{kind}: {message}"
    assert [tokens[request_id] for request_id in ids] == alone
    assert [ends[request_id] for request_id in [*ids, endless]] == ["length"] * 4 + ["cancelled"]
    assert ends[refused].startswith("request: top_p")


def test_waiting_for_an_event_ends(cluster: Cluster) -> None:
    """After the time given, and at once when the other descriptor is readable."""
    assert cluster.next_event() is None
    assert cluster.next_event(timeout_s=0.01) is None
    read_fd, write_fd = os.pipe()
    os.write(write_fd, b"x")
    assert cluster.next_event(wake_fd=read_fd) is None
    os.close(read_fd)
    os.close(write_fd)


def test_logprobs_are_those_of_the_logits(cluster: Cluster) -> None:
    """Logprobs of prompt and answer, seen beside other requests, are the log-softmax of the teacher-forced logits."""
    prompt = [(7 * idx) % 250 for idx in range(100)]
    other = cluster.submit(PROMPTS[1], max_tokens=30, temperature=0.0, ignore_eos=True)
    options = {"temperature": 1.0, "seed": 3, "ignore_eos": True, "presence_penalty": 1.0, "logit_bias": {5: 3.0}}
    plain = cluster.generate(prompt, max_tokens=4, **options)
    answer = cluster.generate(prompt, max_tokens=4, logprobs=2, prompt_logprobs=1, **options)
    assert answer.token_ids == plain.token_ids
    tokens = prompt + answer.token_ids
    logits = cluster.logits(tokens).astype(np.float64)
    wanted = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    found = [*answer.prompt_logprobs, *answer.logprobs]
    assert found[0] is None
    assert [entry.token_id for entry in found[1:] if entry] == tokens[1:]
    np.testing.assert_allclose(
        [entry.logprob for entry in found[1:] if entry], wanted[np.arange(len(tokens) - 1), tokens[1:]], atol=1e-9
    )
    assert [entry.top[0][0] for entry in found[1:] if entry] == logits[:-1].argmax(axis=1).tolist()
    others = []
    while (event := cluster.next_event()) is not None:
        assert event[0] == other
        others += event[1].token_ids if isinstance(event[1], Piece) else []
    assert others == greedy(cluster, PROMPTS[1], max_tokens=30).token_ids


def test_progress_of_a_long_prompt(cluster: Cluster) -> None:
    """Progress is asked for and comes before the first token; the stream of text does not mind it."""
    prompt = [7] * 150
    events = list(cluster.events(prompt, max_tokens=1, progress=True))
    told = [event for event in events if isinstance(event, Progress)]
    assert events[: len(told)] == told
    assert all(0 < event.num_computed < event.num_prompt == 150 for event in told)
    assert list(cluster.stream(prompt, max_tokens=1, progress=True)) == []


def test_clients_in_threads(cluster: Cluster) -> None:
    """Clients of their own, each in a thread, get what they would get alone."""
    alone = [greedy(cluster, prompt).token_ids for prompt in PROMPTS]
    found: dict[int, list[int]] = {}

    def ask(idx: int) -> None:
        with Cluster.attach("api") as mine:
            found[idx] = greedy(mine, PROMPTS[idx]).token_ids

    threads = [threading.Thread(target=ask, args=(idx,)) for idx in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[idx] for idx in range(len(PROMPTS))] == alone


def test_leaving_a_stream_cancels_it(cluster: Cluster) -> None:
    """After an early exit nothing is computed any more and all KV blocks come back."""
    for _ in cluster.events(PROMPTS[0], max_tokens=150, temperature=0.0, ignore_eos=True):
        break
    greedy(cluster, PROMPTS[1], max_tokens=1)
    requests = cluster.stats()["requests"]
    assert requests["active"] == 0
    assert requests["kv_blocks_free"] == requests["kv_blocks"]


def test_more_sessions_than_kv_memory_wait_their_turn(cluster: Cluster) -> None:
    """What does not fit the KV memory now waits and is answered later, unchanged."""
    wanted = greedy(cluster, PROMPTS[0], max_tokens=100).token_ids
    streams = [cluster.events(PROMPTS[0], max_tokens=100, temperature=0.0, ignore_eos=True) for _ in range(4)]
    for stream in streams:
        next(stream)
    for stream in streams:
        tokens = [token for event in stream if not isinstance(event, Finished) for token in event.token_ids]
        assert tokens == wanted[1:]


def test_statistics_add_up(cluster: Cluster) -> None:
    """Every routed expert of the steps is a hit or a miss, and the budget holds what is used."""
    before = cluster.stats()["cache"]
    answer = greedy(cluster, PROMPTS[3], max_tokens=6)
    stats = cluster.stats()
    kinds = ("hits", "promoted", "misses")
    asked = sum(stats["cache"][name] - before[name] for name in kinds)
    assert asked == sum(answer.stats["cache"][name] for name in kinds) == 6 * 4 * 2  # steps, layers, top-k
    assert 0 < stats["memory"]["used_bytes"] <= stats["memory"]["budget_bytes"]
    assert [worker["layers"] for worker in stats["workers"]] == ["layers 0..1", "layers 2..3"]


@pytest.mark.parametrize(
    ("options", "kind", "what"),
    [
        ({"temprature": 1.0}, ConfigError, "unknown option 'temprature'"),
        ({"top_p": 7.0}, RequestError, "top_p"),
        ({"max_tokens": -1}, RequestError, "max_tokens"),
        ({"stop": "x"}, RequestError, "tokenizer"),
        ({"stop_ids": (999,)}, RequestError, "stop_ids: token id 999"),
        ({"max_tokens": "many"}, RequestError, "cannot be sent.*int"),
        ({"seed": 2**70}, RequestError, "cannot be sent"),
        ({"stop": "\ud800"}, RequestError, "cannot be sent"),
    ],
)
def test_bad_options(cluster: Cluster, options: dict[str, object], kind: type[Exception], what: str) -> None:
    """A bad option is an error that names it, and the cluster goes on."""
    with pytest.raises(kind, match=what):
        cluster.generate([1], **options)
    assert greedy(cluster, [1], max_tokens=1).finish_reason == "length"


@pytest.mark.parametrize("prompt", [[1, "a"], [{"role": "user", "content": "a"}, 1], [1.5]])
def test_bad_prompts(cluster: Cluster, prompt: list[object]) -> None:
    """A prompt that is none of the three kinds is refused before it is sent."""
    with pytest.raises(RequestError, match="role"):
        cluster.generate(prompt)


def test_logits_of_one_token(cluster: Cluster) -> None:
    """The smallest request."""
    logits = cluster.logits([7])
    assert logits.shape == (1, 256)
    assert logits.dtype == np.float32


def test_close_is_idempotent() -> None:
    """A closed cluster can be closed again, and its name is free."""
    first = Cluster.launch(MODEL, num_workers=1, num_threads=1, ctx=64, name="again")
    first.close()
    first.close()
    with Cluster.launch(MODEL, num_workers=1, num_threads=1, ctx=64, name="again") as second:
        assert greedy(second, [1], max_tokens=1).finish_reason == "length"
