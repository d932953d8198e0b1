"""What processes use: the readings behind the plan and the reports. What there is to use: see `limits`.

Linux: a process's share is its PSS (/proc/<pid>/smaps_rollup), in which pages that several processes share count once in
the sum. macOS has no PSS: unique pages (USS) of each process plus the pools once (written, not tried on macOS).
"""

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil


def process_bytes(pid: int) -> int:
    """Memory that counts for process `pid` (see the module docstring); 0 if it has gone."""
    return _share(pid, "Pss")


def own_bytes() -> int:
    """Memory of this process alone, without files and pools that others may have mapped as well."""
    return _share(os.getpid(), "Pss_Anon")


def _share(pid: int, kind: str) -> int:
    if sys.platform != "linux":
        try:
            return int(psutil.Process(pid).memory_full_info().uss)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return 0
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    for line in text.splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) * 1024
    return 0


def usable_cores() -> tuple[int, str]:
    """Compute threads to use and why: physical cores, within this process's affinity and control-group CPU quota."""
    limits = [(psutil.cpu_count(logical=False) or os.cpu_count() or 1, "physical cores")]
    if hasattr(os, "sched_getaffinity"):
        limits.append((len(os.sched_getaffinity(0)), "cores in this process's affinity"))
    if (quota := _cpu_quota(Path("/sys/fs/cgroup/cpu.max"))) is not None:
        limits.append((quota, "cores in the control group's quota"))
    return min(limits, key=lambda limit: limit[0])


@dataclass(frozen=True)
class MemorySample:
    """Memory of each process, and the part of it that the slabs of the pools are."""

    by_process: dict[str, int]
    slab_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """The sum."""
        return sum(self.by_process.values())


class MemoryWatch:
    """Reads the memory of named processes, and remembers the last sample and the largest sum seen."""

    def __init__(self) -> None:
        self.last = MemorySample({})
        self.peak_bytes = 0

    def sample(self, processes: Iterable[tuple[str, int]], slab_bytes: Callable[[], int]) -> None:
        """Read the processes (name, pid), and the slabs: added where the readings leave them out.

        Reading takes a while, in which pools may fill: the larger figure counts, so that nothing of theirs is taken for
        the processes' own.
        """
        before = slab_bytes()
        by_process = {name: process_bytes(pid) for name, pid in processes}
        after = max(before, slab_bytes())
        if sys.platform != "linux":
            by_process["pools"] = after
        self.last = MemorySample(by_process, after)
        self.peak_bytes = max(self.peak_bytes, self.last.total_bytes)


def _cpu_quota(path: Path) -> int | None:
    try:
        quota, period = path.read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else max(1, int(quota) // int(period))
