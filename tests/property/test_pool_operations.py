"""Random operations on a pool against a plain model of least-recently-used caching."""

import secrets
from collections import OrderedDict

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from colibri_mp.errors import PoolError
from colibri_mp.shm.layout import LayerSlots, pool_bytes
from colibri_mp.shm.pool import ExpertPool, Held
from colibri_mp.shm.segment import Segment, segment_name
from colibri_mp.shm.view import PoolView

NUM_EXPERTS = 12
LAYERS = (LayerSlots(0, NUM_EXPERTS, 5, 4096), LayerSlots(4, NUM_EXPERTS, 3, 4096))
layer_ids = st.sampled_from([0, 4])
unions = st.sets(st.integers(0, NUM_EXPERTS - 1), min_size=1, max_size=7)


class PoolMachine(RuleBasedStateMachine):
    """Steps that complete, fail in part or outlive their reads, rounds, and crashes; slabs carry their expert's id.

    The model is one ordered dict for each layer, least recent first, of the experts that are resident and not held.
    """

    @initialize()
    def open(self) -> None:
        self.segment = Segment.create(segment_name(secrets.token_hex(4), 0), pool_bytes(LAYERS))
        self.pool = ExpertPool(self.segment, LAYERS, "a" * 64)
        self.model: dict[int, OrderedDict[int, None]] = {entry.layer: OrderedDict() for entry in LAYERS}
        self.late: list[tuple[int, int, int, int]] = []  # layer, expert, slot, generation of unfinished reads

    def teardown(self) -> None:
        if hasattr(self, "segment"):
            del self.pool
            self.segment.close()
            self.segment.unlink()

    def num_slots(self, layer: int) -> int:
        late = sum(1 for entry in self.late if entry[0] == layer)
        return {entry.layer: entry.num_slots for entry in LAYERS}[layer] - late

    def evict_for(self, layer: int, union: set[int]) -> None:
        """What a cache of least recent use must drop before `union` fits."""
        resident = self.model[layer]
        for expert in union:
            resident.pop(expert, None)
        while len(resident) + len(union) > self.num_slots(layer):
            resident.popitem(last=False)

    def check_bytes(self, held: Held) -> None:
        """Each hit's slab still has the bytes of its own expert."""
        for expert, slot in zip(held.hits, held.hit_slots, strict=True):
            assert (self.pool.slab_view(slot) == expert + 100 * (held.layer == 4)).all()

    def finish(self, held: Held, failed: set[int]) -> None:
        """Land every miss, those in `failed` as errors, and release."""
        for expert, slot, generation in zip(held.misses, held.miss_slots, held.generations, strict=True):
            self.pool.slab_view(slot)[:] = expert + 100 * (held.layer == 4)
            if expert in failed:
                self.pool.fail(slot, generation)
            else:
                self.pool.mark_ready(slot, generation)
        self.pool.release(held)
        for expert in sorted({*held.hits, *held.misses} - failed):
            self.model[held.layer][expert] = None

    def step(self, layer: int, union: set[int], failed: set[int]) -> None:
        expected_hits = sorted(union & set(self.model[layer]))
        self.evict_for(layer, union)
        held = self.pool.acquire(layer, union)
        assert held.hits == expected_hits
        assert held.misses == sorted(union - set(expected_hits))
        self.check_bytes(held)
        self.pool.check_integrity()
        self.finish(held, failed & set(held.misses))

    @rule(layer=layer_ids, union=unions, failed=unions)
    def use(self, layer: int, union: set[int], failed: set[int]) -> None:
        """One step whose union fits, or is refused as a whole."""
        union -= {entry[1] for entry in self.late if entry[0] == layer}
        if len(union) <= self.num_slots(layer):
            self.step(layer, union, failed)
            return
        try:
            self.pool.acquire(layer, union)
        except PoolError:
            return
        raise AssertionError("a union larger than the layer's slots was accepted")

    @rule(layer=layer_ids, union=unions)
    def use_in_rounds(self, layer: int, union: set[int]) -> None:
        """Rounds cover the union once, use every resident before it is evicted, and each fits."""
        union -= {entry[1] for entry in self.late if entry[0] == layer}
        if not union or self.num_slots(layer) < 1:
            return
        resident = union & set(self.model[layer])
        num_misses = 0
        rounds = self.pool.rounds(layer, union)
        assert sorted(e for part in rounds for e in part) == sorted(union)
        for part in rounds:
            num_misses += len(set(part) - set(self.model[layer]))
            self.step(layer, set(part), set())
        assert num_misses == len(union) - len(resident)

    @precondition(lambda self: len(self.late) < 2)
    @rule(layer=layer_ids, expert=st.integers(0, NUM_EXPERTS - 1))
    def start_read(self, layer: int, expert: int) -> None:
        """A read that outlives its step takes a slot away until it lands."""
        busy = expert in self.model[layer] or any(entry[:2] == (layer, expert) for entry in self.late)
        if busy or self.num_slots(layer) < 1:
            return
        self.evict_for(layer, {expert})
        held = self.pool.acquire(layer, [expert])
        self.pool.release(held)
        self.late.append((layer, expert, held.miss_slots[0], held.generations[0]))

    @precondition(lambda self: self.late)
    @rule(works=st.booleans())
    def land_read(self, works: bool) -> None:
        """A late read lands, or fails."""
        layer, expert, slot, generation = self.late.pop(0)
        self.pool.slab_view(slot)[:] = expert + 100 * (layer == 4)
        if works:
            self.pool.mark_ready(slot, generation)
            self.model[layer][expert] = None
        else:
            self.pool.fail(slot, generation)

    @rule(layer=layer_ids, union=unions)
    def crash(self, layer: int, union: set[int]) -> None:
        """The writer dies in the middle of a step: residents survive in their order, half-read experts do not."""
        union -= {entry[1] for entry in self.late if entry[0] == layer}
        if len(union) <= self.num_slots(layer):
            before = OrderedDict(self.model[layer])
            self.evict_for(layer, union)
            held = self.pool.acquire(layer, union)
            kept = set(self.model[layer]) | set(held.hits)
            self.model[layer] = OrderedDict((expert, None) for expert in before if expert in kept)
        self.late.clear()
        self.pool = ExpertPool(self.segment, LAYERS, "a" * 64)

    @invariant()
    def sound(self) -> None:
        """The pool is sound, and an observer sees exactly the model's residents."""
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        view = PoolView(self.segment)
        for layer, resident in self.model.items():
            assert set(np.flatnonzero(view.resident(layer)).tolist()) == set(resident)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class TestPoolOperations(PoolMachine.TestCase):  # type: ignore[misc]
    """Any sequence of operations keeps integrity and agrees with the model."""
