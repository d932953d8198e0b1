#!/usr/bin/env python3
"""Does a run stay within its memory budget, and give the same tokens? Prints JSON last.

    scripts/measure_memory.py MODEL --ram 40%      # a size, or a share of the checkpoint's bytes

Runs the prompt once with everything resident and once within --ram, and meanwhile sums the memory (PSS) of all processes of
the cluster, client and resource tracker included, every 100 ms. Exits with 1 if the budget was passed or tokens differ.
"""

import argparse
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from colibri_mp import Cluster
from colibri_mp.config import parse_size
from colibri_mp.memory import process_bytes

PERIOD_S = 0.1


class Sampler(threading.Thread):
    """Sums the memory of this process and all its descendants until told to stop."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.done = threading.Event()
        self.peak: dict[str, int] = {}
        self.peak_bytes = 0
        self.num_samples = 0

    def run(self) -> None:
        me = psutil.Process()
        while not self.done.wait(PERIOD_S):
            now = {f"{p.pid} {role(p)}": process_bytes(p.pid) for p in [me, *me.children(recursive=True)]}
            self.num_samples += 1
            if sum(now.values()) > self.peak_bytes:
                self.peak_bytes, self.peak = sum(now.values()), now


def role(process: psutil.Process) -> str:
    """What a process of the cluster is."""
    try:
        line = " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return "gone"
    for mark in ("resource_tracker", "colibri-coordinator", "spawn_main"):
        if mark in line:
            return mark.replace("spawn_main", "worker")
    return "client"


def one_run(model: str, prompt: list[int], max_tokens: int, **settings: Any) -> dict[str, Any]:
    """Tokens, figures and the memory peak of one cluster."""
    sampler = Sampler()
    sampler.start()
    with Cluster.launch(model, **settings) as cluster:
        done = cluster.generate(prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        stats = cluster.stats()
    sampler.done.set()
    sampler.join()
    return {
        "token_ids": done.token_ids,
        "peak_bytes": sampler.peak_bytes,
        "peak_by_process": sampler.peak,
        "num_samples": sampler.num_samples,
        "budget_bytes": stats["memory"]["budget_bytes"],
        "own_peak_bytes": stats["memory"]["peak_bytes"],
        "hit_rate": done.stats["cache"]["hit_rate"],
        "decode_tok_s": done.stats["decode_tok_s"],
        "prefill_tok_s": done.stats["prefill_tok_s"],
        "cache": done.stats["cache"],
    }


def main() -> int:
    """Measure and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--ram", default="40%")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--ctx", type=int, default=1024)
    args = parser.parse_args()
    stored = sum(path.stat().st_size for path in Path(args.model).glob("*.safetensors"))
    ram = int(stored * float(args.ram[:-1]) / 100) if args.ram.endswith("%") else parse_size(args.ram)
    prompt = [(7919 * i) % 1000 + 3 for i in range(args.prompt_tokens)]
    common = {"num_workers": args.workers, "ctx": args.ctx}
    started = time.perf_counter()
    small = one_run(args.model, prompt, args.max_tokens, ram=ram, **common)
    full = one_run(args.model, prompt, args.max_tokens, **common)
    result = {
        "model": args.model,
        "stored_bytes": stored,
        "within": small,
        "resident": full,
        "within_budget": small["peak_bytes"] <= small["budget_bytes"],
        "same_tokens": small["token_ids"] == full["token_ids"],
        "seconds": time.perf_counter() - started,
    }
    print(json.dumps(result))
    return 0 if result["within_budget"] and result["same_tokens"] else 1


if __name__ == "__main__":
    sys.exit(main())
