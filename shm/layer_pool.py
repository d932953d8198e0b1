"""What is known in memory of the slots: for each layer its lookup, what may be evicted, and pins; for each slab size what is
free and staged.

Only data, which `slots` changes together with the shared tables; `integrity` says how they belong together.
"""

from dataclasses import dataclass

import numpy as np

from colibri_mp.shm.layout import ClassSlots, LayerSlots
from colibri_mp.shm.policy import Lru, Policy


@dataclass(slots=True)
class StagingCounters:
    """What became of the reads ahead of one layer since the pool was opened; what is missing in the sum is staged now.

    `promoted` were asked for in time or not, `late` of them while still being read. `failed` counts reads that failed or
    were called off, `dropped` those that ended and were never asked for.
    """

    issued: int = 0
    promoted: int = 0
    late: int = 0
    dropped: int = 0
    failed: int = 0


class SlabClass:
    """All slots of one slab size: the FREE ones, and what is staged."""

    def __init__(self, entry: ClassSlots, staging_limit: int) -> None:
        self.entry = entry
        self.slots = range(entry.first_slot, entry.first_slot + entry.num_slots)
        self.free: list[int] = []  # with pages
        self.bare: list[int] = []  # without
        self.staged = Lru()  # READY ones, the oldest first
        self.num_staged = 0  # LOADING ones too
        self.staging_limit = staging_limit


class LayerPool:
    """The slots of one layer."""

    def __init__(self, entry: LayerSlots, slabs: SlabClass, limit: int, floor: int, policy: Policy) -> None:
        self.entry = entry
        self.slabs = slabs
        self.limit = limit
        self.floor = floor
        self.num_owned = 0  # slots of the layer; FREE ones that are still held after a failed read are among them
        self.slot_of: dict[int, int] = {}
        self.evictable = policy  # experts that are READY and not held, the most recent last
        self.loading: set[int] = set()
        self.pinned: set[int] = set()  # PINNED, and LOADING that will be
        self.staged: dict[int, int] = {}  # expert -> slot
        self.residency = np.zeros(entry.num_experts, np.bool_)  # READY or PINNED
        self.residency_view = self.residency.view()  # for others, who cannot write it
        self.residency_view.flags.writeable = False
        self.counters = StagingCounters()

    @property
    def num_available(self) -> int:
        """Slots that the layer can still take or evict; negative while more is in use than the limit allows."""
        return self.limit - self.num_owned + len(self.evictable)
