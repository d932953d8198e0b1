"""The coordinator's part of a model: resident weights, KV cache, and the forward pass over the workers' experts.

    x = embed[tokens]                                        [T, D]
    for each layer:
        x += mixer(norm(x))                                  here: attention on the KV cache, or what the layer has in its place
        h, ids, weights = router(norm(x))                    here: which experts, how much of each
        x += shared expert(h), if there is one               here, while the owner computes
        x += sum of weights * experts(h)                     the owner of the layer, over ZeroMQ (a dense block: here)
    logits = head(norm(x))                                   [R, V] of the rows that are asked for

"Here" is a `backend.Backend`. `Coordinator.launch` builds all of it in the order that hides the most: plan, kernels, spawn the
workers, and load the resident weights while they start.
"""

import os
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np
import psutil
from numpy.typing import NDArray

from colibri_mp.backend import Backend, Blocks, Slots
from colibri_mp.backend_choice import with_backend
from colibri_mp.backends import make_backend
from colibri_mp.checkpoint.experts import ExpertLayer
from colibri_mp.checkpoint.hub import resolve
from colibri_mp.checkpoint.source import Checkpoint
from colibri_mp.checksums import describe as describe_checksums
from colibri_mp.checksums import with_checksums
from colibri_mp.compiling import Stopping, compile_kernels
from colibri_mp.config import LaunchConfig
from colibri_mp.disks import ExpertMemory, choose_copies
from colibri_mp.errors import ColibriError, WorkerDied, from_wire
from colibri_mp.formats import Encoding
from colibri_mp.kernels.attention_inputs import Batch
from colibri_mp.limits import tightest_room
from colibri_mp.lossy import lossy_options, with_lossy_options
from colibri_mp.messages import Failed, Floats, Ints, PoolEvent, Routed, StepCounters
from colibri_mp.mixers import kinds
from colibri_mp.models import load_model
from colibri_mp.models.structure import ModelSpec, MoeSpec
from colibri_mp.phases import ATTENTION, COMPUTE, StepClock
from colibri_mp.plan_terms import max_logit_rows
from colibri_mp.planner import Plan, plan_now, split_slabs
from colibri_mp.predicting import Predicting
from colibri_mp.rundir import ClusterInfo, RunDir
from colibri_mp.scheduler import GroupEnded, GroupLook, Look, Rows
from colibri_mp.shm.layout import LayerSlots, pool_bytes
from colibri_mp.shm.policy import Eviction
from colibri_mp.shm.segment import Segment, segment_name
from colibri_mp.shm.view import PoolView
from colibri_mp.supervisor import Supervisor
from colibri_mp.tiers import Tiers, choose_eviction, open_usage
from colibri_mp.trace import EVENTS
from colibri_mp.trace_writer import NoTrace, TraceWriter, open_trace
from colibri_mp.usage import Usage
from colibri_mp.workers.copies import Copy
from colibri_mp.workers.core import WorkerConfig

_READY_TIMEOUT_S = 120.0
_MOST_UNCOUNTED = 10_000


@dataclass(eq=False)
class Step:
    """A forward pass under way. `x` float32 [T, D]: the residual stream of its rows, in `layer_idx`; `ids` [T, K]: what that layer's router
    chose, valid until the backend's next call."""

    number: int
    started_s: float
    rows: list[Rows]
    batch: Batch
    x: Floats
    layer_idx: int = 0
    ids: Ints = field(default_factory=lambda: np.empty((0, 0), np.int32))
    num_choices: int = 0

    def keep(self, left: list[Rows]) -> None:
        """Go on with these of its parts."""
        if left:
            self.x, self.batch = self.x[rows_in(left, self.rows)], make_batch(left)
        self.rows = left


class Coordinator:
    """See the module docstring. Implements `engine.Model`."""

    def __init__(
        self, checkpoint: Checkpoint, model: ModelSpec, plan: Plan, config: LaunchConfig, supervisor: Supervisor,
        backend: Backend, should_stop: Callable[[], bool], trace: TraceWriter | NoTrace, usage: Usage,
    ) -> None:  # fmt: skip
        self.checkpoint = checkpoint
        self.model = model
        self.plan = plan
        self.supervisor = supervisor
        self.notes: tuple[str, ...] = plan.notes
        self.pools: list[PoolView] = []
        self.max_context = plan.ctx_tokens
        self.vocab_size = model.vocab_size
        self.max_logit_rows = max_logit_rows(model.vocab_size, plan.prefill_chunk)
        self.clock = StepClock(model.depth)
        self.trace = trace
        self.can_be_joined = isinstance(trace, NoTrace)  # a trace tells one step after the other
        self.tiers = Tiers(config, model, plan, usage, backend, supervisor)
        self.lossy: tuple[str, ...] = ()
        self.on_wait: Callable[[], None] = lambda: None  # called in each layer, while its worker computes
        self._should_stop = should_stop
        self._backend = backend
        self.kv: Blocks = backend.caches
        self.states: Slots = backend.states
        self._last_step = 0
        self._current: Step | None = None  # whose times and predictions are being noted
        self._totals: defaultdict[int, Counter[str]] = defaultdict(Counter)  # by worker id
        # Counters by layer; added up when somebody asks, who may be the control thread, or now and then.
        self._uncounted: deque[tuple[int, StepCounters]] = deque()
        self._counting = threading.Lock()
        self._may_drop = model.router.top_p < 1
        self._continuing = frozenset(i for i, layer in enumerate(model.layers) if kinds.continues(layer))
        self.predicting = (
            Predicting(backend, self.compute_predictor, plan.prefill_chunk, self.max_logit_rows)
            if model.uses_predictor
            else None
        )

    # -- start ---------------------------------------------------------------------------------------------------------

    @classmethod
    def launch(
        cls, config: LaunchConfig, run_dir: RunDir, progress: Callable[[str], None], should_stop: Callable[[], bool],
        stack: ExitStack,
    ) -> "Coordinator":  # fmt: skip
        """Build everything; `stack` takes it back. Raises a `ColibriError` that says what is in the way."""
        checkpoint = Checkpoint.open(resolve(config.model, progress))
        published = load_model(checkpoint, predicts=config.draft > 0)
        model, lossy = with_lossy_options(published, config), lossy_options(published, config)
        config = with_backend(config, model)
        plan = plan_now(checkpoint, model, config)
        usage = open_usage(model, config.usage, checkpoint.fingerprint)
        compile_kernels(
            encodings_of(model), config.planes, progress, should_stop, model.quantises_experts, kinds.blocks(model)
        )
        experts = with_checksums(model.expert_layers, checkpoint.fingerprint)
        copies = choose_copies(checkpoint, experts, config, expert_memory(experts, plan), progress)
        eviction = choose_eviction(config, model, usage)
        workers = worker_configs(checkpoint, model, experts, plan, config, copies, eviction)
        run_dir.describe(ClusterInfo(os.getpid(), str(checkpoint.path), tuple(w.segment_name for w in workers)))
        segments = [
            stack.enter_context(Segment.create(worker.segment_name, pool_bytes(worker.slots, worker.staging)))
            for worker in workers
        ]
        trace = open_trace(config, checkpoint, model, plan, lossy, eviction)
        stack.callback(trace.close)
        supervisor = Supervisor(run_dir, config.step_timeout, config.log_level)
        stack.callback(supervisor.close)
        supervisor.start(workers)
        progress(f"loading {checkpoint.path.name}")
        backend = make_backend(checkpoint, model, plan, config, stack)
        coordinator = cls(checkpoint, model, plan, config, supervisor, backend, should_stop, trace, usage)
        coordinator.lossy = lossy
        supervisor.on_pool_event = coordinator.add_event
        supervisor.wait_ready(_READY_TIMEOUT_S)
        for segment in segments:
            coordinator.pools.append(PoolView(segment))
            stack.callback(coordinator.pools[-1].close)
        coordinator.tiers.pools = coordinator.pools
        stack.callback(coordinator.tiers.save)
        coordinator.notes += tuple(dict.fromkeys(note for worker in supervisor.workers for note in worker.notes))
        if backend.description:
            coordinator.notes += (backend.description,)
        if note := coordinator.tiers.start():
            coordinator.notes += (note,)
        if config.trace:
            coordinator.notes += (f"route trace: {config.trace}",)
        if lossy:
            coordinator.notes += (f"lossy: {', '.join(lossy)}: the logits are not those of the model as published",)
        coordinator.notes += (describe_checksums(experts, config.verify),)
        return coordinator

    # -- forward -------------------------------------------------------------------------------------------------------

    def forward(self, rows: list[Rows], look: Look) -> Floats:
        """Compute one step; see the module docstring and `engine.Model.forward`. `look` may compute another one in between.

        Raises:
            Stopping: the cluster is to end.
            WorkerDied: the cluster cannot go on.
            ColibriError: this step failed; KV of its rows may be half written, their sequences are to be dropped.
        """
        step = self._begin(rows)
        while self._send_next(step, look):
            self._prepare_next(step)
            self._take(step, self.supervisor.await_routed({step.number: step.layer_idx}, self._backend.expect))
        logits = self._end(step)
        if step.rows:
            self.tiers.end_step(self.clock.step_s, len(step.x))
        return logits

    def forward_groups(self, groups: list[list[Rows]], look: GroupLook, ended: GroupEnded) -> None:
        """Compute steps of several groups of rows at once; see `engine.Model.forward_groups`.

        Raises:
            Stopping, WorkerDied: as `forward`.
        """
        ready = deque((idx, self._begin(rows)) for idx, rows in enumerate(groups))
        under_way: dict[int, tuple[int, Step]] = {}
        while ready or under_way:
            answer: Routed | Failed | None = None
            if ready:
                idx, step = ready.popleft()
            else:
                awaited = {number: step.layer_idx for number, (_, step) in under_way.items()}
                answer = self.supervisor.await_routed(awaited, self._backend.expect)
                idx, step = under_way.pop(answer.request_id if isinstance(answer, Failed) else answer.step)
            outcome = self._go_on(step, answer, partial(look, idx))
            if outcome is None:
                under_way[step.number] = (idx, step)
            else:
                ready.extend((idx, self._begin(rows)) for rows in ended(idx, outcome))

    @property
    def fetch_wait_s(self) -> float:
        """Seconds that steps have waited for experts to be read, since the start."""
        return self.clock.fetch_wait_s

    def _go_on(self, step: Step, answer: Routed | Failed | None, look: Look) -> Floats | ColibriError | None:
        """Take an answer in, if there is one, and send for the next; what has come of the step, or None if it is under way."""
        try:
            if answer is not None:
                self._take(step, answer)
            return None if self._send_next(step, look) else self._end(step)
        except WorkerDied:
            raise
        except ColibriError as error:
            return error

    def _begin(self, rows: list[Rows]) -> Step:
        """A step before its first layer."""
        self._last_step += 1
        tokens = np.array([t for part in rows for t in part.token_ids], np.int32)
        started_s = self.clock.start_step()
        self._current = step = Step(self._last_step, started_s, rows, make_batch(rows), self._backend.embed(tokens))
        self.trace.start_step(step.number, *count_rows(rows))
        self.tiers.start_step(step.number, rows)
        return step

    def _resume(self, step: Step) -> None:
        """The step goes on after another one, or without some of its rows."""
        self._current = step
        self.tiers.resume_step(step.number, step.rows)
        self.clock.resume_step(step.started_s, min(step.layer_idx, self.model.depth - 1))

    def _send_next(self, step: Step, look: Look) -> bool:
        """Compute up to the next routed experts and send for them; False: the last layer is done, or nobody wants the step any more."""
        while step.layer_idx < self.model.depth:
            if self._should_stop():
                raise Stopping
            if (left := self._look(look, step.layer_idx)) is not None:
                step.keep(left)
                if not left:
                    return False
            if left is not None or self._current is not step:
                self._resume(step)
            self.clock.start_layer(step.layer_idx)
            if isinstance(self.model.layers[step.layer_idx].mlp, MoeSpec):
                self._send(step)
                return True
            self._compute_dense(step)
            step.layer_idx += 1
        return False

    def _compute_dense(self, step: Step) -> None:
        """A layer without a router: x += mixer(norm(x)), x += mlp(norm(x)), in place."""
        layer_idx, x = step.layer_idx, step.x
        self._backend.mix(layer_idx, x, step.batch)
        self.clock.lap(ATTENTION)
        x += self._backend.resident_expert(layer_idx, self._backend.mlp_norm(layer_idx, x))
        self.clock.lap(COMPUTE)

    def _send(self, step: Step) -> None:
        """x += mixer(norm(x)), in place; the batch for the experts goes to their owner."""
        layer_idx, x = step.layer_idx, step.x
        h, ids, weights = self._backend.mix_and_route(layer_idx, x, step.batch)
        step.ids, step.num_choices = ids, int(np.count_nonzero(ids >= 0)) if self._may_drop else ids.size
        self.clock.lap_block(self._backend.mixer_ended_s)
        self.supervisor.send_route(step.number, layer_idx, h, ids, weights)
        self._while_waiting(x, h, ids, layer_idx)

    def _take(self, step: Step, answer: Routed | Failed) -> None:
        """x += what the experts gave: the layer is done. Raises the error of a step that failed."""
        if self._current is not step:
            self._resume(step)
        routed = self._routed(answer)
        layer_idx, counters = step.layer_idx, routed.counters
        self.clock.lap_workers(counters, len(step.x), step.num_choices)
        self.tiers.layer_ended(counters)
        step.x += routed.y
        self.clock.end_layer()
        self.trace.add_layer(layer_idx, step.ids, step.num_choices, counters, self.clock.layer_s)
        step.layer_idx += 1

    def _routed(self, answer: Routed | Failed) -> Routed:
        """What the experts of a layer gave, counted. Raises the error that came in its place."""
        if isinstance(answer, Failed):
            raise from_wire(answer.kind, answer.message)
        self._uncounted.append((answer.layer, answer.counters))
        return answer

    def _end(self, step: Step) -> Floats:
        """Logits of the rows that want some, after the last layer; none where no row was left."""
        if not step.rows:
            return np.empty((0, self.vocab_size), np.float32)
        if self._current is not step:
            self._resume(step)
        if len(self._uncounted) > _MOST_UNCOUNTED:
            self._count()
        self.clock.start_head()
        wanted = logit_rows(step.rows)
        if self.predicting is not None:
            self.predicting.note(step.rows, step.x)
        logits = self._backend.head(step.x[wanted]) if wanted else np.empty((0, self.vocab_size), np.float32)
        self.clock.end_step()
        self.trace.end_step(self.clock.step_s)
        return logits

    def _look(self, look: Look, layer_idx: int) -> list[Rows] | None:
        """What `look` says before a layer; not where that layer goes on with what the last one has left for these very rows."""
        return None if layer_idx in self._continuing else look()

    def _while_waiting(self, x: Floats, h: Floats, ids: Ints, layer_idx: int) -> None:
        """A worker computes: the time for what no result depends on, hints first, and for the shared expert."""
        self.on_wait()
        self.tiers.look(layer_idx, x, ids)
        self._add_shared_expert(x, h, layer_idx)

    def _prepare_next(self, step: Step) -> None:
        """A worker computes, and no other step will use the backend before its answer: the time to prepare the next layer."""
        following = step.layer_idx + 1
        if following < self.model.depth and isinstance(self.model.layers[following].mlp, MoeSpec):
            self._backend.prepare(following, step.x, step.batch)

    def _add_shared_expert(self, x: Floats, h: Floats, layer_idx: int) -> None:
        if self.model.layers[layer_idx].resident_expert is not None:
            x += self._backend.resident_expert(layer_idx, h)

    def compute_predictor(self, rows: list[Rows], x: Floats) -> None:
        """The predictor's layer for some positions, between two steps: x [T, D], in place. Raises as `forward`."""
        self._last_step += 1
        layer_idx, backend = self.model.depth, self._backend
        if not isinstance(self.model.layers[layer_idx].mlp, MoeSpec):
            backend.mix(layer_idx, x, make_batch(rows))
            x += backend.resident_expert(layer_idx, backend.mlp_norm(layer_idx, x))
            return
        h, ids, weights = backend.mix_and_route(layer_idx, x, make_batch(rows))
        self.supervisor.send_route(self._last_step, layer_idx, h, ids, weights)
        self._add_shared_expert(x, h, layer_idx)
        answer = self.supervisor.await_routed({self._last_step: layer_idx}, backend.expect)
        x += self._routed(answer).y

    def add_event(self, event: PoolEvent) -> None:
        """Something has happened to a pool beside the steps."""
        if event.layer >= self.model.depth:
            return
        self.trace.add_event(EVENTS[event.kind], event.layer, event.value)

    # -- pools ---------------------------------------------------------------------------------------------------------

    def slab_bytes(self) -> int:
        """Memory that the slabs of all pools take now."""
        return sum(pool.reserved_bytes() - pool.layout.slabs_offset for pool in self.pools)

    def rows_held_together(self) -> int:
        """Rows whose experts fit the pool of every layer together, whichever they choose; at least 1."""
        num_experts = {experts.layer: experts.num_experts for experts in self.model.expert_layers}
        slots = (pair for share in self.plan.workers for pair in zip(share.layers, share.num_slots, strict=True))
        short = [num_slots for layer, num_slots in slots if num_slots < num_experts[layer]]
        return max(1, min(short) // self.model.router.top_k) if short else self.plan.prefill_chunk

    def limit_slabs(self, slab_bytes: int) -> None:
        """Keep the slabs of all pools within so many bytes, soon. Callable from any thread."""
        self.supervisor.request_sizes(split_slabs(self.plan.workers, slab_bytes))

    def kv_identity(self) -> dict[str, Any]:
        """Everything but the tokens that the values in the KV cache depend on, JSON-compatible."""
        return {
            "fingerprint": self.checkpoint.fingerprint,
            **self._backend.identity(),
            "kv_bits": self.kv.bits,
            "lossy": list(self.lossy),
            **({"predictors": 1} if self.model.uses_predictor else {}),
        }

    # -- reports -------------------------------------------------------------------------------------------------------

    def cache_counters(self) -> dict[str, float]:
        """Totals of all workers since the start; the names of `messages.StepCounters`."""
        self._count()
        total: Counter[str] = Counter(dict.fromkeys(StepCounters.__struct_fields__, 0))
        for counters in self._totals.values():
            total.update(counters)
        return dict(total)

    def describe_model(self) -> dict[str, Any]:
        """What `status` says of the model."""
        return {
            "path": str(self.checkpoint.path),
            "model_type": self.model.model_type,
            "num_layers": self.model.depth,
            "stored_bytes": self.checkpoint.total_bytes,
            "fingerprint": self.checkpoint.fingerprint,
            "ctx_tokens": self.max_context,
            "backend": self.plan.backend,
        }

    def describe_workers(self) -> list[dict[str, Any]]:
        """What `status` says of each worker."""
        self._count()
        return [
            {
                "worker_id": worker.config.worker_id,
                "pid": worker.process.pid,
                "layers": worker.config.describe_layers(),
                "num_slots": sum(layer.num_slots for layer in worker.config.slots),
                "pool_bytes": pool_bytes(worker.config.slots, worker.config.staging),
                "pool_used_bytes": pool.reserved_bytes(),
                "slab_limit_bytes": worker.slab_limit_bytes or share.slab_bytes,
                **{name: self._totals[worker.config.worker_id][name] for name in StepCounters.__struct_fields__},
            }
            for worker, pool, share in zip(self.supervisor.workers, self.pools, self.plan.workers, strict=True)
        ]

    def processes(self) -> list[tuple[str, int]]:
        """Names and pids of this cluster's processes, multiprocessing's resource tracker included."""
        names = {worker.process.pid: f"worker {worker.config.worker_id}" for worker in self.supervisor.workers}
        children = [(names.get(child.pid, "resource tracker"), child.pid) for child in psutil.Process().children()]
        return [("coordinator", os.getpid()), *sorted(children)]

    def _count(self) -> None:
        """Add up what has not been counted yet, by worker."""
        with self._counting:
            while self._uncounted:
                layer, counters = self._uncounted.popleft()
                self._totals[self.supervisor.owner_of(layer)].update(msgspec.structs.asdict(counters))


def expert_memory(layers: Sequence[ExpertLayer], plan: Plan) -> ExpertMemory:
    """How much of the experts the pools hold, and what the plan leaves to the page cache."""
    stored = sum(layer.num_experts * layer.stored_bytes for layer in layers)
    return ExpertMemory(
        stored, int(stored * plan.resident_share), max(0, tightest_room().free_bytes - plan.planned_bytes)
    )


def worker_configs(
    checkpoint: Checkpoint, model: ModelSpec, layers: Sequence[ExpertLayer], plan: Plan, config: LaunchConfig,
    copies: tuple[Copy, ...], eviction: Eviction,
) -> list[WorkerConfig]:  # fmt: skip
    """What each worker is told; `layers`: the model's experts, `copies`: where they are read from."""
    by_layer = {experts.layer: experts for experts in layers}
    configs = []
    for worker_id, share in enumerate(plan.workers):
        experts = tuple(by_layer[layer] for layer in share.layers)
        slots = tuple(
            LayerSlots(layer.layer, layer.num_experts, num_slots, layer.shape.slab_bytes)
            for layer, num_slots in zip(experts, share.num_slots, strict=True)
        )
        configs.append(
            WorkerConfig(
                worker_id=worker_id,
                segment_name=segment_name(f"{os.getpid():x}", worker_id),
                expert_layers=experts,
                slots=slots,
                copies=copies,
                fingerprint=checkpoint.fingerprint,
                top_k=model.router.top_k,
                max_tokens=plan.prefill_chunk,
                num_threads=plan.num_threads,
                io_threads=config.io_threads,
                verify=config.verify,
                planes=config.planes,
                staging=share.num_staging,
                advises=config.lookahead == "advise",
                eviction=eviction,
                backend=plan.backend,
                device_bytes=share.device_bytes,
            )
        )
    return configs


def encodings_of(model: ModelSpec) -> frozenset[Encoding]:
    """Every encoding that a matrix of the model has."""
    experts = (layer.encodings for layer in model.expert_layers)
    others = {matrix.encoding for matrix in model.other_resident_matrices()}
    return frozenset(others).union(kinds.encodings(model), *experts)


def make_batch(rows: list[Rows]) -> Batch:
    """Positions, sequence of each row, and the block table [S, longest] of a step (unused entries 0)."""
    positions = np.concatenate([np.arange(part.start, part.start + part.count, dtype=np.int32) for part in rows])
    sequence_idx = np.repeat(np.arange(len(rows), dtype=np.int32), [part.count for part in rows])
    block_table = np.zeros((len(rows), max(len(part.sequence.blocks) for part in rows)), np.int32)
    for idx, part in enumerate(rows):
        block_table[idx, : len(part.sequence.blocks)] = part.sequence.blocks
    return Batch(positions, sequence_idx, block_table, state_runs(rows))


def state_runs(rows: list[Rows]) -> Ints:
    """What a step does with recurrent states, as `Batch` has it, int32 [N, 4]."""
    runs = np.array([run for part in rows for run in part.state_runs], np.int32).reshape(-1, 3)
    first = np.cumsum(runs[:, 0], dtype=np.int32) - runs[:, 0]
    return np.column_stack([first, runs])


def rows_in(left: list[Rows], rows: list[Rows]) -> NDArray[np.bool_]:
    """Which rows of a step [T] belong to the parts that are `left`, a part of `rows` in the same order."""
    wanted = {id(part) for part in left}
    return np.repeat([id(part) in wanted for part in rows], [part.count for part in rows])


def count_rows(rows: list[Rows]) -> tuple[int, int]:
    """Rows of a step, and how many of them are prefill: several of one sequence at once."""
    return sum(part.count for part in rows), sum(part.count for part in rows if part.is_prefill)


def logit_rows(rows: list[Rows]) -> list[int]:
    """Indices of the step's rows whose logits are wanted."""
    wanted: list[int] = []
    end = 0
    for part in rows:
        end += part.count
        wanted += range(end - part.num_logits, end)
    return wanted
