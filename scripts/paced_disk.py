"""A disk of a chosen speed, for benchmarks: reads come from wherever the system has them, and are handed over when it would have had them.

It serves one request after the other, of all processes that name the same file. (A control group's throttle was tried first. It
counts bytes in stretches of 20 to 100 ms: a token's reads pass at full speed until a stretch is used up.)

A benchmark spawns its workers in `disk_of`, and calls `pace_this_worker` at its top level, where they come by too.
"""

import fcntl
import os
import struct
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from colibri_mp.workers.copies import CopyRead, ExpertCopies

_SPEED, _FILE = "COLIBRI_BENCH_BYTES_PER_S", "COLIBRI_BENCH_DISK"
_MOMENT = struct.Struct("d")


class PacedDisk:
    """Serves one request after the other, at `bytes_per_s`. `file` holds when it is free, by the clock that all processes share."""

    def __init__(self, file: Path, bytes_per_s: int) -> None:
        self._file, self._bytes_per_s = file, bytes_per_s

    def wait_for(self, nbytes: int) -> None:
        """Return when a request that is made now would be done."""
        with self._file.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            (free_at,) = _MOMENT.unpack(file.read(_MOMENT.size))
            done_at = max(free_at, time.monotonic()) + nbytes / self._bytes_per_s
            file.seek(0)
            file.write(_MOMENT.pack(done_at))
        time.sleep(max(0.0, done_at - time.monotonic()))


@contextmanager
def disk_of(bytes_per_s: int) -> Iterator[None]:
    """Workers that are spawned inside have such a disk; 0: the disk as it is."""
    if not bytes_per_s:
        yield
        return
    with tempfile.NamedTemporaryFile(prefix="paced-disk-") as file:
        file.write(_MOMENT.pack(0.0))
        file.flush()
        os.environ[_SPEED], os.environ[_FILE] = str(bytes_per_s), file.name
        try:
            yield
        finally:
            del os.environ[_SPEED], os.environ[_FILE]


def pace_this_worker() -> None:
    """Every read of an expert in this process takes as long as the disk needs for it, if there is one."""
    if _SPEED not in os.environ:
        return
    disk, read = PacedDisk(Path(os.environ[_FILE]), int(os.environ[_SPEED])), ExpertCopies.read

    def paced(self: ExpertCopies, *args: Any) -> CopyRead:
        found = read(self, *args)
        disk.wait_for(found.nbytes)
        return found

    ExpertCopies.read = paced  # type: ignore[method-assign]
