"""The launches of a script, one after another: each starts a cluster, plays all sessions on it, and ends it.

What a launch learns of the experts is saved when it ends, and read by the next one: that is what several launches show.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from colibri_mp.client import Cluster
from colibri_mp.errors import ColibriError
from colibri_mp.interruption import Interruption
from colibri_mp.script.definition import Script
from colibri_mp.script.play import Play
from colibri_mp.script.progress import Progress
from colibri_mp.script.runner import Runner, make_plays

Open = Callable[[dict[str, Any]], Cluster]
"""Starts a cluster with these settings, or attaches to a running one."""


@dataclass
class Launch:
    """What came of a launch, numbered from 1. `before` and `after` are the cluster's status around the sessions."""

    number: int
    plays: list[Play]
    error: str = ""
    start_s: float = 0.0
    wall_s: float = 0.0
    before: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)


def run_launches(
    script: Script, open_cluster: Open, make_progress: Callable[[], Progress], interruption: Interruption
) -> Iterator[Launch]:
    """Run the launches and yield each when it has ended; the last one if the cluster ended under it, or on Ctrl-C.

    Raises:
        ColibriError: a cluster could not start.
    """
    with _usage(script) as settings:
        for number in range(1, script.launches + 1):
            launch = Launch(number, make_plays(script))
            _run(launch, script, lambda: open_cluster(settings), make_progress, interruption)
            yield launch
            if launch.error or interruption.signal is not None:
                return


@contextmanager
def _usage(script: Script) -> Iterator[dict[str, Any]]:
    """The settings of all launches; a fresh script learns in a file that goes with it."""
    if not script.fresh:
        yield script.launch
        return
    with tempfile.TemporaryDirectory(prefix="colibri-usage-") as folder:
        yield {**script.launch, "usage": str(Path(folder) / "usage")}


def _run(
    launch: Launch,
    script: Script,
    open_cluster: Callable[[], Cluster],
    make_progress: Callable[[], Progress],
    interruption: Interruption,
) -> None:
    started_s = time.monotonic()
    with open_cluster() as cluster, interruption:
        _settle(cluster, script.settle_s, interruption)
        launch.start_s = time.monotonic() - started_s
        launch.before = cluster.stats()
        began_s = time.monotonic()
        with make_progress() as progress:
            runner = Runner(cluster, launch.plays, script.concurrency, progress, interruption)
            runner.run()
        launch.wall_s = time.monotonic() - began_s
        if runner.error is not None:
            launch.error = str(runner.error)
            return
        try:
            launch.after = cluster.stats()
        except ColibriError as error:
            launch.error = str(error)


def _settle(cluster: Cluster, most_s: float, interruption: Interruption) -> None:
    """Wait, at most so long, until what is read at start has been read."""
    deadline = time.monotonic() + most_s
    while time.monotonic() < deadline and interruption.signal is None and cluster.stats()["tiers"]["waiting"]:
        cluster.next_event(0.1, interruption.wake_fd)
