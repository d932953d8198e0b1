"""Random operations on a pool against a plain model of caching, by last use or by decaying uses, that knows nothing of staging."""

import sys
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from segments import fresh_name

from colibri_mp.errors import PoolError
from colibri_mp.shm.layout import LayerSlots, SlotState, pool_bytes
from colibri_mp.shm.policy import Eviction, LayerDemand, StagingDemand, plan_size
from colibri_mp.shm.pool import ExpertPool, Held
from colibri_mp.shm.segment import SHM_DIR, Segment
from colibri_mp.shm.view import PoolView

NUM_EXPERTS, FLOOR, NUM_STAGING, SLAB = 12, 2, 2, 4096
LAYERS = (LayerSlots(0, NUM_EXPERTS, 5, SLAB), LayerSlots(4, NUM_EXPERTS, 3, SLAB), LayerSlots(7, NUM_EXPERTS, 6, 8192))
STAGING = (StagingDemand(NUM_STAGING, SLAB), StagingDemand(NUM_STAGING, 2 * SLAB))
NUM_PAGES = sum(entry.num_slots * entry.slab_bytes for entry in (*LAYERS, *STAGING)) // SLAB
layer_ids = st.sampled_from([entry.layer for entry in LAYERS])
expert_ids = st.integers(0, NUM_EXPERTS - 1)
unions = st.sets(expert_ids, min_size=1, max_size=7)
num_pages = st.integers(4, NUM_PAGES + 2)
Read = tuple[int, int]  # slot, generation
EVICTIONS = (
    Eviction("lru"),
    Eviction("lrfu", 2),
    Eviction("lrfu", 0.1),  # 2^10 with each use: weights are scaled down again and again
    Eviction("lrfu", 9, {4: tuple(0.3 + 0.9 * expert for expert in range(NUM_EXPERTS))}),
)


@dataclass
class LayerModel:
    """What a layer must hold. An expert is evictable (`lru`), pinned, or busy: held by a step, or being read."""

    entry: LayerSlots
    limit: int
    eviction: Eviction
    use_times: list[list[int]] = field(default_factory=lambda: [[] for _ in range(NUM_EXPERTS)])
    clock: int = 0
    lru: OrderedDict[int, None] = field(default_factory=OrderedDict)
    pins: set[int] = field(default_factory=set)
    busy: set[int] = field(default_factory=set)
    reads: dict[int, Read] = field(default_factory=dict)  # of the busy ones: those that no step waits for
    to_pin: set[int] = field(default_factory=set)  # of those: pins when they land

    @property
    def resident(self) -> set[int]:
        """Complete experts, while no step runs."""
        return {*self.lru, *self.pins}

    @property
    def num_owned(self) -> int:
        """Slots taken."""
        return len(self.lru) + len(self.pins) + len(self.busy)

    @property
    def num_pins(self) -> int:
        """Pins, to come or there."""
        return len(self.pins) + len(self.to_pin)

    def evict_for(self, num_new: int) -> None:
        """Make room: the least weight goes, of equals the least recent."""
        while self.lru and self.num_owned + num_new > self.limit:
            del self.lru[next(iter(self.lru)) if self.eviction.policy == "lru" else min(self.lru, key=self.weight)]

    def use(self, experts: list[int]) -> None:
        """A step asks for these, in this order."""
        for expert in experts:
            self.clock += 1
            self.use_times[expert].append(self.clock)

    def weight(self, expert: int) -> float:
        """By the definition: each use halves with `half_life` later ones, and so does what is known from before."""
        half_life = self.eviction.half_life_tokens * FLOOR
        prior = self.eviction.prior.get(self.entry.layer, [0.0] * NUM_EXPERTS)[expert]
        uses = [(prior, self.clock), *((1.0, self.clock - time) for time in self.use_times[expert])]
        return sum(weight * 2 ** (-age / half_life) for weight, age in uses)

    def forget(self, survivors: list[int]) -> None:
        """A new writer knows no more than the order of the last uses of what is there."""
        self.clock, self.use_times = 0, [[] for _ in range(NUM_EXPERTS)]
        self.use(survivors)

    def begin(self, union: set[int]) -> None:
        """A step takes `union`, or it is read for good, or into a free slot."""
        new = union - self.resident - self.busy
        for expert in union:
            self.lru.pop(expert, None)
        self.busy |= union - self.pins - new
        self.evict_for(len(new))
        self.busy |= new


class PoolMachine(RuleBasedStateMachine):
    """Steps, rounds, reads that fail or outlive their step, reads ahead, pins, sizes, crashes.

    Slabs carry their expert's number. `staged` are the reads ahead under way, `staged_ready` those that ended, oldest first.
    """

    @initialize(eviction=st.sampled_from(EVICTIONS))
    def open(self, eviction: Eviction) -> None:
        self.eviction = eviction
        self.segment = Segment.create(fresh_name(), pool_bytes(LAYERS, NUM_STAGING))
        self.attach()
        self.layers = {entry.layer: LayerModel(entry, entry.num_slots, eviction) for entry in LAYERS}
        self.staging_limits = {demand.slab_bytes: demand.num_slots for demand in STAGING}
        self.staged: dict[tuple[int, int], Read] = {}
        self.staged_ready: list[tuple[int, int]] = []
        self.last_use: dict[tuple[int, int], int] = {}

    def attach(self) -> None:
        options = {"floor": FLOOR, "staging": NUM_STAGING, "eviction": self.eviction}
        self.pool = ExpertPool(self.segment, LAYERS, "a" * 64, **options)

    def teardown(self) -> None:
        if hasattr(self, "segment"):
            del self.pool
            self.segment.close()
            self.segment.unlink()

    # -- parts of the rules

    def touch(self, layer: int, expert: int) -> None:
        """A complete expert that nobody holds any more becomes the most recent one."""
        model = self.layers[layer]
        self.last_use[layer, expert] = len(self.last_use) + max(self.last_use.values(), default=0)
        if expert not in model.pins:
            model.lru[expert] = None
        model.evict_for(0)

    def fill(self, layer: int, expert: int, slot: int) -> None:
        self.pool.slab_view(slot)[:] = expert + 20 * layer

    def land(self, layer: int, expert: int, read: Read, works: bool) -> None:
        """The end of a read, in the pool."""
        self.fill(layer, expert, read[0])
        if works:
            self.pool.mark_ready(*read)
        else:
            self.pool.fail(*read)

    def fits(self, layer: int, union: set[int]) -> bool:
        """Whether a step can have `union` at once."""
        model = self.layers[layer]
        return model.num_owned - len(model.lru) + len(union - model.pins - model.busy) <= model.limit

    def acquire(self, layer: int, union: set[int]) -> Held:
        """Acquire, and compare with the model: staged experts are hits or awaited, but evict as misses do."""
        model = self.layers[layer]
        ready = {expert for of, expert in self.staged_ready if of == layer}
        under_way = {expert for of, expert in self.staged if of == layer}
        num_before = model.num_owned
        new = union - model.resident - model.busy
        pending = union & (model.busy | under_way)
        hits = union & (model.resident | ready)
        model.begin(union)
        model.use(sorted(union))
        held = self.pool.acquire(layer, union)
        assert (held.hits, held.pending) == (sorted(hits), sorted(pending))
        assert held.misses == sorted(union - hits - pending)
        assert held.num_evicted == num_before + len(new) - model.num_owned
        assert (held.num_promoted, held.num_late) == (len(union & (ready | under_way)), len(union & under_way))
        for expert, slot in zip(held.hits, held.hit_slots, strict=True):
            assert (self.pool.slab_view(slot) == expert + 20 * layer).all()
        self.pool.check_integrity()
        return held

    def finish(self, held: Held, union: set[int], failed: set[int]) -> None:
        """Land all that the step waits for, `failed` as errors, and release."""
        layer, model = held.layer, self.layers[held.layer]
        reads = {e: (s, g) for e, s, g in zip(held.misses, held.miss_slots, held.generations, strict=True)}
        for expert in held.pending:
            reads[expert] = model.reads.pop(expert, None) or self.staged.pop((layer, expert))
        self.staged_ready = [key for key in self.staged_ready if key[0] != layer or key[1] not in union]
        failed = failed & set(reads)
        for expert, read in reads.items():
            self.land(layer, expert, read, expert not in failed)
        self.pool.check_integrity()
        self.pool.release(held)
        model.pins |= (model.to_pin & union) - failed
        model.to_pin -= union
        model.busy -= union
        for expert in sorted(union - failed):
            self.touch(layer, expert)

    def step(self, layer: int, union: set[int], failed: set[int]) -> None:
        self.finish(self.acquire(layer, union), union, failed)

    def plan(self, num_bytes: int, held_pins: set[tuple[int, int]]) -> int:
        """What `resize` must do: pins that do not fit go, then limits hold."""
        pins = [(m.entry.layer, e) for m in self.layers.values() for e in m.pins]
        needed = sum((FLOOR + m.num_pins) * m.entry.slab_bytes for m in self.layers.values())
        for layer, expert in sorted(set(pins) - held_pins, key=self.last_use.__getitem__):
            if needed > num_bytes:
                self.layers[layer].pins.remove(expert)
                needed -= self.layers[layer].entry.slab_bytes
        demands = [LayerDemand(m.entry.num_slots, m.entry.slab_bytes, FLOOR + m.num_pins) for m in self.layers.values()]
        limits, staging_limits = plan_size(demands, STAGING, num_bytes)
        for model, limit in zip(self.layers.values(), limits, strict=True):
            model.limit = limit
            model.evict_for(0)
        for demand, limit in zip(STAGING, staging_limits, strict=True):
            self.staging_limits[demand.slab_bytes] = limit
            self.trim_staging(demand.slab_bytes)
        return self.usable_bytes()

    def usable_bytes(self) -> int:
        layer_bytes = sum(m.limit * m.entry.slab_bytes for m in self.layers.values())
        return layer_bytes + sum(limit * slab_bytes for slab_bytes, limit in self.staging_limits.items())

    def staged_of(self, slab_bytes: int) -> tuple[int, list[tuple[int, int]]]:
        """Staging slots of a slab size that are taken, and the complete ones among them, oldest first."""
        under_way = [key for key in self.staged if self.layers[key[0]].entry.slab_bytes == slab_bytes]
        ready = [key for key in self.staged_ready if self.layers[key[0]].entry.slab_bytes == slab_bytes]
        return len(under_way) + len(ready), ready

    def trim_staging(self, slab_bytes: int) -> None:
        taken, ready = self.staged_of(slab_bytes)
        for key in ready[: max(0, taken - self.staging_limits[slab_bytes])]:
            self.staged_ready.remove(key)

    # -- rules

    @rule(layer=layer_ids, union=unions, failed=unions)
    def use(self, layer: int, union: set[int], failed: set[int]) -> None:
        """One step whose union fits, or is refused as a whole."""
        if self.fits(layer, union):
            self.step(layer, union, failed)
            return
        with pytest.raises(PoolError, match="work in rounds"):
            self.pool.acquire(layer, union)

    @rule(layer=layer_ids, union=unions, pages=num_pages)
    def resize_in_a_step(self, layer: int, union: set[int], pages: int) -> None:
        """What a step holds survives a change of the size, up to its end."""
        if self.fits(layer, union):
            held = self.acquire(layer, union)
            self.staged_ready = [key for key in self.staged_ready if key[0] != layer or key[1] not in union]
            late = {key: read for key, read in self.staged.items() if key[0] == layer and key[1] in union}
            self.staged = {key: read for key, read in self.staged.items() if key not in late}
            usable = self.plan(pages * SLAB, {(layer, expert) for expert in union})
            assert self.pool.resize(pages * SLAB) == usable
            self.pool.check_integrity()
            self.staged.update(late)
            self.finish(held, union, set())

    @rule(layer=layer_ids, union=unions)
    def use_in_rounds(self, layer: int, union: set[int]) -> None:
        """Rounds cover the union once, use every resident before it is evicted, and each fits."""
        model = self.layers[layer]
        if not self.fits(layer, {next(iter(union - model.pins - model.busy), min(union))}):
            return
        here = union & (model.resident | model.busy)
        num_new = 0
        rounds = self.pool.rounds(layer, union)
        assert sorted(e for part in rounds for e in part) == sorted(union)
        for part in rounds:
            num_new += len(set(part) - model.resident - model.busy)
            self.step(layer, set(part), set())
        assert num_new == len(union) - len(here)

    @rule(layer=layer_ids, expert=expert_ids)
    def start_read(self, layer: int, expert: int) -> None:
        """A read that outlives its step takes a slot away until it lands."""
        model = self.layers[layer]
        is_staged = (layer, expert) in self.staged or (layer, expert) in self.staged_ready
        if expert in model.resident | model.busy or is_staged or len(model.reads) > 1 or not self.fits(layer, {expert}):
            return
        model.begin({expert})
        model.use([expert])
        held = self.pool.acquire(layer, [expert])
        self.pool.release(held)
        model.reads[expert] = (held.miss_slots[0], held.generations[0])

    @rule(layer=layer_ids, expert=expert_ids)
    def start_fill(self, layer: int, expert: int) -> None:
        """A read into a free slot is no use, and leaves a slot to the steps."""
        model = self.layers[layer]
        is_staged = (layer, expert) in self.staged or (layer, expert) in self.staged_ready
        is_known = expert in model.resident | model.busy or is_staged
        has_place = model.num_owned < model.limit and model.limit - model.num_owned + len(model.lru) > 1
        if len(model.reads) > 1:
            return
        held = self.pool.fill(layer, expert)
        assert (held is None) == (is_known or not has_place)
        if held is not None:
            model.begin({expert})
            self.pool.release(held)
            model.reads[expert] = (held.miss_slots[0], held.generations[0])

    @precondition(lambda self: any(model.reads for model in self.layers.values()))
    @rule(works=st.booleans())
    def land_read(self, works: bool) -> None:
        """A late read, or that of a pin, lands or fails."""
        layer, model = next((layer, model) for layer, model in self.layers.items() if model.reads)
        expert, read = model.reads.popitem()
        model.busy.remove(expert)
        self.land(layer, expert, read, works)
        if works and expert in model.to_pin:
            model.pins.add(expert)
        model.to_pin.discard(expert)
        if works:
            self.touch(layer, expert)

    @rule(layer=layer_ids, expert=expert_ids)
    def read_ahead(self, layer: int, expert: int) -> None:
        """Something is read ahead that may not be asked for."""
        self.stage(layer, expert)

    def stage(self, layer: int, expert: int) -> None:
        """A read ahead is refused for what is here or on its way; the oldest complete one gives way."""
        model, key = self.layers[layer], (layer, expert)
        taken, ready = self.staged_of(model.entry.slab_bytes)
        has_place = taken < self.staging_limits[model.entry.slab_bytes] or ready
        read = self.pool.stage(layer, expert)
        if expert in model.resident | model.busy or key in self.staged or key in self.staged_ready or not has_place:
            assert read is None
            return
        assert read is not None
        self.staged[key] = read
        if taken == self.staging_limits[model.entry.slab_bytes]:
            self.staged_ready.remove(ready[0])

    @rule(layer=layer_ids, union=unions, num_landed=st.integers(0, 2))
    def use_after_staging(self, layer: int, union: set[int], num_landed: int) -> None:
        """Part of a union is read ahead; some of it is there in time."""
        for expert in sorted(union)[:2]:
            self.stage(layer, expert)
        for key in [key for key in self.staged if key[0] == layer][:num_landed]:
            self.land_ahead(key, True)
        self.use(layer, union, set())

    @precondition(lambda self: self.staged)
    @rule(works=st.booleans(), data=st.data())
    def land_staged(self, works: bool, data: st.DataObject) -> None:
        """A read ahead lands or fails."""
        self.land_ahead(data.draw(st.sampled_from(sorted(self.staged))), works)

    def land_ahead(self, key: tuple[int, int], works: bool) -> None:
        self.land(*key, self.staged.pop(key), works)
        if works:
            self.staged_ready.append(key)
        self.trim_staging(self.layers[key[0]].entry.slab_bytes)

    @rule(layer=layer_ids, data=st.data())
    def pin(self, layer: int, data: st.DataObject) -> None:
        """A resident expert is pinned if the floor allows it; any other is not."""
        model = self.layers[layer]
        expert = data.draw(st.sampled_from(sorted(model.resident) * 3 + list(range(NUM_EXPERTS))))
        has_room = model.num_pins < model.limit - FLOOR
        expected = expert in model.pins or (expert in model.lru and has_room)
        assert self.pool.pin(layer, expert) == expected
        if expected:
            model.lru.pop(expert, None)
            model.pins.add(expert)

    @rule(layer=layer_ids, expert=expert_ids)
    def load_pinned(self, layer: int, expert: int) -> None:
        """A pin that is read, or that lies in staging."""
        model, key = self.layers[layer], (layer, expert)
        has_place = model.num_pins < model.limit - FLOOR and self.fits(layer, {expert})
        read = self.pool.load_pinned(layer, expert)
        if expert in model.resident | model.busy or not has_place:
            assert read is None
            return
        model.begin({expert})
        assert (read is None) == (key in self.staged or key in self.staged_ready)
        if key in self.staged_ready:
            self.staged_ready.remove(key)
            model.busy.remove(expert)
            model.pins.add(expert)
            self.touch(layer, expert)
        else:
            model.reads[expert] = read or self.staged.pop(key)
            model.to_pin.add(expert)

    @rule(layer=layer_ids, data=st.data())
    def unpin(self, layer: int, data: st.DataObject) -> None:
        """A pin becomes an expert like others; of anything else nothing changes."""
        model = self.layers[layer]
        expert = data.draw(st.sampled_from(sorted(model.pins | model.to_pin) * 3 + list(range(NUM_EXPERTS))))
        self.pool.unpin(layer, expert)
        model.to_pin.discard(expert)
        if expert in model.pins:
            model.pins.remove(expert)
            self.touch(layer, expert)

    @rule(pages=num_pages)
    def resize(self, pages: int) -> None:
        """The pool shrinks, or grows."""
        usable = self.plan(pages * SLAB, set())
        assert self.pool.resize(pages * SLAB) == usable

    @rule(layer=layer_ids, union=unions)
    def crash(self, layer: int, union: set[int]) -> None:
        """The writer dies, in a step if one fits: what is complete survives in its order, size and pins too."""
        before = {of: list(model.lru) for of, model in self.layers.items()}
        promoted: list[int] = []
        if self.fits(layer, union):
            ready = [expert for of, expert in self.staged_ready if of == layer]
            held = self.acquire(layer, union)
            promoted = [expert for expert in ready if expert in union]
            kept = {*self.layers[layer].lru, *held.hits} - set(promoted)
            before[layer] = [expert for expert in before[layer] if expert in kept]
        self.staged.clear()
        self.staged_ready.clear()
        self.attach()
        for of, model in self.layers.items():
            model.busy.clear()
            model.reads.clear()
            model.to_pin.clear()
            model.lru = OrderedDict.fromkeys(before[of])
        self.adopt_promoted(layer, promoted)
        for of, model in self.layers.items():
            model.forget(self.order_in_table(of, SlotState.READY, SlotState.PINNED))

    def adopt_promoted(self, layer: int, promoted: list[int]) -> None:
        """A slot that had been promoted when the writer died is the layer's, as old as its last use before."""
        view = self.order_in_table(layer)
        model = self.layers[layer]
        assert set(view) == set(model.lru) | set(promoted)
        assert [expert for expert in view if expert not in promoted] == list(model.lru)
        model.lru = OrderedDict.fromkeys(view)

    # -- what always holds

    def order_in_table(self, layer: int, *states: SlotState) -> list[int]:
        """Experts in these states (READY: evictable ones) as an observer sees them, least recent first."""
        table = PoolView(self.segment).slots()
        has_state = np.isin(table["state"], states or (SlotState.READY,))
        own = table[(table["layer"] == layer) & has_state & (table["flags"] == 1)]
        order: list[int] = own["expert"][np.argsort(own["last_use"], kind="stable")].tolist()
        return order

    @invariant()
    def sound(self) -> None:
        """The pool is sound, and observer and file system see exactly what the model says."""
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        view = PoolView(self.segment)
        for layer, model in self.layers.items():
            assert set(np.flatnonzero(view.resident(layer)).tolist()) == model.resident
            assert np.array_equal(view.resident(layer), self.pool.residency(layer))
            assert self.order_in_table(layer) == list(model.lru)
            assert self.pool.pinned(layer) == sorted(model.pins | model.to_pin)
        is_within = all(model.num_owned <= model.limit for model in self.layers.values())
        is_within &= all(self.staged_of(size)[0] <= limit for size, limit in self.staging_limits.items())
        tables = self.pool.layout.slabs_offset
        assert not is_within or view.reserved_bytes() <= tables + self.usable_bytes()
        if sys.platform == "linux":
            assert (SHM_DIR / self.segment.name).stat().st_blocks * 512 == view.reserved_bytes()


PoolMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


class TestPoolOperations(PoolMachine.TestCase):  # type: ignore[misc]
    """Any sequence of operations keeps integrity and agrees with the model."""
