"""What the expert pool costs: `python scripts/bench_pool.py [--slab-mib 3.5] [--gib 1]`.

    steps    8 experts of a layer, found and released: all in memory; half of them absent; all staged       us a step
    resize   a pool full of written slabs gives half of them back, and takes them again                     GB/s
    pin      a slab is locked, and unlocked                                                                 us a slab

Steps are Python alone (no disk, no compute), the best of some repetitions over 16 layers. The last line is all of it as JSON.
"""

import argparse
import json
import random
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from colibri_mp.shm.layout import LayerSlots, pool_bytes
from colibri_mp.shm.pool import ExpertPool, Held
from colibri_mp.shm.segment import Segment, segment_name

NUM_LAYERS, NUM_EXPERTS, NUM_SLOTS, TOP_K = 16, 128, 64, 8
NUM_STEPS, REPETITIONS = 4000, 7


@contextmanager
def opened(slab_bytes: int, num_slots: int) -> Iterator[ExpertPool]:
    """A pool of `num_slots` slots a layer and as many for staging as a token asks for."""
    layers = [LayerSlots(layer, NUM_EXPERTS, num_slots, slab_bytes) for layer in range(NUM_LAYERS)]
    with Segment.create(segment_name(secrets.token_hex(4), 0), pool_bytes(layers, TOP_K)) as segment:
        pool = ExpertPool(segment, layers, "0" * 64, floor=TOP_K, staging=TOP_K)
        yield pool
        pool.close()


def land(pool: ExpertPool, held: Held) -> None:
    """All reads of a step end at once."""
    for slot, generation in zip(held.miss_slots, held.generations, strict=True):
        pool.mark_ready(slot, generation)


def step(pool: ExpertPool, layer: int, union: list[int]) -> None:
    """What a worker does with the pool in one step."""
    for part in pool.rounds(layer, union):
        held = pool.acquire(layer, part)
        if held.misses:
            land(pool, held)
        pool.release(held)


def staged_step(pool: ExpertPool, layer: int, union: list[int]) -> None:
    """The same after all of the union has been read ahead, as far as it was not in memory."""
    for expert in union:
        if read := pool.stage(layer, expert):
            pool.mark_ready(*read)
    step(pool, layer, union)


def us_per_step(pool: ExpertPool, run: Callable[[ExpertPool, int, list[int]], None], num_experts: int) -> float:
    """Best time of a step whose experts are drawn from the first `num_experts` of each layer."""
    rng = random.Random(1)
    unions = [(i % NUM_LAYERS, sorted(rng.sample(range(num_experts), TOP_K))) for i in range(NUM_STEPS)]
    return best_s(lambda: [run(pool, layer, union) for layer, union in unions]) / NUM_STEPS * 1e6


def best_s(run: Callable[[], object]) -> float:
    """Seconds of the fastest repetition."""
    times = []
    for _ in range(REPETITIONS):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def fill(pool: ExpertPool, num_experts: int) -> None:
    """Read the first experts of every layer: every byte of their slabs is written."""
    for layer in range(NUM_LAYERS):
        held = pool.acquire(layer, range(num_experts))
        for slot in held.miss_slots:
            pool.slab_view(slot)[:] = 1
        land(pool, held)
        pool.release(held)


def measure_steps() -> dict[str, float]:
    """us a step."""
    with opened(4096, NUM_SLOTS) as pool:
        fill(pool, NUM_SLOTS)
        return {
            "hits_us": round(us_per_step(pool, step, NUM_SLOTS), 2),
            "half_misses_us": round(us_per_step(pool, step, NUM_EXPERTS), 2),
            "half_staged_us": round(us_per_step(pool, staged_step, NUM_EXPERTS), 2),
        }


def measure_memory(slab_bytes: int, num_bytes: int) -> dict[str, float]:
    """GB/s of giving pages back and of taking them again (which zeroes them), and us a pin."""
    num_slots = max(TOP_K + 1, num_bytes // (NUM_LAYERS * slab_bytes))
    total = NUM_LAYERS * num_slots * slab_bytes
    with opened(slab_bytes, num_slots) as pool:
        fill(pool, num_slots)
        started = time.perf_counter()
        usable = pool.resize(total // 2)
        shrunk = time.perf_counter()
        pool.resize(2 * total)
        grown = time.perf_counter()
        for layer in range(NUM_LAYERS):
            held = pool.acquire(layer, range(num_slots))
            land(pool, held)
            pool.release(held)
        taken = time.perf_counter()
        pinned = [pool.pin(layer, num_slots - 1) for layer in range(NUM_LAYERS)]
        locked = time.perf_counter()
        for layer in range(NUM_LAYERS):
            pool.unpin(layer, num_slots - 1)
        unlocked = time.perf_counter()
    assert all(pinned)
    moved = (total - usable) / 1e9
    return {
        "given_back_bytes": total - usable,
        "shrink_s": round(shrunk - started, 3),
        "shrink_gb_s": round(moved / (shrunk - started), 1),
        "grow_s": round(grown - shrunk, 4),
        "take_again_gb_s": round(moved / (taken - grown), 1),
        "pin_us": round((locked - taken) / NUM_LAYERS * 1e6, 1),
        "unpin_us": round((unlocked - locked) / NUM_LAYERS * 1e6, 1),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slab-mib", type=float, default=3.5, help="size of an expert (default 3.5)")
    parser.add_argument("--gib", type=float, default=1.0, help="size of the pool that is shrunk (default 1)")
    args = parser.parse_args()
    slab_bytes = int(args.slab_mib * 256) * 4096
    figures = measure_steps() | measure_memory(slab_bytes, int(args.gib * 2**30))
    for name, value in figures.items():
        print(f"{name:18} {value:>14,}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
