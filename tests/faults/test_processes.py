"""Deaths of every process of a cluster: a named error within two seconds, and nothing left behind."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from fake_machine import FakeMachine
from segments import segments_of

from colibri_mp import Cluster, rundir
from colibri_mp.errors import ColibriError, CoordinatorDied, WorkerDied
from colibri_mp.simulate.grid import simulate
from colibri_mp.trace import read_trace

MODEL = Path(__file__).parents[1] / "golden" / "tiny" / "qwen3_moe"
SETTINGS = {"num_workers": 2, "num_threads": 1, "ctx": 512}
NOTICE_S = 2.0
CLEAN_S = 6.0


@pytest.fixture
def run_folder(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run folder for each test: clusters that other tests keep are not in it."""
    folder = Path(tempfile.mkdtemp(prefix="cmp-"))
    monkeypatch.setenv("COLIBRI_RUN_DIR", str(folder))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Poll until `condition` holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)


def family(pid: int) -> list[psutil.Process]:
    """A process and all its descendants."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def all_gone(processes: list[psutil.Process]) -> Callable[[], bool]:
    """Whether none of them runs any more."""
    return lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


def nothing_left(processes: list[psutil.Process], run_folder: Path) -> None:
    """Processes, segments and the run directory go by themselves."""
    wait_until(all_gone(processes), CLEAN_S, f"end of {processes}")
    wait_until(lambda: not list(run_folder.iterdir()), CLEAN_S, "removal of the run directory")
    pids = [process.pid for process in processes]
    wait_until(lambda: not segments_of(pids), CLEAN_S, "removal of shared memory")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_worker_killed_during_an_answer(how: signal.Signals, run_folder: Path) -> None:
    """The request under way fails within two seconds with an error that names worker, pid and signal."""
    with Cluster.launch(MODEL, **SETTINGS) as cluster:
        stats = cluster.stats()
        victim = stats["workers"][1]["pid"]
        processes = family(stats["pid"])
        events = cluster.events([1, 2, 3], max_tokens=400, temperature=0.0, ignore_eos=True)
        next(events)
        os.kill(victim, how)
        died = time.monotonic()
        with pytest.raises(WorkerDied, match=rf"worker 1 \(pid {victim}, layers 2\.\.3\) was killed by {how.name}"):
            for _ in events:
                pass
        assert time.monotonic() - died < NOTICE_S
        nothing_left(processes, run_folder)


@pytest.mark.parametrize("is_guest", [False, True])
def test_worker_killed_while_idle(is_guest: bool, run_folder: Path) -> None:
    """An idle cluster notices too: the next request of its owner, or of a guest, gets the same error, and everything ends."""
    with Cluster.launch(MODEL, **SETTINGS, name="idle") as cluster, contextlib.ExitStack() as stack:
        client = stack.enter_context(Cluster.attach("idle")) if is_guest else cluster
        stats = cluster.stats()
        processes = family(stats["pid"])
        victim = stats["workers"][0]["pid"]
        os.kill(victim, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(WorkerDied, match=rf"worker 0 \(pid {victim}, layers 0\.\.1\) was killed by SIGKILL"):
            client.generate([1, 2, 3], max_tokens=4)
        assert time.monotonic() - started < NOTICE_S
        nothing_left(processes, run_folder)


def test_victim_of_the_out_of_memory_killer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker killed while the system's count of such kills rose: the error says so, and what to do."""
    machine = FakeMachine(tmp_path)
    monkeypatch.setenv("COLIBRI_MACHINE_ROOT", str(tmp_path))
    with Cluster.launch(MODEL, **SETTINGS) as cluster:
        victim = cluster.stats()["workers"][0]["pid"]
        machine.set_kills(1)
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(
            WorkerDied, match=r"worker 0 .* killed \(SIGKILL\), probably by the system's out-of-memory killer"
        ):
            cluster.generate([1, 2, 3], max_tokens=4)


def test_coordinator_as_victim_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same when it is the coordinator that was chosen."""
    machine = FakeMachine(tmp_path)
    monkeypatch.setenv("COLIBRI_MACHINE_ROOT", str(tmp_path))
    with Cluster.launch(MODEL, **SETTINGS) as cluster:
        pid = cluster.stats()["pid"]
        machine.set_kills(1)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(CoordinatorDied, match=r"coordinator .* killed \(SIGKILL\), probably by"):
            cluster.generate([1, 2, 3], max_tokens=4)


def test_worker_that_hangs(run_folder: Path) -> None:
    """A stopped worker is given up after the step timeout, by name; the cluster ends, the stopped process too."""
    with Cluster.launch(MODEL, **SETTINGS, step_timeout=1.0) as cluster:
        stats = cluster.stats()
        processes = family(stats["pid"])
        os.kill(stats["workers"][0]["pid"], signal.SIGSTOP)
        with pytest.raises(WorkerDied, match=r"worker 0 .*did not answer step \d+, layer 0, in time"):
            cluster.generate([1, 2, 3], max_tokens=4)
        nothing_left(processes, run_folder)


def test_coordinator_killed(run_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The client gets a named error within two seconds; the workers clean up and go."""
    with Cluster.launch(MODEL, **SETTINGS) as cluster:
        pid = cluster.stats()["pid"]
        processes = family(pid)
        events = cluster.events([1, 2, 3], max_tokens=400, temperature=0.0, ignore_eos=True)
        next(events)
        os.kill(pid, signal.SIGKILL)
        died = time.monotonic()
        with pytest.raises(CoordinatorDied, match="SIGKILL"):
            for _ in events:
                pass
        assert time.monotonic() - died < NOTICE_S
        nothing_left(processes, run_folder)
    assert capfd.readouterr().err == ""


def test_trace_of_a_killed_run_is_readable(run_folder: Path, tmp_path: Path) -> None:
    """SIGKILL of the coordinator in the middle of an answer loses the last moments of the trace; the rest is simulated exactly."""
    path = tmp_path / "trace"
    with Cluster.launch("demo", ctx=2048, num_threads=1, num_workers=1, slots=4, trace=str(path)) as cluster:
        pid = cluster.stats()["pid"]
        processes = family(pid)
        events = cluster.events([5, 6, 7], max_tokens=2000, temperature=0.0, ignore_eos=True)
        next(events)
        empty = path.stat().st_size
        wait_until(lambda: bool(next(events)) and path.stat().st_size > empty + 10_000, 60.0, "steps in the trace")
        os.kill(pid, signal.SIGKILL)
        nothing_left(processes, run_folder)
    made = simulate(read_trace(path), [], ["lru"], None, lambda _: None)
    assert made.as_run.is_exact
    assert made.as_run.decode_tokens > 10


def test_attached_client_notices_the_coordinators_death(run_folder: Path) -> None:
    """A client that did not start the cluster is told as well."""
    with Cluster.launch(MODEL, **SETTINGS, name="shared") as owner, Cluster.attach("shared") as guest:
        pid = owner.stats()["pid"]
        processes = family(pid)
        assert guest.generate([1, 2], max_tokens=2).finish_reason == "length"
        os.kill(pid, signal.SIGKILL)
        died = time.monotonic()
        with pytest.raises(CoordinatorDied, match="'shared'"):
            guest.generate([1, 2], max_tokens=2)
        assert time.monotonic() - died < NOTICE_S
        nothing_left(processes, run_folder)


CLIENT = """
import sys
from colibri_mp import Cluster
cluster = Cluster.launch(sys.argv[1], num_workers=2, num_threads=1, ctx=512)
print(cluster.stats()["pid"], flush=True)
for _ in cluster.stream([1, 2, 3], max_tokens=400, temperature=0.0, ignore_eos=True):
    pass
print("done", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_client_that_dies_takes_its_cluster_along(how: signal.Signals, run_folder: Path) -> None:
    """However an owning client ends, its cluster ends and leaves nothing."""
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, str(MODEL)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert client.stdin is not None
    assert client.stdout is not None
    with client.stdin, client.stdout:
        processes = family(int(client.stdout.readline()))
        assert len(processes) >= 3
        client.send_signal(how)
        client.wait(10)
    nothing_left(processes, run_folder)


def test_sigterm_to_the_coordinator_is_a_clean_stop(run_folder: Path) -> None:
    """Requests are answered with an error that says so, and everything is gone."""
    with Cluster.launch(MODEL, **SETTINGS) as cluster:
        pid = cluster.stats()["pid"]
        processes = family(pid)
        events = cluster.events([1, 2, 3], max_tokens=400, temperature=0.0, ignore_eos=True)
        next(events)
        os.kill(pid, signal.SIGTERM)
        with pytest.raises(ColibriError, match=r"stopping|ended"):
            for _ in events:
                pass
        nothing_left(processes, run_folder)


def test_leftovers_of_a_killed_cluster_are_cleaned_at_the_next_start(run_folder: Path) -> None:
    """When all processes are killed at once, the next start removes what they left."""
    cluster = Cluster.launch(MODEL, **SETTINGS, name="victim")
    processes = family(cluster.stats()["pid"])
    for process in processes:
        process.suspend()
    for process in processes:
        process.kill()
    wait_until(all_gone(processes), CLEAN_S, "end of all")
    cluster.close()
    assert [path.name for path in run_folder.iterdir()] == ["victim"]
    with Cluster.launch(MODEL, **SETTINGS, name="next") as fresh:
        assert fresh.generate([1, 2], max_tokens=2).finish_reason == "length"
        assert list(rundir.running()) == ["next"]
        assert len(segments_of([fresh.stats()["pid"]])) == 2
        assert not segments_of(process.pid for process in processes)
    assert not list(run_folder.iterdir())
