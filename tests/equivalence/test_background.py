"""What a worker reads beside its steps: hints and wishes change what is in memory, never a bit of a result."""

import errno
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
from worker_fixture import LAYERS, NUM_EXPERTS, TOP_K, Model, experts_of, random_batch, run_step, running

from colibri_mp.messages import PoolEvent, PoolReport, Wish
from colibri_mp.shm.layout import SlotFlag, SlotState
from colibri_mp.workers import expert_files
from colibri_mp.workers.core import Worker

LAYER = LAYERS[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Experts on disk, shared by the tests of this file."""
    return Model(tmp_path_factory.mktemp("experts"))


def wait_for(worker: Worker, is_done: Callable[[], bool]) -> None:
    """Do what the idle loop does, until something has happened."""
    deadline = time.monotonic() + 20
    while not is_done():
        assert time.monotonic() < deadline, "nothing happened for 20 s"
        worker.settle()
        worker.read_on()
        time.sleep(0.001)


def staged(worker: Worker) -> int:
    """Reads ahead that have ended and were not asked for yet."""
    table = worker._pool._tables.slots
    return int(((table["flags"] & SlotFlag.STAGED != 0) & (table["state"] == SlotState.READY)).sum())


def report(worker: Worker) -> PoolReport:
    """What the worker would say now."""
    worker._reported_at = 0.0
    found = worker.report()
    assert found is not None
    return found


def resident(worker: Worker, layer: int = LAYER) -> list[int]:
    """Experts of a layer in memory, staged ones apart."""
    return [expert for expert, here in enumerate(worker._pool.residency(layer)) if here]


def test_hinted_experts_are_promoted(model: Model) -> None:
    """What was hinted and is asked for needs no read; what was not asked for stays apart and is dropped for newer hints."""
    with running(model.config(TOP_K, staging=4)) as worker:
        worker.hint(LAYER, [0, 1, 2, 3])
        wait_for(worker, lambda: staged(worker) == 4)
        _, counters = run_step(worker, LAYER, experts_of([0, 1, 5]))
        assert (counters.hits, counters.misses, counters.promoted) == (0, 1, 2)
        assert resident(worker) == [0, 1, 5]
        worker.hint(LAYER, [7, 8, 9, 10])
        wait_for(worker, lambda: not worker._reads)
        found = report(worker)
        assert (found.issued, found.promoted, found.late) == (8, 2, 0)
        assert found.dropped == 2
        assert (found.missed_dropped, found.missed_unpredicted) == (0, 1)
        assert found.wasted_bytes == 2 * worker._layers[LAYER].stored_bytes


def test_results_have_the_same_bits(model: Model) -> None:
    """Right, wrong and late hints, wishes and pins, in pools of the floor and larger."""
    batches = [random_batch(seed, num_tokens) for seed, num_tokens in enumerate((1, 1, 4, 1, 1, 9, 1, 1))]
    with running(model.config(NUM_EXPERTS)) as worker:
        expected = [run_step(worker, layer, batch)[0].tobytes() for batch in batches for layer in LAYERS]
    for num_slots in (TOP_K, 6):
        with running(model.config(num_slots, staging=5)) as worker:
            worker.keep([Wish(layer, expert, expert < 3) for expert in range(5) for layer in LAYERS], [])
            found = []
            for number, batch in enumerate(batches):
                for layer in LAYERS:
                    worker.hint(layer, [int(e) for e in batch[1][0]] if number % 2 else [0, 11])
                    found.append(run_step(worker, layer, batch)[0].tobytes())
                    worker.read_on()
            assert found == expected


def test_late_hints_are_waited_for_and_stale_ones_called_off(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes over the reads that it needs, with their rank; those that have not begun and are not needed never begin."""
    preadv = os.preadv
    monkeypatch.setattr(expert_files.os, "preadv", lambda *wanted: (time.sleep(0.1), preadv(*wanted))[1])
    with running(model.config(TOP_K, staging=8)) as worker:
        worker.hint(LAYER, [0, 1, 2, 3, 4, 5, 6, 7])
        _, counters = run_step(worker, LAYER, experts_of([0, 6, 7]))
        assert (counters.hits, counters.misses, counters.promoted) == (0, 0, 3)
        found = report(worker)
        assert found.late >= 2
        assert found.failed >= 1, "what had not begun was called off"
        wait_for(worker, lambda: not worker._reads)
        assert found.failed + staged(worker) == 5


@pytest.mark.parametrize("read_s", [0.0, 0.05])
def test_wishes_fill_free_slots_and_pin(model: Model, read_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pins first, then free slots, however slow the disk; nothing is evicted for a wish, nor is a pin evicted by a step."""
    preadv = os.preadv
    monkeypatch.setattr(expert_files.os, "preadv", lambda *wanted: (time.sleep(read_s), preadv(*wanted))[1])
    with running(model.config(6)) as worker:
        worker.keep([Wish(LAYER, expert, expert in (3, 4)) for expert in (3, 4, 5, 6, 7, 8, 9)], [])
        wait_for(worker, lambda: not worker._background.num_waiting)
        assert resident(worker) == [3, 4, 5, 6, 7, 8]
        events = report(worker).events
        assert events[:2] == [PoolEvent("load", LAYER, 3), PoolEvent("load", LAYER, 4)]
        assert {event.kind for event in events if event.value in (3, 4)} == {"load", "pin"}
        assert {event.kind for event in events if event.value > 4} == {"fill", "unpin"}
        for seed in range(10):
            run_step(worker, LAYER, random_batch(seed, 1))
        assert {3, 4} <= set(resident(worker))
        worker.keep([Wish(LAYER, 11, True)], [(LAYER, 3), (LAYER, 5)])
        wait_for(worker, lambda: not worker._background.num_waiting)
        found = report(worker)
        assert PoolEvent("unpin", LAYER, 3) in found.events
        assert PoolEvent("unpin", LAYER, 5) not in found.events, "it was no pin"
        assert worker._pool.pinned(LAYER) == [4, 11]


def test_a_step_takes_over_what_a_wish_reads(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that needs an expert that is just being read for a wish waits for that read."""
    preadv = os.preadv
    monkeypatch.setattr(expert_files.os, "preadv", lambda *wanted: (time.sleep(0.1), preadv(*wanted))[1])
    with running(model.config(6)) as worker:
        worker.keep([Wish(LAYER, 0, False), Wish(LAYER, 1, True)], [])
        _, counters = run_step(worker, LAYER, experts_of([0, 1, 2]))
        assert counters.misses == 3
        assert worker._streamer.counters().num_reads > 0
        wait_for(worker, lambda: not worker._background.num_waiting)
        assert (resident(worker), worker._pool.pinned(LAYER)) == ([0, 1, 2], [1])


def test_reads_ahead_that_fail_hurt_nobody(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of a hint or a wish is nobody's error; the step that needs the expert gets its own."""
    preadv = os.preadv

    def failing(*wanted: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with running(model.config(6, staging=4)) as worker:
        monkeypatch.setattr(expert_files.os, "preadv", failing)
        worker.hint(LAYER, [0, 1])
        worker.keep([Wish(LAYER, 2, True), Wish(LAYER, 3, False)], [])
        wait_for(worker, lambda: not worker._reads and not worker._background.num_waiting)
        monkeypatch.setattr(expert_files.os, "preadv", preadv)
        events = report(worker).events
        assert sorted(event.value for event in events if event.kind == "drop") == [2, 3]
        _, counters = run_step(worker, LAYER, experts_of([0, 1, 2]))
        assert (counters.hits, counters.misses, counters.promoted) == (0, 3, 0)


def test_pins_that_a_smaller_pool_gives_up_are_told(model: Model) -> None:
    """A resize below the pins drops them, in the trace too."""
    with running(model.config(NUM_EXPERTS)) as worker:
        worker.keep([Wish(layer, expert, True) for expert in range(8) for layer in LAYERS], [])
        wait_for(worker, lambda: not worker._background.num_waiting)
        report(worker)
        worker.resize(1)
        events = report(worker).events
        dropped = [event for event in events if event.kind == "drop"]
        assert len(dropped) == 2 * 8 - sum(len(worker._pool.pinned(layer)) for layer in LAYERS) > 0
        assert {(event.layer, event.value) for event in events if event.kind == "resize"} == {
            (layer, TOP_K) for layer in LAYERS
        }


def test_advice_is_for_the_page_cache(model: Model) -> None:
    """Hints of what is not in memory become advice to the system: nothing is staged, and the bits are the same."""
    advised: list[tuple[int, int]] = []
    batch = experts_of([0, 1, 2])
    with running(model.config(TOP_K, advises=True)) as worker:
        expected = run_step(worker, LAYER, batch)[0].tobytes()
        advise = worker._streamer.advise
        worker._streamer.advise = lambda layer, expert: (advised.append((layer, expert)), advise(layer, expert))[1]  # type: ignore[method-assign]
        worker.hint(LAYER, [2, 3, 7])
        assert advised == [(LAYER, 3), (LAYER, 7)]
        assert not worker._reads
        assert run_step(worker, LAYER, batch)[0].tobytes() == expected


def test_hints_of_other_layers_are_nothing(model: Model) -> None:
    """A worker is asked about its own layers only; experts that do not exist are an error of the caller."""
    with running(model.config(TOP_K, staging=2)) as worker:
        worker.hint(99, [0])
        assert not worker._reads
