"""Two copies of a checkpoint: reads are split by weight, and each stands in for the other."""

import errno
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from colibri_mp.errors import ReadError
from colibri_mp.workers import expert_files
from colibri_mp.workers.copies import Copy, ExpertCopies
from colibri_mp.workers.expert_files import aligned_buffer
from colibri_mp.workers.read_plan import FileRange

CONTENT = os.urandom(100_000)
WANTED = FileRange(1, 50_000, 1000, 0)


class Copies:
    """Two folders of two files, and which of them each read went to."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folders = [folder / "first", folder / "second"]
        for place in self.folders:
            place.mkdir()
            for name in ("a", "b"):
                (place / name).write_bytes(CONTENT)
        self.used: list[str] = []
        self.broken: set[Path] = set()
        self._preadv = os.preadv
        self._monkeypatch = monkeypatch

    @contextmanager
    def open(self, *weights: float) -> Iterator[ExpertCopies]:
        """Open as many copies as weights."""
        copies = ExpertCopies(
            [
                Copy((place / "a", place / "b"), weight=weight)
                for place, weight in zip(self.folders, weights, strict=False)
            ]
        )
        with self._monkeypatch.context() as patch:
            patch.setattr(expert_files.os, "preadv", self._read)
            yield copies
        copies.close()

    def _read(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        path = Path(f"/dev/fd/{fd}").resolve()
        self.used.append(path.parent.name)
        if path in self.broken:
            raise OSError(errno.ENXIO, "No such device")
        return self._preadv(fd, buffers, offset)


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Copies:
    """Two whole copies."""
    return Copies(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("weights", "share"), [((3.0, 1.0), 0.75), ((1.0, 1.0), 0.5), ((1.0, 9.0), 0.1), ((2.0, 0.0), 1.0)]
)
def test_bytes_are_split_by_weight(copies: Copies, weights: tuple[float, ...], share: float) -> None:
    """After any number of reads, of whatever sizes, each copy has given its share of the bytes, to within one read."""
    buffer = aligned_buffer(60_000)
    given = {"first": 0, "second": 0}
    with copies.open(*weights) as opened:
        for i in range(40):
            nbytes = 500 + 997 * (i % 7)
            opened.read([FileRange(i % 2, 1000 * i, nbytes, 0)], buffer)
            given[copies.used[-1]] += nbytes
            total = sum(given.values())
            assert abs(given["first"] - share * total) <= 500 + 997 * 6
    assert opened.num_fallbacks == 0


def test_shares_are_stated(copies: Copies) -> None:
    """How each copy is read and how much of it, in words."""
    with copies.open(3.0, 1.0) as opened:
        first, second = opened.description.split("; ")
        assert first == f"75% of them from {copies.folders[0]}, buffered (as asked)"
        assert second == f"25% of them from {copies.folders[1]}, buffered (as asked)"
    with copies.open(1.0, 0.0) as opened:
        assert "; if the other copy fails from" in opened.description
    with copies.open(1.0) as opened:
        assert opened.description == "buffered (as asked)"


def test_error_of_one_copy_is_served_by_the_other(copies: Copies, caplog: pytest.LogCaptureFixture) -> None:
    """The bytes come, the fallback is counted, it is said once for each file, and that file is avoided from then on."""
    buffer = aligned_buffer(60_000)
    copies.broken = {copies.folders[0] / "b"}
    with copies.open(1.0, 0.0) as opened, caplog.at_level(logging.WARNING):
        for _ in range(3):
            opened.read([WANTED], buffer)
            assert bytes(buffer[848:1848]) == CONTENT[50_000:51_000]
        assert copies.used == ["first", "second", "second", "second"]
        opened.read([WANTED._replace(file_idx=0)], buffer)
        assert copies.used[-1] == "first"
        assert opened.num_fallbacks == 1
        [record] = caplog.records
        assert f"{copies.folders[0] / 'b'} failed: No such device" in record.getMessage()
        copies.broken.add(copies.folders[1] / "b")
        with pytest.raises(ReadError, match=rf"{copies.folders[0] / 'b'} failed"):
            opened.read([WANTED], buffer)


def test_changed_file_of_one_copy_is_served_by_the_other(copies: Copies) -> None:
    """A file that was written to is in doubt only if no copy is beyond it."""
    buffer = aligned_buffer(60_000)
    with copies.open(1.0, 0.0) as opened:
        (copies.folders[0] / "b").write_bytes(bytes(100_000))
        assert opened.read([WANTED], buffer).doubt is None
        assert bytes(buffer[848:1848]) == CONTENT[50_000:51_000]
        os.utime(copies.folders[1] / "b", ns=(1, 1))
        assert opened.read([WANTED], buffer).doubt is not None


def test_missing_second_copy_leaves_nothing_open(copies: Copies) -> None:
    """The first copy's files are closed again."""
    (copies.folders[1] / "b").unlink()
    before = len(list(Path("/dev/fd").iterdir()))
    with pytest.raises(ReadError, match="cannot open"), copies.open(1.0, 1.0):
        pass
    assert len(list(Path("/dev/fd").iterdir())) == before


def test_threads_share_the_copies(copies: Copies) -> None:
    """Reads of several threads at once are split as exactly."""
    with copies.open(3.0, 1.0) as opened:

        def work() -> None:
            buffer = aligned_buffer(8192)
            for _ in range(50):
                opened.read([WANTED], buffer)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert copies.used.count("first") == 150
