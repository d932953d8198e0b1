"""Starts the worker processes, watches them, exchanges steps with them, stops them.

    coordinator ── spawn ──▶ worker k        multiprocessing, "spawn"
        │  Route ──▶  ◀── Routed, Failed     one ROUTER socket, peers "worker-k"
        └─ sentinel of each process          every wait is on the socket *and* the sentinels

A worker that ends, or does not answer within the step timeout, raises `WorkerDied` out of the wait it concerns; the
cluster is then broken: `close` stops the rest. A worker notices the coordinator's death by itself (see workers.main).
"""

import contextlib
import logging
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess

from colibri_mp.errors import ProtocolError, WorkerDied, describe_exit, from_wire
from colibri_mp.messages import Failed, Floats, Hello, Ints, Message, Route, Routed, Stop
from colibri_mp.rundir import RunDir
from colibri_mp.transport import Listener, Waitable, Waiter
from colibri_mp.workers.core import WorkerConfig
from colibri_mp.workers.main import run as run_worker

_STOP_TIMEOUT_S = 3.0
_log = logging.getLogger(__name__)


@dataclass
class WorkerHandle:
    """One worker as the coordinator sees it. `notes` are what it said of its own choices when it was ready."""

    config: WorkerConfig
    process: SpawnProcess
    notes: tuple[str, ...] = ()
    is_ready: bool = False

    @property
    def peer(self) -> bytes:
        """Its identity on the socket."""
        return peer_name(self.config.worker_id)

    @property
    def label(self) -> str:
        """How messages name it."""
        return f"worker {self.config.worker_id} (pid {self.process.pid}, {self.config.describe_layers()})"


def peer_name(worker_id: int) -> bytes:
    """Socket identity of a worker."""
    return f"worker-{worker_id}".encode()


class Supervisor:
    """The workers of one cluster."""

    def __init__(self, run_dir: RunDir, step_timeout_s: float, log_level: str) -> None:
        self._run_dir = run_dir
        self._step_timeout_s = step_timeout_s
        self._log_level = log_level
        self._listener = Listener(run_dir.workers)
        self.workers: list[WorkerHandle] = []
        self._by_layer: dict[int, WorkerHandle] = {}

    # -- life ----------------------------------------------------------------------------------------------------------

    def start(self, configs: Sequence[WorkerConfig]) -> None:
        """Spawn one worker for each config; the segments that they name must exist until `close`."""
        context = multiprocessing.get_context("spawn")
        for config in configs:
            process = context.Process(
                target=run_worker,
                args=(config, self._run_dir.path, self._log_level),
                name=f"colibri-worker-{config.worker_id}",
            )
            process.start()
            handle = WorkerHandle(config, process)
            self.workers.append(handle)
            self._by_layer.update({layer.layer: handle for layer in config.expert_layers})
        self._waiter = Waiter([self._listener, *self.sentinels])

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until every worker has said hello.

        Raises:
            WorkerDied: one ended or was not ready in time.
            ColibriError: one failed to start, with its own error.
        """
        deadline = time.monotonic() + timeout_s
        while not all(worker.is_ready for worker in self.workers):
            late = [worker for worker in self.workers if not worker.is_ready]
            match self._receive(deadline, late[0], f"was not ready within {timeout_s:.0f} s"):
                case Hello(worker_id=worker_id, notes=notes):
                    self.workers[worker_id].is_ready = True
                    self.workers[worker_id].notes = notes
                case Failed(kind=kind, message=message):
                    raise from_wire(kind, message)
                case other:
                    raise ProtocolError(f"{type(other).__name__} from a worker that is starting")

    def close(self) -> None:
        """Stop all workers, the stubborn ones by force. Never raises for a dead worker."""
        for worker in self.workers:
            self._listener.send(worker.peer, Stop())
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        for worker in self.workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.is_alive():
                _log.warning("%s does not stop, killing it", worker.label)
                worker.process.kill()
                worker.process.join(_STOP_TIMEOUT_S)
            worker.process.close()
        self.workers.clear()
        self._by_layer.clear()
        self._listener.close()

    # -- steps ---------------------------------------------------------------------------------------------------------

    def route(
        self, step: int, layer: int, x: Floats, ids: Ints, weights: Floats, on_answer: Callable[[], None]
    ) -> Routed:
        """Have the owner of `layer` compute a batch; `on_answer` is called when the answer has come, before it is read.

        Raises:
            WorkerDied: its owner ended or stopped answering.
            ColibriError: the step failed in the worker (its pool is intact, the next step works).
        """
        worker = self._by_layer[layer]
        if not self._listener.send(worker.peer, Route(step, layer, x, ids, weights)):
            self.check_alive()
            raise WorkerDied(f"{worker.label} is not connected any more")
        deadline = time.monotonic() + self._step_timeout_s
        while True:
            match self._receive(deadline, worker, f"did not answer step {step}, layer {layer}, in time", on_answer):
                case Routed() as routed if (routed.step, routed.layer) == (step, layer):
                    return routed
                case Failed(kind=kind, message=message):
                    raise from_wire(kind, message)
                case other:
                    raise ProtocolError(f"{type(other).__name__} out of turn from {worker.label}")

    def owner_of(self, layer: int) -> int:
        """Id of the worker that owns `layer`."""
        return self._by_layer[layer].config.worker_id

    def check_alive(self) -> None:
        """Raise `WorkerDied` if a worker has ended."""
        for worker in self.workers:
            if worker.process.exitcode is not None:
                raise WorkerDied(f"{worker.label} {describe_exit(worker.process.exitcode)}")

    @property
    def sentinels(self) -> list[Waitable]:
        """File descriptors that become readable when a worker ends."""
        return [int(worker.process.sentinel) for worker in self.workers]

    def _receive(
        self, deadline: float, awaited: WorkerHandle, silence: str, on_message: Callable[[], None] = lambda: None
    ) -> Message:
        """The next message of any worker; raises if one ends, or `awaited` is silent until `deadline`."""
        while (left := deadline - time.monotonic()) > 0:
            ready = self._waiter.wait(left)
            if self._listener in ready:
                on_message()
                received = self._listener.receive()
                if isinstance(received, ProtocolError):
                    raise received
                if received is not None:
                    return received[1]
            elif ready:
                self._reap()
        raise WorkerDied(f"{awaited.label} {silence}; it is stopped or hangs, see --step-timeout")

    def _reap(self) -> None:
        for worker in self.workers:
            with contextlib.suppress(TimeoutError):
                worker.process.join(0.1)
        self.check_alive()
