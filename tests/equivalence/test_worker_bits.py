"""A worker's result has the same bits whatever the pool, the disk and the threads do, and it is the right result."""

import errno
import itertools
import os
import shutil
import threading
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from expert_checkpoint import checksums_of
from worker_fixture import LAYERS, MAX_TOKENS, NUM_EXPERTS, TOP_K, Floats, Model, random_batch, run_step, running

from colibri_mp.config import IoMode
from colibri_mp.errors import PoolError, ProtocolError
from colibri_mp.messages import Route, Routed, from_frames, to_frames
from colibri_mp.shm.layout import pool_bytes
from colibri_mp.shm.policy import Eviction
from colibri_mp.shm.segment import Segment
from colibri_mp.workers import core, expert_files
from colibri_mp.workers.copies import Copy

BATCHES = [random_batch(seed, num_tokens) for seed, num_tokens in enumerate((1, 1, 7, 32, 1, 2, 1))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Experts on disk, shared by the tests of this file (nobody changes them)."""
    return Model(tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def expected(model: Model) -> list[bytes]:
    """The bits of all batches with everything resident."""
    return run_all(model, NUM_EXPERTS)


def run_all(model: Model, num_slots: int, **changes: Any) -> list[bytes]:
    """Results of all batches through both layers, one worker."""
    with running(model.config(num_slots, **changes)) as worker:
        return [run_step(worker, layer, batch)[0].tobytes() for batch in BATCHES for layer in LAYERS]


@pytest.mark.parametrize("num_slots", [TOP_K, NUM_EXPERTS // 2, NUM_EXPERTS])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_pool_size_and_threads_change_no_bit(
    model: Model, expected: list[bytes], num_slots: int, num_threads: int
) -> None:
    """The smallest legal pool (rounds in prefill), half, and all; one and two compute threads."""
    assert run_all(model, num_slots, num_threads=num_threads) == expected


@pytest.mark.parametrize(("mode", "io_threads"), [("buffered", 1), ("direct", 1), ("direct", 8), ("drop", 3)])
def test_reading_changes_no_bit(model: Model, expected: list[bytes], mode: IoMode, io_threads: int) -> None:
    """One or eight reads in flight; through the page cache or past it."""
    assert run_all(model, 4, copies=(Copy(model.files, mode),), io_threads=io_threads) == expected


@pytest.mark.parametrize("verify", ["first", "off", "always"])
def test_checksums_change_no_bit(model: Model, expected: list[bytes], verify: str) -> None:
    """Checked or not, compared at each use or not."""
    layers = tuple(replace(layer, checksums=checksums_of(model.experts[layer.layer])) for layer in model.expert_layers)
    assert run_all(model, 4, expert_layers=layers, verify=verify) == expected


def test_second_copy_changes_no_bit(
    model: Model, expected: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads split between two copies, one of which fails now and then."""
    files = tuple(Path(shutil.copy(file, tmp_path)) for file in model.files)
    bad, preadv = {file.stat().st_ino for file in files[:1]}, os.preadv

    def flaky(fd: int, buffers: list[memoryview], offset: int) -> int:
        if os.fstat(fd).st_ino in bad and offset > 60_000:
            raise OSError(errno.ENXIO, "No such device")
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(expert_files.os, "preadv", flaky)
    copies = (Copy(model.files, "direct", weight=2.0), Copy(files, "buffered"))
    assert run_all(model, 4, copies=copies) == expected


def test_order_of_arrival_changes_no_bit(model: Model, expected: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each second read is held back until the one after it is done, so that misses land out of order and one by one."""
    counter, previous = itertools.count(), threading.Event()
    pack = core.pack

    def reordered(*args: Any) -> None:
        if next(counter) % 2:
            previous.set()
        else:
            previous.wait(0.002)
            previous.clear()
        pack(*args)

    monkeypatch.setattr(core, "pack", reordered)
    assert run_all(model, 5) == expected


def test_batching_changes_no_bit(model: Model) -> None:
    """Tokens one at a time, or all at once, or with others in the batch."""
    x, ids, weights = random_batch(11, MAX_TOKENS)
    for layer in LAYERS:
        with running(model.config(5)) as worker:
            whole, _ = run_step(worker, layer, (x, ids, weights))
            singles = [run_step(worker, layer, (x[t : t + 1], ids[t : t + 1], weights[t : t + 1]))[0] for t in range(8)]
            part, _ = run_step(worker, layer, (x[3:10], ids[3:10], weights[3:10]))
        assert whole[:8].tobytes() == np.concatenate(singles).tobytes()
        assert whole[3:10].tobytes() == part.tobytes()


@pytest.mark.parametrize("num_slots", [TOP_K, NUM_EXPERTS])
def test_result_is_the_reference(model: Model, num_slots: int) -> None:
    """Against plain numpy in float64, ids that are not routed (-1) included."""
    with running(model.config(num_slots)) as worker:
        for layer, skip in itertools.product(LAYERS, (0.0, 0.4, 1.0)):
            batch = random_batch(21, 9, skip)
            result, _ = run_step(worker, layer, batch)
            reference: Floats = model.reference(layer, *batch)
            np.testing.assert_allclose(result, reference, rtol=0, atol=2e-5 * max(1.0, float(np.abs(reference).max())))


def test_counters_are_those_of_a_plain_lru(model: Model) -> None:
    """Hits, misses and evictions of single tokens equal a simulation with an ordered dict; reads are counted in bytes."""
    cache: OrderedDict[int, None] = OrderedDict()
    with running(model.config(5, eviction=Eviction("lru"))) as worker:
        for seed in range(40):
            batch = random_batch(seed, 1)
            union = sorted(set(batch[1].ravel().tolist()))
            hits = sum(expert in cache for expert in union)
            room = 5 - len(cache)
            for expert in union:
                cache.pop(expert, None)
            while len(cache) + len(union) > 5:
                cache.popitem(last=False)
            cache.update(dict.fromkeys(union))
            _, counters = run_step(worker, 1, batch)
            assert (counters.hits, counters.misses) == (hits, TOP_K - hits)
            assert counters.evictions == max(0, TOP_K - hits - room)
            assert counters.bytes_read >= counters.misses * model.experts[1].expert_layer().stored_bytes
            assert (counters.disk_s > 0) == (counters.misses > 0)
            assert counters.compute_s > 0


def test_resident_step_reads_nothing(model: Model) -> None:
    """The second time everything is a hit and the disk is not touched."""
    batch = random_batch(5, 4)
    with running(model.config(NUM_EXPERTS)) as worker:
        first, cold = run_step(worker, 4, batch)
        second, warm = run_step(worker, 4, batch)
    assert (cold.hits, warm.misses, warm.bytes_read, warm.disk_s, warm.wait_s) == (0, 0, 0, 0.0, 0.0)
    assert warm.hits == cold.misses == len(np.unique(batch[1]))
    assert first.tobytes() == second.tobytes()


def test_new_worker_finds_a_warm_pool(model: Model) -> None:
    """A worker that is closed and opened again on its segment has no misses and gives the same bits."""
    config = model.config(NUM_EXPERTS)
    batch = random_batch(6, 3)
    with Segment.create(config.segment_name, pool_bytes(config.slots)):
        first = core.Worker(config)
        expected, cold = run_step(first, 1, batch)
        first.close()
        again = core.Worker(config)
        result, warm = run_step(again, 1, batch)
        again.close()
    assert (warm.misses, warm.hits) == (0, cold.misses)
    assert result.tobytes() == expected.tobytes()
    assert any(f"found {cold.misses} experts in its pool" in note for note in again.notes)


def test_pool_below_one_token_is_refused(model: Model) -> None:
    """A pool that cannot hold one token's experts is refused at start with the number."""
    config = model.config(TOP_K - 1)
    refusal = r"layer 1 needs 3 slots of \d+ bytes for one token, the pool has 2; raise --ram"
    with Segment.create(config.segment_name, pool_bytes(config.slots)), pytest.raises(PoolError, match=refusal):
        core.Worker(config)


def test_arrays_that_do_not_fit_are_refused(model: Model) -> None:
    """Unknown layer, wrong width, too many tokens, too large an id: a ProtocolError, and the worker goes on."""
    x, ids, weights = random_batch(0, 2)
    many = random_batch(0, MAX_TOKENS + 1)
    with running(model.config(NUM_EXPERTS)) as worker:
        for layer, batch, message in (
            (2, (x, ids, weights), "layer 2 is not owned"),
            (1, (x[:, :-1].copy(), ids, weights), "do not fit hidden 128"),
            (1, (x, ids[:1], weights), "do not fit"),
            (1, many, "made for 32 tokens"),
            (1, (x, np.full_like(ids, NUM_EXPERTS), weights), "expert 12 of 12"),
        ):
            with pytest.raises(ProtocolError, match=message):
                run_step(worker, layer, batch)
        run_step(worker, 1, (x, ids, weights))


def test_no_tokens_are_no_work(model: Model) -> None:
    """An empty batch, and one whose ids are all -1, read nothing; the latter gives zeros."""
    with running(model.config(TOP_K)) as worker:
        out, counters = run_step(worker, 1, random_batch(0, 3, skip=1.0))
        assert not out.any()
        assert (counters.hits, counters.misses) == (0, 0)


def answer_at_once(worker: core.Worker, layer: int, batch: tuple[Any, ...]) -> Routed | None:
    """A step from frame to frame, if the worker can."""
    (frame,) = to_frames(Route(5, layer, *batch))
    answer = worker.answer_at_once(bytes(frame), lambda: None)
    routed = None if answer is None else from_frames([bytes(answer)])
    assert routed is None or isinstance(routed, Routed)
    return routed


@pytest.mark.parametrize("num_threads", [1, 2])
def test_answer_at_once_has_the_same_bits(model: Model, expected: list[bytes], num_threads: int) -> None:
    """With everything in memory, few tokens are answered from frame to frame: the bits and the hits of `step`; others are not."""
    with running(model.config(NUM_EXPERTS, num_threads=num_threads)) as worker:
        for layer in LAYERS:
            everything = np.arange(NUM_EXPERTS, dtype=np.int32).reshape(-1, TOP_K)
            x = np.ones((len(everything), BATCHES[0][0].shape[1]), np.float32)
            run_step(worker, layer, (x, everything, np.ones(everything.shape, np.float32)))
        worker.settle()
        wanted = iter(expected)
        for batch in BATCHES:
            for layer in LAYERS:
                routed = answer_at_once(worker, layer, batch)
                bits = next(wanted)
                if len(batch[0]) > core.MOST_AT_ONCE:
                    assert routed is None
                    continue
                assert routed is not None
                assert routed.y.tobytes() == bits
                assert (routed.step, routed.layer) == (5, layer)
                assert routed.counters.hits == len(set(batch[1].ravel().tolist())) == routed.counters.asked
                worker.settle()


def test_answer_at_once_is_for_what_is_in_memory(model: Model) -> None:
    """A missing expert, another layer or shape, an id out of range: left to `step`, which reads or refuses."""
    batch = random_batch(3, 1)
    wrong_id = (batch[0], np.full((1, TOP_K), NUM_EXPERTS, np.int32), batch[2])
    narrow = (batch[0][:, :64].copy(), *batch[1:])
    with running(model.config(NUM_EXPERTS)) as worker:
        assert answer_at_once(worker, LAYERS[0], batch) is None
        wanted, _ = run_step(worker, LAYERS[0], batch)
        found = answer_at_once(worker, LAYERS[0], batch)
        assert found is not None
        assert found.y.tobytes() == wanted.tobytes()
        assert answer_at_once(worker, LAYERS[0] + 1, batch) is None
        assert answer_at_once(worker, LAYERS[0], wrong_id) is None
        assert answer_at_once(worker, LAYERS[0], narrow) is None
        assert worker.answer_at_once(b"CLBR", lambda: None) is None
        others = np.array([[e for e in range(NUM_EXPERTS) if e not in batch[1]][:TOP_K]], np.int32)
        assert answer_at_once(worker, LAYERS[0], (batch[0], others, batch[2])) is None


def test_answer_at_once_counts_as_a_use(model: Model) -> None:
    """What it used is the most recent: the next misses evict the others."""
    first, second, third = (np.arange(start, start + TOP_K, dtype=np.int32)[None] for start in (0, TOP_K, 2 * TOP_K))
    x, weights = np.ones((1, BATCHES[0][0].shape[1]), np.float32), np.ones((1, TOP_K), np.float32)
    with running(model.config(2 * TOP_K)) as worker:
        for ids in (first, second):
            run_step(worker, LAYERS[0], (x, ids, weights))
        assert answer_at_once(worker, LAYERS[0], (x, first, weights)) is not None
        _, counters = run_step(worker, LAYERS[0], (x, third, weights))
        assert counters.evictions == TOP_K
        assert answer_at_once(worker, LAYERS[0], (x, second, weights)) is None
        assert answer_at_once(worker, LAYERS[0], (x, first, weights)) is not None
