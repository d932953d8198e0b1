"""Readings of memory: control-group limits, process sizes."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from colibri_mp.memory import MemoryWatch, available_memory, process_bytes


def write_group(folder: Path, version: int, limit: str, usage: int, inactive: int) -> None:
    """A control group's files as the kernel shows them."""
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(limit + "\n")
    (folder / names[1]).write_text(f"{usage}\n")
    stat_name = "inactive_file" if version == 2 else "total_inactive_file"
    (folder / "memory.stat").write_text(f"anon 1\n{stat_name} {inactive}\n")


def test_v2_limit_of_a_parent_counts(tmp_path: Path) -> None:
    """The tightest group on the way to the root decides; page cache that can be dropped is available."""
    write_group(tmp_path / "slice", 2, "1000000", 600_000, 100_000)
    write_group(tmp_path / "slice" / "unit", 2, "max", 1, 0)
    proc = tmp_path / "cgroup"
    proc.write_text("0::/slice/unit\n")
    found = available_memory(tmp_path, proc)
    assert found.nbytes == 500_000
    assert "slice" in found.reason


def test_v1_limit(tmp_path: Path) -> None:
    """Version 1 controllers are read as well, in a container with its group mounted at the root."""
    write_group(tmp_path / "memory", 1, "2000000", 500_000, 0)
    proc = tmp_path / "cgroup"
    proc.write_text("5:cpu:/docker/abc\n4:memory:/docker/abc\n")
    assert available_memory(tmp_path, proc).nbytes == 1_500_000


def test_no_limit_is_the_system(tmp_path: Path) -> None:
    """Without a limit the system's own figure counts."""
    write_group(tmp_path / "memory", 1, str(2**63 - 4096), 5, 0)
    proc = tmp_path / "cgroup"
    proc.write_text("4:memory:/\n0::/\n")
    assert available_memory(tmp_path, proc).reason == "available in the system"


@pytest.mark.skipif(sys.platform != "linux", reason="PSS is Linux's")
def test_process_bytes_sees_an_allocation() -> None:
    """Memory that this process touches shows in its figure, and a process that does not exist has none."""
    before = process_bytes(os.getpid())
    block = np.ones(50_000_000, np.uint8)
    grown = process_bytes(os.getpid()) - before
    assert block.nbytes * 0.9 < grown < block.nbytes * 1.5
    assert process_bytes(2**22 + 1) == 0


def test_watch_keeps_the_peak() -> None:
    """The peak is that of the sum."""
    watch = MemoryWatch()
    watch.sample([("me", os.getpid())])
    peak = watch.peak_bytes
    watch.sample([("nobody", 2**22 + 1)])
    assert watch.total_bytes == 0
    assert watch.peak_bytes == peak > 0
