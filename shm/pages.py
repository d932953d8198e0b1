"""What the system can do with single pages of a mapping: punch holes, lock. Python has no calls for it, so libc's are used.

Nothing here knows of slots; an address belongs to a mapping of this process.
"""

import ctypes
import errno
import os
import resource

from colibri_mp.errors import PoolError

_KEEP_SIZE_AND_PUNCH_HOLE = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE of <linux/falloc.h>

_libc = ctypes.CDLL(None, use_errno=True)


def punch_hole(fd: int, offset: int, nbytes: int) -> bool:
    """Free the pages of a range of a shared-memory file; it reads as zeros afterwards. Linux only.

    Works on locked pages too, where `madvise(MADV_REMOVE)` is refused. False if this system has no such call for its
    shared memory (some sandboxes); `PoolError` for any other refusal.
    """
    length = ctypes.c_int64(nbytes)
    if _libc.fallocate(fd, _KEEP_SIZE_AND_PUNCH_HOLE, ctypes.c_int64(offset), length) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EOPNOTSUPP, errno.ENOSYS):
        return False
    raise PoolError(f"cannot give {nbytes} bytes of shared memory at {offset} back: {os.strerror(number)}")


def lock_pages(address: int, nbytes: int) -> str | None:
    """Keep a range in memory: it is never swapped out. None if it is locked now, else why the system refuses.

    Locks do not add up (one `unlock_pages` undoes any number of them), and end with the process.
    """
    if _libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes)) == 0:
        return None
    return _why_not_locked(ctypes.get_errno(), nbytes)


def unlock_pages(address: int, nbytes: int) -> None:
    """Let the system swap a range again. `PoolError` if it is not mapped, which is a defect of ours."""
    if _libc.munlock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes)) != 0:
        raise PoolError(f"cannot unlock {nbytes} bytes of memory: {os.strerror(ctypes.get_errno())}")


class PageLocks:
    """The ranges that this process has locked. `refusal`: why the system did not lock one more, the last time it did not."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.refusal: str | None = None
        self._ranges: dict[int, int] = {}  # address -> bytes

    def lock(self, address: int, nbytes: int) -> None:
        """Lock a range that is not locked, if the system allows it."""
        refusal = lock_pages(address, nbytes)
        if refusal is not None:
            self.refusal = refusal
            return
        self._ranges[address] = nbytes
        self.nbytes += nbytes

    def unlock(self, address: int) -> None:
        """Unlock the range that starts at `address`, if it has been locked."""
        nbytes = self._ranges.pop(address, 0)
        if nbytes:
            self.nbytes -= nbytes
            unlock_pages(address, nbytes)


def _why_not_locked(number: int, nbytes: int) -> str:
    """The refusal with the limit that causes it (EPERM: it is 0; ENOMEM: it is used up) and the cure."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    refusal = f"the system does not lock {nbytes} more bytes of memory ({os.strerror(number)})"
    if number not in (errno.EPERM, errno.ENOMEM, errno.EAGAIN) or limit == resource.RLIM_INFINITY:
        return refusal
    return (
        f"{refusal}: RLIMIT_MEMLOCK is {limit} bytes for each process; raise it (ulimit -l; in a container "
        "--ulimit memlock=-1; in a service LimitMEMLOCK=) or go on without"
    )
