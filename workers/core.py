"""What a worker does with one `Route`: find the experts, read what is missing, compute, sum. No process, no socket.

    step   union of experts ─▶ rounds (all fits: one) ─▶ for each round
             acquire ─ submit all misses ─ compute hits ─ compute misses in the groups in which they land ─ release
           finish: each token's experts are summed in ascending id

Because the partial results are kept apart until `finish`, neither the size of the pool, nor rounds, nor the order in
which the disk answers can change a bit of the result. An error of a read ends the step; the pool stays sound and the
next step works.
"""

import contextlib
import time
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_mp.checkpoint.experts import ExpertLayer
from colibri_mp.config import Verify
from colibri_mp.errors import PoolError, ProtocolError, ReadError
from colibri_mp.kernels.expert import ExpertStage
from colibri_mp.kernels.layout import ExpertShape, pack
from colibri_mp.kernels.team import ThreadTeam
from colibri_mp.messages import StepCounters
from colibri_mp.shm.layout import LayerSlots
from colibri_mp.shm.pool import ExpertPool, Held
from colibri_mp.shm.segment import Segment
from colibri_mp.workers.copies import Copy, ExpertCopies
from colibri_mp.workers.expert_reader import ExpertReader
from colibri_mp.workers.slab_audit import SlabAudit
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

    def describe_layers(self) -> str:
        """Which layers this worker owns, for messages."""
        return f"layers {self.expert_layers[0].layer}..{self.expert_layers[-1].layer}"


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

    def __init__(self, busy_s: float) -> None:
        self.hits = self.misses = self.evictions = self.bytes_read = 0
        self.wait, self.compute = _Stopwatch(), _Stopwatch()
        self._busy_s = busy_s

    def counters(self, busy_s: float) -> StepCounters:
        """The counters; `busy_s` is the disk's total busy time now."""
        return StepCounters(
            hits=self.hits,
            misses=self.misses,
            evictions=self.evictions,
            bytes_read=self.bytes_read,
            disk_s=busy_s - self._busy_s,
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
        self._check_floor()
        with contextlib.ExitStack() as stack:
            self._segment = Segment.attach(config.segment_name)
            stack.callback(self._segment.close)
            self._pool = ExpertPool(self._segment, config.slots, config.fingerprint)
            stack.callback(self._pool.close)
            self._team = ThreadTeam(config.num_threads)
            stack.callback(self._team.close)
            copies = ExpertCopies(config.copies)
            reader = ExpertReader(copies, config.expert_layers, pack, config.verify)
            self._streamer = Streamer(reader, config.io_threads)
            stack.callback(self._streamer.close)
            self._audit = SlabAudit(reader) if config.verify == "always" else None
            self._layers = {layer.layer: layer for layer in config.expert_layers}
            self._stages = self._make_stages()
            self._resources = stack.pop_all()
        self._reads: dict[int, int] = {}  # slot -> generation of the read that fills it
        self._held: Held | None = None  # what the last round acquired, until `settle`
        self._unsettled: list[tuple[int, StepCounters]] = []
        self.totals = dict.fromkeys(self._layers, StepCounters())
        self.notes: tuple[str, ...] = (
            f"expert reads, {config.io_threads} at a time in each worker: {copies.description}",
        )
        if num_resident := self._pool.num_resident():
            self.notes += (f"worker {config.worker_id} found {num_resident} experts in its pool",)

    def step(self, layer: int, x: Floats, ids: Ints, weights: Floats, out: Floats) -> StepCounters:
        """Routed sum of a batch: x [T, D], ids [T, K] (< 0: not routed), weights [T, K] -> out [T, D], overwritten.

        The experts of the last round stay in use until `settle`, which the next step calls if nobody else has: between
        two layers every microsecond counts, and that bookkeeping can wait until the answer is on its way.

        Raises `ReadError` if an expert cannot be read, `PoolError` if it has no place, `ProtocolError` for arrays that
        do not fit the layer. The pool is sound afterwards and the next step works.
        """
        self.settle()
        self._check_arrays(layer, x, ids, weights, out)
        union = _union(ids, self._layers[layer])
        tally = _Tally(self._streamer.busy_s())
        stage = self._stages[layer]
        with tally.compute:
            stage.begin(x, _writable(ids), _writable(weights))
        for part in self._pool.rounds(layer, union):
            self._run_round(stage, layer, part, tally)
        with tally.compute:
            stage.finish(out)
        counters = tally.counters(self._streamer.busy_s())
        self._unsettled.append((layer, counters))
        return counters

    def expect_step(self) -> None:
        """A step is on its way: wake the compute threads, which takes as long as reading the message."""
        self._team.expect()

    def settle(self) -> None:
        """Make the experts of the last step evictable, and add up its counters. Idempotent."""
        if self._reads:
            self._take_landed(self._streamer.landed(0.0))
        if self._held is not None:
            held, self._held = self._held, None
            self._pool.release(held)
        while self._unsettled:
            layer, counters = self._unsettled.pop()
            self.totals[layer] = add_counters(self.totals[layer], counters)

    def check_integrity(self) -> None:
        """`PoolError` if the pool contradicts itself; for idle moments and tests."""
        self.settle()
        self._pool.check_integrity()

    def close(self) -> None:
        """End the threads, close the files, unmap the pool (it survives). Idempotent."""
        self._resources.close()

    # ── one round ───────────────────────────────────────────────────────────────────────────────────────────────

    def _run_round(self, stage: ExpertStage, layer: int, experts: list[int], tally: _Tally) -> None:
        self.settle()
        self._held = held = self._pool.acquire(layer, experts)
        tally.hits += len(held.hits)
        tally.misses += len(held.misses) + len(held.pending)
        tally.evictions += held.num_evicted
        self._submit(held)
        if self._audit is not None:
            self._audit.check(layer, held.hits, [self._pool.slab_view(slot) for slot in held.hit_slots])
        self._compute(stage, held.hits, held.hit_slots, tally)
        self._compute_as_they_land(stage, held, tally)

    def _submit(self, held: Held) -> None:
        """Start all reads of the round; the slot is the tag, since only one read at a time fills a slot."""
        for expert, slot, generation in zip(held.misses, held.miss_slots, held.generations, strict=True):
            self._reads[slot] = generation
            self._streamer.submit(held.layer, expert, self._pool.slab_view(slot), slot)

    def _compute_as_they_land(self, stage: ExpertStage, held: Held, tally: _Tally) -> None:
        """Wait for every read of the round. After an error nothing more is computed, but all reads are waited for."""
        awaited = dict(zip(held.miss_slots + held.pending_slots, held.misses + held.pending, strict=True))
        error: Exception | None = None
        while awaited:
            landed = self._wait(held.layer, awaited, tally)
            ready = [(awaited.pop(done.tag), done) for done in landed if done.tag in awaited]
            error = error or next((done.error for _, done in ready if done.error), None)
            tally.bytes_read += sum(done.nbytes for done in landed)
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

    def _compute(self, stage: ExpertStage, experts: list[int], slots: list[int], tally: _Tally) -> None:
        if experts:
            with tally.compute:
                stage.compute(np.array(experts, np.int32), self._pool.addresses[slots])

    # ── start, checks, counts ───────────────────────────────────────────────────────────────────────────────────

    def _make_stages(self) -> dict[int, ExpertStage]:
        """The stage of each layer; layers of one shape share one, buffers included."""
        by_shape: dict[ExpertShape, ExpertStage] = {}
        for layer in self.config.expert_layers:
            if layer.shape not in by_shape:
                by_shape[layer.shape] = ExpertStage(
                    self._team, layer.shape, self.config.max_tokens, self.config.top_k, self.config.planes
                )
        return {layer.layer: by_shape[layer.shape] for layer in self.config.expert_layers}

    def _check_floor(self) -> None:
        """One token's experts must fit each layer: the least that makes progress without reading them twice."""
        for entry in self.config.slots:
            floor = min(entry.num_experts, self.config.top_k)
            if entry.num_slots < floor:
                missing_bytes = (floor - entry.num_slots) * entry.slab_bytes
                raise PoolError(
                    f"layer {entry.layer} needs {floor} slots of {entry.slab_bytes} bytes for one token, the pool has "
                    f"{entry.num_slots}; raise --ram by {missing_bytes} bytes a layer"
                )

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


def add_counters(a: StepCounters, b: StepCounters) -> StepCounters:
    """Field by field."""
    return StepCounters(*(getattr(a, name) + getattr(b, name) for name in StepCounters.__struct_fields__))


def _writable(array: NDArray[Any]) -> NDArray[Any]:
    """The arrays of a message are read-only, a type of its own for numba: copied, so that nothing is compiled for it."""
    return array if array.flags.writeable else array.copy()


def _union(ids: Ints, layer: ExpertLayer) -> list[int]:
    """The distinct experts that ids [T, K] name, ascending; negative ids name none."""
    union = sorted(set(ids.ravel().tolist()))
    if union and union[-1] >= layer.num_experts:
        raise ProtocolError(f"layer {layer.layer}: expert {union[-1]} of {layer.num_experts}")
    return union[bisect_left(union, 0) :]
