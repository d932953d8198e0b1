"""The process of one worker: attach the pool, say hello, answer `Route` and `Resize` until `Stop` or the coordinator's death.

The wait is on the socket and on the parent's sentinel (its end of a pipe closes when it dies, however it dies). A worker
that outlives its coordinator removes what that could not: its segment's name and the run directory.
"""

import logging
import os
import signal
import sys
import traceback
from multiprocessing import parent_process
from pathlib import Path

import numpy as np

from colibri_mp import log, rundir
from colibri_mp.errors import ColibriError, ProtocolError
from colibri_mp.messages import Failed, Hello, Resize, Resized, Route, Routed, Stop
from colibri_mp.shm.segment import unlink_stale
from colibri_mp.transport import Link, Waiter
from colibri_mp.workers.core import Worker, WorkerConfig

_log = logging.getLogger(__name__)
_SWITCH_S = 0.0005  # how long a reading thread may keep the interpreter while the compute thread waits for it


def run(config: WorkerConfig, run_dir: Path, log_level: str) -> None:
    """Entry point of the process; returns when the worker is to end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the coordinator decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.setswitchinterval(_SWITCH_S)
    log.configure(f"worker {config.worker_id}", log_level)
    link = Link(run_dir / "workers", f"worker-{config.worker_id}".encode())
    try:
        _serve(config, link)
    finally:
        link.close()
        if _is_orphan():
            _clean_after_coordinator(config, run_dir)


def _serve(config: WorkerConfig, link: Link) -> None:
    try:
        worker = Worker(config)
    except Exception as error:
        link.send(_failure(-1, error))
        return
    try:
        link.send(Hello(config.worker_id, os.getpid(), worker.notes))
        _loop(worker, link)
    finally:
        worker.close()


def _loop(worker: Worker, link: Link) -> None:
    parent = parent_process()
    assert parent is not None, "a worker is a child of the coordinator"
    waiter = Waiter([link, parent.sentinel])
    while parent.sentinel not in waiter.wait(None):
        worker.expect_step()
        message = link.receive(0.0)
        match message:
            case Stop():
                return
            case Route():
                link.send(_answer(worker, message))
                worker.settle()  # while the coordinator goes on with the next layer
            case Resize(slab_bytes=slab_bytes):
                link.send(Resized(worker.config.worker_id, worker.resize(slab_bytes)))
            case None:
                continue
            case other:
                raise ProtocolError(f"{type(other).__name__} sent to a worker")


def _answer(worker: Worker, route: Route) -> Routed | Failed:
    y = np.empty_like(route.x)
    try:
        counters = worker.step(route.layer, route.x, route.ids, route.weights, y)
    except Exception as error:
        return _failure(route.step, error)
    return Routed(route.step, route.layer, y, counters)


def _failure(step: int, error: Exception) -> Failed:
    """The error as a message; one that is not ours is a defect, so its traceback goes along."""
    if isinstance(error, ColibriError):
        return Failed(step, error.kind, str(error))
    _log.error("defect in a worker", exc_info=error)
    return Failed(step, "error", "".join(traceback.format_exception(error)))


def _is_orphan() -> bool:
    parent = parent_process()
    return parent is not None and not parent.is_alive()


def _clean_after_coordinator(config: WorkerConfig, run_dir: Path) -> None:
    unlink_stale(config.segment_name)
    rundir.remove_if_ended(run_dir)
