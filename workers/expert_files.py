"""One copy of the checkpoint's files, open for reading experts: through the page cache, or past it.

    buffered   through the page cache, which may have the bytes already and keeps them for the next time
    drop       the same, and the pages are given back right after
    direct     past it (O_DIRECT; on macOS F_NOCACHE): whole blocks of 4096 bytes, straight into our memory

Every way in which a read can go wrong ends as a `ReadError` that names file, offset and bytes. What may pass by itself is
tried again a few times. A file that is no longer what was opened is told apart: one that has only been cut still has the
bytes before the cut; of one that has been written to nothing can be trusted (`doubt`), unless checksums say otherwise.
"""

import errno
import logging
import mmap
import os
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from colibri_mp.config import IoMode
from colibri_mp.errors import ReadError
from colibri_mp.workers.read_plan import ALIGNMENT, FileRange

TRANSIENT = (errno.EAGAIN, errno.EINTR, errno.EIO, errno.ENOMEM, errno.ETIMEDOUT)
MAX_ATTEMPTS = 4
SETTLE_S = 0.1  # a file that keeps its size for so long is not being written anew
HEAD_BYTES = ALIGNMENT  # of a safetensors file: size of the header, names and places of the first tensors
_HUGE_PAGE = 2 << 20
_SMALL_BUFFER = _HUGE_PAGE // 4
_log = logging.getLogger(__name__)


class FileState(NamedTuple):
    """What must not change while a file is in use."""

    nbytes: int
    mtime_ns: int


class FileChanged(ReadError):
    """The file is not the one that was opened: the bytes that were read may be others than they were."""


@dataclass(slots=True)
class _OpenFile:
    """`trusted`: the last state in which the file had the bytes of the opened one, as far as it reached; None: no more."""

    path: Path
    fd: int
    opened: FileState
    head: bytes
    trusted: FileState | None = field(init=False)

    def __post_init__(self) -> None:
        self.trusted = self.opened


def buffer_bytes(nbytes: int) -> int:
    """Memory that an `aligned_buffer` of `nbytes` takes at most: whole huge pages, small ones whole pages."""
    unit = ALIGNMENT if nbytes <= _SMALL_BUFFER else _HUGE_PAGE
    return -(-nbytes // unit) * unit


def aligned_buffer(nbytes: int) -> memoryview:
    """Zeroed memory of its own, in huge pages where the system has them; taken when touched.

    A disk fills one piece of 2 MiB faster than 512 pages that lie scattered in the memory: 2.5 times on a virtual one.
    """
    nbytes = buffer_bytes(nbytes)
    if nbytes <= _SMALL_BUFFER:
        return memoryview(mmap.mmap(-1, max(1, nbytes)))[:nbytes]
    pages = mmap.mmap(-1, nbytes + _HUGE_PAGE - ALIGNMENT, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        pages.madvise(mmap.MADV_HUGEPAGE)
    start = -np.frombuffer(pages, np.uint8, count=1).ctypes.data % _HUGE_PAGE
    return memoryview(pages)[start : start + nbytes]


class ExpertFiles:
    """Open files of a checkpoint. `mode` is what reads really do, `refusal` why if that is not what was asked.

    Threads may read at the same time. `num_retries` counts reads that were tried again.
    """

    def __init__(self, paths: Sequence[Path | str], mode: IoMode) -> None:
        """Open all of `paths`. Falls back to buffered reads, saying so in `refusal`, where direct ones are refused.

        Raises `ReadError` if a file cannot be opened.
        """
        self.paths = [Path(path) for path in paths]
        self.num_retries = 0
        self._lock = threading.Lock()
        self._files: list[_OpenFile] = []
        self.mode, self.refusal = self._open(mode)

    def read(self, wanted: FileRange, buffer: memoryview) -> int:
        """Read a range into `buffer`; its first byte lands at `target_offset + offset % 4096`. Returns bytes read.

        Direct reads cover the whole blocks around the range, so up to 4095 bytes at either side of it are written too.
        """
        lead = wanted.offset % ALIGNMENT
        needed = lead + wanted.nbytes
        if self.mode == "direct":
            target = buffer[wanted.target_offset : wanted.target_offset + -(-needed // ALIGNMENT) * ALIGNMENT]
            return self._read_fully(wanted, wanted.offset - lead, target, needed)
        target = buffer[wanted.target_offset + lead : wanted.target_offset + needed]
        nbytes = self._read_fully(wanted, wanted.offset, target, wanted.nbytes)
        if self.mode == "drop":
            self.forget(wanted)
        return nbytes

    def doubt(self, ranges: Iterable[FileRange]) -> FileChanged | None:
        """Why the bytes that have just been read from `ranges` may be wrong; None if their files are as they were.

        A file that has become shorter and is otherwise left alone is as it was, as far as it goes.
        """
        for wanted in ranges:
            file = self._files[wanted.file_idx]
            if (now := _state(file.fd)) != file.opened and not self._is_only_cut(file):
                return FileChanged(
                    f"{self._describe(wanted)}: the file has been written to since it was opened "
                    f"({file.opened.nbytes} bytes then, {now.nbytes} now), and no checksum is there to tell whether these "
                    f"are still right; stop the cluster, restore the checkpoint, launch again"
                )
        return None

    if sys.platform == "linux":

        def forget(self, wanted: FileRange) -> None:
            """Give the pages of a range back to the system: the next buffered read goes to the disk."""
            start = wanted.offset // ALIGNMENT * ALIGNMENT
            end = -(-(wanted.offset + wanted.nbytes) // ALIGNMENT) * ALIGNMENT
            os.posix_fadvise(self._files[wanted.file_idx].fd, start, end - start, os.POSIX_FADV_DONTNEED)

        def forget_all(self) -> None:
            """The same for all pages of all files."""
            for file in self._files:
                os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)

        def advise(self, wanted: FileRange) -> None:
            """Have the system read a range into its page cache, without waiting for it."""
            os.posix_fadvise(self._files[wanted.file_idx].fd, wanted.offset, wanted.nbytes, os.POSIX_FADV_WILLNEED)

        def is_cached(self, wanted: FileRange) -> bool:
            """Whether the page cache has the middle of a range; False where the file system does not tell.

            Asking has the system read that one page.
            """
            middle = wanted.offset + wanted.nbytes // 2
            try:
                return os.preadv(self._files[wanted.file_idx].fd, [bytearray(1)], middle, os.RWF_NOWAIT) > 0
            except OSError:
                return False

    else:

        def forget(self, wanted: FileRange) -> None:
            """Nothing: this system does not take such advice."""

        def forget_all(self) -> None:
            """Nothing either."""

        def advise(self, wanted: FileRange) -> None:
            """Nothing either."""

        def is_cached(self, _wanted: FileRange) -> bool:
            """Whether the page cache has the middle of a range: this system does not tell, so it must be supposed."""
            return True

    def close(self) -> None:
        """Close every file; idempotent."""
        while self._files:
            os.close(self._files.pop().fd)

    # ── opening ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _open(self, mode: IoMode) -> tuple[IoMode, str]:
        if mode == "direct":
            return self._open_direct()
        self._open_all(0)
        return mode, ""

    if sys.platform == "linux":

        def _open_direct(self) -> tuple[IoMode, str]:
            try:
                self._open_all(os.O_DIRECT)
            except ReadError as exc:
                self._open_all(0)
                return "buffered", f"direct reads are refused here: {exc}"
            return "direct", ""

    elif sys.platform == "darwin":

        def _open_direct(self) -> tuple[IoMode, str]:
            """F_NOCACHE stands in for O_DIRECT: what is read stays out of the page cache. Not tried on macOS."""
            import fcntl

            self._open_all(0)
            for file in self._files:
                fcntl.fcntl(file.fd, fcntl.F_NOCACHE, 1)
            return "direct", ""

    else:

        def _open_direct(self) -> tuple[IoMode, str]:
            self._open_all(0)
            return "buffered", f"no direct reads known for {sys.platform}"

    def _open_all(self, flags: int) -> None:
        try:
            for path in self.paths:
                self._files.append(_open_file(path, flags))
        except OSError as exc:
            self.close()
            raise ReadError(f"cannot open {path}: {exc.strerror}") from exc

    # ── reading ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _read_fully(self, wanted: FileRange, offset: int, target: memoryview, needed: int) -> int:
        """Fill at least the first `needed` bytes of `target`; a read may return less than it was asked for."""
        done = 0
        while done < needed:
            nbytes = self._read_once(wanted, offset + done, target[done:])
            done += nbytes
            if nbytes == 0 or (self.mode == "direct" and done < needed and done % ALIGNMENT):
                raise ReadError(self._describe_end(wanted, offset + done))
        return done

    def _read_once(self, wanted: FileRange, offset: int, target: memoryview) -> int:
        fd = self._files[wanted.file_idx].fd
        for attempt in range(MAX_ATTEMPTS):
            try:
                return os.preadv(fd, [target], offset)
            except OSError as exc:
                if exc.errno not in TRANSIENT or attempt == MAX_ATTEMPTS - 1:
                    raise ReadError(
                        f"{self._describe(wanted)}: {exc.strerror} ({errno.errorcode.get(exc.errno or 0)})"
                        + (f", {attempt + 1} times" if attempt else "")
                    ) from exc
            with self._lock:
                self.num_retries += 1
            time.sleep(0.001 * 4**attempt)
        raise AssertionError("unreachable")

    # ── changes of a file ───────────────────────────────────────────────────────────────────────────────────────

    def _is_only_cut(self, file: _OpenFile) -> bool:
        """Whether a file that is not as it was opened still has, as far as it reaches, the bytes that it had then."""
        with self._lock:
            now = _state(file.fd)
            if file.trusted is not None and now != file.trusted:
                is_cut = now.nbytes < file.trusted.nbytes and _has_settled(file, now)
                file.trusted = now if is_cut else None
                if is_cut:
                    _log.warning(
                        "%s was cut from %d to %d bytes while in use; the experts before that are still read",
                        file.path, file.opened.nbytes, now.nbytes,
                    )  # fmt: skip
            return file.trusted is not None

    def _describe_end(self, wanted: FileRange, end: int) -> str:
        file = self._files[wanted.file_idx]
        return (
            f"{self._describe(wanted)}: the file ends at {end}, it had {file.opened.nbytes} bytes when it was opened; "
            f"it was truncated: restore the checkpoint and launch again"
        )

    def _describe(self, wanted: FileRange) -> str:
        path = self._files[wanted.file_idx].path
        return f"reading {wanted.nbytes} bytes at offset {wanted.offset} of {path} failed"


def _open_file(path: Path, flags: int) -> _OpenFile:
    """Open a file and read its head, so that a file system which refuses such reads does so here; raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        if sys.platform == "linux":  # reading ahead of one expert fetches others: a quarter more bytes, measured
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        return _OpenFile(path, fd, _state(fd), _head(fd))
    except OSError:
        os.close(fd)
        raise


def _has_settled(file: _OpenFile, now: FileState) -> bool:
    """Whether a file that has become shorter is the old one cut, and not a new one that is being written in its place.

    A finished safetensors file that is shorter has another head; an unfinished one grows.
    """
    time.sleep(SETTLE_S)
    return _head(file.fd) == file.head[: now.nbytes] and _state(file.fd) == now


def _head(fd: int) -> bytes:
    """The first bytes of a file, also of one that is open for direct reads."""
    buffer = aligned_buffer(HEAD_BYTES)
    return bytes(buffer[: os.preadv(fd, [buffer], 0)])


def _state(fd: int) -> FileState:
    stats = os.fstat(fd)
    return FileState(stats.st_size, stats.st_mtime_ns)
