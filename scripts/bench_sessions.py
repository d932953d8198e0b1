#!/usr/bin/env python3
"""Tokens a second of many sessions that decode together, against one alone, in turn in one run. Prints JSON last.

    scripts/bench_sessions.py MODEL [--sessions 8] [--ram 40%] [--rounds 5] [--tokens 48]

Each round decodes with one session, then with all, and takes the ratio; the figures are medians over the rounds. The limit is
what memory allows where every expert is resident: a step reads the resident weights once and each expert of the union once, so
S sessions can be S * bytes(1) / bytes(S) times as fast as one. Unions are those that the coordinator counted.

On a machine that others use too, seconds say little: `cpu_ratio` compares the CPU time of a token in coordinator and workers
(best with --threads 1: the threads of a team spin while they wait for each other).
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from bench_model import ForeignCpu, add_cluster_flags, cluster_settings, median

from colibri_mp import Cluster
from colibri_mp.checkpoint.source import Checkpoint
from colibri_mp.messages import Failed, Piece
from colibri_mp.models import load_model
from colibri_mp.plan_terms import resident_bytes


def decode(cluster: Cluster, num_sessions: int, num_tokens: int, seed: int) -> dict[str, float]:
    """Sessions with prompts of their own decode together; from the moment all have begun until one has all its tokens."""
    counts = {}
    for idx in range(num_sessions):
        prompt = [(7919 * (i + 31 * idx + 1009 * seed)) % 1000 + 3 for i in range(16)]
        counts[cluster.submit(prompt, max_tokens=num_tokens, temperature=0.0, ignore_eos=True)] = 0
    before = cluster.stats()
    pids = [before["pid"], *(worker["pid"] for worker in before["workers"])]
    started_cpu_s = ended_cpu_s = 0.0
    started, num_before, ended, num_after = 0.0, 0, 0.0, 0
    while (found := cluster.next_event()) is not None:
        request, event = found
        if isinstance(event, Failed):
            raise SystemExit(f"a session failed: {event.message}")
        if not isinstance(event, Piece):
            continue
        counts[request] += len(event.token_ids)
        if not started and min(counts.values()) >= 2:
            started, num_before, started_cpu_s = time.perf_counter(), sum(counts.values()), cpu_seconds(pids)
        if not ended and max(counts.values()) == num_tokens:
            ended, num_after, ended_cpu_s = time.perf_counter(), sum(counts.values()), cpu_seconds(pids)
    after = cluster.stats()
    bytes_read = after["cache"]["bytes_read"] - before["cache"]["bytes_read"]
    phases = {
        name: after["phases"]["seconds"][name] - before["phases"]["seconds"][name]
        for name in after["phases"]["seconds"]
    }
    total_s = sum(phases.values())
    return {
        "tok_s": (num_after - num_before) / (ended - started),
        "union": union_size(before, after, num_sessions),
        "cpu_ms_a_token": 1000 * (ended_cpu_s - started_cpu_s) / (num_after - num_before),
        "bytes_read_a_token": bytes_read / sum(counts.values()),
        **{f"share_{name}": seconds / total_s for name, seconds in phases.items()},
        "step_ms": 1000 * (ended - started) / max(1, (num_after - num_before) / num_sessions),
    }


def cpu_seconds(pids: list[int]) -> float:
    """What these processes have used so far."""
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(time.user + time.system for time in times)


def union_size(before: dict[str, Any], after: dict[str, Any], num_rows: int) -> float:
    """Mean number of distinct experts of a layer in the steps of about so many rows between two readings of the statistics."""
    count = total = 0.0
    for stats, sign in ((after, 1), (before, -1)):
        for entry in stats["phases"]["unions"]:
            if entry["least_rows"] <= num_rows <= entry["most_rows"]:
                count += sign * entry["count"]
                total += sign * entry["count"] * entry["mean"]
    return total / count if count else 0.0


def memory_limit(folder: Path, num_sessions: int, union_one: float, union_all: float) -> float:
    """How many times as fast as one session all together can be, if reading memory is what takes the time."""
    model = load_model(Checkpoint.open(folder))
    slab_bytes = sum(layer.shape.slab_bytes for layer in model.expert_layers)
    fixed_bytes = resident_bytes(model)
    return num_sessions * (fixed_bytes + union_one * slab_bytes) / (fixed_bytes + union_all * slab_bytes)


def summarise(rows: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Median, least and most of each figure."""
    return {name: median([row[name] for row in rows]) for name in rows[0]}


def measure(folder: Path, settings: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Start a cluster and time it, one session and all in turn."""
    with Cluster.launch(folder, **settings) as cluster:
        for count in (1, args.sessions):  # whatever is done once, and the experts that are used most
            decode(cluster, count, max(4, args.tokens // 2), 99)
        foreign = ForeignCpu()
        one, many = [], []
        for seed in range(args.rounds):
            one.append(decode(cluster, 1, args.tokens, seed))
            many.append(decode(cluster, args.sessions, args.tokens, seed))
        ratios = [b["tok_s"] / a["tok_s"] for a, b in zip(one, many, strict=True)]
        stats = cluster.stats()
        first, together = summarise(one), summarise(many)
        limit = memory_limit(folder, args.sessions, first["union"]["median"], together["union"]["median"])
        return {
            "settings": settings,
            "sessions": args.sessions,
            "one": first,
            "together": together,
            "ratio": median(ratios),
            "cpu_ratio": first["cpu_ms_a_token"]["median"] / together["cpu_ms_a_token"]["median"],
            "resident_limit": limit,
            "share_of_limit": median(ratios)["median"] / limit,
            "foreign_cores": foreign.cores(),
            "planned_bytes": stats["memory"]["planned_bytes"],
            "notes": list(cluster.notes),
        }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--sessions", type=int, default=8)
    add_cluster_flags(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    args = parser.parse_args()
    stored, settings = cluster_settings(args, args.model)
    print(json.dumps({"model": str(args.model), "stored_bytes": stored, **measure(args.model, settings, args)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
