"""Which expert goes next (eviction), and how many slots each layer gets (sizing).

Eviction is by layer. A policy is a dictionary of the experts that may be evicted, the most recent one last; one in use is
taken out (`pop`), so it cannot be. `policy[expert] = None` makes an absent one evictable. Dictionaries themselves, not
objects around one: these two run for every expert of every layer and token.

`lrfu` counts uses that lose weight with age, so that an expert that is asked for again and again outlives one that came by
once. With a short half-life it is LRU, with an endless one LFU. docs/log.md says what it gains.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from colibri_mp.errors import MemoryPlanError

PolicyName = Literal["lrfu", "lru"]
HALF_LIFE_TOKENS = 24.0
"""Tokens after whose uses a use weighs half. Measured on the built-in model; docs/log.md has the sweep."""

_RESCALE = 2.0**500


class Lru(OrderedDict[int, None]):
    """Evicts the least recent one. Every operation is O(1)."""

    def used(self, experts: Iterable[int]) -> None:
        """A step uses these: it takes them out and puts them back, which is all that counts."""

    def evict(self) -> int:
        """Take out and return the least recent one."""
        return self.popitem(last=False)[0]


class Lrfu(dict[int, None]):
    """Evicts the one with the least weight: its uses, each halved with every `half_life` later uses of the layer.

    Lee et al., "LRFU: a spectrum of policies that subsumes the least recently used and least frequently used policies" (IEEE
    Transactions on Computers 50, 2001). Of equal weights the least recent goes. Weights outlive an eviction.

    In place of all weights decaying, a new use weighs more than the one before: the order is the same, and only what is used
    changes. `evict` looks at all members, some 20 ns each, where the miss that follows takes a read; a heap, with an entry for
    each use, costs more in the steps that miss nothing.
    """

    def __init__(self, num_experts: int, half_life: float, prior: Sequence[float] = ()) -> None:
        """`half_life` in uses; `prior`: for each expert what it weighs at the start, in uses (default: nothing)."""
        super().__init__()
        self._growth = 2.0 ** (1 / half_life)
        self._gain = 1.0
        self._weights = list(prior) or [0.0] * num_experts

    def used(self, experts: Iterable[int]) -> None:
        """A step uses these, in this order."""
        weights, growth, gain = self._weights, self._growth, self._gain
        for expert in experts:
            gain *= growth
            weights[expert] += gain
        self._gain = gain
        if gain > _RESCALE:
            self._gain = gain / _RESCALE
            self._weights = [weight / _RESCALE for weight in weights]

    def evict(self) -> int:
        """Take out and return the one with the least weight."""
        victim = min(self, key=self._weights.__getitem__)
        del self[victim]
        return victim


Policy: TypeAlias = Lru | Lrfu


@dataclass(frozen=True, slots=True)
class Eviction:
    """The policy of all layers of a pool. `prior`: by layer, for each expert the weight that `lrfu` starts with, in uses."""

    policy: PolicyName = "lrfu"
    half_life_tokens: float = HALF_LIFE_TOKENS
    prior: Mapping[int, tuple[float, ...]] = field(default_factory=dict)

    def make(self, layer: int, num_experts: int, floor: int) -> Policy:
        """For one layer, of whose experts a token uses `floor`."""
        if self.policy == "lru":
            return Lru()
        return Lrfu(num_experts, self.half_life_tokens * floor, self.prior.get(layer, ()))


DEFAULT_EVICTION = Eviction()


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
