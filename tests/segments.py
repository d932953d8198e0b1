"""Shared memory segments: names for those that tests make themselves, and those that some processes have made."""

import itertools
import os
from collections.abc import Iterable
from pathlib import Path

from colibri_mp.shm.segment import segment_name

_NUMBERS = itertools.count()


def fresh_name() -> str:
    """A name that no other segment has; it begins with this process's id, as a cluster's do with its coordinator's."""
    return segment_name(f"{os.getpid():x}", next(_NUMBERS))


def segments_of(pids: Iterable[int]) -> set[str]:
    """Names of the segments that clusters with these coordinators have; others may run at the same time."""
    return {path.name for pid in pids for path in Path("/dev/shm").glob(f"colibri-{pid:x}-*")}
