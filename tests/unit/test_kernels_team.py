"""The thread team: every chunk is done exactly once, by whoever is there, and late helpers do no harm."""

import os
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from colibri_mp.kernels import team as team_module
from colibri_mp.kernels.jit import Native, compiled, fixed
from colibri_mp.kernels.team import PHASE_0, PHASE_1, Arena, ThreadTeam, barrier, done, take, thread_slot
from colibri_mp.kernels.vectors import get_i64, record_at, set_i64

FRAME = np.dtype(
    [
        ("first", np.int64),
        ("second", np.int64),
        ("counts", np.int64),
        ("sums", np.int64),
        ("owners", np.int64),
        ("work", np.int64),
    ]
)
NUM_THREADS = fixed(8)


@compiled
def _add(place: int, amount: int) -> None:
    set_i64(place, get_i64(place) + amount)


def _counting_stage(frame: int, control: int, tag: int) -> None:
    """Phase 0 counts up each of `counts`; phase 1 writes the sum of all counts to each of `sums`: wrong if phase 0 is not complete."""
    job = record_at(frame, FRAME)
    slot = thread_slot(control, tag, NUM_THREADS)
    chunk = take(control, tag, PHASE_0, job.first)
    while chunk >= 0:
        for _ in range(job.work):
            _add(job.counts + 8 * chunk, 1)
        set_i64(job.owners + 8 * chunk, slot)
        done(control, PHASE_0)
        chunk = take(control, tag, PHASE_0, job.first)
    if not barrier(control, tag, PHASE_0, job.first):
        return
    chunk = take(control, tag, PHASE_1, job.second)
    while chunk >= 0:
        for i in range(job.first):
            _add(job.sums + 8 * chunk, get_i64(job.counts + 8 * i))
        done(control, PHASE_1)
        chunk = take(control, tag, PHASE_1, job.second)
    barrier(control, tag, PHASE_1, job.second)


COUNTING_STAGE = Native(_counting_stage)


class Job:
    """A frame of the counting stage and its arrays."""

    def __init__(self, first: int, second: int, work: int = 1) -> None:
        self.counts, self.sums, self.owners = (np.zeros(size + 1, np.int64) for size in (first, second, first))
        self.frame = np.zeros(1, FRAME)
        self.frame["first"], self.frame["second"], self.frame["work"] = first, second, work
        for name in ("counts", "sums", "owners"):
            self.frame[name] = getattr(self, name).ctypes.data

    def check(self) -> None:
        first, second, work = (int(self.frame[name][0]) for name in ("first", "second", "work"))
        assert self.counts.tolist() == [work] * first + [0]
        assert self.sums.tolist() == [work * first] * second + [0]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    num_threads=st.integers(1, 4),
    jobs=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 300)), min_size=1, max_size=40),
    helpers=st.sampled_from([None, 0, 1]),
)
def test_every_chunk_is_done_once(num_threads: int, jobs: list[tuple[int, int, int]], helpers: int | None) -> None:
    """In jobs that follow each other at once, no chunk is lost, doubled, or done before the phase in front of it."""
    with ThreadTeam(num_threads) as team:
        for sizes in jobs:
            job = Job(*sizes)
            team.run(COUNTING_STAGE, job.frame, helpers)
            job.check()


def test_helpers_take_part() -> None:
    """Of a job that takes a while, a helper does some chunks, under a slot of its own."""
    with ThreadTeam(2) as team:
        for _ in range(100):  # a busy machine may run the helper late
            job = Job(64, 1, work=20_000)
            team.run(COUNTING_STAGE, job.frame)
            job.check()
            if len(set(job.owners[:-1].tolist())) == 2:
                return
    pytest.fail("the helper took no chunk in 100 jobs")


def test_stale_tag_gets_nothing() -> None:
    """A helper that is a job behind gets neither chunk nor slot, and leaves at the barrier."""
    with ThreadTeam(1) as team:
        control = team._control_address
        job = Job(3, 3)
        team.run(COUNTING_STAGE, job.frame)
        tag = team_module._open_job(control, COUNTING_STAGE.address, job.frame.ctypes.data, job.frame.nbytes // 8)
        assert take(control, tag - 1, PHASE_0, 3) == -1
        assert thread_slot(control, tag - 1, 1) == -1
        assert not barrier(control, tag - 1, PHASE_0, 3)
        assert [take(control, tag, PHASE_0, 2) for _ in range(3)] == [0, 1, -1]
        assert [thread_slot(control, tag, 2) for _ in range(3)] == [0, 1, -1]
    job.check()


def test_late_helper_of_a_finished_job_touches_nothing() -> None:
    """The stage itself, entered with the tag of the job before, changes no array."""
    with ThreadTeam(1) as team:
        job = Job(3, 3)
        team.run(COUNTING_STAGE, job.frame)
        next_job = Job(5, 5)
        control = team._control_address
        tag = team_module._open_job(
            control, COUNTING_STAGE.address, next_job.frame.ctypes.data, next_job.frame.nbytes // 8
        )
        team_module._run_opened(control, COUNTING_STAGE.address, tag - 1)
        assert not next_job.counts.any()
        team_module._run_opened(control, COUNTING_STAGE.address, tag)
    next_job.check()
    job.check()


def test_more_wakes_than_the_pipe_holds() -> None:
    """Tens of thousands of short jobs in a row, faster than the helpers can read their calls."""
    with ThreadTeam(3) as team:
        for _ in range(20_000):
            job_frame = np.zeros(1, FRAME)
            team.run(COUNTING_STAGE, job_frame)
        job = Job(50, 50)
        team.run(COUNTING_STAGE, job.frame)
    job.check()


def test_close_ends_helpers_and_pipe() -> None:
    """After close no thread and no descriptor is left; closing again is allowed."""
    before = set(os.listdir("/dev/fd"))  # noqa: PTH208
    team = ThreadTeam(4)
    assert sum(thread.name.startswith("kernels-") for thread in threading.enumerate()) == 3
    team.run(COUNTING_STAGE, Job(5, 5).frame)
    team.close()
    team.close()
    assert not any(thread.name.startswith("kernels-") for thread in threading.enumerate())
    assert set(os.listdir("/dev/fd")) == before  # noqa: PTH208


def test_a_team_has_at_least_one_thread() -> None:
    """Zero threads cannot do anything."""
    with pytest.raises(ValueError, match="at least one thread, not 0"):
        ThreadTeam(0)


def test_an_arena_gives_out_parts_that_do_not_overlap() -> None:
    """Zeroed, at multiples of 64; what does not fit any more has memory of its own."""
    arena = Arena(300)
    parts = [arena.take(size) for size in (100, 64, 100, 64)]
    for number, part in enumerate(parts, 1):
        assert part.ctypes.data % 64 == 0
        assert not part.any()
        part[:] = number
    assert [(part.nbytes, *set(part.tolist())) for part in parts] == [(100, 1), (64, 2), (100, 3), (64, 4)]
    assert parts[1].ctypes.data - parts[0].ctypes.data == 128
