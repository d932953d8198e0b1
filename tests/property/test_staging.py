"""Reading ahead changes when experts are read, never which a layer holds: a pool with staging beside one without."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from segments import fresh_name

from colibri_mp.shm.layout import LayerSlots, pool_bytes
from colibri_mp.shm.pool import ExpertPool, Held
from colibri_mp.shm.segment import Segment
from colibri_mp.shm.view import PoolView

NUM_EXPERTS, FLOOR, NUM_STAGING = 10, 3, 2
LAYERS = (LayerSlots(0, NUM_EXPERTS, 4, 4096), LayerSlots(1, NUM_EXPERTS, 6, 4096), LayerSlots(2, NUM_EXPERTS, 5, 8192))
layer_ids = st.integers(0, len(LAYERS) - 1)
expert_ids = st.integers(0, NUM_EXPERTS - 1)
reads_ahead = st.tuples(layer_ids, expert_ids, st.booleans())  # whether the read ends before the step
steps = st.tuples(layer_ids, st.sets(expert_ids, min_size=1, max_size=7), st.lists(reads_ahead, max_size=6))
pins = st.tuples(st.just("pin"), layer_ids, expert_ids)
unpins = st.tuples(st.just("unpin"), layer_ids, expert_ids)


@contextmanager
def opened(num_staging: int) -> Iterator[tuple[ExpertPool, PoolView]]:
    """A fresh pool and an observer."""
    with Segment.create(fresh_name(), pool_bytes(LAYERS, num_staging)) as segment:
        pool = ExpertPool(segment, LAYERS, "b" * 64, floor=FLOOR, staging=num_staging)
        yield pool, PoolView(segment)
        pool.close()


def finish(pool: ExpertPool, held: Held, reads: dict[tuple[int, int], tuple[int, int]]) -> None:
    """All reads that the step waits for end, and it releases."""
    for slot, generation in zip(held.miss_slots, held.generations, strict=True):
        pool.mark_ready(slot, generation)
    for expert in held.pending:
        pool.mark_ready(*reads.pop((held.layer, expert)))
    pool.release(held)
    pool.check_integrity()


def pin(pool: ExpertPool, layer: int, expert: int) -> None:
    """Pin an expert that is resident, or read it for that."""
    if not pool.pin(layer, expert) and (read := pool.load_pinned(layer, expert)):
        pool.mark_ready(*read)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(steps, pins, unpins), max_size=25))
def test_residency_does_not_depend_on_staging(events: list[tuple[object, ...]]) -> None:
    """After the same routed unions and pins: the same residents in the same order, and every read ahead accounts for one miss."""
    with opened(NUM_STAGING) as (ahead, ahead_view), opened(0) as (plain, plain_view):
        reads: dict[tuple[int, int], tuple[int, int]] = {}
        for event in events:
            match event:
                case ("pin", int(layer), int(expert)):
                    for pool in (ahead, plain):
                        pin(pool, layer, expert)
                    if (layer, expert) in reads and expert in ahead.pinned(layer):
                        ahead.mark_ready(*reads.pop((layer, expert)))
                case ("unpin", int(layer), int(expert)):
                    for pool in (ahead, plain):
                        pool.unpin(layer, expert)
                case (int(layer), set(union), list(staged)):
                    for of, expert, lands in staged:
                        if read := ahead.stage(of, expert):
                            reads[of, expert] = read
                            if lands:
                                ahead.mark_ready(*reads.pop((of, expert)))
                    rounds = plain.rounds(layer, union)
                    assert ahead.rounds(layer, union) == rounds
                    for part in rounds:
                        one, other = ahead.acquire(layer, part), plain.acquire(layer, part)
                        assert len(one.misses) + one.num_promoted == len(other.misses)
                        assert len(one.hits) - one.num_promoted + one.num_late == len(other.hits)
                        assert one.num_evicted == other.num_evicted
                        finish(ahead, one, reads)
                        finish(plain, other, {})
            for entry in LAYERS:
                assert order(ahead_view, entry.layer) == order(plain_view, entry.layer)
                assert ahead.pinned(entry.layer) == plain.pinned(entry.layer)


def order(view: PoolView, layer: int) -> list[int]:
    """Residents of a layer by last use."""
    table = view.slots()
    table = table[(table["layer"] == layer) & (table["flags"] == 1)]
    experts: list[int] = table["expert"][np.argsort(table["last_use"], kind="stable")].tolist()
    return experts
