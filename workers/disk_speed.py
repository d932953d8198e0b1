"""How fast a disk gives random experts, past the page cache and through it, both cold: a measurement of about a second.

    sample of experts ─▶ the system is to forget their pages; those that it does not forget are left out
    direct │ buffered │ buffered │ direct │ ...      short turns, so that a disk whose speed drifts treats both alike

The reads are those of the streamer: the same ranges, as many at a time. No expert is read twice.
"""

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from colibri_mp.checkpoint.experts import ExpertLayer
from colibri_mp.workers.expert_files import ExpertFiles, aligned_buffer
from colibri_mp.workers.read_plan import FileRange, LayerPlan

DEPTH = 8
TURNS = ("direct", "buffered", "buffered", "direct") * 2
TURN_S, TOTAL_S = 0.12, 1.0
SAMPLE_BYTES, SAMPLE_EXPERTS = 4_000_000_000, 2048

Task = list[FileRange]


class Speed(NamedTuple):
    """Bytes a second of cold reads; `direct` 0: direct reads are refused."""

    direct: float
    buffered: float


def typical_read_bytes(layer: ExpertLayer) -> int:
    """Size of the largest read of an expert: most of its bytes come in reads of this size."""
    return max(wanted.nbytes for task in LayerPlan(layer).tasks(0) for wanted in task.ranges)


def measure(files: Sequence[Path], layers: Sequence[ExpertLayer], seed: int | None = None) -> Speed | None:
    """Measure with experts of `layers`; None if the system does not let go of their pages (they lie in a tmpfs).

    Raises `ReadError` if a file cannot be read.
    """
    with closing(ExpertFiles(files, "buffered")) as buffered, closing(ExpertFiles(files, "direct")) as direct:
        sample = _cold_sample(buffered, layers, random.Random(seed))  # noqa: S311
        if not sample:
            return None
        opened = {"buffered": buffered, "direct": direct}
        turns = [mode for mode in TURNS if opened[mode].mode == mode]
        found = _take_turns([opened[mode] for mode in turns], sample)
    rates = {}
    for mode in opened:
        mine = [one for turn, one in zip(turns, found, strict=False) if turn == mode]
        rates[mode] = sum(nbytes for nbytes, _ in mine) / sum(seconds for _, seconds in mine) if mine else 0.0
    return Speed(**rates)


def _cold_sample(files: ExpertFiles, layers: Sequence[ExpertLayer], rng: random.Random) -> list[Task]:
    """Tasks of random experts without any page in the cache."""
    experts = [(plan, expert) for plan in map(LayerPlan, layers) for expert in range(plan.layer.num_experts)]
    sample: list[Task] = []
    left = SAMPLE_BYTES
    for plan, expert in rng.sample(experts, min(len(experts), SAMPLE_EXPERTS)):
        if left <= 0:
            break
        left -= plan.layer.stored_bytes
        sample += [_to_scratch(task.ranges, task.into_slab) for task in plan.tasks(expert)]
    for wanted in (wanted for task in sample for wanted in task):
        files.forget(wanted)
    return [task for task in sample if not any(map(files.is_cached, task))]


def _to_scratch(ranges: Sequence[FileRange], into_slab: bool) -> Task:
    """A part of a packed slab goes to the start of a scratch buffer, not to its place in the slab."""
    return [wanted._replace(target_offset=0) for wanted in ranges] if into_slab else list(ranges)


def _take_turns(turns: Sequence[ExpertFiles], sample: Sequence[Task]) -> list[tuple[int, float]]:
    """Bytes and seconds of each turn; an even number of them, fewer than asked if the time is up."""
    buffers = [aligned_buffer(max(map(_buffer_bytes, sample))) for _ in range(DEPTH)]
    found: list[tuple[int, float]] = []
    started = time.perf_counter()
    with ThreadPoolExecutor(DEPTH) as threads:
        for i, files in enumerate(turns):
            if i % 2 == 0 and time.perf_counter() - started > TOTAL_S:
                break
            found.append(_take_turn(threads, files, sample[i :: len(turns)], buffers))
    return found


def _take_turn(
    threads: ThreadPoolExecutor, files: ExpertFiles, tasks: Sequence[Task], buffers: Sequence[memoryview]
) -> tuple[int, float]:
    """Read tasks until they or the time are used up."""
    left = iter(tasks)
    started = time.perf_counter()

    def work(buffer: memoryview) -> int:
        nbytes = 0
        while time.perf_counter() - started < TURN_S and (task := next(left, None)):
            nbytes += sum(files.read(wanted, buffer) for wanted in task)
        return nbytes

    nbytes = sum(threads.map(work, buffers))
    return nbytes, time.perf_counter() - started


def _buffer_bytes(task: Task) -> int:
    """Room for the whole blocks around the ranges of a task."""
    return max(wanted.target_offset + wanted.nbytes for wanted in task) + 8192
