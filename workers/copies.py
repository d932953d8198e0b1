"""The one or two copies of a checkpoint that experts are read from.

    read ─▶ the copy that is behind its weight ── error, or the file has changed ──▶ the other copy

Each copy gets the share of the bytes that its weight says. A file that has failed once is read from the other copy first
from then on: a disk may take seconds to report an error.
"""

import logging
import math
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from colibri_mp.config import IoMode
from colibri_mp.errors import ReadError
from colibri_mp.workers.expert_files import ExpertFiles, FileChanged
from colibri_mp.workers.read_plan import FileRange

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Copy:
    """Files of one copy, how to read them and why so, and its weight among the copies (0: read if others fail).

    `in_place`: packed slabs are read to where they belong, not through a buffer.
    """

    files: tuple[Path, ...]
    mode: IoMode = "buffered"
    reason: str = "as asked"
    weight: float = 1.0
    in_place: bool = True


class CopyRead(NamedTuple):
    """What a read gave: bytes read; `doubt`: why they may be wrong all the same, if no copy is beyond doubt."""

    nbytes: int
    doubt: FileChanged | None


class ExpertCopies:
    """Open copies of a checkpoint: the same files in the same order. Threads may read at the same time.

    `num_fallbacks` counts reads that another copy had to serve. `description`: how the copies are read, and why.
    `in_place`: whether packed slabs are read to where they belong.
    """

    def __init__(self, copies: Sequence[Copy]) -> None:
        """Open everything; raises `ReadError` if a file cannot be opened, nothing stays open then."""
        self.num_fallbacks = 0
        self.in_place = all(copy.in_place for copy in copies)
        total = sum(copy.weight for copy in copies)
        self._shares = [copy.weight / total for copy in copies]
        self._given = [0.0] * len(copies)  # bytes / share
        self._failed: set[tuple[int, int]] = set()  # (copy, file)
        self._lock = threading.Lock()
        self._copies: list[ExpertFiles] = []
        with ExitStack() as stack:
            for copy in copies:
                self._copies.append(ExpertFiles(copy.files, copy.mode))
                stack.callback(self._copies[-1].close)
            self._resources = stack.pop_all()
        self.description = "; ".join(map(_describe, copies, self._copies, self._shares))

    def __len__(self) -> int:
        return len(self._copies)

    @property
    def num_retries(self) -> int:
        """Reads that were tried again."""
        return sum(files.num_retries for files in self._copies)

    def read(self, ranges: Sequence[FileRange], buffer: memoryview) -> CopyRead:
        """Read ranges as `ExpertFiles.read` does, all from the copy whose turn it is, or else from another one.

        Raises `ReadError` if no copy can be read.
        """
        *others, last = self._order(ranges)
        for copy_idx in others:
            try:
                found = self.read_from(copy_idx, ranges, buffer)
                if found.doubt is None:
                    return found
                self._note_failure(copy_idx, ranges, found.doubt)
            except ReadError as exc:
                self._note_failure(copy_idx, ranges, exc)
        return self.read_from(last, ranges, buffer)

    def read_from(self, copy_idx: int, ranges: Sequence[FileRange], buffer: memoryview) -> CopyRead:
        """The same, from one copy."""
        files = self._copies[copy_idx]
        nbytes = sum([files.read(wanted, buffer) for wanted in ranges])
        return CopyRead(nbytes, files.doubt(ranges))

    def forget(self, copy_idx: int, ranges: Sequence[FileRange]) -> None:
        """Have the next read of these ranges go to the disk."""
        for wanted in ranges:
            self._copies[copy_idx].forget(wanted)

    def advise(self, ranges: Sequence[FileRange]) -> None:
        """Have the system read these ranges of the first copy into its page cache."""
        for wanted in ranges:
            self._copies[0].advise(wanted)

    def describe_place(self, wanted: FileRange) -> str:
        """File and offset, for messages."""
        return f"offset {wanted.offset} of {self._copies[0].paths[wanted.file_idx]}"

    def close(self) -> None:
        """Close every file; idempotent."""
        self._resources.close()

    def _order(self, ranges: Sequence[FileRange]) -> list[int]:
        """All copies, the one to be read from first in front; its bytes are counted."""
        if len(self._copies) == 1:
            return [0]
        nbytes = sum(wanted.nbytes for wanted in ranges)
        with self._lock:
            order = sorted(range(len(self._copies)), key=lambda idx: self._key(idx, ranges, nbytes))
            if share := self._shares[order[0]]:
                self._given[order[0]] += nbytes / share
        return order

    def _key(self, copy_idx: int, ranges: Sequence[FileRange], nbytes: int) -> tuple[bool, float]:
        """Failed files last; then the copy that would be least ahead of its share after this read."""
        has_failed = any((copy_idx, wanted.file_idx) in self._failed for wanted in ranges)
        share = self._shares[copy_idx]
        return has_failed, self._given[copy_idx] + nbytes / share if share else math.inf

    def _note_failure(self, copy_idx: int, ranges: Sequence[FileRange], error: ReadError) -> None:
        """Count, and say it once for each file."""
        keys = {(copy_idx, wanted.file_idx) for wanted in ranges}
        with self._lock:
            self.num_fallbacks += 1
            is_new = not keys <= self._failed
            self._failed |= keys
        if is_new:
            _log.warning("%s; it is read from the other copy from now on", error)


def _describe(copy: Copy, files: ExpertFiles, share: float) -> str:
    how = f"{files.mode} ({files.refusal or copy.reason})"
    if share == 1.0:
        return how
    part = f"{share:.0%} of them" if share else "if the other copy fails"
    return f"{part} from {copy.files[0].parent}, {how}"
