"""Decode with and without lookahead, alternating, from a disk of a chosen speed.

    python scripts/bench_lookahead.py [MODEL] [--disk-mb-s 200] [--slots N] [--rounds 5]

The disk is throttled with a control group (blkio of version 1, io of version 2; needs root) that this process and its clusters
live in; reads are direct, so every miss is a read of the disk. Without --disk-mb-s the disk is as it is. One launch for each
mode and round, greedy, the same tokens; ratios are of the same round. Says recall and what became of the reads ahead. JSON last.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from colibri_mp import Cluster
from colibri_mp.checkpoint.hub import resolve

PROMPT = [(7919 * i) % 1000 + 3 for i in range(16)]  # of token ids: not every checkpoint has a tokenizer


@contextmanager
def throttled(folder: Path, bytes_per_s: int) -> Iterator[None]:
    """Reads of the disk that holds `folder`, by this process and its children, at most so fast."""
    device = folder.stat().st_dev
    disk = f"{os.major(device)}:{os.minor(device)}"
    root = Path("/sys/fs/cgroup")
    if (root / "blkio").is_dir():
        parent, file, limit = root / "blkio", "blkio.throttle.read_bps_device", f"{disk} {bytes_per_s}"
    else:
        parent, file, limit = root, "io.max", f"{disk} rbps={bytes_per_s}"
    group = parent / f"colibri-bench-{os.getpid()}"
    group.mkdir()
    try:
        (group / file).write_text(limit)
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (parent / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def decode(options: argparse.Namespace, mode: str) -> dict[str, Any]:
    """One launch: tokens/s, token ids, and counters."""
    settings: dict[str, Any] = {"slots": options.slots} if options.slots else {"ram": options.ram}
    with Cluster.launch(
        options.model, ctx=512, io="direct", usage="off", lookahead=mode, lookahead_distance=options.distance,
        lookahead_width=options.width, num_workers=options.workers, **settings,
    ) as cluster:  # fmt: skip
        cluster.generate(PROMPT, max_tokens=options.warm_up, temperature=0.0, ignore_eos=True)
        before = cluster.stats()["tiers"]["reads_ahead"]
        done = cluster.generate(PROMPT, max_tokens=options.tokens, temperature=0.0, ignore_eos=True)
        tiers = cluster.stats()["tiers"]
    return {
        "tok_s": done.stats["decode_tok_s"],
        "token_ids": done.token_ids,
        "cache": done.stats["cache"],
        "reads_ahead": {name: count - before[name] for name, count in tiers["reads_ahead"].items()},
        "lookahead": tiers["lookahead"],
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
    parser.add_argument(
        "--modes", nargs="+", default=["off", "on"], help="the first is what the others are held against"
    )
    options = parser.parse_args()
    rounds: list[dict[str, dict[str, Any]]] = []
    folder = resolve(options.model)
    with throttled(folder, options.disk_mb_s * 10**6) if options.disk_mb_s else nullcontext():
        for _ in range(options.rounds):
            found = {mode: decode(options, mode) for mode in options.modes}
            assert len({tuple(run["token_ids"]) for run in found.values()}) == 1, "the modes made different tokens"
            rounds.append(found)
            print("  ".join(f"{mode} {run['tok_s']:.2f} tok/s" for mode, run in found.items()), file=sys.stderr)
    base = options.modes[0]
    summary = {
        mode: {
            "tok_s": statistics.median(found[mode]["tok_s"] for found in rounds),
            "ratio": statistics.median(found[mode]["tok_s"] / found[base]["tok_s"] for found in rounds),
            "hit_rate": rounds[-1][mode]["cache"]["hit_rate"],
            "disk_share_of_time": rounds[-1][mode]["cache"]["disk_s"] * rounds[-1][mode]["tok_s"] / options.tokens,
            "reads_ahead": rounds[-1][mode]["reads_ahead"],
            "lookahead": {k: v for k, v in rounds[-1][mode]["lookahead"].items() if k != "layers"},
        }
        for mode in options.modes
    }
    print(json.dumps({"settings": vars(options), **summary}))


if __name__ == "__main__":
    main()
