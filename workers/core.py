"""What a worker does with one `Route`: find the experts, read what is missing, compute, sum. No process, no socket.

    step   union of experts ─▶ rounds (all fits: one) ─▶ for each round
             acquire ─ submit all misses ─ compute hits ─ compute misses in the groups in which they land ─ release
           finish: each token's experts are summed in ascending id
           (nothing to wait for: all of it in one compiled call, the usual case when decoding)

Because the partial results are kept apart until `finish`, neither the size of the pool, nor rounds, nor the order in
which the disk answers can change a bit of the result. An error of a read ends the step; the pool stays sound and the
next step works.
"""

import contextlib
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_mp.checkpoint.experts import ExpertLayer
from colibri_mp.config import BackendName, Verify
from colibri_mp.errors import ProtocolError, ReadError
from colibri_mp.kernels.layout import pack
from colibri_mp.messages import Frame, PoolEvent, PoolReport, StepBuffers, StepCounters, Wish, route_head
from colibri_mp.shm.layout import LayerSlots
from colibri_mp.shm.policy import DEFAULT_EVICTION, Eviction
from colibri_mp.shm.pool import ExpertPool, Held
from colibri_mp.shm.segment import Segment
from colibri_mp.workers.background import Background
from colibri_mp.workers.copies import Copy, ExpertCopies
from colibri_mp.workers.expert_reader import ExpertReader
from colibri_mp.workers.slab_audit import SlabAudit
from colibri_mp.workers.stages import MAKERS, BoundStep, Computing, ExpertLimits, Stage
from colibri_mp.workers.streamer import Landed, Streamer

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """All that a worker process is told; picklable. `slots` is parallel to `expert_layers` (ascending layers)."""

    worker_id: int
    segment_name: str
    expert_layers: tuple[ExpertLayer, ...]
    slots: tuple[LayerSlots, ...]
    copies: tuple[Copy, ...]
    fingerprint: str
    top_k: int
    max_tokens: int
    num_threads: int = 1
    io_threads: int = 8
    verify: Verify = "first"
    planes: int = 3
    read_timeout_s: float = 60.0
    staging: int = 0
    advises: bool = False
    eviction: Eviction = DEFAULT_EVICTION
    backend: BackendName = "cpu"
    device_bytes: int = 0

    @property
    def takes_hints(self) -> bool:
        """Whether hints may come: to read ahead into `staging` slots, or to advise the system."""
        return self.advises or self.staging > 0

    def describe_layers(self) -> str:
        """Which layers this worker owns, for messages."""
        return f"layers {self.expert_layers[0].layer}..{self.expert_layers[-1].layer}"


MOST_AT_ONCE = 16
"""Tokens of a step that `answer_at_once` takes: for more, what it saves is nothing beside the computing."""
_REPORT_S = 0.25  # between two reports in which nothing happened but reads ahead
_STAGING_COUNTERS = ("issued", "promoted", "late", "dropped", "failed")


@dataclass(frozen=True, slots=True)
class _Bound:
    """A step of one shape: its frames, and the experts' stage that works on them."""

    buffers: StepBuffers
    stage: BoundStep


class _Stopwatch:
    """Adds up the wall time of its `with` blocks."""

    def __init__(self) -> None:
        self.seconds = self._started = 0.0

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._started


class _Tally:
    """Counters of a step while it runs."""

    def __init__(self) -> None:
        self.hits = self.misses = self.promoted = self.evictions = 0
        self.wait, self.compute = _Stopwatch(), _Stopwatch()

    def add(self, held: Held, under_way: set[int]) -> None:
        """Count what a round has acquired; what was `under_way` when the step began is a miss, though it may have come by now."""
        num_come = len(under_way.intersection(held.hits))
        self.hits += len(held.hits) - held.num_promoted + held.num_late - num_come
        self.misses += len(held.misses) + len(held.pending) - held.num_late + num_come
        self.promoted += held.num_promoted
        self.evictions += held.num_evicted

    def counters(self, bytes_read: int, disk_s: float) -> StepCounters:
        """The counters, with what was read and the wall time in which the disk was busy."""
        return StepCounters(
            hits=self.hits,
            misses=self.misses,
            promoted=self.promoted,
            evictions=self.evictions,
            bytes_read=bytes_read,
            disk_s=disk_s,
            wait_s=self.wait.seconds,
            compute_s=self.compute.seconds,
        )


class Worker:
    """Owner of one expert pool. One thread calls it. `notes` are the choices made at start, with reasons."""

    def __init__(self, config: WorkerConfig) -> None:
        """Attach the pool (a surviving one comes back warm), open the files, start the threads.

        Raises `PoolError` or `ReadError`; nothing stays open then.
        """
        self.config = config
        with contextlib.ExitStack() as stack:
            self._segment = Segment.attach(config.segment_name)
            stack.callback(self._segment.close)
            self._pool = ExpertPool(
                self._segment, config.slots, config.fingerprint, floor=config.top_k, staging=config.staging,
                eviction=config.eviction,
            )  # fmt: skip
            stack.callback(self._pool.close)
            self._computing = self._make_computing()
            stack.callback(self._computing.close)
            copies = ExpertCopies(config.copies)
            reader = ExpertReader(copies, config.expert_layers, pack, config.verify)
            self._streamer = Streamer(reader, config.io_threads)
            stack.callback(self._streamer.close)
            self._audit = SlabAudit(reader) if config.verify == "always" else None
            self._layers = {layer.layer: layer for layer in config.expert_layers}
            self._stages = self._computing.stages
            self._background = Background(self._pool, self._begin_background, self._call_off)
            self._resources = stack.pop_all()
        self._reads: dict[int, int] = {}  # slot -> generation of the read that fills it
        self._bound: dict[tuple[int, int], _Bound] = {}  # by layer and number of tokens
        self._used: tuple[int, list[int]] | None = (
            None  # layer and experts of the last `answer_at_once`, until `settle`
        )
        self._held: Held | None = None  # what the last round acquired, until `settle`
        self._under_way: set[int] = set()  # experts that were being read for wishes when the step began
        self._bytes_read = 0  # since the last step
        self._told_busy_s = 0.0  # the disk's busy time that steps have reported
        self._reported, self._reported_at = PoolReport(config.worker_id), 0.0
        self.notes: tuple[str, ...] = (
            f"expert reads, {config.io_threads} at a time in each worker: {copies.description}",
            *self._computing.notes,
        )
        if num_resident := self._pool.num_resident():
            self.notes += (f"worker {config.worker_id} found {num_resident} experts in its pool",)

    def step(
        self,
        layer: int,
        x: Floats,
        ids: Ints,
        weights: Floats,
        out: Floats,
        before_compute: Callable[[], None] | None = None,
    ) -> StepCounters:
        """Routed sum of a batch: x [T, D], ids [T, K] (< 0: not routed), weights [T, K] -> out [T, D], overwritten.

        `before_compute` is called when the step's own reads have been started: the moment to say what had happened before it,
        and to take in hints.

        The experts of the last round stay in use until `settle`, which the next step calls if nobody else has: between
        two layers every microsecond counts, and that bookkeeping can wait until the answer is on its way.

        Raises `ReadError` if an expert cannot be read, `PoolError` if it has no place, `ProtocolError` for arrays that
        do not fit the layer. The pool is sound afterwards and the next step works.
        """
        self.settle()
        self._background.settle()
        self._check_arrays(layer, x, ids, weights, out)
        self._under_way = self._background.under_way(layer)
        stage, tally = self._stages[layer], _Tally()
        rounds = self._pool.rounds(layer, _union(ids, self._layers[layer])) or [[]]
        held = self._acquire(layer, rounds[0], tally)
        self._submit(held)
        if before_compute is not None:
            before_compute()
        if len(rounds) == 1 and not (held.misses or held.pending):
            with tally.compute:
                stage.run(x, ids, weights, np.array(held.hits, np.int32), self._pool.addresses[held.hit_slots], out)
        else:
            with tally.compute:
                stage.begin(x, ids, weights)
            self._run_round(stage, held, tally)
            for part in rounds[1:]:
                held = self._acquire(layer, part, tally)
                self._submit(held)
                self._run_round(stage, held, tally)
            with tally.compute:
                stage.finish(out)
        return tally.counters(self._take_bytes_read(), self._disk_time())

    def answer_at_once(self, frame: bytes, before_compute: Callable[[], None]) -> Frame | None:
        """The `Routed` frame that answers a `Route` frame, if it is for few tokens and all their experts are in memory, and nothing
        has happened that has to be told; None: `step` is needed. The same bits, with an eighth of the interpreter's work.

        The frame returned is used again by the next call. What the step used is noted in the pool by `settle`.
        """
        head = route_head(frame)
        if head is None or self._reads or self._bytes_read or self._audit is not None:
            return None
        step, layer, num_tokens, _, _ = head
        bound = self._bound.get((layer, num_tokens)) or self._bind(*head[1:])
        if bound is None or len(frame) != bound.buffers.route_bytes:
            return None
        self.settle()
        bound.buffers.load(frame)
        experts = sorted(set(bound.buffers.ids.ravel().tolist()))
        slots = self._pool.find(layer, experts)
        if slots is None:
            return None
        before_compute()
        started = time.perf_counter()
        bound.stage.run(experts, self._pool.addresses[slots])
        seconds = time.perf_counter() - started
        self._used = layer, experts
        return bound.buffers.answer(step, layer, len(experts), seconds)

    def _bind(self, layer: int, num_tokens: int, hidden: int, top_k: int) -> "_Bound | None":
        """What `answer_at_once` needs for steps of one shape; made once. None: `step` has to look at it."""
        spec = self._layers.get(layer)
        if spec is None or not 0 < num_tokens <= min(MOST_AT_ONCE, self.config.max_tokens):
            return None
        if (hidden, top_k) != (spec.hidden, self.config.top_k):
            return None
        buffers = StepBuffers(num_tokens, hidden, top_k)
        stage = self._stages[layer]
        bound = _Bound(buffers, stage.bind(buffers.x, buffers.ids, buffers.weights, buffers.y))
        self._bound.update({(other, num_tokens): bound for other, shared in self._stages.items() if shared is stage})
        return bound

    def expect_step(self) -> None:
        """A step is on its way: wake the compute threads, which takes as long as reading the message."""
        self._computing.expect()

    def settle(self) -> None:
        """Make the experts of the last step evictable. Idempotent."""
        if self._reads:
            self._take_landed(self._streamer.landed(0.0))
        if self._used is not None:
            used, self._used = self._used, None
            self._held = self._pool.acquire(*used)
            self._background.step_acquired(self._held)
        if self._held is not None:
            held, self._held = self._held, None
            self._pool.release(held)

    def resize(self, slab_bytes: int) -> int:
        """Keep the pool's slabs within `slab_bytes` from now on; returns what they may take (see `ExpertPool.resize`)."""
        self.settle()
        self._background.settle()
        pins = {layer: self._pool.pinned(layer) for layer in self._layers}
        limits = self._pool.limits()
        usable_bytes = self._pool.resize(slab_bytes)
        for layer, pinned in pins.items():
            self._background.given_up(layer, set(pinned).difference(self._pool.pinned(layer)))
        for layer, limit in self._pool.limits().items():
            if limit != limits[layer]:
                self._background.events.append(PoolEvent("resize", layer, limit))
        return usable_bytes

    # ── reads ahead ─────────────────────────────────────────────────────────────────────────────────────────────────

    def hint(self, layer: int, experts: Iterable[int]) -> None:
        """Read ahead what `layer` will probably need soon, the likeliest first; nothing waits for it."""
        if layer not in self._layers:
            return
        if not self.config.advises:
            self._background.hint(layer, experts)
            return
        residency = self._pool.residency(layer)
        for expert in experts:
            if not residency[expert]:
                self._streamer.advise(layer, expert)

    def keep(self, wishes: Iterable[Wish], let_go: Iterable[tuple[int, int]]) -> None:
        """Have these experts in memory when there is time to read them; let pins be evicted again."""
        self.settle()
        for layer, expert in let_go:
            self._background.let_go(layer, expert)
        self._background.keep(wishes)
        self._background.read_on()

    def read_on(self) -> bool:
        """Go on with what is to be kept in memory; for moments without a step. False: there is nothing left to do."""
        if not self._background.num_waiting:
            return False
        self.settle()
        self._background.read_on()
        return True

    def report(self) -> PoolReport | None:
        """What has changed beside the steps since the last report; None: nothing."""
        now = time.monotonic()
        if not self._background.events and not (self.config.staging and now - self._reported_at > _REPORT_S):
            return None
        self._reported_at = now
        report = self._make_report()
        if report == self._reported:
            return None
        self._reported = report
        return report

    def _make_report(self) -> PoolReport:
        counters, background = self._pool.staging_counters(), self._background
        locked_bytes, refusal = self._pool.locked
        return PoolReport(
            worker_id=self.config.worker_id,
            **{name: sum(getattr(layer, name) for layer in counters.values()) for name in _STAGING_COUNTERS},
            wasted_bytes=sum(self._layers[layer].stored_bytes * count.dropped for layer, count in counters.items()),
            missed_dropped=background.misses.dropped,
            missed_unpredicted=background.misses.unpredicted,
            num_pinned=sum(len(self._pool.pinned(layer)) for layer in self._layers),
            locked_bytes=locked_bytes,
            lock_refusal=refusal or "",
            num_waiting=background.num_waiting,
            refusal=background.refusal,
            events=background.take_events(),
        )

    def _begin_background(self, layer: int, expert: int, slot: int, generation: int) -> None:
        self._reads[slot] = generation
        self._streamer.submit(layer, expert, self._pool.slab_view(slot), slot, background=True)

    def _call_off(self, slot: int) -> bool:
        if not self._streamer.cancel(slot):
            return False
        del self._reads[slot]
        return True

    def check_integrity(self) -> None:
        """`PoolError` if the pool contradicts itself; for idle moments and tests."""
        self.settle()
        self._pool.check_integrity()

    def close(self) -> None:
        """End the threads, close the files, unmap the pool (it survives). Idempotent."""
        self._resources.close()

    # ── one round ───────────────────────────────────────────────────────────────────────────────────────────────

    def _acquire(self, layer: int, experts: list[int], tally: _Tally) -> Held:
        """Slots for the experts of one round; those of the round before are let go first."""
        self.settle()
        self._held = held = self._pool.acquire(layer, experts)
        tally.add(held, self._under_way)
        if self._audit is not None:
            self._audit.check(held.layer, held.hits, [self._pool.slab_view(slot) for slot in held.hit_slots])
        return held

    def _run_round(self, stage: Stage, held: Held, tally: _Tally) -> None:
        self._compute(stage, held.hits, held.hit_slots, tally)
        self._compute_as_they_land(stage, held, tally)

    def _submit(self, held: Held) -> None:
        """Start all reads of the round; the slot is the tag, since only one read at a time fills a slot."""
        for slot in self._background.step_acquired(held):
            self._streamer.promote(slot)
        for expert, slot, generation in zip(held.misses, held.miss_slots, held.generations, strict=True):
            self._reads[slot] = generation
            self._streamer.submit(held.layer, expert, self._pool.slab_view(slot), slot)

    def _compute_as_they_land(self, stage: Stage, held: Held, tally: _Tally) -> None:
        """Wait for every read of the round. After an error nothing more is computed, but all reads are waited for."""
        awaited = dict(zip(held.miss_slots + held.pending_slots, held.misses + held.pending, strict=True))
        error: Exception | None = None
        while awaited:
            landed = self._wait(held.layer, awaited, tally)
            ready = [(awaited.pop(done.tag), done) for done in landed if done.tag in awaited]
            error = error or next((done.error for _, done in ready if done.error), None)
            if error is None:
                self._compute(stage, [expert for expert, _ in ready], [done.tag for _, done in ready], tally)
        if error is not None:
            raise error

    def _wait(self, layer: int, awaited: dict[int, int], tally: _Tally) -> list[Landed]:
        """The next reads that end, at least one."""
        with tally.wait:
            landed = self._streamer.landed(self.config.read_timeout_s)
        if not landed:
            raise ReadError(
                f"layer {layer}: the disk has not delivered experts {sorted(awaited.values())} within "
                f"{self.config.read_timeout_s:.0f} s"
            )
        self._take_landed(landed)
        return landed

    def _take_landed(self, landed: Iterable[Landed]) -> None:
        """Tell the pool how reads ended, those that outlived their step too."""
        for done in landed:
            end = self._pool.mark_ready if done.error is None else self._pool.fail
            end(done.tag, self._reads.pop(done.tag))
            self._background.landed(done.tag, done.error)
            self._bytes_read += done.nbytes

    def _take_bytes_read(self) -> int:
        """Bytes that have come from the disk, ahead of demand too, since the step before."""
        nbytes, self._bytes_read = self._bytes_read, 0
        return nbytes

    def _disk_time(self) -> float:
        """Seconds in which a read was under way, since the step before."""
        before, self._told_busy_s = self._told_busy_s, self._streamer.busy_s()
        return self._told_busy_s - before

    def _compute(self, stage: Stage, experts: list[int], slots: list[int], tally: _Tally) -> None:
        if experts:
            with tally.compute:
                stage.compute(np.array(experts, np.int32), self._pool.addresses[slots])

    # ── start and checks ───────────────────────────────────────────────────────────────────────────────────

    def _make_computing(self) -> Computing:
        config = self.config
        limits = ExpertLimits(config.max_tokens, config.top_k, config.num_threads, config.planes, config.device_bytes)
        return MAKERS[config.backend](config.expert_layers, limits)

    def _check_arrays(self, layer: int, x: Floats, ids: Ints, weights: Floats, out: Floats) -> None:
        if layer not in self._layers:
            raise ProtocolError(f"layer {layer} is not owned by worker {self.config.worker_id}")
        spec = self._layers[layer]
        expected = (len(x), spec.hidden)
        shapes: tuple[Any, ...] = (x.shape, out.shape, ids.shape, weights.shape)
        if shapes != (expected, expected, ids.shape, ids.shape) or ids.ndim != 2 or len(ids) != len(x):
            raise ProtocolError(
                f"layer {layer}: x, out, ids, weights of shapes {shapes} do not fit hidden {spec.hidden}"
            )
        if len(x) > self.config.max_tokens or ids.shape[1] != self.config.top_k:
            raise ProtocolError(
                f"layer {layer}: {ids.shape} routed ids, this worker was made for "
                f"{self.config.max_tokens} tokens of {self.config.top_k} experts"
            )


def _union(ids: Ints, layer: ExpertLayer) -> list[int]:
    """The distinct experts that ids [T, K] name, ascending; negative ids name none."""
    union = sorted(set(ids.ravel().tolist()))
    if union and union[-1] >= layer.num_experts:
        raise ProtocolError(f"layer {layer.layer}: expert {union[-1]} of {layer.num_experts}")
    return union[bisect_left(union, 0) :]
