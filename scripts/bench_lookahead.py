"""Decode with and without lookahead, alternating, from a disk of a chosen speed.

    python scripts/bench_lookahead.py [MODEL] [--disk-mb-s 200] [--slots N] [--rounds 5]

The disk is paced (`paced_disk`). Without --disk-mb-s reads are direct and the disk is as it is.

One launch for each mode and round, greedy, the same tokens; ratios are of the same round. Says recall, what became of the reads
ahead, and for which share of the time the disk was busy. JSON last. The coordinator runs in this process, the workers are spawned by it.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from paced_disk import disk_of, pace_this_worker

from colibri_mp import rundir
from colibri_mp.config import LaunchConfig
from colibri_mp.coordinator import Coordinator
from colibri_mp.scheduler import Rows, Sequence

PROMPT = [(7919 * i) % 1000 + 3 for i in range(16)]
MODES = ("off", "measure", "advise", "on", "auto")


if __name__ == "__mp_main__":  # a worker
    pace_this_worker()


@contextmanager
def launched(options: argparse.Namespace, mode: str) -> Iterator[Coordinator]:
    """A coordinator with its workers."""
    memory: dict[str, Any] = {"slots": options.slots} if options.slots else {"ram": options.ram}
    config = LaunchConfig(
        model=options.model, ctx=512, io="buffered" if options.disk_mb_s else "direct", usage="off", lookahead=mode,  # type: ignore[arg-type]
        lookahead_distance=options.distance, lookahead_width=options.width, num_workers=options.workers, **memory,
    )  # fmt: skip
    with ExitStack() as stack:
        run_dir = rundir.create(f"bench-{os.getpid()}")
        stack.callback(run_dir.remove)
        yield Coordinator.launch(config, run_dir, lambda _text: None, lambda: False, stack)


def decode(options: argparse.Namespace, mode: str) -> dict[str, Any]:
    """One launch: tokens/s (of the median token, and of all), token ids, and counters."""
    with launched(options, mode) as coordinator:
        sequence = Sequence(list(PROMPT), 512, 512)
        sequence.blocks = list(range(512 // 16))
        seconds = []
        for step in range(options.warm_up + options.tokens):
            if step == options.warm_up:
                before = coordinator.cache_counters(), coordinator.tiers.describe()["reads_ahead"]
            started = time.perf_counter()
            part = Rows(sequence, sequence.num_computed, sequence.num_pending)
            logits = coordinator.forward([part], lambda: None)
            sequence.num_computed += part.count
            sequence.token_ids.append(int(np.argmax(logits[-1])))
            seconds.append(time.perf_counter() - started)
        cache, tiers = coordinator.cache_counters(), coordinator.tiers.describe()
    seconds = seconds[options.warm_up :]
    return {
        "tok_s": len(seconds) / sum(seconds),
        "token_ids": sequence.token_ids,
        "cache": {name: count - before[0][name] for name, count in cache.items()},
        "disk_share": (cache["disk_s"] - before[0]["disk_s"]) / sum(seconds),
        "reads_ahead": {name: count - before[1][name] for name, count in tiers["reads_ahead"].items()},
        "lookahead": {name: value for name, value in tiers["lookahead"].items() if name != "layers"},
    }


def summary(rounds: list[dict[str, dict[str, Any]]], mode: str, base: str) -> dict[str, Any]:
    """Medians of a mode over the rounds, and the counters of the last one."""
    last, cache = rounds[-1][mode], rounds[-1][mode]["cache"]
    return {
        "tok_s": statistics.median(found[mode]["tok_s"] for found in rounds),
        "ratio": statistics.median(found[mode]["tok_s"] / found[base]["tok_s"] for found in rounds),
        "ratios": [found[mode]["tok_s"] / found[base]["tok_s"] for found in rounds],
        "hit_rate": cache["hits"] / (cache["hits"] + cache["misses"] + cache["promoted"]),
        "disk_share_of_time": last["disk_share"],
        "reads_ahead": last["reads_ahead"],
        "lookahead": last["lookahead"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--disk-mb-s", type=int, default=0)
    parser.add_argument("--slots", type=int, default=0, help="experts a layer in memory")
    parser.add_argument("--ram", default="auto", help="memory, where --slots is not given")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--width", type=int, default=0)
    parser.add_argument("--distance", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=32, help="tokens before the measurement")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--modes", nargs="+", default=["off", "on"], choices=MODES, help="the first is the base")
    options = parser.parse_args()
    rounds: list[dict[str, dict[str, Any]]] = []
    for _ in range(options.rounds):
        with disk_of(options.disk_mb_s * 10**6):
            found = {mode: decode(options, mode) for mode in options.modes}
        assert len({tuple(run["token_ids"]) for run in found.values()}) == 1, "the modes made different tokens"
        rounds.append(found)
        print("  ".join(f"{mode} {run['tok_s']:.2f} tok/s" for mode, run in found.items()), file=sys.stderr)
    found_modes = {mode: summary(rounds, mode, options.modes[0]) for mode in options.modes}
    print(json.dumps({"settings": vars(options), **found_modes}))


if __name__ == "__main__":
    main()
