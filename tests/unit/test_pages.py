"""Locking pages and punching holes, as the system really does it."""

import ctypes
import errno
import mmap
import multiprocessing
import os
import resource
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from segments import fresh_name

from colibri_mp.errors import PoolError
from colibri_mp.shm import pages
from colibri_mp.shm.layout import LayerSlots, pool_bytes
from colibri_mp.shm.pages import PageLocks, lock_pages, punch_hole, unlock_pages
from colibri_mp.shm.pool import ExpertPool
from colibri_mp.shm.segment import SHM_DIR, Segment

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="holes are punched, and locks counted, on Linux only")
PAGE = mmap.PAGESIZE
NOBODY = 65534
LAYERS = (LayerSlots(0, 4, 4, PAGE),)


@pytest.fixture
def address() -> Iterator[int]:
    """Four pages of memory."""
    memory = mmap.mmap(-1, 4 * PAGE)
    array = np.frombuffer(memory, np.uint8)
    yield int(array.ctypes.data)
    del array
    memory.close()


@pytest.fixture
def segment() -> Iterator[Segment]:
    """A segment with room for a pool of `LAYERS`."""
    with Segment.create(fresh_name(), pool_bytes(LAYERS)) as segment:
        yield segment


def locked_bytes() -> int:
    """What the system says that this process has locked."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmLck:")[1].split()[0])


@linux_only
def test_locks_are_the_systems(address: int) -> None:
    """What `PageLocks` counts is what the system counts, and goes with `unlock`; unlocking what is not locked is nothing."""
    before, locks = locked_bytes(), PageLocks()
    locks.lock(address, PAGE)
    locks.lock(address + 2 * PAGE, 2 * PAGE)
    assert (locks.nbytes, locks.refusal) == (3 * PAGE, None)
    assert locked_bytes() - before == 3 * PAGE
    locks.unlock(address)
    locks.unlock(address)
    locks.unlock(address + PAGE)
    assert locked_bytes() - before == locks.nbytes == 2 * PAGE
    locks.unlock(address + 2 * PAGE)
    assert locked_bytes() - before == locks.nbytes == 0


def test_memory_that_is_not_there_cannot_be_unlocked() -> None:
    """A range without memory is a defect of the caller."""
    with pytest.raises(PoolError, match="cannot unlock 4096 bytes"):
        unlock_pages(0, 4096)


def lock_one_page_and_two(segment: Segment) -> list[str | None]:
    """What the system says to a page, and to two more."""
    return [lock_pages(segment.address, PAGE), lock_pages(segment.address + PAGE, 2 * PAGE)]


def pin_three(segment: Segment) -> tuple[int, str | None, list[int], list[int]]:
    """Pin three of four experts: bytes locked, refusal, pins, and what stays after other experts were used."""
    pool = ExpertPool(segment, LAYERS, "a" * 64, floor=1)
    held = pool.acquire(0, range(4))
    for slot, generation in zip(held.miss_slots, held.generations, strict=True):
        pool.mark_ready(slot, generation)
    pool.release(held)
    assert all(pool.pin(0, expert) for expert in range(3))
    pool.check_integrity()
    nbytes, refusal = pool.locked
    found = nbytes, refusal, pool.pinned(0), np.flatnonzero(pool.residency(0)).tolist()
    pool.close()
    return found


def run_limited(limit: int, body: Callable[[Segment], object], result: Connection) -> None:
    """Body of a spawned process: run `body` as a user whom RLIMIT_MEMLOCK binds, and send what it returns."""
    with Segment.create(fresh_name(), pool_bytes(LAYERS)) as segment:
        segment.reserve(0, segment.nbytes)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
        if os.geteuid() == 0:
            os.seteuid(NOBODY)
        try:
            result.send(body(segment))
        finally:
            os.seteuid(os.getuid())


def limited(limit: int, body: Callable[[Segment], object]) -> object:
    """What `body` returns in a process that may lock `limit` bytes."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=run_limited, args=(limit, body, sender))
    child.start()
    sender.close()
    try:
        return receiver.recv()
    finally:
        child.join(60)
        receiver.close()


@linux_only
def test_refusal_names_the_limit() -> None:
    """Within RLIMIT_MEMLOCK memory is locked; beyond it the reason is the limit, with the cure; the same if it is 0."""
    locked, refusal = limited(2 * PAGE, lock_one_page_and_two)  # type: ignore[misc]
    assert locked is None
    assert f"does not lock {2 * PAGE} more bytes" in refusal
    assert f"RLIMIT_MEMLOCK is {2 * PAGE} bytes" in refusal
    assert "ulimit -l" in refusal
    refusals = limited(0, lock_one_page_and_two)
    assert all("RLIMIT_MEMLOCK is 0 bytes" in refusal for refusal in refusals)  # type: ignore[attr-defined]


@linux_only
def test_pins_survive_a_refused_lock() -> None:
    """Pins that the system does not lock are pins all the same; the pool says how much is locked, and why not more."""
    nbytes, refusal, pinned, resident = limited(2 * PAGE, pin_three)  # type: ignore[misc]
    assert nbytes == 2 * PAGE
    assert f"RLIMIT_MEMLOCK is {2 * PAGE} bytes" in refusal
    assert (pinned, resident) == ([0, 1, 2], [0, 1, 2, 3])


def test_refusal_without_a_limit_is_the_systems(monkeypatch: pytest.MonkeyPatch, address: int) -> None:
    """Where no limit is the cause, the message does not send anybody to look for one."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    refusal = lock_pages(address + 2**40, PAGE)  # nothing is mapped there
    assert refusal == f"the system does not lock {PAGE} more bytes of memory ({os.strerror(errno.ENOMEM)})"


@linux_only
def test_pins_are_unlocked_when_they_are_given_up(segment: Segment) -> None:
    """What `unpin` and `resize` take from the pins is not locked any more, and a new writer locks the rest again."""
    before = locked_bytes()
    assert pin_three(segment)[:2] == (3 * PAGE, None)
    again = ExpertPool(segment, LAYERS, "a" * 64, floor=1)
    assert again.pinned(0) == [0, 1, 2]
    assert locked_bytes() - before == again.locked[0] == 3 * PAGE
    again.unpin(0, 1)
    assert locked_bytes() - before == again.locked[0] == 2 * PAGE
    again.resize(2 * PAGE)
    assert again.pinned(0) == [2]
    assert locked_bytes() - before == again.locked[0] == PAGE
    again.check_integrity()
    again.unpin(0, 2)
    assert locked_bytes() == before


@linux_only
def test_locked_pages_can_be_punched(segment: Segment) -> None:
    """A hole is punched into locked memory too: the pages are gone, and those beside them stay."""
    segment.reserve(0, 4 * PAGE)
    segment.buffer[: 4 * PAGE] = 9
    assert lock_pages(segment.address, 4 * PAGE) is None
    assert segment.punch(PAGE, 2 * PAGE)
    assert (SHM_DIR / segment.name).stat().st_blocks * 512 == 2 * PAGE
    assert segment.buffer[: 4 * PAGE : PAGE].tolist() == [9, 0, 0, 9]
    unlock_pages(segment.address, 4 * PAGE)


@linux_only
def test_other_refusals_to_punch_are_errors() -> None:
    """A file that has no pages is refused by the system with its reason."""
    reader, writer = os.pipe()
    try:
        with pytest.raises(PoolError, match="cannot give 4096 bytes of shared memory at 0 back"):
            punch_hole(writer, 0, 4096)
    finally:
        os.close(reader)
        os.close(writer)


def test_systems_without_holes_keep_the_pages(segment: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the call is missing, or on macOS, `punch` says that the pages stay, and nothing is lost."""

    class Libc:
        def fallocate(self, *_: object) -> int:
            ctypes.set_errno(errno.EOPNOTSUPP)
            return -1

    segment.reserve(0, 2 * PAGE)
    segment.buffer[: 2 * PAGE] = 9
    with monkeypatch.context() as patch:
        patch.setattr(pages, "_libc", Libc())
        assert not segment.punch(0, PAGE)
    with monkeypatch.context() as patch:
        patch.setattr(segment, "_fd", -1)  # as on macOS
        assert not segment.punch(0, PAGE)
    assert segment.buffer[PAGE] == 9
