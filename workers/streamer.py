"""Reads experts from disk into slabs with a number of I/O threads; the disk sees as many requests at once.

    step (compute thread)          submit ─▶ task queue ──▶ I/O thread: read ─ pack ─ the last one: verify ──┐
                                   landed ◀─ completions ◀───────────────────────────────────────────────────┘

Each thread owns a scratch buffer; reading, packing and checksums release the interpreter lock, so they run beside
compute. The slab belongs to the streamer from `submit` until its completion is taken. An error of any task becomes the
completion of its expert, after its other tasks have ended: nothing writes into a slab whose completion has been seen.
"""

import queue
import threading
import time
from dataclasses import dataclass

from colibri_mp.errors import ReadError
from colibri_mp.workers.copies import CopyRead
from colibri_mp.workers.expert_files import aligned_buffer
from colibri_mp.workers.expert_reader import Bytes, ExpertReader
from colibri_mp.workers.read_meter import StreamCounters
from colibri_mp.workers.task_queue import QueuedRead, TaskQueue

CLOSE_TIMEOUT_S = 10.0
MAX_BACKGROUND = 2
"""Tasks of background reads under way: more would keep a demand read waiting that comes meanwhile."""


@dataclass(frozen=True, slots=True)
class Landed:
    """The end of one read: all bytes of the slab are there, or `error` says why not."""

    tag: int
    nbytes: int
    error: Exception | None


class _Read(QueuedRead):
    """One expert on its way. `num_left`, `results`, `error` change under the streamer's lock."""

    __slots__ = ("error", "expert", "layer", "num_left", "results", "slab", "tag")

    def __init__(self, tag: int, layer: int, expert: int, slab: Bytes, num_tasks: int, background: bool) -> None:
        super().__init__(num_tasks, background)
        self.tag, self.layer, self.expert, self.slab = tag, layer, expert, slab
        self.num_left = num_tasks
        self.results: list[CopyRead] = []
        self.error: Exception | None = None


class Streamer:
    """The I/O threads of one worker. All methods are for one thread, the one that computes."""

    def __init__(self, reader: ExpertReader, num_threads: int = 8, max_background: int = MAX_BACKGROUND) -> None:
        """Start the threads; `reader` is closed by `close`."""
        self._reader = reader
        self._tasks = TaskQueue[_Read](max_background)
        self._completions: queue.SimpleQueue[Landed] = queue.SimpleQueue()
        self._background: dict[int, _Read] = {}
        self._lock = threading.Lock()
        self._is_closing = False
        self._threads = [threading.Thread(target=self._work, name=f"colibri-io-{i}") for i in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, layer: int, expert: int, slab: Bytes, tag: int, background: bool = False) -> None:
        """Start reading one expert into `slab` (uint8 [slab_bytes]); its completion will carry `tag`.

        A background read begins only while no other read waits or is under way. A tag may be used again once its read
        has landed or has been cancelled.
        """
        read = _Read(tag, layer, expert, slab, self._reader.num_tasks(layer), background)
        if background:
            self._background[tag] = read
        self._tasks.put(read)

    def promote(self, tag: int) -> None:
        """Give a background read the rank of the others, since it is awaited now. It may have landed already."""
        if (read := self._background.pop(tag, None)) is not None:
            self._tasks.promote(read)

    def cancel(self, tag: int) -> bool:
        """Drop a background read: True if nothing of it had begun. Then it has no completion, the slab is untouched."""
        read = self._background.get(tag)
        if read is None or not self._tasks.cancel(read):
            return False
        del self._background[tag]
        return True

    def advise(self, layer: int, expert: int) -> None:
        """Have the system read an expert into its page cache; of no use, and no harm, where reads go past it."""
        self._reader.advise(layer, expert)

    def landed(self, timeout_s: float) -> list[Landed]:
        """All reads that have ended, in the order they did; waits for the first. Empty after `timeout_s` seconds."""
        found: list[Landed] = []
        try:
            found.append(self._completions.get(block=timeout_s > 0, timeout=timeout_s if timeout_s > 0 else None))
            while True:
                found.append(self._completions.get_nowait())
        except queue.Empty:
            for landed in found:
                self._background.pop(landed.tag, None)
            return found

    def counters(self) -> StreamCounters:
        """A copy of the totals."""
        return self._reader.counters()

    def busy_s(self) -> float:
        """Wall time since the start in which at least one read was under way."""
        return self._reader.meter.busy_s()

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Drop what has not begun, end and join the threads, close the files. Idempotent.

        Raises `ReadError` if a thread hangs in a read for longer than `timeout_s`; its files then stay open.
        """
        if not self._is_closing:
            self._is_closing = True
            self._tasks.close(len(self._threads))
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if self._threads:
            raise ReadError(
                f"{len(self._threads)} I/O threads did not end within {timeout_s} s: a disk does not answer"
            )
        self._reader.close()

    # ── I/O threads ─────────────────────────────────────────────────────────────────────────────────────────────

    def _work(self) -> None:
        scratch = aligned_buffer(self._reader.scratch_bytes)
        while (taken := self._tasks.take()) is not None:
            read, task_idx = taken
            self._run(read, task_idx, scratch)
            self._tasks.done(read)

    def _run(self, read: _Read, task_idx: int, scratch: memoryview) -> None:
        """One task, and the end of the read if it is the last one. Whatever goes wrong is the read's error."""
        results: list[CopyRead] = []
        error: Exception | None = None
        try:
            if self._is_closing:
                raise ReadError("the worker is closing")
            if read.error is None:
                results.append(self._reader.run_task(read.layer, read.expert, task_idx, read.slab, scratch))
        except Exception as exc:
            error = exc
        with self._lock:
            read.num_left -= 1
            read.results += results
            read.error = read.error or error
            is_last = read.num_left == 0
        if is_last:
            self._finish(read, scratch)

    def _finish(self, read: _Read, scratch: memoryview) -> None:
        try:
            if read.error is None:
                self._reader.finish(read.layer, read.expert, read.slab, scratch, read.results)
        except Exception as exc:
            read.error = exc
        nbytes = sum(result.nbytes for result in read.results)
        self._completions.put(Landed(read.tag, nbytes, read.error))
