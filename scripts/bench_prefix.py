#!/usr/bin/env python3
"""The second turn of a long conversation, with its first turn cached and without. Prints JSON last.

    scripts/bench_prefix.py [MODEL] [--tokens 1500] [--new 24] [--repeat 3] [--ram SIZE] [--kv-bits 32]

A conversation is --tokens random tokens, of which the last 16 are generated. Its second turn brings --new tokens more. Each side
has a cluster of its own, one after the other, and sees the same conversations; only the first computes the first turns. Counted
are the rows that the steps computed for the second turn, timed is its first token (as the coordinator sees it).
"""

import argparse
import json
import statistics
from typing import Any

import numpy as np

from colibri_mp import Cluster

ANSWER_TOKENS = 16
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def second_turn(cluster: Cluster, conversation: list[int], new: list[int], has_first_turn: bool) -> dict[str, Any]:
    """Time and count the second turn; with `has_first_turn` its first turn has been answered before."""
    if has_first_turn:
        answer = cluster.generate(conversation[:-ANSWER_TOKENS], max_tokens=ANSWER_TOKENS, **GREEDY)
        conversation[-ANSWER_TOKENS:] = answer.token_ids
    before = cluster.stats()["progress"]["tokens"]
    stats = cluster.generate(conversation + new, max_tokens=1, **GREEDY).stats
    computed = cluster.stats()["progress"]["tokens"] - before
    return {"ttft_s": stats["ttft_s"], "computed_rows": computed, "cached_tokens": stats["cached_tokens"]}


def measure(
    args: argparse.Namespace, conversations: list[list[int]], new: list[int], mode: str
) -> list[dict[str, Any]]:
    """All conversations on one side; the answers of their first turns are put into them where they are made."""
    settings: dict[str, Any] = {"ram": args.ram, "ctx": args.ctx, "kv_bits": args.kv_bits, "usage": "off"}
    with Cluster.launch(args.model, prefix_cache=mode, **settings) as cluster:
        cluster.generate(new, max_tokens=2, **GREEDY)
        return [second_turn(cluster, conversation, new, mode == "on") for conversation in conversations]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Median time with its extremes, and counts, the same in each repeat."""
    times = [row["ttft_s"] for row in rows]
    counts = {name: sorted({row[name] for row in rows}) for name in ("computed_rows", "cached_tokens")}
    return {"ttft_s": {"median": statistics.median(times), "min": min(times), "max": max(times)}, **counts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--new", type=int, default=24)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--ram", default="auto")
    parser.add_argument("--ctx", type=int, default=2048)
    parser.add_argument("--kv-bits", type=int, default=32)
    args = parser.parse_args()
    rng = np.random.default_rng(1)
    conversations = [rng.integers(5, 1000, args.tokens).tolist() for _ in range(args.repeat)]
    new = rng.integers(5, 1000, args.new).tolist()
    shared = summary(measure(args, conversations, new, "on"))
    alone = summary(measure(args, conversations, new, "off"))
    sooner = alone["ttft_s"]["median"] / shared["ttft_s"]["median"]
    for name, side in (("with the first turn cached", shared), ("without", alone)):
        print(f"{name}: {side['ttft_s']['median']:.3f} s, {side['computed_rows']} rows computed")
    settings = {name: getattr(args, name) for name in ("model", "tokens", "new", "repeat", "ctx", "kv_bits")}
    print(json.dumps({**settings, "shared": shared, "alone": alone, "times_sooner": sooner}))


if __name__ == "__main__":
    main()
