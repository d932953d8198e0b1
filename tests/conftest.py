"""What all tests share: a run folder of their own, and a check that a test leaves nothing behind."""

import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import psutil
import pytest

from colibri_mp.user_cache import user_cache_dir

ORPHANS_S = 10.0
"""How long segments of dead processes may be there: other tests that run at the same time make and remove some."""
GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="session", autouse=True)
def run_folder() -> Iterator[Path]:
    """Clusters of the tests live in a short-named folder apart from the user's."""
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a background job ignores it, and so would child processes
    resource_tracker.ensure_running()  # it lives to the end, so it must not start in the middle of a test
    folder = Path(tempfile.mkdtemp(prefix="cmp-"))
    os.environ["COLIBRI_RUN_DIR"] = str(folder)
    os.environ["COLIBRI_CACHE_DIR"] = str(_own_cache(folder))
    os.environ["PYTHONSAFEPATH"] = "1"  # child processes use the installed package, not the folder they start in
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(os.environ["COLIBRI_CACHE_DIR"], ignore_errors=True)


def _own_cache(folder: Path) -> Path:
    """What the tests learn is not for the user, nor the other way round; compiled kernels alone are shared."""
    kernels = user_cache_dir() / "kernels"
    kernels.mkdir(mode=0o700, parents=True, exist_ok=True)
    cache = folder.with_name(folder.name + "-cache")
    cache.mkdir(mode=0o700)
    (cache / "kernels").symlink_to(kernels)
    return cache


@pytest.fixture(scope="module", autouse=True)
def no_open_descriptors() -> Iterator[None]:
    """Fail a file whose tests leave sockets or pipes. Not test by test: a cluster that they share connects when it likes."""
    before = _sockets_and_pipes()
    yield
    leaked = _sockets_and_pipes() - before
    assert not leaked, f"left open: {leaked}"


@pytest.fixture(autouse=True)
def no_leaks(run_folder: Path) -> Iterator[None]:
    """Fail a test that leaves processes, threads, shared memory or run directories."""
    before = _leftovers(run_folder)
    yield
    deadline = time.monotonic() + ORPHANS_S
    while True:
        leaked = {kind: found - before[kind] for kind, found in _leftovers(run_folder).items()}
        if not leaked["segments"] or time.monotonic() > deadline:
            break
        time.sleep(0.1)  # of a cluster of other tests, that they have killed, or are cleaning up
    assert not any(leaked.values()), f"left behind: { {kind: found for kind, found in leaked.items() if found} }"


def _leftovers(run_folder: Path) -> dict[str, set[str]]:
    return {
        "processes": {
            f"{child.pid} {child.name()}"
            for child in psutil.Process().children(recursive=True)
            if not _is_tracker(child)
        },
        "threads": {thread.name for thread in threading.enumerate() if not thread.daemon},
        "segments": {
            path.name for path in Path("/dev/shm").glob("colibri-*") if not _is_elsewhere(path.name, run_folder)
        },
        "run directories": {path.name for path in run_folder.iterdir()},
    }


def _is_elsewhere(segment: str, run_folder: Path) -> bool:
    """Whether a segment belongs to a living process with another run folder: names hold the coordinator's, or the test's, pid."""
    try:
        owner = int(segment.split("-")[1], 16)
        if owner == os.getpid():
            return False
        environment = Path(f"/proc/{owner}/environ").read_bytes()
    except (ValueError, OSError):
        return False
    return f"COLIBRI_RUN_DIR={run_folder}".encode() not in environment.split(b"\0")


def _is_tracker(process: psutil.Process) -> bool:
    """multiprocessing's resource tracker lives as long as the test process."""
    try:
        return "resource_tracker" in " ".join(process.cmdline()) or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _sockets_and_pipes() -> set[str]:
    """Open sockets and pipes of this process, by what they point at; empty where /proc does not tell."""
    found = set()
    for fd in Path("/proc/self/fd").glob("*"):
        try:
            target = str(fd.readlink())
        except OSError:
            continue
        if target.startswith(("socket:", "pipe:")):
            found.add(target)
    return found
