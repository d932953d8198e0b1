"""Segments: names, pages, and what is left behind by each way of ending."""

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from segments import fresh_name

from colibri_mp.errors import PoolError
from colibri_mp.shm.segment import SHM_DIR, Segment, free_shm_bytes, segment_name, unlink_stale

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="pages are committed and given back on Linux only")
PAGE = 4096


def exists(name: str) -> bool:
    """Whether the segment has a name; on macOS, which cannot list names, whether it can be attached."""
    try:
        Segment.attach(name).close()
    except PoolError:
        return False
    return True


@pytest.fixture
def name() -> Iterator[str]:
    """A name that no other run uses; the segment must be gone at the end."""
    name = fresh_name()
    yield name
    assert not exists(name)


def write_from_child(name: str, value: int) -> None:
    """Body of a spawned process: attach, write one byte, close."""
    with Segment.attach(name) as segment:
        segment.buffer[0] += value


def hold_until_parent_ends(name: str, ready: "multiprocessing.connection.Connection") -> None:
    """Body of a spawned process: attach, report, and end once the parent has gone."""
    segment = Segment.attach(name)
    ready.send("attached")
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join(30)
    segment.close()


def create_and_wait(name: str) -> None:
    """Body of a process that is to be killed: a segment, a spawned child that uses it, then wait for the signal."""
    segment = Segment.create(name, 4 * PAGE)
    segment.reserve(0, segment.nbytes)
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=hold_until_parent_ends, args=(name, sender))
    child.start()
    assert receiver.recv() == "attached"
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    signal.pause()


def run_here(code: str, **kwargs: object) -> "subprocess.Popen[str]":
    """Start a Python process that can import this module."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", code], text=True, env=env, **pipes, **kwargs)  # type: ignore[call-overload,no-any-return]


def test_attached_segment_shares_bytes(name: str) -> None:
    """What one mapping writes, another one reads, at different addresses."""
    with Segment.create(name, 3 * PAGE) as created, Segment.attach(name) as attached:
        created.buffer[PAGE : PAGE + 3] = (1, 2, 3)
        assert attached.buffer[PAGE : PAGE + 3].tolist() == [1, 2, 3]
        assert attached.nbytes >= 3 * PAGE
        assert attached.address != created.address


def test_spawned_process_attaches_and_leaves_the_segment(name: str) -> None:
    """A child that attaches and ends neither destroys the segment nor says anything."""
    context = multiprocessing.get_context("spawn")
    with Segment.create(name, PAGE) as segment:
        for value in (3, 4):
            child = context.Process(target=write_from_child, args=(name, value))
            child.start()
            child.join(60)
            assert child.exitcode == 0
        assert segment.buffer[0] == 7
        assert exists(name)


def test_foreign_process_attaches_without_destroying(name: str) -> None:
    """An observer that is no child of the creator, with a tracker of its own, leaves name and tracker alone."""
    with Segment.create(name, PAGE) as segment:
        process = run_here(f"import test_segment; test_segment.write_from_child({name!r}, 5)")
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out, err) == (0, "", "")
        assert segment.buffer[0] == 5
        Segment.attach(name).close()


def test_clean_stop_is_silent(name: str) -> None:
    """Create, spawn a child that attaches, unlink: no output of the resource tracker, nothing left."""
    code = f"""if True:
        import multiprocessing, test_segment
        from colibri_mp.shm.segment import Segment
        if __name__ == "__main__":
            with Segment.create({name!r}, 4096):
                child = multiprocessing.get_context("spawn").Process(
                    target=test_segment.write_from_child, args=({name!r}, 1)
                )
                child.start()
                child.join()
                assert child.exitcode == 0
        """
    process = run_here(code)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "", "")


@linux_only
def test_killed_creator_leaves_nothing(name: str) -> None:
    """After SIGKILL of the creator its child ends, and the tracker, which keeps stderr open till then, unlinks."""
    process = run_here(f"import test_segment; test_segment.create_and_wait({name!r})")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert exists(name)
    process.kill()
    process.communicate(timeout=30)
    assert not exists(name)


def test_stale_name_is_an_error_with_the_cure(name: str) -> None:
    """A second segment of the same name is refused; a name whose owner is dead can be removed, once."""
    with Segment.create(name, PAGE), pytest.raises(PoolError, match=r"already exists.*remove it"):
        Segment.create(name, PAGE)
    first = Segment.create(name, PAGE)
    assert unlink_stale(name)
    assert not unlink_stale(name)
    first.close()
    first.unlink()


def test_missing_segment_is_named(name: str) -> None:
    """Attaching to nothing names the segment."""
    with pytest.raises(PoolError, match=name):
        Segment.attach(name)


@pytest.mark.parametrize("run_id", ["x" * 30, "a/b"])
def test_bad_names_are_refused(run_id: str) -> None:
    """A name longer than macOS allows, or with a slash, is refused on every system."""
    with pytest.raises(PoolError, match="at most 30"):
        segment_name(run_id, 1)


@linux_only
def test_reserve_and_punch_move_pages(name: str) -> None:
    """Reserved pages are counted by the file system, punched ones go back and read as zero; others keep their bytes."""
    with Segment.create(name, 64 * PAGE) as segment:
        path = SHM_DIR / name
        assert path.stat().st_blocks == 0
        segment.reserve(0, 32 * PAGE)
        assert path.stat().st_blocks * 512 == 32 * PAGE
        segment.buffer[: 32 * PAGE] = 9
        segment.reserve(0, 32 * PAGE)
        assert segment.punch(8 * PAGE, 16 * PAGE)
        assert path.stat().st_blocks * 512 == 16 * PAGE
        assert segment.buffer[8 * PAGE : 24 * PAGE].max() == 0
        assert segment.buffer[: 8 * PAGE].min() == 9


@linux_only
def test_full_shm_is_an_error(name: str) -> None:
    """Pages beyond the size of /dev/shm are refused with what is free and the cure, and nothing is committed."""
    stats = os.statvfs(SHM_DIR)
    too_much = stats.f_blocks * stats.f_frsize + PAGE
    free_bytes = free_shm_bytes()
    assert free_bytes is not None
    assert 0 < free_bytes < too_much
    with Segment.create(name, too_much) as segment, pytest.raises(PoolError, match=r"is full.*are free.*--shm-size"):
        segment.reserve(0, too_much)


@linux_only
def test_other_reserve_errors_are_pool_errors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that is not lack of space is reported as it is."""

    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with Segment.create(name, PAGE) as segment, pytest.raises(PoolError, match="Operation not supported"):
        segment.reserve(0, PAGE)


def test_close_with_living_views_keeps_them_valid(name: str) -> None:
    """An array that outlives `close` can still be read, and the mapping goes with it."""
    segment = Segment.create(name, PAGE)
    segment.buffer[7] = 1
    view = segment.buffer[:8]
    segment.close()
    segment.unlink()
    assert view[7] == 1
    del view
    segment.close()
