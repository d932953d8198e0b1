"""Sessions share the steps: nobody waits for another's whole prompt, the queue is bounded, and what was dropped leaves no trace."""

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from colibri_mp import Cluster
from colibri_mp.errors import RequestError
from colibri_mp.messages import Failed, Finished, Piece, Progress

MODEL = Path(__file__).parents[1] / "golden" / "tiny" / "olmoe"
LONG = [(7 * i) % 250 + 1 for i in range(400)]
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One cluster for the module: steps of 16 rows at most, KV memory for two long requests, two may wait."""
    with Cluster.launch(
        MODEL, num_workers=2, num_threads=1, ctx=512, prefill_chunk=16, slots=4, queue=2, name="fair"
    ) as running:
        yield running


def test_a_short_request_does_not_wait_for_a_long_prompt(cluster: Cluster) -> None:
    """While 400 tokens are computed in 25 steps, a request of 3 tokens that comes later is answered, and both are as alone."""
    long = cluster.submit(LONG, max_tokens=4, progress=True, **GREEDY)
    short = cluster.submit(LONG[:3], max_tokens=4, **GREEDY)
    seen = []
    while (event := cluster.next_event()) is not None:
        seen.append(event)
    kinds = [(request, type(event)) for request, event in seen]
    assert kinds.index((short, Finished)) < kinds.index((long, Piece))
    assert kinds.count((long, Progress)) >= 25
    for request, prompt in ((long, LONG), (short, LONG[:3])):
        pieces = [event for owner, event in seen if owner == request and isinstance(event, Piece)]
        alone = cluster.generate(prompt, max_tokens=4, **GREEDY)
        assert [token for piece in pieces for token in piece.token_ids] == alone.token_ids


def test_the_queue_is_bounded(cluster: Cluster) -> None:
    """What does not fit waits in order; one more than may wait is refused as overloaded, and nobody else is hurt."""
    requests = [cluster.submit(LONG[:2], max_tokens=500, **GREEDY) for _ in range(5)]  # each takes all KV memory
    ends: dict[int, object] = {}
    first = cluster.next_event()
    assert first is not None
    ends[first[0]] = first[1]
    while len(ends) < 3 or not isinstance(ends[requests[4]], Failed):
        event = cluster.next_event()
        assert event is not None
        ends[event[0]] = event[1]
    waiting = cluster.stats()["requests"]
    assert (waiting["waiting"], waiting["queue"]) == (2, 2)
    assert "KV memory" in waiting["waiting_for"]
    refused = [ends[request] for request in requests[3:]]
    assert all(isinstance(end, Failed) and end.kind == "overloaded" and "--queue 2" in end.message for end in refused)
    for request in requests[:3]:
        cluster.cancel(request)
    while (event := cluster.next_event()) is not None:
        ends[event[0]] = event[1]
    for request in requests[:3]:
        end = ends[request]
        assert isinstance(end, Finished)
        assert (end.finish_reason, end.stats["queue_s"] > 0) == ("cancelled", True)
    assert cluster.stats()["requests"]["waiting_for"] == ""


def test_what_can_never_fit_is_refused_with_the_number(cluster: Cluster) -> None:
    """A prompt beyond the context is an error at once."""
    with pytest.raises(RequestError, match="513 tokens, the context holds 512"):
        cluster.generate([1] * 513)


def start_and_cancel(client: Cluster, first: int) -> None:
    """A long prompt that nobody wants any more when a part of it has been computed."""
    request = client.submit([first, *LONG[:300]], max_tokens=1, progress=True, **GREEDY)
    assert client.next_event() is not None
    client.cancel(request)
    while client.next_event() is not None:
        pass


def ask_shortly(client: Cluster, first: int) -> None:
    """A prompt short enough to be computed in the middle of a step."""
    client.generate([first, 3], max_tokens=1, **GREEDY)


@pytest.mark.parametrize(
    ("disturb", "counter", "enough"), [(start_and_cancel, "dropped_rows", 100), (ask_shortly, "joined_requests", 10)]
)
def test_what_happens_in_the_middle_of_steps_does_not_change_others(
    cluster: Cluster, disturb: Callable[[Cluster, int], None], counter: str, enough: int
) -> None:
    """While another client cancels long prompts or brings short ones without end, logits are to the bit what they are alone."""
    prompt = LONG[100:220]
    alone = cluster.logits(prompt)
    ended = threading.Event()

    def go_on() -> None:
        with Cluster.attach("fair") as other:
            for first in itertools.cycle(range(1, 250)):
                if ended.is_set():
                    return
                disturb(other, first)

    disturber = threading.Thread(target=go_on)
    disturber.start()
    try:
        for _ in range(300):
            np.testing.assert_array_equal(cluster.logits(prompt), alone)
            if cluster.stats()["progress"][counter] > enough:
                break
    finally:
        ended.set()
        disturber.join()
    stats = cluster.stats()
    assert stats["progress"][counter] > 0
    assert stats["requests"]["kv_blocks_free"] == stats["requests"]["kv_blocks"]
