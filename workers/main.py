"""The process of one worker: attach the pool, say hello, answer `Route` and `Resize` until `Stop` or the coordinator's death.

A wait for a message looks every 100 ms whether the coordinator lives (its end of a pipe closes when it dies, however it dies). A worker
that outlives its coordinator removes what that could not: its segment's name and the run directory.
"""

import logging
import os
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable
from multiprocessing import parent_process
from pathlib import Path

import numpy as np

from colibri_mp import log, rundir
from colibri_mp.errors import ColibriError, ProtocolError
from colibri_mp.messages import Failed, Hello, Hint, Keep, Message, Resize, Resized, Route, Routed, Stop, from_frames
from colibri_mp.shm.segment import unlink_stale
from colibri_mp.transport import Link
from colibri_mp.workers.core import Worker, WorkerConfig

_log = logging.getLogger(__name__)
_WATCH_S = 0.1  # how often a wait looks whether the coordinator lives
_READ_ON_S = 0.002  # between two looks at what is being read to be kept, while there is no step
SWITCH_S = 0.0005  # how long a reading thread may keep the interpreter while the compute thread waits for it


def run(config: WorkerConfig, run_dir: Path, log_level: str) -> None:
    """Entry point of the process; returns when the worker is to end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the coordinator decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.setswitchinterval(SWITCH_S)
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


class _Answered:
    """A route has come, and has been answered."""


_ANSWERED = _Answered()


def _loop(worker: Worker, link: Link) -> None:
    parent = parent_process()
    assert parent is not None, "a worker is a child of the coordinator"
    inbox = _Inbox(worker, link)
    reads_on = False
    while True:
        message = inbox.next(_READ_ON_S if reads_on else _WATCH_S)
        match message:
            case None:
                if not parent.is_alive():
                    return
            case Stop():
                return
            case Route():
                link.send(_answer(worker, message, inbox.look_beside))
                worker.settle()  # while the coordinator goes on with the next layer
            case Keep(wishes=wishes, let_go=let_go):
                worker.keep(wishes, let_go)
            case Resize(slab_bytes=slab_bytes):
                usable_bytes = worker.resize(slab_bytes)
                _report(worker, link)
                link.send(Resized(worker.config.worker_id, usable_bytes))
            case Hint() | _Answered():
                pass
            case other:
                raise ProtocolError(f"{type(other).__name__} sent to a worker")
        was_reading, reads_on = reads_on, worker.read_on()
        if was_reading and not reads_on:
            _report(worker, link)


class _Inbox:
    """What has come over the link. Hints are worth something at once, in the middle of a step too; all else keeps its order.

    Routes that can be answered at once are: in place of them `next` says so.
    """

    def __init__(self, worker: Worker, link: Link) -> None:
        self._worker, self._link = worker, link
        self._waiting: deque[Message] = deque()

    def next(self, timeout_s: float) -> Message | _Answered | None:
        """The next message, None if there is none in time; a hint has been taken already."""
        if self._waiting:
            return self._waiting.popleft()
        frames = self._link.receive_frames(timeout_s, self._worker.expect_step)
        if frames is None:
            return None
        answer = self._worker.answer_at_once(frames[0], self.look_beside)
        if answer is None:
            return self._taken(from_frames(frames))
        self._link.send_frame(answer)
        self._worker.settle()  # while the coordinator goes on with the next layer
        return _ANSWERED

    def look_beside(self) -> None:
        """In a step, before it computes: report what happened before it, and take the hints that have come; the rest waits for `next`."""
        _report(self._worker, self._link)
        if not self._worker.config.takes_hints:
            return
        while (message := self._link.receive(0.0)) is not None:
            if not isinstance(self._taken(message), Hint):
                self._waiting.append(message)

    def _taken(self, message: Message) -> Message:
        if isinstance(message, Hint):
            self._worker.hint(message.layer, message.experts.tolist())
        return message


def _report(worker: Worker, link: Link) -> None:
    if (report := worker.report()) is not None:
        link.send(report)


def _answer(worker: Worker, route: Route, look_beside: Callable[[], None]) -> Routed | Failed:
    y = np.empty_like(route.x)
    try:
        counters = worker.step(route.layer, route.x, route.ids, route.weights, y, look_beside)
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
