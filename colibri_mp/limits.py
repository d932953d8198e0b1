"""How much memory there is to take: the system's and each control group's room, and limits on single processes.

A room has a size and what is free in it; each has two marks below which a monitor acts (see `pressure`):

    0          low mark          high mark                        size
    ├─ danger ─┼─ nothing grows ─┼─ free to use ──────────────────┤
               5 % of the size, 64 to 512 MB; the high mark is twice that

Swap is never counted: a slab that has to come back from swap is slower than one read from the checkpoint.
"""

import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from colibri_mp.config import format_size
from colibri_mp.control_groups import machine_root, memory_groups, stalled_us

_LOW_SHARE = 0.05  # of a room's size
_LEAST_LOW_BYTES, _MOST_LOW_BYTES = 64_000_000, 512_000_000


@dataclass(frozen=True)
class Room:
    """A limit that this process and its children share with others: `free_bytes` may still be taken of `size_bytes`.

    `stalled_us`: how long tasks in it have stood still for memory since it exists; None where the kernel does not tell.
    """

    name: str
    size_bytes: int
    free_bytes: int
    stalled_us: int | None = None

    @property
    def low_bytes(self) -> int:
        """With less than this free, the kernel may soon have to kill."""
        return int(min(max(self.size_bytes * _LOW_SHARE, _LEAST_LOW_BYTES), _MOST_LOW_BYTES))

    @property
    def high_bytes(self) -> int:
        """With more than this free, there is memory to use."""
        return 2 * self.low_bytes

    def __str__(self) -> str:
        return f"{format_size(self.free_bytes)} free in {self.name}"


def rooms(root: Path | None = None) -> list[Room]:
    """The system, and every control group with a limit around this process."""
    root = root or machine_root()
    found = [_system(root)]
    for group in memory_groups(root):
        size, free = group.limit_bytes(), group.free_bytes()
        if size is not None and free is not None:
            found.append(Room(f"control group {group.name}", size, free, stalled_us(group.pressure_file)))
    return found


def tightest_room(root: Path | None = None) -> Room:
    """The room with the least memory to take."""
    return min(rooms(root), key=lambda room: room.free_bytes)


def address_space_bytes() -> int | None:
    """Most virtual memory of one process (`ulimit -v`); None without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def _system(root: Path) -> Room:
    if sys.platform != "linux":
        memory = psutil.virtual_memory()
        return Room("the system", memory.total, memory.available)
    info = _meminfo(root)
    return Room("the system", info["MemTotal"], info["MemAvailable"], stalled_us(root / "proc/pressure/memory"))


def _meminfo(root: Path) -> dict[str, int]:
    """/proc/meminfo in bytes."""
    fields = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
    return {name.rstrip(":"): int(kilobytes) * 1024 for name, kilobytes, *_ in fields}
