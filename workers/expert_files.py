"""The checkpoint's files, open for reading experts: buffered through the page cache, or direct past it.

Every way in which a read can go wrong ends as a `ReadError` that names file, offset and bytes: a file that is shorter
than it was, one that has changed since it was opened, an error of the disk. What may pass by itself (EAGAIN, EINTR) is
tried again a few times.
"""

import errno
import mmap
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from colibri_mp.config import IoMode
from colibri_mp.errors import ReadError
from colibri_mp.workers.read_plan import ALIGNMENT, FileRange

MAX_RETRIES = 4
_HUGE_PAGE = 2 << 20


class FileState(NamedTuple):
    """What must not change while a file is in use."""

    nbytes: int
    mtime_ns: int


def buffer_bytes(nbytes: int) -> int:
    """Memory that an `aligned_buffer` of `nbytes` takes at most: whole pages, from 2 MiB on whole huge pages."""
    unit = ALIGNMENT if nbytes < _HUGE_PAGE else _HUGE_PAGE
    return -(-nbytes // unit) * unit


def aligned_buffer(nbytes: int) -> memoryview:
    """Zeroed memory of its own, starting on a page, from 2 MiB on on 2 MiB; pages are taken when touched."""
    nbytes = buffer_bytes(nbytes)
    if nbytes < _HUGE_PAGE:
        return memoryview(mmap.mmap(-1, nbytes))
    pages = mmap.mmap(-1, nbytes + _HUGE_PAGE - ALIGNMENT)
    start = -np.frombuffer(pages, np.uint8, count=1).ctypes.data % _HUGE_PAGE
    return memoryview(pages)[start : start + nbytes]


class ExpertFiles:
    """Open files of a checkpoint. `mode` is what reads really do, `reason` why; threads may read at the same time."""

    def __init__(self, paths: Sequence[Path | str], mode: IoMode) -> None:
        """Open all of `paths`. Falls back to buffered reads, saying so in `reason`, where direct ones are refused.

        Raises `ReadError` if a file cannot be opened.
        """
        self.paths = [Path(path) for path in paths]
        self._fds: list[int] = []
        self.mode, self.reason = self._open(mode)
        self._states = [_state(fd) for fd in self._fds]

    def read(self, wanted: FileRange, scratch: memoryview) -> int:
        """Read a range into `scratch`; its first byte lands at `scratch_offset + offset % 4096`. Returns bytes read.

        Direct reads cover the whole blocks around the range, so up to 4095 bytes at either side of it are written too.
        """
        lead = wanted.offset % ALIGNMENT
        needed = lead + wanted.nbytes
        if self.mode == "direct":
            target = scratch[wanted.scratch_offset : wanted.scratch_offset + -(-needed // ALIGNMENT) * ALIGNMENT]
            nbytes = self._read_fully(wanted, wanted.offset - lead, target, needed)
        else:
            target = scratch[wanted.scratch_offset + lead : wanted.scratch_offset + needed]
            nbytes = self._read_fully(wanted, wanted.offset, target, wanted.nbytes)
        self._check_unchanged(wanted)
        return nbytes

    def close(self) -> None:
        """Close every file; idempotent."""
        while self._fds:
            os.close(self._fds.pop())

    def _open(self, mode: IoMode) -> tuple[IoMode, str]:
        if mode == "buffered":
            self._open_all(0)
            return "buffered", "as asked"
        return self._open_direct()

    if sys.platform == "linux":

        def _open_direct(self) -> tuple[IoMode, str]:
            try:
                self._open_all(os.O_DIRECT)
                probe = aligned_buffer(ALIGNMENT)
                for fd in self._fds:
                    os.preadv(fd, [probe], 0)
            except (OSError, ReadError) as exc:
                self.close()
                self._open_all(0)
                return "buffered", f"direct reads are refused here: {exc}"
            return "direct", "as asked"

    elif sys.platform == "darwin":

        def _open_direct(self) -> tuple[IoMode, str]:
            """F_NOCACHE stands in for O_DIRECT: what is read stays out of the page cache. Not tried on macOS."""
            import fcntl

            self._open_all(0)
            for fd in self._fds:
                fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)
            return "direct", "as asked (F_NOCACHE)"

    else:

        def _open_direct(self) -> tuple[IoMode, str]:
            self._open_all(0)
            return "buffered", f"no direct reads known for {sys.platform}"

    def _open_all(self, flags: int) -> None:
        for path in self.paths:
            try:
                self._fds.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags))
            except OSError as exc:
                self.close()
                raise ReadError(f"cannot open {path}: {exc.strerror}") from exc
            if sys.platform == "linux":  # reading ahead of one expert fetches others: a quarter more bytes, measured
                os.posix_fadvise(self._fds[-1], 0, 0, os.POSIX_FADV_RANDOM)

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
        fd = self._fds[wanted.file_idx]
        for attempt in range(MAX_RETRIES):
            try:
                return os.preadv(fd, [target], offset)
            except OSError as exc:
                transient = exc.errno in (errno.EAGAIN, errno.EINTR)
                if not transient or attempt == MAX_RETRIES - 1:
                    raise ReadError(
                        f"{self._describe(wanted)}: {exc.strerror} ({errno.errorcode.get(exc.errno or 0)})"
                    ) from exc
            time.sleep(0.001 * 4**attempt)
        raise AssertionError("unreachable")

    def _check_unchanged(self, wanted: FileRange) -> None:
        opened, now = self._states[wanted.file_idx], _state(self._fds[wanted.file_idx])
        if now != opened:
            raise ReadError(
                f"{self._describe(wanted)}: the file has changed since it was opened ({opened.nbytes} bytes then, "
                f"{now.nbytes} now); stop the cluster, restore the checkpoint, launch again"
            )

    def _describe_end(self, wanted: FileRange, end: int) -> str:
        opened = self._states[wanted.file_idx]
        return (
            f"{self._describe(wanted)}: the file ends at {end}, it had {opened.nbytes} bytes when it was opened; "
            f"it was truncated: restore the checkpoint and launch again"
        )

    def _describe(self, wanted: FileRange) -> str:
        path = self.paths[wanted.file_idx]
        return f"reading {wanted.nbytes} bytes at offset {wanted.offset} of {path} failed"


def _state(fd: int) -> FileState:
    stats = os.fstat(fd)
    return FileState(stats.st_size, stats.st_mtime_ns)
