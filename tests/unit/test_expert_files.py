"""Files open for reading: modes, errors that are named, changes of a file while it is in use."""

import errno
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from colibri_mp.config import IoMode
from colibri_mp.errors import ReadError
from colibri_mp.workers import expert_files
from colibri_mp.workers.expert_files import ExpertFiles, aligned_buffer
from colibri_mp.workers.read_plan import ALIGNMENT, FileRange

SIZE = 40_000
CONTENT = bytes(range(256)) * (SIZE // 256 + 1)
WANTED = FileRange(0, 10_001, 9_000, 4096)
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="O_DIRECT and its like are Linux")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file whose bytes tell where they lie."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(CONTENT[:SIZE])
    return path


@pytest.fixture
def buffer() -> memoryview:
    """Room for what the tests read."""
    return aligned_buffer(64 << 10)


@pytest.fixture(autouse=True)
def no_time_to_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of the tests are not being written while they are looked at."""
    monkeypatch.setattr(expert_files, "SETTLE_S", 0.0)


def content_of(wanted: FileRange, buffer: memoryview) -> bytes:
    """What has been read for a range."""
    start = wanted.target_offset + wanted.offset % ALIGNMENT
    return bytes(buffer[start : start + wanted.nbytes])


@pytest.mark.parametrize("mode", ["buffered", "direct", "drop"])
@pytest.mark.parametrize(("offset", "nbytes"), [(0, 1), (4096, 4096), (10_001, 9_000), (39_000, 1_000), (4095, 2)])
def test_ranges_land_at_their_place(file: Path, buffer: memoryview, mode: IoMode, offset: int, nbytes: int) -> None:
    """In every mode the bytes of a range lie at its target, shifted by its offset in the block."""
    wanted = FileRange(0, offset, nbytes, 8192)
    with closing(ExpertFiles([file], mode)) as files:
        assert files.read(wanted, buffer) >= nbytes
        assert files.doubt([wanted]) is None
    assert content_of(wanted, buffer) == CONTENT[offset : offset + nbytes]


@linux_only
def test_direct_reads_cover_whole_blocks(file: Path, buffer: memoryview) -> None:
    """Direct mode asks for the blocks around a range, up to the end of the file; others for the range."""
    for mode, nbytes in (("direct", 5 * 4096 - 2 * 4096), ("buffered", 9_000)):
        with closing(ExpertFiles([file], mode)) as files:  # type: ignore[arg-type]
            if files.mode != mode:
                pytest.skip(files.refusal)
            assert files.read(WANTED, buffer) == nbytes


@linux_only
def test_drop_gives_the_pages_back(file: Path, buffer: memoryview) -> None:
    """After a buffered read the page cache has the range, after a dropping one it has not."""
    os.sync()
    with closing(ExpertFiles([file], "buffered")) as buffered, closing(ExpertFiles([file], "drop")) as dropping:
        buffered.forget_all()  # pages that were written lie in larger pieces, which go only whole
        buffered.read(WANTED, buffer)
        if not buffered.is_cached(WANTED):
            pytest.skip("this file system does not say what it has cached")
        dropping.read(WANTED, buffer)
        assert not buffered.is_cached(WANTED)


@linux_only
def test_refused_direct_reads_fall_back_with_a_reason(
    file: Path, buffer: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system without O_DIRECT gives buffered reads, and says so."""
    really_open = os.open

    def refuse_direct(path: Path, flags: int, *args: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return really_open(path, flags, *args)

    monkeypatch.setattr(os, "open", refuse_direct)
    with closing(ExpertFiles([file], "direct")) as files:
        assert files.mode == "buffered"
        assert "Invalid argument" in files.refusal
        files.read(WANTED, buffer)
    assert content_of(WANTED, buffer) == CONTENT[10_001:19_001]


def test_missing_file_is_named(file: Path) -> None:
    """A file that cannot be opened is an error at start; the others are closed again."""
    before = num_fds()
    for mode in ("buffered", "direct"):
        with pytest.raises(ReadError, match=r"cannot open .*gone\.safetensors: No such file"):
            ExpertFiles([file, file.with_name("gone.safetensors")], mode)  # type: ignore[arg-type]
    assert num_fds() == before


def num_fds() -> int:
    """Open file descriptors of this process."""
    return len(list(Path("/dev/fd").iterdir()))


# ── errors of the disk ──────────────────────────────────────────────────────────────────────────────────────────


class FlakyReads:
    """Stands in for os.preadv: fails as told for the first reads, or returns short."""

    def __init__(self, errors: list[int], most_bytes: int = 1 << 30) -> None:
        self.errors, self.most_bytes = errors, most_bytes
        self.preadv = os.preadv

    def __call__(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        if self.errors:
            code = self.errors.pop()
            raise OSError(code, os.strerror(code))
        return self.preadv(fd, [buffers[0][: self.most_bytes]], offset)


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EIO, errno.ENOMEM])
def test_errors_that_pass_are_retried_and_short_reads_continued(
    file: Path, buffer: memoryview, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """An error twice and reads of 1000 bytes at most: the bytes are right all the same, and the retries are counted."""
    with closing(ExpertFiles([file], "buffered")) as files:
        monkeypatch.setattr(expert_files.os, "preadv", FlakyReads([code, code], most_bytes=1000))
        files.read(WANTED, buffer)
        assert files.num_retries == 2
    assert content_of(WANTED, buffer) == CONTENT[10_001:19_001]


@pytest.mark.parametrize(("code", "num_attempts"), [(errno.EIO, expert_files.MAX_ATTEMPTS), (errno.ENXIO, 1)])
def test_error_that_stays_is_named(
    file: Path, buffer: memoryview, monkeypatch: pytest.MonkeyPatch, code: int, num_attempts: int
) -> None:
    """After a bounded number of attempts, or at once where that is of no use: file, offset, bytes and the system's word."""
    flaky = FlakyReads([code] * 9)
    with closing(ExpertFiles([file], "buffered")) as files:
        monkeypatch.setattr(expert_files.os, "preadv", flaky)
        with pytest.raises(
            ReadError, match=rf"9000 bytes at offset 10001 of {file} failed: .* \({errno.errorcode[code]}\)"
        ):
            files.read(WANTED, buffer)
    assert len(flaky.errors) == 9 - num_attempts


# ── files that change while they are open ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mode", ["buffered", "direct"])
def test_cut_file_keeps_what_lies_before_the_cut(
    file: Path, buffer: memoryview, mode: IoMode, caplog: pytest.LogCaptureFixture
) -> None:
    """Behind the end of a truncated file: a named error. Before it: the bytes, beyond doubt, and one line in the log."""
    behind, across = WANTED._replace(offset=30_000), WANTED._replace(offset=19_000)
    with closing(ExpertFiles([file], mode)) as files, caplog.at_level(logging.WARNING):
        os.truncate(file, 20_000)
        for wanted in (behind, across):
            with pytest.raises(ReadError, match=rf"of {file} failed: the file ends at .*truncated"):
                files.read(wanted, buffer)
        for _ in range(2):
            files.read(WANTED, buffer)
            assert files.doubt([WANTED]) is None
        assert content_of(WANTED, buffer) == CONTENT[10_001:19_001]
        os.truncate(file, 19_500)
        assert files.doubt([WANTED]) is None
    assert [record.getMessage().split(" was ")[1][:36] for record in caplog.records] == [
        "cut from 40000 to 20000 bytes while ",
        "cut from 40000 to 19500 bytes while ",
    ]


def rewrite(file: Path) -> None:
    """The same size, other contents: as a new download in place."""
    file.write_bytes(CONTENT[1 : SIZE + 1])


def touch(file: Path) -> None:
    """The same bytes; that cannot be told from others."""
    os.utime(file, ns=(1, 1))


def grow(file: Path) -> None:
    """More bytes at the end."""
    file.write_bytes(CONTENT[:SIZE] + b"more")


def replace_by_shorter(file: Path) -> None:
    """A finished, shorter file with a head of its own."""
    file.write_bytes(CONTENT[1:30_000])


def cut_then_restore(file: Path) -> None:
    """Cut, and the rest written anew by somebody."""
    os.truncate(file, 20_000)
    with file.open("ab") as end:
        end.write(bytes(SIZE - 20_000))
    os.utime(file, ns=(1, 1))


@pytest.mark.parametrize("change", [rewrite, touch, grow, replace_by_shorter, cut_then_restore])
def test_file_that_was_written_to_is_in_doubt(file: Path, buffer: memoryview, change: object) -> None:
    """Whatever it holds now: bytes can be read, and the doubt names the file and both sizes."""
    assert callable(change)
    with closing(ExpertFiles([file], "buffered")) as files:
        change(file)
        files.read(WANTED, buffer)
        assert f"of {file} failed: the file has been written to since it was opened (40000 bytes" in str(
            files.doubt([WANTED])
        )


def test_file_that_is_being_replaced_is_in_doubt(
    file: Path, buffer: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cp` cuts the file and fills it again: the head is the same, but the size does not stay."""
    monkeypatch.setattr(expert_files, "SETTLE_S", 0.2)
    with closing(ExpertFiles([file], "buffered")) as files, file.open("r+b") as copying:
        copying.truncate(20_000)
        filling = threading.Timer(0.05, lambda: os.truncate(file, 25_000))
        filling.start()
        files.read(WANTED, buffer)
        assert files.doubt([WANTED]) is not None
        filling.join()
        assert files.doubt([WANTED]) is not None  # it has come to rest, but nobody knows what was filled in


def test_doubt_stays_once_a_cut_file_changes_again(file: Path, buffer: memoryview) -> None:
    """After the cut was accepted, a write makes the file one that cannot be trusted."""
    with closing(ExpertFiles([file], "buffered")) as files:
        os.truncate(file, 30_000)
        files.read(WANTED, buffer)
        assert files.doubt([WANTED]) is None
        os.truncate(file, SIZE)
        assert files.doubt([WANTED]) is not None


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No open file may be left."""
    before = num_fds()
    yield
    assert num_fds() == before
