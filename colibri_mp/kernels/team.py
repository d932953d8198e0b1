"""A team of threads that run one compiled *stage* together.

A stage is a `jit.Native` function `stage(frame, control, tag)`:

    FRAME = np.dtype([("x", np.int64), ("num_chunks", np.int64), ...])     # addresses, sizes, floats; at most FRAME_BYTES

    def _stage(frame: int, control: int, tag: int) -> None:
        job = record_at(frame, FRAME)
        chunk = take(control, tag, PHASE_0, job.num_chunks)
        while chunk >= 0:
            ...                                                  # this thread alone does this chunk
            done(control, PHASE_0)
            chunk = take(control, tag, PHASE_0, job.num_chunks)
        if not barrier(control, tag, PHASE_0, job.num_chunks):   # all chunks of phase 0 are done; False: the job is over, leave
            return
        ...                                                      # PHASE_1 ... up to MAX_PHASES - 1
        barrier(control, tag, PHASE_1, ...)                      # the last phase ends with a barrier too

    STAGE = Native(_stage)
    team.run(STAGE, frame)        # frame: a numpy array of FRAME, shape (1,)

    caller   copies the frame, wakes helpers, runs the stage, waits until the chunks of the last phase are done, returns
    helpers  parked in read(2) on a pipe, without the GIL, in compiled code for their whole life; run the stage; park again

Chunks are taken dynamically, so a helper that wakes late costs nothing: the caller does the chunks itself and returns.
Such a helper may run a stage whose job is over. Three rules make that harmless:

- tickets carry the job's tag, so that `take` gives it -1 (a compare-and-swap, the tag is part of the word);
- before the frame is overwritten all tickets are closed, so that a frame that was read half old, half new meets no open ticket;
- **a stage must not follow an address of its frame, nor write anything, but for a chunk that `take` gave it** (or a slot of `thread_slot`);
  nor may the number of a phase come from the frame: it is part of the address that `take` looks at.

A stage goes through its phases in order, 0 first, each with `take` and then `barrier` (after the last phase too: `run` returns
when the caller's own call of the stage returns), and every thread with the same numbers of chunks. A phase may have 0 chunks.
"""

import os
import threading
from contextlib import suppress
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri_mp.kernels import atomic
from colibri_mp.kernels.jit import Native, compiled, fixed
from colibri_mp.kernels.vectors import call_native3, get_i64, set_i64

MAX_PHASES = 20
PHASE_0, PHASE_1, PHASE_2, PHASE_3, _SLOTS = (fixed(phase) for phase in (0, 1, 2, 3, MAX_PHASES))
FRAME_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20
SPINS_BEFORE_YIELD = 4000
SPINS_FOR_A_JOB = 8000
"""How long a helper that was told to expect a job waits for it before it parks again: 0.1-0.2 ms."""

# Control block, bytes; each word that threads write has a 128-byte line of its own.
_TAG, _STAGE, _STOP, _BYTE, _WANTED, _AWAKE = 0, 128, 256, 264, 384, 512
_TICKETS, _DONE = 640, 640 + 128 * (MAX_PHASES + 1)  # one more: thread slots
_FRAME = _DONE + 128 * (MAX_PHASES + 1)
_CONTROL_BYTES = _FRAME + FRAME_BYTES + 128
_CLOSED = 0x7FFFFFFF  # no phase has so many chunks


@compiled
def take(control: int, tag: int, phase: int, num_chunks: int) -> int:
    """Number of the next chunk of a phase for the calling thread, or -1: none is left, or the job `tag` is over."""
    word = control + _TICKETS + 128 * phase
    while True:
        ticket: int = atomic.load_acquire(word)
        chunk = ticket & 0xFFFFFFFF
        if ticket >> 32 != tag or chunk >= num_chunks:
            return -1
        atomic.fence()
        if atomic.compare_and_swap(word, ticket, ticket + 1):
            return chunk


@compiled
def done(control: int, phase: int) -> None:
    """Say that a chunk got from `take` is complete; publishes what was written."""
    atomic.fetch_add(control + _DONE + 128 * phase, 1)


@compiled
def barrier(control: int, tag: int, phase: int, num_chunks: int) -> bool:
    """Wait until all chunks of a phase are done. False: the job `tag` is over, so leave."""
    spins = 0
    while atomic.load_acquire(control + _DONE + 128 * phase) < num_chunks:
        if atomic.load_acquire(control + _TAG) != tag:
            return False
        atomic.pause()
        spins += 1
        if spins >= SPINS_BEFORE_YIELD:
            atomic.sched_yield()
    current_tag: int = atomic.load_acquire(control + _TAG)
    return current_tag == tag


@compiled
def thread_slot(control: int, tag: int, num_threads: int) -> int:
    """A number in [0, num_threads) that no other thread of the job has, for scratch memory; ask once. -1: the job is over, leave."""
    return take(control, tag, _SLOTS, num_threads)


@compiled
def _open_job(control: int, stage: int, frame: int, frame_words: int) -> int:
    """Make `stage` with a copy of the frame the current job. Nobody holds a chunk of the one before: its caller waited for all."""
    tag: int = (atomic.load_acquire(control + _TAG) + 1) & 0x7FFFFFFF
    for phase in range(MAX_PHASES + 1):
        atomic.store_release(control + _TICKETS + 128 * phase, (tag << 32) + _CLOSED)
    atomic.fence()
    for word in range(frame_words):
        set_i64(control + _FRAME + 8 * word, get_i64(frame + 8 * word))
    for phase in range(MAX_PHASES + 1):
        atomic.store_release(control + _DONE + 128 * phase, 0)
    atomic.store_release(control + _STAGE, stage)
    for phase in range(MAX_PHASES + 1):
        atomic.store_release(control + _TICKETS + 128 * phase, tag << 32)
    atomic.store_release(control + _TAG, tag)
    return tag


@compiled
def _run_opened(control: int, stage: int, tag: int) -> None:
    call_native3(stage, control + _FRAME, control, tag)


@compiled
def _call_helpers(control: int, tag: int) -> int:
    """Make job `tag` the one that helpers join; returns how many are awake already and will see it without being woken."""
    atomic.store_release(control + _WANTED, tag)
    atomic.fence()  # with the one in `_await_job`: a helper that stops waiting now is either not counted, or sees the job
    num_awake: int = atomic.load_acquire(control + _AWAKE)
    return num_awake


@compiled
def _await_job(control: int, last_tag: int) -> int:
    """Wait a little for a job other than `last_tag`; returns the tag that is wanted then, perhaps the old one."""
    atomic.fetch_add(control + _AWAKE, 1)
    spins = 0
    while atomic.load_acquire(control + _WANTED) == last_tag and spins < SPINS_FOR_A_JOB:
        atomic.pause()
        spins += 1
    atomic.fetch_add(control + _AWAKE, -1)
    atomic.fence()
    tag: int = atomic.load_acquire(control + _WANTED)
    return tag


@compiled
def _help(control: int, pipe: int) -> None:
    """Life of a helper thread: a byte in the pipe is a call to look for a new job. Ends when told to, or when the pipe is closed."""
    last_tag = 0
    while atomic.read(pipe, control + _BYTE, 1) != 0:
        if atomic.load_acquire(control + _STOP) != 0:
            return
        tag = atomic.load_acquire(control + _WANTED)
        if tag == last_tag:
            tag = _await_job(control, last_tag)
        if tag != last_tag:
            stage = atomic.load_acquire(control + _STAGE)
            call_native3(stage, control + _FRAME, control, tag)
            last_tag = tag


def aligned_bytes(num_bytes: int, alignment: int = 64) -> npt.NDArray[np.uint8]:
    """Zeroed bytes at an aligned address."""
    raw = np.zeros(num_bytes + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + num_bytes]


class Arena:
    """One piece of memory that is given out part by part, never to be given back: large enough for the system's huge pages.

    Decoding walks through all resident weights; in matrices of a few MB each, most of whose pages are small, it takes a tenth longer.
    """

    def __init__(self, num_bytes: int) -> None:
        self._memory = aligned_bytes(num_bytes, HUGE_PAGE_BYTES)
        self._end = 0

    def take(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Zeroed bytes at a multiple of 64; memory of their own where no more is left."""
        start = -(-self._end // 64) * 64
        if start + num_bytes > self._memory.nbytes:
            return aligned_bytes(num_bytes)
        self._end = start + num_bytes
        return self._memory[start : self._end]


class ThreadTeam:
    """The calling thread and `num_threads - 1` parked helpers. One job at a time: not for use by several threads at once.

    A context manager; `close` ends the helpers (they hold no resources but a pipe).
    """

    def __init__(self, num_threads: int) -> None:
        if num_threads < 1:
            raise ValueError(f"a team needs at least one thread, not {num_threads}")
        self.num_threads = num_threads
        self._frames: dict[
            int, tuple[npt.NDArray[Any], int, int]
        ] = {}  # by id; an id is not used again while its frame is here
        self._control = aligned_bytes(_CONTROL_BYTES, 128)
        self._control_address = int(self._control.ctypes.data)
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        self._helpers = [
            threading.Thread(
                target=_help, args=(self._control_address, self._read_fd), name=f"kernels-{i}", daemon=True
            )
            for i in range(1, num_threads)
        ]
        for helper in self._helpers:
            helper.start()

    def run(self, stage: Native, frame: npt.NDArray[Any], max_helpers: int | None = None) -> None:
        """Run a stage with a copy of `frame` (array of the stage's frame dtype, shape (1,)); returns when it is complete.

        `max_helpers`: how many to wake at most; 0 for work of a few microseconds, which waking (5-20 us) would only delay.
        """
        known = self._frames.get(id(frame))
        _, address, words = self._look_at(frame) if known is None else known
        tag = _open_job(self._control_address, stage.address, address, words)
        wanted = len(self._helpers) if max_helpers is None else min(max_helpers, len(self._helpers))
        if wanted:
            self._wake(wanted - _call_helpers(self._control_address, tag))
        _run_opened(self._control_address, stage.address, tag)

    def _look_at(self, frame: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], int, int]:
        """A frame, its address and 8-byte words, which numpy takes its time to tell. Kept, since stages use one frame all their life."""
        words = -(-frame.nbytes // 8)
        assert words * 8 == frame.nbytes <= FRAME_BYTES, (
            f"frame of {frame.nbytes} bytes: a multiple of 8, at most {FRAME_BYTES}"
        )
        self._frames[id(frame)] = known = (frame, frame.ctypes.data, words)
        return known

    def expect(self) -> None:
        """Wake the helpers for a job that comes within 0.1 ms, so that they are there when it does.

        A core that has gone to sleep takes 50 us and more to wake, as long as the caller takes to prepare a small job.
        """
        self._wake(len(self._helpers))

    def _wake(self, count: int) -> None:
        if count > 0:
            with suppress(BlockingIOError):  # thousands of calls are waiting already
                os.write(self._write_fd, b"x" * count)

    def close(self) -> None:
        """End the helpers and wait for them; may be called twice."""
        if self._write_fd < 0:
            return
        self._control[_STOP] = 1
        os.close(self._write_fd)
        self._write_fd = -1
        for helper in self._helpers:
            helper.join()
        os.close(self._read_fd)

    def __enter__(self) -> "ThreadTeam":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
