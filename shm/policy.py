"""Which slot goes next (eviction), and how many slots each layer gets (sizing).

Eviction is least-recently-used per layer: on published traces of sparse MoE models no practical policy beats it by more
than a few points, and only where the cache is smaller than about one token's demand. Every operation is O(1).
"""

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from colibri_mp.errors import MemoryPlanError


class Lru(OrderedDict[int, None]):
    """Slots that may be evicted, least recent first. A slot in use is taken out (`pop`), so it cannot be.

    `lru[slot] = None` makes an absent slot the most recent one. A dictionary itself, not an object around one: these
    two run for every expert of every layer and token.
    """

    def evict(self) -> int:
        """Take out and return the least recent slot."""
        return self.popitem(last=False)[0]


class LayerDemand(NamedTuple):
    """What one layer could use: `floor` slots of `slab_bytes` at least (one token's experts), `num_experts` at most."""

    num_experts: int
    slab_bytes: int
    floor: int


class SlotPlan(NamedTuple):
    """Slots of each layer, and the bytes of the budget that are left."""

    num_slots: tuple[int, ...]
    left_bytes: int


def plan_slots(layers: Sequence[LayerDemand], budget_bytes: int) -> SlotPlan:
    """Share `budget_bytes` (slabs only, without the tables) among the layers.

    After the floors, each slab goes to the layer with the smallest resident share of its experts (then to the earlier
    one). So every layer gets bytes in proportion to what its experts weigh: a miss costs as many bytes as a slot does.

    Raises `MemoryPlanError` with the needed bytes if the floors do not fit.
    """
    num_slots = [min(layer.num_experts, layer.floor) for layer in layers]
    needed_bytes = sum(n * layer.slab_bytes for n, layer in zip(num_slots, layers, strict=True))
    left_bytes = budget_bytes - needed_bytes
    if left_bytes < 0:
        raise MemoryPlanError(
            f"the expert pools need at least {needed_bytes} bytes, the experts of one token in each of "
            f"{len(layers)} layers; {max(0, budget_bytes)} are left for them; raise --ram by {-left_bytes} bytes"
        )
    hungry = [(n / layer.num_experts, idx) for idx, (n, layer) in enumerate(zip(num_slots, layers, strict=True))]
    heapq.heapify(hungry)
    while hungry:
        _, idx = heapq.heappop(hungry)
        layer = layers[idx]
        if num_slots[idx] < layer.num_experts and layer.slab_bytes <= left_bytes:
            num_slots[idx] += 1
            left_bytes -= layer.slab_bytes
            heapq.heappush(hungry, (num_slots[idx] / layer.num_experts, idx))
    return SlotPlan(tuple(num_slots), left_bytes)


class StagingDemand(NamedTuple):
    """Staging slots of one slab size."""

    num_slots: int
    slab_bytes: int


class SizePlan(NamedTuple):
    """Slots that each layer, and the staging of each slab size, may use."""

    limits: tuple[int, ...]
    staging_limits: tuple[int, ...]


def plan_size(layers: Sequence[LayerDemand], staging: Sequence[StagingDemand], budget_bytes: int) -> SizePlan:
    """Share `budget_bytes` of slabs in a pool that has been made for more.

    The floors come first, whatever the budget; then staging, then the layers again, each slab to the one that has the
    smallest share of what it had (`LayerDemand.num_experts`: the slots that the pool was made with).
    """
    floor_bytes = sum(layer.floor * layer.slab_bytes for layer in layers)
    left_bytes = max(0, budget_bytes - floor_bytes)
    staging_limits = []
    for demand in staging:
        staging_limits.append(min(demand.num_slots, left_bytes // demand.slab_bytes))
        left_bytes -= staging_limits[-1] * demand.slab_bytes
    return SizePlan(plan_slots(layers, floor_bytes + left_bytes).num_slots, tuple(staging_limits))
