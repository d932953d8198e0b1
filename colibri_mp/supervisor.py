"""Starts the worker processes, watches them, exchanges steps with them, stops them.

    coordinator ── spawn ──▶ worker k        multiprocessing, "spawn"
        │  Route ──▶  ◀── Routed, Failed     one ROUTER socket, peers "worker-k"
        │  Keep, Hint ──▶  ◀── PoolReport    beside the steps: what to read when there is time, and what became of it
        │  Resize ──▶  ◀── Resized           sent between steps; the answer may come while another is awaited
        └─ exit code of each process         looked at every 50 ms of a wait, which therefore outlives no worker for long

A worker that ends, or does not answer within the step timeout, raises `WorkerDied` out of the wait it concerns; the
cluster is then broken: `close` stops the rest. A worker notices the coordinator's death by itself (see workers.main).
"""

import logging
import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess

from colibri_mp.control_groups import KillCounter
from colibri_mp.errors import ProtocolError, WorkerDied, describe_exit, from_wire
from colibri_mp.messages import (
    Failed,
    Floats,
    Hello,
    Hint,
    Ints,
    Keep,
    Message,
    PoolEvent,
    PoolReport,
    Resize,
    Resized,
    Route,
    Routed,
    Stop,
    Wish,
)
from colibri_mp.rundir import RunDir
from colibri_mp.transport import Listener, Waitable
from colibri_mp.workers.core import WorkerConfig
from colibri_mp.workers.main import run as run_worker

_STOP_TIMEOUT_S = 3.0
_WATCH_S = 0.05  # how often a wait for a worker's message looks whether all of them live
_log = logging.getLogger(__name__)


@dataclass
class WorkerHandle:
    """One worker as the coordinator sees it.

    `notes` are what it said of its own choices when it was ready; `slab_limit_bytes` is its last answer to a `Resize`, `report`
    the last word of its pool.
    """

    config: WorkerConfig
    process: SpawnProcess
    notes: tuple[str, ...] = ()
    is_ready: bool = False
    slab_limit_bytes: int | None = None
    report: PoolReport | None = None

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
        self._wanted_sizes: deque[Sequence[int]] = deque()
        self._kills = KillCounter()
        self.on_pool_event: Callable[[PoolEvent], None] = lambda _event: None

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

    def send_route(self, step: int, layer: int, x: Floats, ids: Ints, weights: Floats) -> None:
        """Have the owner of `layer` compute a batch; the arrays may be used again when its answer has come.

        Raises:
            WorkerDied: its owner has ended.
        """
        if self._wanted_sizes:
            self._send_sizes()
        worker = self._by_layer[layer]
        if not self._listener.send(worker.peer, Route(step, layer, x, ids, weights)):
            self.check_alive()
            raise WorkerDied(f"{worker.label} is not connected any more")

    def await_routed(self, awaited: Mapping[int, int], on_answer: Callable[[], None]) -> Routed | Failed:
        """The first answer to routes that were sent: `awaited` has the layer of each step under way.

        `on_answer` is called when a message has come, before it is read. `Failed`: the step `request_id` failed in the worker, whose
        pool is intact; the next step works.

        Raises:
            WorkerDied: an owner ended or stopped answering.
        """
        step, layer = next(iter(awaited.items()))
        worker = self._by_layer[layer]
        deadline = time.monotonic() + self._step_timeout_s
        match self._receive(deadline, worker, f"did not answer step {step}, layer {layer}, in time", on_answer):
            case Routed() as routed if awaited.get(routed.step) == routed.layer:
                return routed
            case Failed() as failed if failed.request_id in awaited:
                return failed
            case other:
                raise ProtocolError(f"{type(other).__name__} out of turn from a worker, perhaps {worker.label}")

    def hint(self, step: int, layer: int, experts: Ints) -> None:
        """Tell the owner of `layer` what it will probably need; nothing waits for it, and nothing fails if it is lost."""
        self._listener.send(self._by_layer[layer].peer, Hint(step, layer, experts))

    def keep(self, wishes: Sequence[Wish], let_go: Sequence[tuple[int, int]] = ()) -> None:
        """Have the owners read these experts when there is time, in this order, and let go of pins (layer, expert)."""
        for worker in self.workers:
            mine = [wish for wish in wishes if self._by_layer[wish.layer] is worker]
            gone = [pin for pin in let_go if self._by_layer[pin[0]] is worker]
            if mine or gone:
                self._listener.send(worker.peer, Keep(mine, gone))

    def request_sizes(self, slab_bytes: Sequence[int]) -> None:
        """Have each worker keep its slabs within so many bytes, soon: between two steps. Callable from any thread."""
        self._wanted_sizes.append(slab_bytes)

    def exchange(self) -> None:
        """Send the sizes that are wanted and take in answers to earlier ones, without waiting; for idle moments."""
        self._send_sizes()
        while (received := self._listener.receive()) is not None:
            if isinstance(received, ProtocolError):
                raise received
            if not self._take_aside(received[1]):
                raise ProtocolError(f"{type(received[1]).__name__} out of turn from {received[0].decode()}")

    def owner_of(self, layer: int) -> int:
        """Id of the worker that owns `layer`."""
        return self._by_layer[layer].config.worker_id

    def check_alive(self) -> None:
        """Raise `WorkerDied` if a worker has ended."""
        for worker in self.workers:
            if worker.process.exitcode is not None:
                described = describe_exit(worker.process.exitcode, self._kills.has_risen())
                raise WorkerDied(f"{worker.label} {described}")

    @property
    def sources(self) -> list[Waitable]:
        """What becomes readable when a worker says something, or ends."""
        return [self._listener, *(int(worker.process.sentinel) for worker in self.workers)]

    def _send_sizes(self) -> None:
        """Of several wishes only the last counts. A worker that cannot be reached is found dead elsewhere."""
        sizes: Sequence[int] = ()
        while self._wanted_sizes:
            sizes = self._wanted_sizes.popleft()
        for worker, slab_bytes in zip(self.workers, sizes, strict=False):
            self._listener.send(worker.peer, Resize(slab_bytes))

    def _take_aside(self, message: Message) -> bool:
        """Note what a worker says beside the steps; False if the message is something else."""
        match message:
            case Resized(worker_id=worker_id, slab_bytes=slab_bytes):
                self.workers[worker_id].slab_limit_bytes = slab_bytes
            case PoolReport(worker_id=worker_id) as report:
                self.workers[worker_id].report = report
                for event in report.events:
                    self.on_pool_event(event)
            case _:
                return False
        return True

    def _receive(
        self, deadline: float, awaited: WorkerHandle, silence: str, on_message: Callable[[], None] = lambda: None
    ) -> Message:
        """The next message of any worker; raises if one ends, or `awaited` is silent until `deadline`."""
        while (left := deadline - time.monotonic()) > 0:
            received = self._listener.receive(min(left, _WATCH_S), on_message)
            if received is None:
                self.check_alive()
            elif isinstance(received, ProtocolError):
                raise received
            elif not self._take_aside(received[1]):
                return received[1]
        raise WorkerDied(f"{awaited.label} {silence}; it is stopped or hangs, see --step-timeout")
