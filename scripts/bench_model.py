#!/usr/bin/env python3
"""Speed of a model through a whole cluster: start, prefill, decode. Prints JSON last.

    scripts/bench_model.py MODEL [--ram 40%] [--drop-cache] [--repeat 5]

States beside the figures: how fast this machine reads memory (before and after each decode, and tokens decoded in the time of reading
a gigabyte), the disk's share, and what else used the CPU.
`--drop-cache` tells the system to forget the checkpoint's pages before the start (cold); otherwise they may be warm.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from bench_kernels import bench_read

from colibri_mp import Cluster
from colibri_mp.config import parse_size
from colibri_mp.kernels.team import ThreadTeam
from colibri_mp.memory import usable_cores


def forget_pages(model: Path) -> None:
    """Ask the system to drop the checkpoint's pages from its cache."""
    for path in model.glob("*.safetensors"):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


class ForeignCpu:
    """CPU seconds used by processes that are not ours, over a stretch of time."""

    def __init__(self) -> None:
        self._started, self._total, self._own = time.perf_counter(), *self._read()

    @staticmethod
    def _read() -> tuple[float, float]:
        times = psutil.cpu_times()
        own = 0.0
        me = psutil.Process()
        for process in [me, *me.children(recursive=True)]:
            try:
                used = process.cpu_times()
                own += used.user + used.system
            except psutil.NoSuchProcess:
                continue
        return times.user + times.system + times.nice, own

    def cores(self) -> float:
        """Average number of cores that others used."""
        total, own = self._read()
        return max(0.0, (total - self._total - (own - self._own)) / (time.perf_counter() - self._started))


class MemoryRead:
    """How fast this machine reads memory now: the limit of decode. It changes from second to second where others share the bus."""

    def __init__(self, team: ThreadTeam) -> None:
        self._team, self._data = team, np.ones(500_000_000, np.uint8)

    def gb_s(self) -> float:
        """GB/s of a plain read of 0.5 GB, median of 5."""
        return float(bench_read(self._team, self._data, 5)["median"])


def median(values: list[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def measure(model: str, settings: dict[str, Any], args: argparse.Namespace, memory: MemoryRead) -> dict[str, Any]:
    """Start a cluster and time it; `memory` is read before and after each decode, and the two are compared."""
    started = time.perf_counter()
    with Cluster.launch(model, **settings) as cluster:
        launch_s = time.perf_counter() - started
        first = cluster.generate([5, 6, 7], max_tokens=1, temperature=0.0)
        first_token_s = time.perf_counter() - started
        foreign = ForeignCpu()
        prefill, decode, hits, read, memory_reads = [], [], [], [], []
        for run in range(args.repeat):
            prompt = [(7919 * (i + 31 * run)) % 1000 + 3 for i in range(args.prompt_tokens)]
            prefill.append(cluster.generate(prompt, max_tokens=1, temperature=0.0).stats["prefill_tok_s"])
            short = prompt[: args.decode_after]
            before = memory.gb_s()
            done = cluster.generate(short, max_tokens=args.max_tokens, temperature=0.0, ignore_eos=True)
            memory_reads.append((before + memory.gb_s()) / 2)
            decode.append(done.stats["decode_tok_s"])
            hits.append(done.stats["cache"]["hit_rate"])
            read.append(done.stats["cache"]["bytes_read"])
        stats = cluster.stats()
        return {
            "settings": settings,
            "launch_s": launch_s,
            "first_token_s": first_token_s,
            "first_ttft_s": first.stats["ttft_s"],
            "prefill_tokens": args.prompt_tokens,
            "prefill_tok_s": median(prefill),
            "decode_tokens": args.max_tokens,
            "decode_tok_s": median(decode),
            "memory_read_gb_s": median(memory_reads),
            "decode_tok_per_gb_read": median([a / b for a, b in zip(decode, memory_reads, strict=True)]),
            "decode_hit_rate": median(hits),
            "decode_bytes_read": median(read),
            "foreign_cores": foreign.cores(),
            "memory": stats["memory"],
            "workers": stats["workers"],
            "notes": list(cluster.notes),
        }


def add_cluster_flags(parser: argparse.ArgumentParser) -> None:
    """How to launch; `cluster_settings` reads them."""
    parser.add_argument("--ram", default="auto", help="a size, or a share of the checkpoint such as 40%%")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--ctx", type=int, default=1024)
    parser.add_argument("--io", default="buffered")
    parser.add_argument("--drop-cache", action="store_true", help="have the system forget the checkpoint's pages first")


def cluster_settings(args: argparse.Namespace, folder: Path) -> tuple[int, dict[str, Any]]:
    """Bytes of the checkpoint, and the settings of `Cluster.launch`; forgets the checkpoint's pages if asked to."""
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    ram: int | str = args.ram
    if args.ram.endswith("%"):
        ram = int(stored * float(args.ram[:-1]) / 100)
    elif args.ram != "auto":
        ram = parse_size(args.ram)
    if args.drop_cache:
        forget_pages(folder)
    settings = {"ram": ram, "num_workers": args.workers, "num_threads": args.threads, "ctx": args.ctx, "io": args.io}
    return stored, settings


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    add_cluster_flags(parser)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--decode-after", type=int, default=16, help="prompt tokens before decoding is timed")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    folder = Path(args.model)
    stored, settings = cluster_settings(args, folder)
    result = {"model": args.model, "stored_bytes": stored, "cold": args.drop_cache}
    with ThreadTeam(args.threads or usable_cores()[0]) as team:
        result.update(measure(args.model, settings, args, MemoryRead(team)))
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
