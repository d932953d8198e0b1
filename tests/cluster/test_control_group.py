"""Clusters in a real, small control group: never killed with `--ram auto`, shrinking, and naming a kill that was forced.

Needs a memory hierarchy of version 1 in which this user may make a group below its own.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

HIERARCHY = Path("/sys/fs/cgroup/memory")
BALLAST = """
import sys
blocks = [bytearray(b"x" * 1_000_000) for _ in range(int(sys.argv[1]) // 1_000_000)]
print("full", flush=True)
sys.stdin.readline()
"""
SHRINKING = """
import subprocess, sys, time
from colibri_mp import Cluster

def until(wanted):
    started = time.monotonic()
    while not wanted(cluster.stats()["memory"]["pressure"]):
        assert time.monotonic() - started < 15, cluster.stats()
        time.sleep(0.02)
    return time.monotonic() - started

with Cluster.launch("demo", num_workers=1, num_threads=1, ctx=256, ram="320MB") as cluster:
    wanted = cluster.generate("Once", max_tokens=16, temperature=0.0).token_ids
    free = min(room["free_bytes"] for room in cluster.stats()["memory"]["pressure"]["rooms"])
    command = [sys.executable, "-c", sys.argv[1], str(free - 40_000_000)]  # the low mark is 64 MB
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as ballast:
        ballast.stdout.readline()
        seconds = until(lambda pressure: not pressure["admits_requests"])
        ballast.stdin.close()
    until(lambda pressure: pressure["admits_requests"])
    assert cluster.generate("Once", max_tokens=16, temperature=0.0).token_ids == wanted
    print(seconds)
"""
KILLING = """
import subprocess, sys
from pathlib import Path
from colibri_mp import Cluster
with Cluster.launch("demo", num_workers=1, num_threads=1, ctx=256, ram="320MB") as cluster:
    Path("/proc", str(cluster.stats()["workers"][0]["pid"]), "oom_score_adj").write_text("1000")  # the first to go
    with subprocess.Popen([sys.executable, "-c", sys.argv[1], "400000000"], stdin=subprocess.PIPE) as ballast:
        try:
            while True:
                cluster.generate([1, 2, 3], max_tokens=2)
        finally:
            ballast.kill()
"""


@contextmanager
def small_group(limit: int) -> Iterator[Path]:
    """A group with `limit` bytes below this process's own; skips the test where none can be made."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        own = next(path for _, names, path in (line.split(":", 2) for line in lines) if "memory" in names.split(","))
        folder = HIERARCHY / own.lstrip("/") / f"colibri-test-{os.getpid()}"
        folder.mkdir()
    except (OSError, StopIteration):
        pytest.skip("no control group can be made here")
    (folder / "memory.limit_in_bytes").write_text(str(limit))
    try:
        yield folder
    finally:
        for pid in (folder / "cgroup.procs").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
        while (folder / "cgroup.procs").read_text():
            time.sleep(0.02)
        folder.rmdir()


def run_in(group: Path, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run Python in a group."""
    join = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
    command = ["sh", "-c", join, str(group), sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def num_kills(group: Path) -> int:
    """Processes of the group that the out-of-memory killer has ended."""
    fields = (group / "memory.oom_control").read_text().split()
    return int(fields[fields.index("oom_kill") + 1])


def test_auto_in_a_small_group_is_never_killed() -> None:
    """The budget follows from the group's limit, the run stays within it, and nobody is killed."""
    with small_group(480_000_000) as group:
        run = ["-m", "colibri_mp", "run", "Once", "--ram", "auto", "--max-tokens", "64", "--temp", "0", "--json"]
        done = run_in(group, run)
        assert done.returncode == 0, done.stderr
        memory = json.loads(done.stdout)["memory"]
        assert 290_000_000 < memory["budget_bytes"] <= 480_000_000 - 128_000_000 + 60_000_000  # its own 60 MB count in
        assert memory["peak_bytes"] <= memory["planned_bytes"] <= memory["budget_bytes"]
        assert num_kills(group) == 0


def test_real_ballast_shrinks_the_pools_for_a_while() -> None:
    """A process in the same group that takes the memory: within 2 s there is pressure, and it passes with the process."""
    with small_group(520_000_000) as group:
        done = run_in(group, ["-c", SHRINKING, BALLAST])
        assert done.returncode == 0, done.stderr
        assert float(done.stdout) < 2.0
        assert "expert pools shrink from 11 MB to 1.38 MB" in done.stderr
        assert "expert pools may grow from 1.38 MB to 11 MB" in done.stderr
        assert num_kills(group) == 0


def test_real_kill_is_named() -> None:
    """A worker that the kernel's out-of-memory killer has chosen is reported as such."""
    with small_group(450_000_000) as group:
        done = run_in(group, ["-c", KILLING, BALLAST])
        assert "WorkerDied: worker 0 " in done.stderr
        assert "was killed (SIGKILL), probably by the system's out-of-memory killer" in done.stderr
        assert num_kills(group) >= 1
