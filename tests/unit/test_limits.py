"""Readings of what memory there is: the system, control groups of both versions, kills, standing still."""

import sys
from pathlib import Path

import pytest
from fake_machine import V1_UNLIMITED, FakeMachine

from colibri_mp.control_groups import KillCounter, memory_groups, stalled_us
from colibri_mp.limits import Room, rooms, tightest_room

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="control groups and /proc are Linux's")
V2, V1 = "/sys/fs/cgroup", "/sys/fs/cgroup/memory"


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    """16 GB, 8 GB available, no control groups."""
    return FakeMachine(tmp_path)


def test_without_groups_there_is_the_system(machine: FakeMachine) -> None:
    """MemTotal and MemAvailable; swap does not count."""
    assert rooms(machine.root) == [Room("the system", 16_000_000_000, 8_000_000_000)]
    machine.set_memory(8_000_000_000, swap=4_000_000_000)
    assert tightest_room(machine.root).free_bytes == 8_000_000_000


def test_v2_limit_of_a_parent_counts(machine: FakeMachine) -> None:
    """The tightest group on the way to the root decides; page cache, active or not, is free."""
    machine.mount(2, V2)
    machine.join(2, "/slice/unit")
    machine.group(f"{V2}/slice", 2, "3000000000", 2_600_000_000, page_cache=100_000_000)
    machine.group(f"{V2}/slice/unit", 2, "max", 1)
    tightest = tightest_room(machine.root)
    assert (tightest.size_bytes, tightest.free_bytes) == (3_000_000_000, 500_000_000)
    assert tightest.name == "control group /slice"
    assert len(rooms(machine.root)) == 2  # the group without a limit is none


def test_v2_high_is_a_limit(machine: FakeMachine) -> None:
    """A group is throttled above memory.high, so that is its size where it is less than memory.max."""
    machine.mount(2, V2)
    machine.join(2, "/a")
    machine.group(f"{V2}/a", 2, "2000000000", 500_000_000, high="1000000000")
    assert tightest_room(machine.root).free_bytes == 500_000_000
    machine.group(f"{V2}/a", 2, "max", 500_000_000, high="900000000")
    assert tightest_room(machine.root).free_bytes == 400_000_000


def test_v1_limit_of_a_parent_counts(machine: FakeMachine) -> None:
    """Version 1 likewise, below the controller's own mount point."""
    machine.mount(1, V1)
    machine.join(1, "/jobs/7")
    machine.group(f"{V1}/jobs/7", 1, V1_UNLIMITED, 5)
    machine.group(f"{V1}/jobs", 1, "2000000000", 700_000_000, page_cache=200_000_000)
    assert tightest_room(machine.root).free_bytes == 1_500_000_000


def test_both_versions_at_once(machine: FakeMachine) -> None:
    """In the hybrid layout version 2 is mounted beside the controllers of version 1; both are looked at."""
    machine.mount(1, V1)
    machine.mount(2, f"{V2}/unified")
    machine.join(1, "/a")
    machine.join(2, "/b")
    machine.group(f"{V1}/a", 1, "1000000000", 0)
    machine.group(f"{V2}/unified/b", 2, "900000000", 0)
    assert [group.version for group in memory_groups(machine.root)] == [1, 1, 2, 2]  # each with its root
    assert tightest_room(machine.root).free_bytes == 900_000_000


@pytest.mark.parametrize("mounted", ["/docker/abc", "/elsewhere"])
def test_container_that_sees_its_group_at_the_mount_point(machine: FakeMachine, mounted: str) -> None:
    """The path in /proc/self/cgroup is the host's; what is mounted is the container's own group."""
    machine.mount(1, V1, mounted)
    machine.join(1, "/docker/abc")
    machine.group(V1, 1, "2000000000", 500_000_000)
    assert tightest_room(machine.root) == Room("control group /", 2_000_000_000, 1_500_000_000)


def test_group_outside_of_the_namespace(machine: FakeMachine) -> None:
    """A path that leaves the visible part of the hierarchy is read as the mount point."""
    machine.mount(2, V2)
    machine.join(2, "/../other")
    machine.group(V2, 2, "1000000000", 0)
    assert tightest_room(machine.root).free_bytes == 1_000_000_000


def test_a_group_beyond_its_limit_has_nothing_free(machine: FakeMachine) -> None:
    """Use above a limit that was lowered is no negative room."""
    machine.mount(2, V2)
    machine.join(2, "/a")
    machine.group(f"{V2}/a", 2, "1000000000", 1_200_000_000)
    assert tightest_room(machine.root).free_bytes == 0


def test_standing_still(machine: FakeMachine) -> None:
    """The total of `some`, of the system and of a group; None where the kernel does not tell."""
    assert stalled_us(machine.root / "proc/pressure/memory") is None
    machine.set_stalled(1234)
    machine.mount(2, V2)
    machine.join(2, "/a")
    machine.group(f"{V2}/a", 2, "1000000000", 0)
    machine.set_stalled(77, f"{V2}/a")
    assert [room.stalled_us for room in rooms(machine.root)] == [1234, 77]


@pytest.mark.parametrize("version", [1, 2])
def test_kills_of_the_group(machine: FakeMachine, version: int) -> None:
    """A kill in this process's group is seen, one before the counter was made is not."""
    top = V2 if version == 2 else V1
    machine.mount(version, top)
    machine.join(version, "/a")
    machine.group(f"{top}/a", version, "1000000000", 0, kills=3)
    counter = KillCounter(machine.root)
    assert not counter.has_risen()
    machine.group(f"{top}/a", version, "1000000000", 0, kills=4)
    assert counter.has_risen()


def test_kills_anywhere(machine: FakeMachine) -> None:
    """So is one of the system's killer."""
    machine.set_kills(7)
    counter = KillCounter(machine.root)
    assert not counter.has_risen()
    machine.set_kills(8)
    assert counter.has_risen()


@pytest.mark.parametrize(
    ("size", "low"), [(500_000_000, 64_000_000), (4_000_000_000, 200_000_000), (64_000_000_000, 512_000_000)]
)
def test_marks_follow_the_size_within_bounds(size: int, low: int) -> None:
    """5 %, from 64 to 512 MB; the high mark is twice that."""
    room = Room("x", size, 0)
    assert (room.low_bytes, room.high_bytes) == (low, 2 * low)


def test_this_machine_can_be_read() -> None:
    """The real files have the form that the code expects."""
    found = rooms()
    assert found[0].name == "the system"
    assert all(0 <= room.free_bytes <= room.size_bytes for room in found)
    assert not KillCounter().has_risen()
