#!/usr/bin/env python3
"""A cluster in a small memory control group, with and without a neighbour that takes memory away. Prints JSON last.

    scripts/measure_pressure.py MODEL [--limit 2GB] [--ballast 800MB] [--tokens 64]

Needs root and a memory hierarchy of control groups (version 1, or 2 with the memory controller given to this group's children). Launches
MODEL in a new group of --limit with `--ram auto`, and has it answer; then a process in the same group takes --ballast and keeps it for
some answers, and ends. Says how long the pools took to shrink and to grow back, whether the tokens stayed the same, and how
often the kernel had to reclaim or to kill. Exits with 1 if anybody was killed or the tokens differ.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from colibri_mp import Cluster
from colibri_mp.config import parse_size

BALLAST = """
import sys
blocks = [bytearray(b"x" * 1_000_000) for _ in range(int(sys.argv[1]) // 1_000_000)]
print("full", flush=True)
sys.stdin.readline()
"""
ROOT = Path("/sys/fs/cgroup")


class Group:
    """A memory control group that this process lives in, for a while."""

    def __init__(self, limit: int) -> None:
        is_v1 = (ROOT / "memory").is_dir()
        self.parent = ROOT / "memory" if is_v1 else ROOT
        self.path = self.parent / f"colibri-pressure-{os.getpid()}"
        self._events = "memory.oom_control" if is_v1 else "memory.events"
        self.path.mkdir()
        (self.path / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(str(limit))
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def kills(self) -> int:
        """Processes of the group that the out-of-memory killer has ended."""
        lines = (self.path / self._events).read_text().splitlines()
        return int(next(value for name, value in (line.split() for line in lines) if name == "oom_kill"))

    def leave(self) -> None:
        """Back to the parent; the group goes."""
        (self.parent / "cgroup.procs").write_text(str(os.getpid()))
        self.path.rmdir()


@contextmanager
def in_group(limit: int) -> Iterator[Group]:
    """This process, and what it starts, within `limit` bytes."""
    group = Group(limit)
    try:
        yield group
    finally:
        group.leave()


def seconds_until(cluster: Cluster, wanted: Callable[[dict[str, Any]], bool], most_s: float = 60.0) -> float | None:
    """How long it takes until the monitor's status is as `wanted`; None: it does not get there."""
    started = time.monotonic()
    while time.monotonic() - started < most_s:
        if wanted(cluster.stats()["memory"]["pressure"]):
            return time.monotonic() - started
        time.sleep(0.02)
    return None


def answer(cluster: Cluster, num_tokens: int) -> tuple[list[int], dict[str, Any]]:
    """Greedy tokens of a fixed prompt, and what they cost."""
    prompt = [(7919 * i) % 1000 + 3 for i in range(64)]
    done = cluster.generate(prompt, max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    return done.token_ids, {
        "decode_tok_s": done.stats["decode_tok_s"],
        "hit_rate": done.stats["cache"]["hit_rate"],
        "slab_limit_bytes": cluster.stats()["memory"]["pressure"]["slab_limit_bytes"],
    }


def with_ballast(cluster: Cluster, nbytes: int, num_tokens: int) -> tuple[list[int], dict[str, Any]]:
    """The same while a neighbour holds `nbytes`; times from when it has them."""
    full = cluster.stats()["memory"]["pressure"]["slab_limit_bytes"]
    command = [sys.executable, "-c", BALLAST, str(nbytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as ballast:
        assert ballast.stdin is not None
        assert ballast.stdout is not None
        ballast.stdout.readline()
        shrunk_s = seconds_until(cluster, lambda pressure: pressure["slab_limit_bytes"] < full)
        tokens, cost = answer(cluster, num_tokens)
        was_killed = ballast.poll() is not None
        if not was_killed:
            ballast.stdin.close()
    grown_s = seconds_until(cluster, lambda pressure: pressure["slab_limit_bytes"] == full)
    return tokens, cost | {"shrunk_s": shrunk_s, "grown_s": grown_s, "ballast_was_killed": was_killed}


def main() -> int:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--limit", default="2GB")
    parser.add_argument("--ballast", default="800MB")
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    with in_group(parse_size(options.limit)) as group:
        with Cluster.launch(options.model, ctx=1024, usage="off") as cluster:
            alone, before = answer(cluster, options.tokens)
            pressed, beside = with_ballast(cluster, parse_size(options.ballast), options.tokens)
            again, after = answer(cluster, options.tokens)
            memory = cluster.stats()["memory"]
        kills = group.kills()
    result = {
        "limit_bytes": parse_size(options.limit),
        "budget_bytes": memory["budget_bytes"],
        "planned_bytes": memory["planned_bytes"],
        "peak_bytes": memory["peak_bytes"],
        "before": before,
        "beside_ballast": beside,
        "after": after,
        "changes": memory["pressure"]["changes"],
        "kills": kills,
        "same_tokens": alone == pressed == again,
    }
    print(json.dumps(result))
    return 0 if result["same_tokens"] and not kills else 1


if __name__ == "__main__":
    sys.exit(main())
