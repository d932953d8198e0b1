"""What memory there is and what processes use: the readings behind the plan and the reports.

Linux: a process's share is its PSS (/proc/<pid>/smaps_rollup), in which pages that several processes share count once in
the sum. macOS has no PSS: unique pages (USS) of each process plus the pools once (written, not tried on macOS).
"Available" is the system's figure capped by the limits of the control groups (v2 and v1) that the process is in.
"""

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

_UNLIMITED_V1 = 1 << 60  # cgroup v1 says "no limit" with a huge number


@dataclass(frozen=True)
class Available:
    """Bytes that this process and its children may still take, and which limit that is."""

    nbytes: int
    reason: str


def available_memory(cgroup_root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc/self/cgroup")) -> Available:
    """The least of the system's available memory and what each control group above this process leaves."""
    found = [Available(psutil.virtual_memory().available, "available in the system")]
    if sys.platform == "linux":
        found += _cgroup_limits(cgroup_root, proc)
    return min(found, key=lambda limit: limit.nbytes)


def process_bytes(pid: int) -> int:
    """Memory that counts for process `pid` (see the module docstring); 0 if it has gone."""
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
        if line.startswith("Pss:"):
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


class MemoryWatch:
    """Sums the memory of named processes, and remembers the largest sum seen."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self.by_process: dict[str, int] = {}

    def sample(self, processes: Iterable[tuple[str, int]], shared_bytes: int = 0) -> None:
        """Read the processes (name, pid). `shared_bytes`: pools in use, added where the readings leave them out."""
        self.by_process = {name: process_bytes(pid) for name, pid in processes}
        if sys.platform != "linux":
            self.by_process["pools"] = shared_bytes
        self.peak_bytes = max(self.peak_bytes, self.total_bytes)

    @property
    def total_bytes(self) -> int:
        """The last sum."""
        return sum(self.by_process.values())


def _cgroup_limits(root: Path, proc: Path) -> list[Available]:
    """What each memory control group on the path from this process to the root leaves."""
    found = []
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            files = ("memory.max", "memory.current", "inactive_file")
            base = root
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            base = root / "memory"
        else:
            continue
        for folder in _upwards(base, path):
            if (left := _left_in(folder, *files)) is not None:
                found.append(Available(left, f"left in control group {folder}"))
    return found


def _upwards(base: Path, path: str) -> list[Path]:
    """The folders from a control group up to `base`; inside a container the path may not exist, `base` does."""
    folder = base / path.lstrip("/")
    return [p for p in (folder, *folder.parents) if p == base or base in p.parents]


def _left_in(folder: Path, limit_file: str, usage_file: str, reclaimable: str) -> int | None:
    """Limit minus usage plus the page cache that the kernel would drop first; None without a limit."""
    try:
        limit = (folder / limit_file).read_text().strip()
        if limit == "max" or int(limit) >= _UNLIMITED_V1:
            return None
        usage = int((folder / usage_file).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return max(0, int(limit) - usage + int(stat.get(reclaimable, 0)))


def _cpu_quota(path: Path) -> int | None:
    try:
        quota, period = path.read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else max(1, int(quota) // int(period))
