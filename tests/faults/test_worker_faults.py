"""A worker when disk, memory or itself fail: a named error, a sound pool, and the next step works."""

import errno
import itertools
import multiprocessing
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worker_fixture import NUM_EXPERTS, Model, experts_of, random_batch, run_step, running

from colibri_mp.errors import PoolError, ReadError
from colibri_mp.kernels.expert import ExpertStage
from colibri_mp.shm.layout import pool_bytes, read_layout
from colibri_mp.shm.segment import Segment
from colibri_mp.shm.view import PoolView
from colibri_mp.workers import core, expert_files
from colibri_mp.workers.core import Worker, WorkerConfig


@pytest.fixture
def model(tmp_path: Path) -> Model:
    """Experts on disk that the test may damage."""
    return Model(tmp_path)


class FailingReads:
    """Stands in for os.preadv: an I/O error for any read that covers byte `position` of the file `path`."""

    def __init__(self, path: Path, position: int) -> None:
        self.inode, self.position, self.preadv = path.stat().st_ino, position, os.preadv

    def __call__(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        if os.fstat(fd).st_ino == self.inode and offset <= self.position < offset + len(buffers[0]):
            raise OSError(errno.EIO, "Input/output error")
        return self.preadv(fd, buffers, offset)


def test_disk_error_ends_the_step_only(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """EIO in one expert: the error names it, its neighbours become resident, and the step succeeds once the disk does."""
    batch = experts_of([2, 5, 7, 5, 8, 9])
    position = model.experts[4].places[7, 0][1]
    with running(model.config(8)) as worker:
        with monkeypatch.context() as patch:
            patch.setattr(expert_files.os, "preadv", FailingReads(model.files[1], position))
            with pytest.raises(ReadError, match=rf"layer 4, expert 7: reading .* of {model.files[1]} failed.*\(EIO\)"):
                run_step(worker, 4, batch)
        worker.check_integrity()
        result, counters = run_step(worker, 4, batch)
    assert (counters.hits, counters.misses) == (4, 1)
    np.testing.assert_allclose(result, model.reference(4, *batch), rtol=0, atol=1e-4)


def test_file_truncated_under_way(model: Model) -> None:
    """A file cut while running: named errors for what is gone; residents, what lies before the cut, and other files go on."""
    with running(model.config(NUM_EXPERTS)) as worker:
        run_step(worker, 4, experts_of([0, 1, 2]))
        os.truncate(model.files[1], model.experts[4].places[8, 0][1])
        with pytest.raises(ReadError, match=rf"layer 4, expert 11: .* offset \d+ of {model.files[1]} .*truncated"):
            run_step(worker, 4, experts_of([1, 2, 11]))
        worker.check_integrity()
        assert run_step(worker, 4, experts_of([0, 1, 2]))[1].hits == 3
        batch = experts_of([5, 6, 7])
        result, counters = run_step(worker, 4, batch)
        assert counters.misses == 3
        np.testing.assert_allclose(result, model.reference(4, *batch), rtol=0, atol=1e-4)
        assert run_step(worker, 1, experts_of([0, 1, 2]))[1].misses == 3


def test_file_rewritten_under_way(model: Model) -> None:
    """A file written to while running is refused where no checksum can vouch for it; residents and other files go on."""
    with running(model.config(NUM_EXPERTS)) as worker:
        run_step(worker, 4, experts_of([0, 1, 2]))
        os.utime(model.files[1], ns=(1, 1))
        with pytest.raises(ReadError, match=rf"layer 4, expert 3: .* of {model.files[1]} .*written to since"):
            run_step(worker, 4, experts_of([1, 2, 3]))
        assert run_step(worker, 4, experts_of([0, 1, 2]))[1].hits == 3
        assert run_step(worker, 1, experts_of([0, 1, 2]))[1].misses == 3


def test_memory_that_changes_is_found(model: Model) -> None:
    """With `verify` "always" a resident expert is compared with the disk before it is used."""
    config, batch = model.config(NUM_EXPERTS, verify="always"), experts_of([0, 1, 2])
    with running(config) as worker:
        run_step(worker, 1, batch)
        assert run_step(worker, 1, batch)[1].hits == 3
        segment = Segment.attach(config.segment_name)
        place = read_layout(segment.buffer)[0].slabs_offset + 100
        segment.buffer[place] ^= 1
        with pytest.raises(ReadError, match=r"layer 1, expert \d: byte 100 of its slab in memory"):
            run_step(worker, 1, batch)
        segment.buffer[place] ^= 1
        segment.close()
        assert run_step(worker, 1, batch)[1].hits == 3


def test_disk_that_does_not_answer(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read without end: an error after the deadline; other experts can be used; the late one is resident in the end."""
    with running(model.config(5)) as worker:
        run_step(worker, 1, experts_of([0, 1, 2]))  # everything is compiled before deadlines are short
    go_on, held = threading.Event(), threading.Event()
    pack = core.pack

    def hanging(*args: Any) -> None:
        if not held.is_set():
            held.set()
            go_on.wait(30)
        pack(*args)

    monkeypatch.setattr(core, "pack", hanging)
    with running(model.config(5, read_timeout_s=1.0)) as worker:
        with pytest.raises(ReadError, match=r"layer 1: the disk has not delivered experts \[\d+\] within"):
            run_step(worker, 1, experts_of([0, 1, 2]))
        worker.check_integrity()
        assert run_step(worker, 1, experts_of([6, 7, 8]))[1].misses == 3
        with pytest.raises(ReadError, match="has not delivered"):
            run_step(worker, 1, experts_of([0, 1, 2]))
        go_on.set()
        result, counters = run_step(worker, 1, experts_of([0, 1, 2]))
        assert counters.hits >= 2
        np.testing.assert_allclose(result, model.reference(1, *experts_of([0, 1, 2])), rtol=0, atol=1e-4)


def test_full_shared_memory(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """ENOSPC while pages are committed is a PoolError with the cure, never a SIGBUS; what is resident goes on."""
    if sys.platform != "linux":
        pytest.skip("segments have no limit of their own here")

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with running(model.config(NUM_EXPERTS)) as worker:
        run_step(worker, 1, experts_of([0, 1, 2]))
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", full)
            with pytest.raises(PoolError, match=r"is full.*lower --ram"):
                run_step(worker, 1, experts_of([1, 2, 3]))
            assert run_step(worker, 1, experts_of([0, 1, 2]))[1].hits == 3
        assert run_step(worker, 1, experts_of([1, 2, 3]))[1].misses == 1


def test_defect_in_the_kernels_keeps_the_pool_sound(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in the middle of a step, reads in flight: everything is released, the next step works."""
    batch = random_batch(3, 8)
    with running(model.config(6)) as worker:
        with monkeypatch.context() as patch:
            patch.setattr(ExpertStage, "compute", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                run_step(worker, 1, batch)
        result, _ = run_step(worker, 1, batch)
        np.testing.assert_allclose(result, model.reference(1, *batch), rtol=0, atol=1e-4)


def test_start_that_fails_leaves_nothing(model: Model) -> None:
    """A missing file, a missing segment: an error at once, all threads and files closed (the shared fixture looks)."""
    config = model.config(NUM_EXPERTS)
    with pytest.raises(PoolError, match="cannot attach"):
        Worker(config)
    model.files[0].unlink()
    with Segment.create(config.segment_name, pool_bytes(config.slots)), pytest.raises(ReadError, match="cannot open"):
        Worker(config)


def die_in_the_middle(config: WorkerConfig) -> None:
    """Body of a spawned process: one step, then death by SIGKILL in the middle of the next one's reads."""
    pack, num_packed = core.pack, itertools.count()

    def deadly(*args: Any) -> None:
        if next(num_packed) == 3 * 4 + 1:  # the second matrix of the fifth expert
            os.kill(os.getpid(), signal.SIGKILL)
        pack(*args)

    core.pack = deadly
    worker = Worker(config)
    run_step(worker, 1, experts_of([0, 1, 2]))
    run_step(worker, 1, experts_of([5, 6, 7, 8, 9, 10]))


def test_killed_worker_comes_back_warm(model: Model) -> None:
    """After SIGKILL in the middle of a step a new worker trusts what was complete, drops the rest, same bits."""
    config = model.config(NUM_EXPERTS, io_threads=1)
    batch = experts_of([0, 1, 2, 5, 6, 7])
    with running(model.config(NUM_EXPERTS)) as untouched:
        expected, _ = run_step(untouched, 1, batch)
    with Segment.create(config.segment_name, pool_bytes(config.slots)):
        child = multiprocessing.get_context("spawn").Process(target=die_in_the_middle, args=(config,))
        child.start()
        child.join(100)
        assert child.exitcode == -signal.SIGKILL
        view = PoolView.attach(config.segment_name)
        resident = np.flatnonzero(view.resident(1)).tolist()
        view.close()
        worker = Worker(config)
        worker.check_integrity()
        result, counters = run_step(worker, 1, batch)
        worker.close()
    assert resident in ([0, 1, 2], [0, 1, 2, 5])  # expert 5 was complete, perhaps not yet marked so
    assert counters.hits == len(resident)
    assert result.tobytes() == expected.tobytes()
