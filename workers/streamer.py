"""Reads experts from disk into slabs with a number of I/O threads; the disk sees as many requests at once.

    step (compute thread)          submit ─▶ tasks ──▶ I/O thread: preadv into scratch ─ pack into the slab ─┐
                                   landed ◀─ completions ◀── when the last task of an expert is done ────────┘

Each thread owns a scratch buffer; reading and packing release the interpreter lock, so both run beside compute. The
slab belongs to the streamer from `submit` until its completion is taken. An error of any task becomes the completion of
its expert, after its other tasks have ended: nothing writes into a slab whose completion has been seen.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from colibri_mp.checkpoint.experts import ExpertLayer
from colibri_mp.config import IoMode
from colibri_mp.errors import ReadError
from colibri_mp.formats import Encoding
from colibri_mp.workers.expert_files import ExpertFiles, aligned_buffer, buffer_bytes
from colibri_mp.workers.read_plan import LayerPlan, MatrixRows, ReadTask

Packer = Callable[[Encoding, int, int, Sequence[NDArray[np.uint8]], NDArray[np.uint8]], None]
"""`kernels.layout.pack`: encoding, rows, cols, stored parts (uint8), packed output (uint8); releases the lock."""

CLOSE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Landed:
    """The end of one request: all bytes of the slab are there, or `error` says why not."""

    tag: int
    nbytes: int
    error: Exception | None


@dataclass(slots=True)
class StreamCounters:
    """Totals since the start. `reads_s`, `pack_s`: summed over threads; `busy_s`: wall time with a read under way."""

    num_reads: int = 0
    bytes_read: int = 0
    reads_s: float = 0.0
    busy_s: float = 0.0
    pack_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Request:
    tag: int
    layer: int
    expert: int
    slab: NDArray[np.uint8]
    num_left: int
    nbytes: int = 0
    error: Exception | None = None


@dataclass(slots=True)
class _Meter:
    """Counters of all threads, and how many reads are under way."""

    totals: StreamCounters = field(default_factory=StreamCounters)
    num_active: int = 0
    active_since: float = 0.0

    def begin(self, now: float) -> None:
        if self.num_active == 0:
            self.active_since = now
        self.num_active += 1

    def busy_s(self, now: float) -> float:
        return self.totals.busy_s + (now - self.active_since if self.num_active else 0.0)

    def end(self, now: float) -> None:
        self.num_active -= 1
        if self.num_active == 0:
            self.totals.busy_s += now - self.active_since


def scratch_bytes(layers: Sequence[ExpertLayer], num_threads: int) -> int:
    """Scratch memory of a streamer for these layers, at most, all threads together."""
    return num_threads * buffer_bytes(max(LayerPlan(layer).scratch_bytes for layer in layers))


class Streamer:
    """The I/O threads of one worker. `submit` and `landed` are for one thread, the one that computes."""

    def __init__(
        self,
        files: Sequence[Path | str],
        layers: Sequence[ExpertLayer],
        pack: Packer,
        mode: IoMode = "buffered",
        num_threads: int = 8,
    ) -> None:
        """Open the files and start the threads; raises `ReadError` if a file cannot be opened."""
        self._plans = {layer.layer: LayerPlan(layer) for layer in layers}
        self._pack = pack
        self._files = ExpertFiles(files, mode)
        self._tasks: queue.SimpleQueue[tuple[_Request, ReadTask] | None] = queue.SimpleQueue()
        self._completions: queue.SimpleQueue[Landed] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._meter = _Meter()
        self._is_closing = False
        scratch_size = max(plan.scratch_bytes for plan in self._plans.values())
        self._threads = [
            threading.Thread(target=self._work, args=(scratch_size,), name=f"colibri-io-{i}")
            for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def mode(self) -> tuple[IoMode, str]:
        """How files are read, and why so."""
        return self._files.mode, self._files.reason

    def submit(self, layer: int, expert: int, slab: NDArray[np.uint8], tag: int) -> None:
        """Start reading one expert into `slab` (uint8 [slab_bytes]); its completion will carry `tag`."""
        tasks = self._plans[layer].tasks(expert)
        request = _Request(tag, layer, expert, slab, len(tasks))
        for task in tasks:
            self._tasks.put((request, task))

    def landed(self, timeout_s: float) -> list[Landed]:
        """All requests that have ended, in the order they did; waits for the first. Empty after `timeout_s` seconds."""
        found: list[Landed] = []
        try:
            found.append(self._completions.get(block=timeout_s > 0, timeout=timeout_s if timeout_s > 0 else None))
            while True:
                found.append(self._completions.get_nowait())
        except queue.Empty:
            return found

    def counters(self) -> StreamCounters:
        """A copy of the totals."""
        with self._lock:
            return replace(self._meter.totals, busy_s=self._meter.busy_s(time.perf_counter()))

    def busy_s(self) -> float:
        """Wall time since the start in which at least one read was under way."""
        with self._lock:
            return self._meter.busy_s(time.perf_counter())

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Drop what has not begun, end and join the threads, close the files. Idempotent.

        Raises `ReadError` if a thread hangs in a read for longer than `timeout_s`; its files then stay open.
        """
        self._is_closing = True
        for _ in self._threads:
            self._tasks.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if self._threads:
            raise ReadError(
                f"{len(self._threads)} I/O threads did not end within {timeout_s} s: a disk does not answer"
            )
        self._files.close()

    # ── I/O threads ─────────────────────────────────────────────────────────────────────────────────────────────

    def _work(self, scratch_size: int) -> None:
        scratch = aligned_buffer(scratch_size)
        while (job := self._tasks.get()) is not None:
            request, task = job
            try:
                nbytes, error = self._run(request, task, scratch), None
            except Exception as exc:  # whatever it is, it belongs to the thread that waits for this expert
                nbytes, error = 0, exc
            self._finish(request, nbytes, error)

    def _run(self, request: _Request, task: ReadTask, scratch: memoryview) -> int:
        """Read and pack one task; returns the bytes asked of the disk."""
        if self._is_closing:
            raise ReadError("the worker is closing")
        if request.error is not None:
            return 0
        nbytes = self._read(request, task, request.slab.data if task.into_slab else scratch)
        started = time.perf_counter()
        for matrix, part_offsets in zip(task.matrices, task.part_offsets, strict=True):
            self._pack_rows(matrix, part_offsets, scratch, request.slab)
        with self._lock:
            self._meter.totals.pack_s += time.perf_counter() - started
        return nbytes

    def _read(self, request: _Request, task: ReadTask, scratch: memoryview) -> int:
        started = time.perf_counter()
        nbytes = 0
        with self._lock:
            self._meter.begin(started)
        try:
            for wanted in task.ranges:
                nbytes += self._files.read(wanted, scratch)
        except ReadError as exc:
            raise ReadError(f"layer {request.layer}, expert {request.expert}: {exc}") from exc
        finally:
            ended = time.perf_counter()
            with self._lock:
                self._meter.end(ended)
                self._meter.totals.num_reads += len(task.ranges)
                self._meter.totals.bytes_read += nbytes
                self._meter.totals.reads_s += ended - started
        return nbytes

    def _pack_rows(
        self, matrix: MatrixRows, part_offsets: tuple[int, ...], scratch: memoryview, slab: NDArray[np.uint8]
    ) -> None:
        parts = [
            np.frombuffer(scratch, np.uint8, count=piece.nbytes, offset=offset)
            for piece, offset in zip(matrix.slices, part_offsets, strict=True)
        ]
        out = slab[matrix.slab_offset : matrix.slab_offset + matrix.packed_bytes]
        self._pack(matrix.encoding, matrix.rows, matrix.cols, parts, out)

    def _finish(self, request: _Request, nbytes: int, error: Exception | None) -> None:
        with self._lock:
            request.num_left -= 1
            request.nbytes += nbytes
            request.error = request.error or error
            is_last = request.num_left == 0
        if is_last:
            self._completions.put(Landed(request.tag, request.nbytes, request.error))
