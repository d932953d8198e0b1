"""A running cluster when memory gets short and comes back: pools, admission, status, and the same tokens throughout."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_machine import FakeMachine

from colibri_mp import Cluster, Completion

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the test turns /proc/meminfo")
MODEL = Path(__file__).parents[1] / "golden" / "tiny" / "qwen3_moe"
PROMPT = [(7 * i) % 250 for i in range(100)]
PLENTY, SHORT = 8_000_000_000, 300_000_000
SHRINK_S, GROW_S = 2.0, 6.0


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    """The machine as clusters of the test see it."""
    monkeypatch.setenv("COLIBRI_MACHINE_ROOT", str(tmp_path))
    return FakeMachine(tmp_path)


@contextmanager
def pressed_cluster() -> Iterator[Cluster]:
    """Two workers whose pools hold all experts."""
    with Cluster.launch(MODEL, num_workers=2, num_threads=1, ctx=512, name="pressed", prefix_cache="off") as running:
        answer(running)
        yield running


def answer(cluster: Cluster, max_tokens: int = 8) -> Completion:
    """A greedy answer that uses all experts."""
    return cluster.generate(PROMPT, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def pools(cluster: Cluster) -> list[int]:
    """Memory of each worker's pool."""
    return [worker["pool_used_bytes"] for worker in cluster.stats()["workers"]]


def pressure(cluster: Cluster) -> dict[str, Any]:
    """What the monitor says."""
    found: dict[str, Any] = cluster.stats()["memory"]["pressure"]
    return found


def within(timeout_s: float, condition: Callable[[], bool]) -> None:
    """Wait until `condition` holds."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s
        time.sleep(0.02)


def test_idle_pools_shrink_and_grow(machine: FakeMachine, capfd: pytest.CaptureFixture[str]) -> None:
    """Slabs go back within two seconds, down to the floor; they come back when memory does; the tokens stay the same."""
    with pressed_cluster() as cluster:
        full, wanted = pools(cluster), answer(cluster).token_ids
        machine.set_memory(SHORT)
        within(SHRINK_S, lambda: max(pools(cluster)) < full[0] / 2)
        machine.set_memory(PLENTY)
        within(GROW_S, lambda: pressure(cluster)["admits_requests"])
        assert answer(cluster).token_ids == wanted
        assert pools(cluster) == full
        shrunk, grown = pressure(cluster)["changes"]
        assert (shrunk["admits"], grown["admits"]) == (False, True)
        assert shrunk["slab_bytes"] < grown["slab_bytes"] == pressure(cluster)["slab_full_bytes"]
        assert "300 MB free in the system, the low-water mark is 512 MB" in shrunk["reason"]
    log = capfd.readouterr().err
    assert "expert pools shrink from" in log
    assert "new requests wait: 300 MB free in the system" in log
    assert "expert pools may grow from" in log


def test_running_request_goes_on_and_a_new_one_waits(machine: FakeMachine) -> None:
    """Under pressure in the middle of an answer it shrinks, the answer goes on unchanged, a second one waits for memory."""
    found: list[list[int]] = []

    def second_client() -> None:
        with Cluster.attach("pressed") as mine:
            found.append(answer(mine).token_ids)

    thread = threading.Thread(target=second_client)
    with pressed_cluster() as cluster, Cluster.attach("pressed") as looker:
        wanted, short_answer = answer(cluster, 400).token_ids, answer(cluster).token_ids
        events = cluster.events(PROMPT, max_tokens=400, temperature=0.0, ignore_eos=True)
        tokens = list(getattr(next(events), "token_ids", []))
        machine.set_memory(SHORT)
        within(SHRINK_S, lambda: not pressure(looker)["admits_requests"])
        thread.start()
        tokens += [token for event in events for token in getattr(event, "token_ids", [])]
        assert tokens == wanted
        within(SHRINK_S, lambda: looker.stats()["requests"]["waiting_sequences"] == 1)
        assert found == []
        machine.set_memory(PLENTY)
        thread.join(GROW_S)
        assert found == [short_answer]


def test_control_group_counts(machine: FakeMachine) -> None:
    """`auto` keeps within the group that the cluster is in, and the group's shortage shrinks the pools."""
    machine.mount(2, "/sys/fs/cgroup")
    machine.join(2, "/box")
    machine.group("/sys/fs/cgroup/box", 2, "2000000000", 100_000_000)
    with Cluster.launch(MODEL, num_workers=1, num_threads=1, ctx=128) as cluster:
        memory = cluster.stats()["memory"]
        assert 1_600_000_000 < memory["budget_bytes"] < 1_800_000_000
        assert [room["name"] for room in memory["pressure"]["rooms"]] == ["the system", "control group /box"]
        machine.group("/sys/fs/cgroup/box", 2, "2000000000", 1_950_000_000)
        within(SHRINK_S, lambda: not pressure(cluster)["admits_requests"])
        assert "free in control group /box" in pressure(cluster)["changes"][0]["reason"]


def test_memory_that_cannot_be_read_is_said(machine: FakeMachine) -> None:
    """The cluster goes on without its monitor, and `status` shows that."""
    with pressed_cluster() as cluster:
        machine.write("proc/meminfo", "nonsense\n")
        within(SHRINK_S, lambda: not pressure(cluster)["is_watching"])
        assert answer(cluster).finish_reason == "length"
