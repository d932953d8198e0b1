"""How experts are read from the disks of this run: chosen at start from a measurement that is made once for each disk.

    each copy (model, mirror) ─▶ its disk ─▶ disks.json has it? ── no ─▶ measure, about a second ─▶ disks.json
                                                │
                mode and reason ◀── choose ◀────┘     with a mirror: each copy's share of the reads, by its speed

Direct reads pay where they are faster than what buffered ones come to once the page cache has served its part: of the
experts that are asked for again, it can have those that were read since the pools forgot them (`cached_share`).
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from colibri_mp.checkpoint.experts import ExpertLayer
from colibri_mp.checkpoint.mirror import mirror_files
from colibri_mp.checkpoint.source import Checkpoint
from colibri_mp.config import IoMode, LaunchConfig, format_size
from colibri_mp.user_cache import replace_file, user_cache_dir
from colibri_mp.workers import disk_speed
from colibri_mp.workers.copies import Copy

LEAST_BYTES = 256_000_000  # experts that take less all together are too little to measure a disk with
MARGIN = 1.1  # direct reads must be so much faster: a smaller difference may be chance
COPY_MARGIN = 1.25  # a buffer costs a copy: it must make direct reads so much faster
FORGET_S = 30 * 24 * 3600  # an older measurement is made again


class DiskRecord(msgspec.Struct, frozen=True):
    """One measurement, in bytes a second: a `disk_speed.Speed`, and when it was made, in seconds since 1970."""

    buffered: float
    direct: float
    in_place: float
    measured: float

    @property
    def is_better_in_place(self) -> bool:
        """Whether direct reads straight into the pool are fast enough to spare the copy from a buffer."""
        return self.in_place * COPY_MARGIN >= self.direct

    @property
    def best_direct(self) -> float:
        """Speed of direct reads in the better way; 0: refused."""
        return self.in_place if self.is_better_in_place else self.direct

    def rate(self, mode: IoMode) -> float:
        """Speed of cold reads in a mode; where direct reads are refused, buffered ones take their place."""
        return self.best_direct if mode == "direct" and self.best_direct else self.buffered

    def __str__(self) -> str:
        direct = f"direct {format_size(self.direct)}/s" if self.direct else "direct refused"
        if self.in_place:
            direct += f" ({format_size(self.in_place)}/s without a buffer)"
        return f"measured: {direct}, buffered {format_size(self.buffered)}/s"


class ExpertMemory(NamedTuple):
    """Bytes of all experts, those that the pools hold, and memory that is left to the page cache."""

    stored: int
    pools: int
    page_cache: int

    @property
    def cached_share(self) -> float:
        """Share of the pools' misses that the page cache can serve: what was read after the pools' own contents.

        Pools and page cache both forget what is least recent. The page cache holds the last reads, and the most recent
        of those are in the pools still: it is of use only as far as it is larger than they are.
        """
        return min(1.0, max(0.0, (self.page_cache - self.pools) / max(1, self.stored - self.pools)))


class _Disks(msgspec.Struct):
    """Contents of disks.json, by disk, file system and size of the reads."""

    version: int = 1
    disks: dict[str, DiskRecord] = msgspec.field(default_factory=dict)


def choose_copies(
    checkpoint: Checkpoint, layers: Sequence[ExpertLayer], config: LaunchConfig, memory: ExpertMemory,
    progress: Callable[[str], None],
) -> tuple[Copy, ...]:  # fmt: skip
    """The checkpoint's files and, with `--mirror`, those of the second copy: how to read each, and how much from each.

    Raises `CheckpointError` if the mirror is no copy, `ReadError` if a disk cannot be read.
    """
    places = [checkpoint.files]
    if config.mirror:
        places.append(mirror_files(checkpoint, Path(config.mirror)))
    matters = config.io == "auto" or (config.io == "direct" and layers[0].is_packed)
    is_measured = memory.stored >= LEAST_BYTES and (config.mirror or (matters and memory.pools < memory.stored))
    copies, rates = [], []
    for files in places:
        record = _record(files, layers, progress) if is_measured else None
        mode, reason = choose_mode(record, memory) if config.io == "auto" else (config.io, "as asked")
        in_place = mode != "direct" or record is None or record.is_better_in_place
        copies.append(Copy(files, mode, reason, in_place=in_place))
        rates.append(record.rate(mode) if record else 1.0)
    return _weighted(copies, rates)


def choose_mode(record: DiskRecord | None, memory: ExpertMemory) -> tuple[IoMode, str]:
    """How to read from a disk, and why; `record` is None if it has not been measured."""
    if memory.pools >= memory.stored:
        return "buffered", "the pools have room for every expert"
    if memory.stored < LEAST_BYTES:
        return "buffered", f"{format_size(memory.stored)} of experts are too little to measure the disk with"
    if record is None:
        return "buffered", "cold reads cannot be measured here"
    share = memory.cached_share
    reason = f"{record}; the page cache can serve {share:.0%} of the pools' misses"
    is_faster = record.best_direct * (1 - share) > record.buffered * MARGIN
    return "direct" if is_faster else "buffered", reason


def _weighted(copies: list[Copy], rates: list[float]) -> tuple[Copy, ...]:
    """Each copy's share of the reads; a second copy on the same disk adds nothing, it only stands by."""
    first, *others = copies
    if any(_device(copy.files[0])[1] == _device(first.files[0])[1] for copy in others):
        standing_by = [replace(copy, reason=f"{copy.reason}; the same disk", weight=0.0) for copy in others]
        return (replace(first, weight=1.0), *standing_by)
    return tuple(replace(copy, weight=rate / sum(rates)) for copy, rate in zip(copies, rates, strict=True))


def _record(files: Sequence[Path], layers: Sequence[ExpertLayer], progress: Callable[[str], None]) -> DiskRecord | None:
    """The measurement of the disk that `files` lie on, from the user's cache or made now."""
    path = user_cache_dir() / "disks.json"
    known, key, now = _load(path), _key(files[0], layers[0]), time.time()
    if key in known.disks and now - known.disks[key].measured < FORGET_S:
        return known.disks[key]
    progress(f"measuring the disk of {files[0].parent}, once")
    speed = disk_speed.measure(files, layers)
    if speed is None:
        return None
    known.disks[key] = DiskRecord(*speed, measured=now)
    try:
        replace_file(path, msgspec.json.format(msgspec.json.encode(known)))
    except OSError as error:
        progress(f"the measurement cannot be kept in {path}: {error.strerror}")
    return known.disks[key]


def _load(path: Path) -> _Disks:
    """What is known; nothing if the file is missing, damaged or of another version: it will be measured again."""
    try:
        known = msgspec.json.decode(path.read_bytes(), type=_Disks)
    except (OSError, msgspec.DecodeError):
        return _Disks()
    return known if known.version == _Disks().version else _Disks()


def _key(file: Path, layer: ExpertLayer) -> str:
    """Disk, layout and size of the reads as a power of two: the speed depends on all of them."""
    read_bytes = 1 << (disk_speed.typical_read_bytes(layer) - 1).bit_length()
    return f"{_device(file)[0]}, {'packed ' if layer.is_packed else ''}reads of {read_bytes} bytes"


def _device(file: Path) -> tuple[str, int]:
    """Name and number of what a file lies on."""
    resolved = file.resolve()
    device = resolved.stat().st_dev
    mounts = [part for part in psutil.disk_partitions(all=True) if resolved.is_relative_to(part.mountpoint)]
    mount = max(mounts, key=lambda part: len(part.mountpoint), default=None)
    name = f"{mount.device} {mount.fstype}" if mount else "unknown"
    return f"{name} {os.major(device)}:{os.minor(device)}", device
