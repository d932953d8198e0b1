"""Clients that vanish at random moments, two hundred of them: nothing of them is left, and the next request is a normal one."""

import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from colibri_mp import Cluster, rundir
from colibri_mp.messages import Generate, Sampling
from colibri_mp.transport import Link

MODEL = Path(__file__).parents[1] / "golden" / "tiny" / "olmoe"
SETTLE_S = 10.0
NUM_PROCESSES, CLIENTS_A_PROCESS, NUM_CONNECTIONS = 5, 24, 80

_ASK_AND_HANG = """
import random, sys
from pathlib import Path
from colibri_mp.messages import Generate, Sampling
from colibri_mp.transport import Link
path, seed, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
rng = random.Random(seed)
links = [Link(path) for _ in range(count)]
for link in links:
    prompt = [rng.randrange(1, 250) for _ in range(rng.choice([1, 20, 300]))]
    link.send(Generate(1, prompt, rng.choice([2, 150]), Sampling(temperature=0.0), ignore_eos=True))
links[0].receive(60.0)
print("asked", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Little KV memory, so that many wait; short steps, so that some vanish between two steps and some within one."""
    with Cluster.launch(
        MODEL, num_workers=2, num_threads=1, ctx=480, prefill_chunk=64, slots=4, queue=400, name="vanish"
    ) as running:
        yield running


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Poll until `condition` holds."""
    deadline = time.monotonic() + SETTLE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {SETTLE_S} s: {what}"
        time.sleep(0.02)


def resources(pids: list[int]) -> list[tuple[int, int]]:
    """Open descriptors and threads of each process."""
    return [(process.num_fds(), process.num_threads()) for process in map(psutil.Process, pids)]


def ask_and_close(path: Path, rng: random.Random) -> None:
    """One client that goes after none, some or all of its answer."""
    link = Link(path, linger_s=0.0)
    prompt = [rng.randrange(1, 250) for _ in range(rng.choice([1, 20, 300]))]
    link.send(Generate(1, prompt, 150, Sampling(temperature=0.0), ignore_eos=True))
    for _ in range(rng.choice([0, 0, 1, 5])):
        link.receive(0.05)
    link.close()


def test_nothing_is_left_of_two_hundred_clients(cluster: Cluster) -> None:
    """Killed processes and closed connections: no session, KV block, descriptor or thread stays, and bits are as before."""
    run_dir = rundir.find("vanish")
    assert run_dir is not None
    path = run_dir.control
    wanted = cluster.generate([9, 8, 7], max_tokens=10, temperature=0.0, ignore_eos=True).token_ids
    stats = cluster.stats()
    pids = [stats["pid"], *(worker["pid"] for worker in stats["workers"])]
    before = resources(pids)
    command = [sys.executable, "-c", _ASK_AND_HANG, str(path)]
    processes = [
        subprocess.Popen(
            [*command, str(seed), str(CLIENTS_A_PROCESS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for seed in range(NUM_PROCESSES)
    ]
    rng = random.Random(5)
    for _ in range(NUM_CONNECTIONS):
        ask_and_close(path, rng)
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "asked\n"
        process.kill()
    for process in processes:
        process.communicate()
    wait_until(lambda: cluster.stats()["requests"]["active"] == 0, "the end of all requests")
    requests = cluster.stats()["requests"]
    assert (requests["running_sequences"], requests["waiting"]) == (0, 0)
    assert requests["kv_blocks_free"] == requests["kv_blocks"]
    wait_until(lambda: resources(pids) == before, f"descriptors and threads back at {before}, now {resources(pids)}")
    assert cluster.generate([9, 8, 7], max_tokens=10, temperature=0.0, ignore_eos=True).token_ids == wanted


def test_a_client_that_only_listens_is_missed(cluster: Cluster) -> None:
    """One that vanishes while its request waits in the queue, when nothing is sent to it, is found all the same."""
    run_dir = rundir.find("vanish")
    assert run_dir is not None
    first = cluster.submit([1, 2], max_tokens=478, temperature=0.0, ignore_eos=True)
    link = Link(run_dir.control, linger_s=0.0)
    link.send(Generate(1, [3, 4], 478, Sampling(temperature=0.0), ignore_eos=True))
    wait_until(lambda: cluster.stats()["requests"]["active"] == 2, "both requests")
    link.close()
    wait_until(lambda: cluster.stats()["requests"]["active"] < 2, "the loss of the second")
    cluster.cancel(first)
    while cluster.next_event() is not None:
        pass
