"""The memory control groups (cgroups) around this process, from its own up to the root: limits, use, kills, stalls.

    /proc/self/mountinfo   where a hierarchy is mounted, and which part of it: `cgroup2`, or `cgroup` with `memory`
    /proc/self/cgroup      this process's place in each hierarchy
    a group's folder              version 2                         version 1
        limit                     memory.max, memory.high           memory.limit_in_bytes
        use                       memory.current                    memory.usage_in_bytes
        page cache in it          memory.stat: inactive_file + active_file (version 1: total_...)
        kills                     memory.events: oom_kill           memory.oom_control: oom_kill
        stalls                    memory.pressure                   -

A limit binds every group below it, so all of them are read. Page cache counts as free: the kernel drops it before it
kills. Both versions may be mounted at once, each with other controllers. All paths are taken below a root (`machine_root`).
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_UNLIMITED_V1 = 1 << 60  # version 1 says "no limit" with a huge number


@dataclass(frozen=True)
class MemoryGroup:
    """One control group; `folder` has its files, `name` is its path below the mount point."""

    name: str
    folder: Path
    version: int

    def limit_bytes(self) -> int | None:
        """The least of its limits; None without one. Above `memory.high` the kernel slows a group down to a crawl."""
        names = ("memory.max", "memory.high") if self.version == 2 else ("memory.limit_in_bytes",)
        found = [_number(self.folder / name) for name in names]
        return min((limit for limit in found if limit is not None and limit < _UNLIMITED_V1), default=None)

    def free_bytes(self) -> int | None:
        """Limit minus use, page cache counted as free; None without a limit."""
        limit, used = self.limit_bytes(), self._used_bytes()
        if limit is None or used is None:
            return None
        return min(max(0, limit - used + self._page_cache_bytes()), limit)

    def num_oom_kills(self) -> int:
        """Processes of the group that the out-of-memory killer has ended since the group was made."""
        return _table(self.folder / ("memory.events" if self.version == 2 else "memory.oom_control")).get("oom_kill", 0)

    @property
    def pressure_file(self) -> Path:
        """Where the kernel tells how long the group's processes stood still for memory (version 2 only)."""
        return self.folder / "memory.pressure"

    def _used_bytes(self) -> int | None:
        return _number(self.folder / ("memory.current" if self.version == 2 else "memory.usage_in_bytes"))

    def _page_cache_bytes(self) -> int:
        prefix = "" if self.version == 2 else "total_"
        stat = _table(self.folder / "memory.stat")
        return sum(stat.get(f"{prefix}{name}_file", 0) for name in ("inactive", "active"))


def machine_root() -> Path:
    """Where /proc and /sys of the machine are seen: `$COLIBRI_MACHINE_ROOT`, for containers that mount them elsewhere."""
    return Path(os.environ.get("COLIBRI_MACHINE_ROOT", "/"))


def memory_groups(root: Path) -> list[MemoryGroup]:
    """The groups that this process is in, in each hierarchy from its own up; empty where there are none."""
    found = []
    for version, mount_point, mounted in _mounts(_lines(root / "proc/self/mountinfo")):
        place = _place(_lines(root / "proc/self/cgroup"), version)
        if place is not None:
            top = root / mount_point.relative_to("/")
            folders = _upwards(top, _below(place, mounted))
            found += [MemoryGroup(_name(folder, top), folder, version) for folder in folders]
    return found


class KillCounter:
    """Tells whether the out-of-memory killer has struck since this object was made: in this group, or anywhere."""

    def __init__(self, root: Path | None = None) -> None:
        self._root = root or machine_root()
        self._before = self._counts()

    def has_risen(self) -> bool:
        """Whether it has. A process that was killed in that time was probably its victim."""
        return any(now > before for now, before in zip(self._counts(), self._before, strict=True))

    def _counts(self) -> tuple[int, int]:
        own = sum(group.num_oom_kills() for group in memory_groups(self._root))
        return own, _table(self._root / "proc/vmstat").get("oom_kill", 0)


def stalled_us(pressure_file: Path) -> int | None:
    """Time in which at least one task stood still for memory, since the start; None where the kernel does not tell."""
    for line in _lines(pressure_file):
        kind, *fields = line.split()
        if kind == "some":
            return int(dict(field.split("=") for field in fields)["total"])
    return None


def _mounts(lines: Iterable[str]) -> list[tuple[int, PurePosixPath, PurePosixPath]]:
    """Version, mount point and mounted part of each hierarchy that may have memory groups."""
    found = []
    for line in lines:
        left, _, right = line.partition(" - ")
        mounted, mount_point = left.split()[3:5]
        kind, _, options = right.split(maxsplit=2)
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(",")):
            found.append((2 if kind == "cgroup2" else 1, PurePosixPath(mount_point), PurePosixPath(mounted)))
    return found


def _place(lines: Iterable[str], version: int) -> PurePosixPath | None:
    """This process's group in the hierarchy of that version."""
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if (controllers == "") if version == 2 else ("memory" in controllers.split(",")):
            return PurePosixPath(path)
    return None


def _below(place: PurePosixPath, mounted: PurePosixPath) -> PurePosixPath:
    """`place` as seen below the mount point, which shows `mounted`; the mount point itself if it is not in there."""
    is_visible = place.is_relative_to(mounted) and ".." not in place.parts
    return place.relative_to(mounted) if is_visible else PurePosixPath()


def _upwards(top: Path, place: PurePosixPath) -> list[Path]:
    """The folders from a group up to `top`."""
    folder = top / place
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(top))]


def _name(folder: Path, top: Path) -> str:
    return str(PurePosixPath("/") / folder.relative_to(top))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    """The number in a file; None for "max", or without the file."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0] != "max" else None


def _table(path: Path) -> dict[str, int]:
    """A file of lines `name number`."""
    pairs = (line.split() for line in _lines(path))
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}
