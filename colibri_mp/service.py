"""The coordinator process: start everything, run the engine, stop everything.

    main thread       engine: waits for commands and worker deaths, runs steps
    control thread    clients' socket, status, memory readings (see control)
    monitor thread    memory pressure: sizes of the pools, admission (see monitor)
    lifeline thread   owned clusters: waits for the end of stdin, which is the end of the client

Ends by `Shutdown`, SIGTERM, the end of an owning client, or a worker's death; in each case requests are answered,
workers stopped, segments unlinked and the run directory removed. Ctrl-C is the client's business: it reaches the whole
process group and is ignored here.
"""

import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from colibri_mp import __version__, log, rundir
from colibri_mp.compiling import Stopping
from colibri_mp.config import LaunchConfig
from colibri_mp.constraints import Compiled, Constraints
from colibri_mp.control import ClientGone, Command, ControlEndpoint
from colibri_mp.coordinator import Coordinator
from colibri_mp.drafting import Drafting
from colibri_mp.engine import Engine
from colibri_mp.errors import ColibriError, RequestError, WorkerDied
from colibri_mp.handshake import Ready, Reporter, StartFailed, read_request
from colibri_mp.kernels.paged_cache import BLOCK_TOKENS
from colibri_mp.kvcache import BlockAllocator
from colibri_mp.limits import rooms
from colibri_mp.memory import MemoryWatch
from colibri_mp.messages import (
    Cancel,
    Constraint,
    Failed,
    Generate,
    Restored,
    RestoreSession,
    Saved,
    SaveSession,
    Score,
    Shutdown,
    Status,
)
from colibri_mp.monitor import Monitor
from colibri_mp.overlap import Overlap
from colibri_mp.pressure import Decision, Governor, Reading
from colibri_mp.prompt_lookup import PromptLookup
from colibri_mp.scheduler import Scheduler
from colibri_mp.session_store import SessionStore
from colibri_mp.shm.segment import unlink_stale
from colibri_mp.tokenizer import Tokenizer, eos_token_ids, sampling_defaults
from colibri_mp.transport import wait

_log = logging.getLogger(__name__)
_IDLE_TICK_S = 1.0
_SAMPLE_S = 1.0  # between two readings of memory, at least,
_SAMPLE_SHARE = 0.01  # and so long that reading takes at most this share of the time
_SWITCH_S = 0.0005  # how long a thread may keep the interpreter while another waits: steps are made of short stretches


def main() -> None:
    """Entry point of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.setswitchinterval(_SWITCH_S)
    reporter = Reporter()
    try:
        config, owned = read_request(sys.stdin.buffer.readline())
        log.configure("coordinator", config.log_level)
        code = _run(config, owned, reporter)
    except ColibriError as error:
        reporter.send(StartFailed(error.kind, str(error)))
        code = error.exit_code
    except Exception:  # a defect: say all we know, and end
        traceback.print_exc()
        code = 1
    reporter.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the lifeline thread sits in a read of stdin that nothing can interrupt


def _run(config: LaunchConfig, owned: bool, reporter: Reporter) -> int:
    with ExitStack() as stack:
        service = Service(config, owned, reporter.progress, stack)
        signal.signal(signal.SIGTERM, lambda _signal, _frame: service.stop())
        if owned:
            threading.Thread(target=_lifeline, args=(service.stop,), daemon=True, name="lifeline").start()
        try:
            service.start()
        except Stopping:
            return 0
        reporter.send(Ready(service.run_dir.path.name, service.notes))
        reporter.close()
        return service.run()


def _lifeline(stop: Callable[[], None]) -> None:
    while os.read(0, 4096):
        pass
    stop()


class Service:
    """One cluster, from the coordinator's side."""

    def __init__(self, config: LaunchConfig, owned: bool, progress: Callable[[str], None], stack: ExitStack) -> None:
        self._config = config
        self._owner = [("client", os.getppid())] if owned else []
        self._progress = progress
        self._stack = stack
        self._stopping = threading.Event()
        self._started = time.time()
        self._watch = MemoryWatch()
        self.notes: tuple[str, ...] = ()
        self._broken: WorkerDied | None = None

    def start(self) -> None:
        """Bring the cluster up to the point where it serves.

        Raises:
            ColibriError: what is in the way; the exit stack takes back what has been made.
        """
        rundir.clean_stale(unlink_stale)
        self.run_dir = rundir.create(self._config.name or f"run-{os.getpid()}")
        self._stack.callback(self.run_dir.remove)
        if not self._owner:
            self._log_to_file()
        self.coordinator = Coordinator.launch(
            self._config, self.run_dir, self._progress, self._stopping.is_set, self._stack
        )
        self.notes = self.coordinator.notes
        allocator = BlockAllocator(self.coordinator.kv.num_blocks, BLOCK_TOKENS)
        self.control = ControlEndpoint(self.run_dir.control, self.status, self._tick)
        checkpoint = self.coordinator.checkpoint
        tokenizer = Tokenizer.load(checkpoint.path)
        self.engine = Engine(
            self.coordinator,
            Scheduler(
                allocator,
                self.coordinator.plan.prefill_chunk,
                self.coordinator.max_logit_rows,
                self._prefix_root(),
                self.coordinator.rows_held_together(),
                self.coordinator.states.num_slots,
            ),
            tokenizer,
            sampling_defaults(checkpoint),
            eos_token_ids(checkpoint, tokenizer),
            self.control.emit,
            self._config.queue,
            self._drafting(),
            Overlap(self._config.overlap),
        )
        self.coordinator.on_wait = self.control.flush
        self.sessions = SessionStore(
            self.coordinator.kv, self.coordinator.states, self.engine.scheduler, self.coordinator.kv_identity()
        )
        self.monitor = Monitor(self._make_governor(), self._read_pressure, self._relieve)
        self._processes = self.coordinator.processes()
        self._sample_memory()
        self.constraints = Constraints(tokenizer, self.engine.eos_ids, self.control.inbox.put, self._config.queue)
        self._stack.callback(self.control.close)
        self._stack.callback(self.constraints.close)
        self._stack.callback(self.monitor.close)
        self.control.start()
        self.monitor.start()

    def stop(self) -> None:
        """Ask the cluster to end; callable from any thread and from a signal handler."""
        self._stopping.set()
        if hasattr(self, "control"):
            self.control.inbox.wake()

    def run(self) -> int:
        """Serve until the end; returns the exit code."""
        try:
            while not self._stopping.is_set():
                self._wait_if_idle()
                self.coordinator.supervisor.exchange()
                self._listen()
                self.coordinator.supervisor.check_alive()
                num_requests = self.engine.num_requests
                self.engine.step(self._look_up)
                if self.engine.num_requests < num_requests:
                    self.coordinator.tiers.turn_ended()
        except Stopping:
            pass
        except WorkerDied as error:
            self._broken = error
            self.run_dir.leave_last_words(error)
            _log.error("%s", error)
        self.engine.fail_all(self._broken or ColibriError("the cluster is stopping"))
        return self._broken.exit_code if self._broken else 0

    def status(self, reads_memory: bool = True) -> dict[str, Any]:
        """What `status --json` prints; the memory in it is read now, or the last reading."""
        if reads_memory:
            self._sample_memory()
        coordinator = self.coordinator
        cache = coordinator.cache_counters()
        asked = cache["hits"] + cache["misses"] + cache["promoted"]
        return {
            "version": __version__,
            "name": self.run_dir.path.name,
            "pid": os.getpid(),
            "uptime_s": time.time() - self._started,
            "state": "broken" if self._broken else "stopping" if self._stopping.is_set() else "serving",
            "model": coordinator.describe_model(),
            "requests": {
                "active": self.engine.num_requests,
                "running_sequences": len(self.engine.scheduler.running),
                "waiting_sequences": len(self.engine.scheduler.waiting),
                "waiting": self.engine.num_waiting,
                "waiting_for": self.engine.waits_for,
                "queue": self._config.queue,
                "refused": self.engine.num_refused,
                "kv_blocks_free": self.engine.scheduler.allocator.num_free,
                "kv_blocks": self.engine.scheduler.allocator.num_blocks,
            },
            "prefix_cache": self.engine.scheduler.prefix.describe(),
            "progress": {
                "steps": self.engine.num_steps,
                "tokens": self.engine.num_tokens,
                "joined_requests": self.engine.num_joined,
                "dropped_rows": self.engine.num_dropped_rows,
                "two_groups": self.engine.overlap.describe(),
            },
            "drafting": self.engine.drafting.describe() if self.engine.drafting is not None else None,
            "cache": {**cache, "hit_rate": cache["hits"] / asked if asked else 0.0},
            "phases": coordinator.clock.describe(),
            "lossy": list(coordinator.lossy),
            "workers": coordinator.describe_workers(),
            "tiers": coordinator.tiers.describe(),
            "memory": {
                "budget_bytes": coordinator.plan.budget_bytes,
                "planned_bytes": coordinator.plan.planned_bytes,
                "used_bytes": self._watch.last.total_bytes,
                "peak_bytes": self._watch.peak_bytes,
                "by_process": self._watch.last.by_process,
                "pressure": self.monitor.status(),
            },
            "notes": list(self.notes),
        }

    def _prefix_root(self) -> str | None:
        """What a block's key begins with; None: nothing is shared."""
        return json.dumps(self.coordinator.kv_identity()) if self._config.prefix_cache == "on" else None

    def _drafting(self) -> Drafting | None:
        """Guesses by the model's predictor, if it has one, else by looking them up in the text."""
        if not self._config.draft:
            return None
        return Drafting(self._config.draft, self.coordinator.predicting or PromptLookup())

    def _log_to_file(self) -> None:
        """A detached cluster outlives the terminal: its messages, and its workers', go to a file from here on."""
        with self.run_dir.log.open("ab") as file:
            for fd in (1, 2):
                os.dup2(file.fileno(), fd)

    def _wait_if_idle(self) -> None:
        if not self.engine.can_step:
            self.control.flush()
            self.coordinator.trace.flush()
            wait([self.control.inbox.fd, *self.coordinator.supervisor.sources], _IDLE_TICK_S)

    def _listen(self) -> None:
        """Obey what has come."""
        for command in self.control.inbox.drain():
            self._obey(command)

    def _look_up(self) -> None:
        """`_listen` between two layers, where it usually is for nothing and must cost nothing."""
        if self.control.inbox.has_items:
            self._listen()

    def _obey(self, command: Command) -> None:
        match command:
            case ClientGone(client=client):
                self.constraints.forget_client(client)
                self.engine.forget_client(client)
            case (client, Cancel(request_id=request_id)):
                if (waiting := self.constraints.cancel(client, request_id)) is not None:
                    self.engine.submit(client, msgspec.structs.replace(waiting, constraint=None))  # for its `Finished`
                self.engine.cancel(client, request_id)
            case (client, Shutdown(request_id=request_id)):
                self._stopping.set()
                self.control.emit(client, Status(request_id, self.status()))
            case (client, Generate(constraint=Constraint()) as request):
                self._constrain(client, request)
            case Compiled() as compiled:
                self._constrained(compiled)
            case (client, Generate() | Score() as request):
                self.engine.submit(client, request)
            case (client, SaveSession() | RestoreSession() as request):
                self.control.emit(client, self._move_session(request))

    def _move_session(self, request: SaveSession | RestoreSession) -> Saved | Restored | Failed:
        try:
            if isinstance(request, RestoreSession):
                return self.sessions.restore(request.request_id, Path(request.path))
            token_ids = self.engine.prompt_ids(request.prompt)
            return self.sessions.save(request.request_id, token_ids, Path(request.path))
        except ColibriError as error:
            return Failed(request.request_id, error.kind, str(error))

    def _constrain(self, client: bytes, request: Generate) -> None:
        """A request begins when its constraint has been compiled."""
        try:
            self.constraints.begin(client, request)
        except ColibriError as error:
            self.control.emit(client, Failed(request.request_id, error.kind, str(error)))

    def _constrained(self, compiled: Compiled) -> None:
        if not self.constraints.take(compiled):
            return
        if isinstance(compiled.result, RequestError):
            self.control.emit(
                compiled.client, Failed(compiled.request.request_id, compiled.result.kind, str(compiled.result))
            )
        else:
            self.engine.submit(compiled.client, compiled.request, compiled.result)

    # -- memory --------------------------------------------------------------------------------------------------------

    def _make_governor(self) -> Governor:
        workers = self.coordinator.plan.workers
        return Governor(sum(share.slab_bytes for share in workers), sum(share.floor_bytes for share in workers))

    def _read_pressure(self) -> Reading:
        """What the monitor looks at. An owner counts as planned: what else it does with its memory is its own business."""
        sample, slab_bytes = self._watch.last, self.coordinator.slab_bytes()
        owner_bytes = sample.by_process.get("client", 0)
        planned = sum(term.nbytes for term in self.coordinator.plan.terms if term.process == "client")
        others = sample.total_bytes - sample.slab_bytes - owner_bytes + (planned if owner_bytes else 0)
        return Reading(time.monotonic(), rooms(), slab_bytes, self.coordinator.plan.budget_bytes - others - slab_bytes)

    def _relieve(self, decision: Decision) -> None:
        """Called in the monitor's thread: the engine's thread finds what it has to do between two steps."""
        self.coordinator.limit_slabs(decision.slab_bytes)
        self.engine.scheduler.admits = decision.admits
        self.control.inbox.wake()

    def _tick(self) -> None:
        """Sample the memory now and then: reading a process's share walks its page tables, 0.1 s for some GB."""
        if time.monotonic() >= self._next_sample:
            self._sample_memory()

    def _sample_memory(self) -> None:
        started = time.monotonic()
        self._watch.sample([*self._owner, *self._processes], self.coordinator.slab_bytes)
        ended = time.monotonic()
        self._next_sample = ended + max(_SAMPLE_S, (ended - started) / _SAMPLE_SHARE)
