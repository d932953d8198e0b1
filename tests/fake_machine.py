"""A machine's /proc and /sys below a folder, as the kernel shows them: memory, pressure, control groups, for tests to turn."""

from pathlib import Path

V1_UNLIMITED = str(2**63 - 4096)


class FakeMachine:
    """Files below `root`. At first a system of 16 GB with 8 GB available, without swap and without control groups."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.set_memory(8_000_000_000)
        self._mounts: list[str] = []
        self._places: list[str] = []
        self.set_kills(0)

    def set_memory(self, available: int, total: int = 16_000_000_000, swap: int = 0) -> None:
        """What the system has, in bytes."""
        fields = {"MemTotal": total, "MemFree": available // 2, "MemAvailable": available, "SwapTotal": swap}
        lines = [f"{name}:{value // 1024:>12} kB" for name, value in fields.items()]
        self.write("proc/meminfo", "\n".join(lines) + "\nHugePages_Total:       0\n")

    def set_kills(self, number: int) -> None:
        """How often the out-of-memory killer has struck anywhere."""
        self.write("proc/vmstat", f"nr_free_pages 5\noom_kill {number}\n")

    def set_stalled(self, microseconds: int, group: str = "") -> None:
        """For how long tasks have stood still for memory: in the system, or a group (its folder below the root)."""
        text = f"some avg10=0.00 avg60=0.00 avg300=0.00 total={microseconds}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
        self.write(f"{group}/memory.pressure" if group else "proc/pressure/memory", text)

    def mount(self, version: int, mount_point: str, mounted: str = "/") -> None:
        """A hierarchy of control groups that shows the part `mounted` at `mount_point`."""
        kind = "cgroup2 cgroup2 rw" if version == 2 else "cgroup cgroup rw,memory"
        self._mounts.append(f"3{len(self._mounts)} 31 0:29 {mounted} {mount_point} rw,relatime shared:9 - {kind}")
        lines = [
            "22 1 0:21 / /proc rw - proc proc rw",
            "30 1 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu",
            *self._mounts,
        ]
        self.write("proc/self/mountinfo", "\n".join(lines) + "\n")

    def join(self, version: int, path: str) -> None:
        """Put this process into a group."""
        self._places.append(f"0::{path}" if version == 2 else f"4:memory:{path}")
        self.write("proc/self/cgroup", "\n".join(["5:cpu:/elsewhere", *self._places]) + "\n")

    def group(
        self, folder: str, version: int, limit: str, used: int, page_cache: int = 0, high: str = "max", kills: int = 0
    ) -> None:
        """A control group's files; half of the page cache is active."""
        prefix = "" if version == 2 else "total_"
        halves = f"{prefix}inactive_file {page_cache // 2}\n{prefix}active_file {page_cache - page_cache // 2}\n"
        self.write(f"{folder}/memory.stat", f"anon 1\n{halves}")
        if version == 2:
            files = {"memory.max": limit, "memory.high": high, "memory.current": str(used)}
            files["memory.events"] = f"low 0\nhigh 3\nmax 5\noom {kills}\noom_kill {kills}"
        else:
            files = {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": str(used)}
            files["memory.oom_control"] = f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}"
        for name, text in files.items():
            self.write(f"{folder}/{name}", text + "\n")

    def write(self, name: str, text: str) -> None:
        """Write a file below the root; a reader sees the old or the new one."""
        path = self.root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".new")
        partial.write_text(text)
        partial.rename(path)
