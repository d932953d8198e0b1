#!/usr/bin/env python3
"""Decode with and without guessed tokens, alternating in one cluster. Prints JSON last.

    scripts/bench_draft.py [MODEL] [--draft 4] [--tokens 96] [--rounds 5] [--ram SIZE] [--slots N]

Texts: one that repeats itself, one that is to be copied (both are what looking up in the text is for), and one that does neither. A
model without a tokenizer gets random tokens instead: a period, and none. Each answer is asked for with `draft` 0 and with --draft,
the order changing from round to round; they must be equal. Ratios are of the same round.
"""

import argparse
import json
import statistics
from typing import Any

import numpy as np

from colibri_mp import Cluster
from colibri_mp.errors import RequestError

_LIST = "".join(f"    'item_{n}': {{'name': 'item', 'value': {n}}},\n" for n in range(8))
TEXTS = {
    "repeats": "la la la la la la la la la la la la",
    "copies": f"ITEMS = {{\n{_LIST}}}\n\nCOPY = {{\n{_LIST[:60]}",
    "prose": "Once upon a time",
}


def prompts(cluster: Cluster) -> dict[str, str | list[int]]:
    """The texts, or tokens for a model without a tokenizer."""
    try:
        cluster.generate("Once", max_tokens=1)
    except RequestError:
        rng = np.random.default_rng(1)
        return {"repeats": rng.integers(5, 1000, 12).tolist() * 8, "prose": rng.integers(5, 1000, 48).tolist()}
    return dict(TEXTS)


def answer(cluster: Cluster, prompt: str | list[int], draft: int, num_tokens: int) -> tuple[list[int], dict[str, Any]]:
    """Tokens and statistics of a greedy answer."""
    done = cluster.generate(prompt, max_tokens=num_tokens, temperature=0.0, ignore_eos=True, draft=draft)
    return done.token_ids, done.stats


def measure(cluster: Cluster, prompt: str | list[int], args: argparse.Namespace) -> dict[str, Any]:
    """Both ways, `rounds` times, after a round that is not counted."""
    speeds: dict[int, list[float]] = {0: [], args.draft: []}
    ratios, last = [], {}
    for turn in range(args.rounds + 1):
        order = (0, args.draft) if turn % 2 else (args.draft, 0)
        found = {draft: answer(cluster, prompt, draft, args.tokens) for draft in order}
        assert found[0][0] == found[args.draft][0], "guessing has changed an answer"
        last = found[args.draft][1]
        if turn:
            for draft, (_, stats) in found.items():
                speeds[draft].append(stats["decode_tok_s"])
            ratios.append(speeds[args.draft][-1] / speeds[0][-1])
    drafted, accepted = last["drafted_tokens"], last["accepted_tokens"]
    return {
        "plain_tok_s": statistics.median(speeds[0]),
        "drafted_tok_s": statistics.median(speeds[args.draft]),
        "ratio": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
        "drafted_tokens": drafted,
        "accepted_tokens": accepted,
        "tokens_per_step": args.tokens / (args.tokens - accepted),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--draft", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ram", default="auto")
    parser.add_argument("--slots", type=int, default=0)
    args = parser.parse_args()
    settings: dict[str, Any] = {"ram": args.ram, "slots": args.slots, "ctx": 1024, "usage": "off"}
    with Cluster.launch(args.model, draft=args.draft, **settings) as cluster:
        found = {name: measure(cluster, prompt, args) for name, prompt in prompts(cluster).items()}
        drafting = cluster.stats()["drafting"]
    for name, side in found.items():
        print(
            f"{name}: {side['plain_tok_s']:.1f} tokens/s plain, {side['drafted_tok_s']:.1f} drafted "
            f"({side['ratio']['median']:.2f} times; {side['accepted_tokens']} of {side['drafted_tokens']} guesses right)"
        )
    named = {name: getattr(args, name) for name in ("model", "draft", "tokens", "rounds", "ram", "slots")}
    print(json.dumps({**named, "texts": found, "drafting": drafting}))


if __name__ == "__main__":
    main()
