"""Counters of the reads of one worker, shared by its I/O threads."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace


@dataclass(slots=True)
class StreamCounters:
    """Totals since the start. `reads_s`, `pack_s`: summed over threads; `busy_s`: wall time with a read under way.

    `num_retries`: reads tried again after an error that may pass; `num_fallbacks`: reads that the other copy had to
    serve; `num_verified`: slabs whose checksum was right; `num_mismatches`: slabs whose checksum was wrong at first.
    """

    num_reads: int = 0
    bytes_read: int = 0
    reads_s: float = 0.0
    busy_s: float = 0.0
    pack_s: float = 0.0
    num_verified: int = 0
    num_mismatches: int = 0
    num_retries: int = 0
    num_fallbacks: int = 0


@dataclass(slots=True)
class Reading:
    """One task's reads while they go on: what they ask for is known at the end."""

    num_reads: int
    nbytes: int = 0


class ReadMeter:
    """Thread-safe totals, and how many reads are under way."""

    def __init__(self) -> None:
        self._totals = StreamCounters()
        self._lock = threading.Lock()
        self._num_active = 0
        self._active_since = 0.0

    @contextmanager
    def reading(self, num_reads: int) -> Iterator[Reading]:
        """Count what happens inside as `num_reads` reads of `Reading.nbytes` bytes, however it ends."""
        reading, started = Reading(num_reads), time.perf_counter()
        with self._lock:
            if self._num_active == 0:
                self._active_since = started
            self._num_active += 1
        try:
            yield reading
        finally:
            self._end(reading, started)

    def add_pack(self, seconds: float) -> None:
        """Count time of packing."""
        with self._lock:
            self._totals.pack_s += seconds

    def add_check(self, is_right: bool) -> None:
        """Count a checksum that has been compared."""
        with self._lock:
            self._totals.num_verified += is_right
            self._totals.num_mismatches += not is_right

    def counters(self) -> StreamCounters:
        """A copy of the totals."""
        with self._lock:
            return replace(self._totals, busy_s=self._busy_s(time.perf_counter()))

    def busy_s(self) -> float:
        """Wall time since the start in which at least one read was under way."""
        with self._lock:
            return self._busy_s(time.perf_counter())

    def _end(self, reading: Reading, started: float) -> None:
        ended = time.perf_counter()
        with self._lock:
            self._totals.num_reads += reading.num_reads
            self._totals.bytes_read += reading.nbytes
            self._totals.reads_s += ended - started
            self._num_active -= 1
            if self._num_active == 0:
                self._totals.busy_s += ended - self._active_since

    def _busy_s(self, now: float) -> float:
        return self._totals.busy_s + (now - self._active_since if self._num_active else 0.0)
