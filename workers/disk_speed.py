"""How fast a disk gives random experts, cold, in each of the ways to read them: a measurement of about a second.

    buffered   through the page cache
    direct     past it, into buffers of huge pages
    in place   past it, straight into shared memory as the pools have it; only of packed experts, others need a buffer

    sample of experts ─▶ those of which the page cache has nothing; if these are few, it is to forget the files first
    direct │ buffered │ buffered │ direct │ ...      short turns, so that a disk whose speed drifts treats all alike

The reads are those of the streamer: the same ranges, as many at a time. No expert is read twice.
"""

import mmap
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from colibri_mp.checkpoint.experts import ExpertLayer
from colibri_mp.workers.expert_files import ExpertFiles, aligned_buffer
from colibri_mp.workers.read_plan import ALIGNMENT, FileRange, LayerPlan

DEPTH = 8
TOTAL_S = 1.0
ROUNDS = 4  # turns of each way
SAMPLE_BYTES, SAMPLE_EXPERTS = 4_000_000_000, 2048

Task = Sequence[FileRange]


class Speed(NamedTuple):
    """Bytes a second of cold reads; 0: direct reads are refused, or experts cannot be read in place."""

    buffered: float
    direct: float
    in_place: float


class _Way:
    """One way to read, and what its turns have read so far."""

    def __init__(self, files: ExpertFiles, buffers: Sequence[memoryview]) -> None:
        self._files, self._buffers = files, buffers
        self._nbytes, self._seconds = 0, 0.0

    @property
    def rate(self) -> float:
        """Bytes a second; 0 if it has had no turn."""
        return self._nbytes / self._seconds if self._seconds else 0.0

    def take_turn(self, threads: ThreadPoolExecutor, tasks: Sequence[Task], turn_s: float) -> None:
        """Read tasks until they or the time are used up."""
        left = iter(tasks)
        started = time.perf_counter()

        def work(buffer: memoryview) -> int:
            nbytes = 0
            while time.perf_counter() - started < turn_s and (task := next(left, None)):
                nbytes += sum(self._files.read(wanted, buffer) for wanted in task)
            return nbytes

        self._nbytes += sum(threads.map(work, self._buffers))
        self._seconds += time.perf_counter() - started


def typical_read_bytes(layer: ExpertLayer) -> int:
    """Size of the largest read of an expert: most of its bytes come in reads of this size."""
    return max(_largest(task.ranges).nbytes for task in LayerPlan(layer).tasks(0))


def measure(files: Sequence[Path], layers: Sequence[ExpertLayer], seed: int | None = None) -> Speed | None:
    """Measure with experts of `layers`; None if the system does not let go of their pages (they lie in a tmpfs).

    Raises `ReadError` if a file cannot be read.
    """
    with closing(ExpertFiles(files, "buffered")) as buffered, closing(ExpertFiles(files, "direct")) as direct:
        sample = _cold_sample(buffered, layers, random.Random(seed))  # noqa: S311
        if len(sample) < 3 * ROUNDS:
            return None
        nbytes = max(map(_buffer_bytes, sample))
        huge = [aligned_buffer(nbytes) for _ in range(DEPTH)]
        ways = {"buffered": _Way(buffered, huge)}
        if direct.mode == "direct":
            ways["direct"] = _Way(direct, huge)
            if layers[0].is_packed:
                ways["in_place"] = _Way(direct, [memoryview(mmap.mmap(-1, nbytes)) for _ in range(DEPTH)])
        _take_turns(list(ways.values()), sample)
    return Speed(*(ways[name].rate if name in ways else 0.0 for name in Speed._fields))


def _take_turns(ways: Sequence[_Way], sample: Sequence[Task]) -> None:
    """Alternate, with as many turns for each and a part of the sample for every turn; stop early if the disk is slow."""
    turns = [*ways, *reversed(ways)] * (ROUNDS // 2)
    started = time.perf_counter()
    with ThreadPoolExecutor(DEPTH) as threads:
        for i, way in enumerate(turns):
            if i % len(ways) == 0 and time.perf_counter() - started > TOTAL_S:
                return
            way.take_turn(threads, sample[i :: len(turns)], TOTAL_S / len(turns))


def _cold_sample(files: ExpertFiles, layers: Sequence[ExpertLayer], rng: random.Random) -> list[Task]:
    """Tasks of random experts that the page cache does not have."""
    sample = _sample(layers, rng)
    cold = [task for task in sample if not files.is_cached(_largest(task))]
    if len(cold) < len(sample) // 2:
        files.forget_all()
        cold = [task for task in sample if not files.is_cached(_largest(task))]
    return cold


def _sample(layers: Sequence[ExpertLayer], rng: random.Random) -> list[Task]:
    """Tasks of random experts, each once, in random order."""
    experts = [(plan, expert) for plan in map(LayerPlan, layers) for expert in range(plan.layer.num_experts)]
    sample: list[Task] = []
    left = SAMPLE_BYTES
    for plan, expert in rng.sample(experts, min(len(experts), SAMPLE_EXPERTS)):
        if left <= 0:
            break
        left -= plan.layer.stored_bytes
        sample += [task.ranges for task in plan.tasks(expert)]
    return sample


def _largest(task: Task) -> FileRange:
    return max(task, key=lambda wanted: wanted.nbytes)


def _buffer_bytes(task: Task) -> int:
    """Room for the whole blocks around the ranges of a task."""
    return max(wanted.target_offset + wanted.nbytes for wanted in task) + 2 * ALIGNMENT
