"""One shared-memory segment: named pages that outlive the process that fills them.

    supervisor  create ──────────────────────────────▶ unlink       owns the name; its resource tracker knows it
    worker            attach ── reserve, punch ── close             owns the contents
    observer              attach ── read ── close

This is the only user of `multiprocessing.shared_memory`. What it adds:

- **Names.** Only the creator's resource tracker knows a name, so an attached process that ends does not destroy the
  segment. When the creator is killed, its tracker (a process of its own, held open by the spawned children too)
  unlinks the name as soon as the last child has gone.
- **Pages.** `create` only reserves addresses. On Linux a page that does not fit in /dev/shm is a SIGBUS for whoever
  touches it, therefore `reserve` commits pages first and turns a full /dev/shm into a `PoolError`; `punch` gives them
  back. macOS backs its segments with the compressor and swap, has no such limit, and `reserve` has nothing to do there;
  it cannot take pages out of a segment either, `punch` only advises (not tried on macOS).

It knows nothing of what the bytes mean: see `layout` and `pool`.
"""

import contextlib
import errno
import mmap
import os
import sys
import threading
from collections.abc import Iterator, Sized
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from colibri_mp.errors import PoolError
from colibri_mp.shm.pages import punch_hole

SHM_DIR = Path("/dev/shm")  # noqa: S108 - where Linux keeps the files behind shm_open
MAX_NAME_CHARS = 30  # macOS: PSHMNAMLEN is 31 with the leading slash
NAME_PREFIX = "colibri-"

_tracker_lock = threading.Lock()


class _Mapping(SharedMemory):
    """`SharedMemory` whose `close` leaves the mapping alone while arrays still view it (no noise in `__del__`)."""

    def close(self) -> None:
        with contextlib.suppress(BufferError):
            super().close()


def segment_name(run_id: str, worker_id: int) -> str:
    """Name of a worker's segment, `colibri-<run id>-<worker>`; at most 30 characters, the limit of macOS."""
    name = f"{NAME_PREFIX}{run_id}-{worker_id}"
    if len(name) > MAX_NAME_CHARS or "/" in name:
        raise PoolError(f"segment name {name!r} must have at most {MAX_NAME_CHARS} characters and no '/'")
    return name


def unlink_stale(name: str) -> bool:
    """Remove the name of a segment whose creator is dead (the caller knows that it is); False if there is none."""
    try:
        if sys.platform == "linux":
            (SHM_DIR / name).unlink()
            resource_tracker.register(f"/{name}", "shared_memory")  # balanced, whether it was known before or not
            resource_tracker.unregister(f"/{name}", "shared_memory")
        else:
            stale = _Mapping(name)
            stale.close()
            stale.unlink()
    except FileNotFoundError:
        return False
    return True


def free_shm_bytes() -> int | None:
    """Bytes that /dev/shm can still take; None where segments have no limit of their own (macOS)."""
    if sys.platform != "linux":
        return None
    stats = os.statvfs(SHM_DIR)
    return stats.f_bavail * stats.f_frsize


class Segment:
    """A mapped segment. Use `create` or `attach`; `close` unmaps it, `unlink` (creator only) removes its name."""

    def __init__(self, mapping: _Mapping, *, created: bool) -> None:
        self._mapping = mapping
        self._created = created
        self._fd = os.open(SHM_DIR / mapping.name, os.O_RDWR | os.O_CLOEXEC) if sys.platform == "linux" else -1
        assert mapping.buf is not None
        self._bytes: NDArray[np.uint8] | None = np.frombuffer(mapping.buf, dtype=np.uint8)
        self.name = mapping.name
        self.nbytes = mapping.size

    @classmethod
    def create(cls, name: str, nbytes: int) -> "Segment":
        """A new zero-filled segment without pages; this process must `unlink` it. `PoolError` if the name exists."""
        try:
            return cls(_Mapping(name, create=True, size=nbytes), created=True)
        except FileExistsError as exc:
            raise PoolError(
                f"shared-memory segment {name!r} already exists: it belongs to another run, or to one that was killed; "
                f"if no such run is alive, remove it ({SHM_DIR / name} on Linux)"
            ) from exc
        except OSError as exc:
            raise PoolError(f"cannot create shared-memory segment {name!r} of {nbytes} bytes: {exc}") from exc

    @classmethod
    def attach(cls, name: str) -> "Segment":
        """Map an existing segment; `PoolError` if there is none. Leaves the resource tracker out of it."""
        try:
            return cls(_attach_untracked(name), created=False)
        except (OSError, ValueError) as exc:  # ValueError: the creator died before it gave the segment a size
            raise PoolError(f"cannot attach shared-memory segment {name!r}: {exc}; has its creator ended?") from exc

    @property
    def buffer(self) -> NDArray[np.uint8]:
        """All bytes, uint8 [nbytes], writable. Valid until `close`; views of it keep the mapping alive."""
        assert self._bytes is not None, "the segment is closed"
        return self._bytes

    @property
    def address(self) -> int:
        """Where this process sees the segment's first byte; valid until `close`."""
        return int(self.buffer.ctypes.data)

    def reserve(self, offset: int, nbytes: int) -> None:
        """Commit the pages of a range, so that touching it cannot fail. Idempotent; contents stay.

        Raises `PoolError` with what is free and the cure if /dev/shm is full; nothing is committed then.
        """
        assert offset >= 0
        assert offset + nbytes <= self.nbytes
        if sys.platform != "linux":
            return
        try:
            os.posix_fallocate(self._fd, offset, nbytes)
        except OSError as exc:
            if exc.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
                raise PoolError(f"cannot reserve {nbytes} bytes of segment {self.name!r}: {exc}") from exc
            raise PoolError(
                f"{SHM_DIR} is full: segment {self.name!r} needs {nbytes} more bytes, {free_shm_bytes()} are free; "
                f"enlarge it (mount -o remount,size=... {SHM_DIR}; in a container --shm-size) or lower --ram"
            ) from exc

    def punch(self, offset: int, nbytes: int) -> bool:
        """Give the pages of a range back to the system; they are gone at once, and read as zeros.

        False if the pages stay. macOS cannot punch holes into shared memory: there the system is told that the contents
        are not needed (MADV_FREE), and may take the pages when it wants memory.
        """
        assert offset + nbytes <= self.nbytes
        if self._fd >= 0:
            return punch_hole(self._fd, offset, nbytes)
        start, end = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE, (offset + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        pages = self._mapping.buf.obj if self._mapping.buf is not None else None
        if isinstance(pages, mmap.mmap) and start < end:
            with contextlib.suppress(OSError):  # advice, which the system may decline
                pages.madvise(mmap.MADV_FREE, start, end - start)
        return False

    def close(self) -> None:
        """Unmap. While arrays still view the segment the mapping stays, until they are gone. Idempotent."""
        self._bytes = None
        self._mapping.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def unlink(self) -> None:
        """Remove the name: the memory goes back when the last process has unmapped it. Creator only; idempotent."""
        assert self._created, "only the creator unlinks a segment"
        try:
            self._mapping.unlink()
        except FileNotFoundError:  # somebody removed it: the tracker must still forget the name
            resource_tracker.unregister(f"/{self.name}", "shared_memory")
        self._created = False

    def __enter__(self) -> "Segment":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        if self._created:
            self.unlink()


if sys.version_info >= (3, 13):

    def _attach_untracked(name: str) -> _Mapping:
        return _Mapping(name, track=False)

else:

    def _attach_untracked(name: str) -> _Mapping:
        with _no_registration(f"/{name}"):
            return _Mapping(name)


@contextlib.contextmanager
def _no_registration(tracked_name: str) -> Iterator[None]:
    """Keep `SharedMemory` from registering `tracked_name` (before Python 3.13 it registers attachments as well)."""
    register = resource_tracker.register

    def register_others(name: Sized, rtype: str) -> None:
        if name != tracked_name:
            register(name, rtype)

    with _tracker_lock:
        resource_tracker.register = register_others
        try:
            yield
        finally:
            resource_tracker.register = register
