"""What learned usage is worth: the hit rate of a launch's first tokens, before and after the same kind of text was asked for.

    python scripts/bench_learning.py [MODEL] [--slots N] [--pins SHARE] [--policy lrfu|lru]

A set of prompts of each kind is run in two launches of its own, with a usage file that begins empty; then a third launch, with what
the first two have learned, runs the prompts of the *next* kind. A fourth is a plain LRU: no usage, `--policy lru`. Hit rates are of
the first tokens of a launch (prompt and answer; default 50), where a cold pool hurts, and of the whole set. Sampled with fixed
seeds: every launch of a set makes the same text. JSON last, medians over the kinds.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from colibri_mp import Cluster
from colibri_mp.config import LaunchConfig

KINDS = {
    "stories": [
        "Once upon a time there was a captain who had sailed round the world and loved nothing but the sea.",
        "She was a very good woman, and her daughters were the delight of the whole neighbourhood.",
        "Mr. Darcy looked at her with more earnestness than she could well understand,",
        "In the evening the gentlemen came back, and Emma had nothing to say to any of them.",
    ],
    "scripture": [
        "And the LORD said unto Moses, Go up into the mountain, and stand there before the people,",
        "In the beginning God created the heaven and the earth, and the spirit of God moved",
        "And it came to pass in those days, that the king of Assyria sent his servants to Jerusalem,",
        "Blessed is the man that walketh not in the counsel of the ungodly, nor standeth",
    ],
    "spanish": [
        "Y el rey dijo á sus siervos: Id y traed delante de mí á los ancianos de la ciudad,",
        "Y Jehová habló á Moisés, diciendo: Habla á los hijos de Israel, y diles que vengan",
        "En aquel tiempo salió el pueblo de la tierra de Egipto, y acamparon junto al mar,",
        "Y aconteció que cuando hubo acabado de hablar, toda la gente se levantó",
    ],
    "python": [
        'def read_lines(path):\n    """Return the lines of a file as a list of strings."""\n',
        "class Graph:\n    def __init__(self, nodes, edges):\n        self.nodes = nodes\n",
        "import os\nimport sys\n\ndef main(argv):\n    for name in argv[1:]:\n",
        "    def test_empty(self):\n        self.assertEqual(len(self.queue), 0)\n",
    ],
}


class Rates:
    """Hits and experts asked for, of the first tokens of a launch and of all."""

    def __init__(self) -> None:
        self.first, self.total = [0.0, 0.0], [0.0, 0.0]

    def add(self, cache: dict[str, float], is_first: bool) -> None:
        counts = cache["hits"], cache["hits"] + cache["misses"] + cache["promoted"]
        for sums in (self.first, self.total) if is_first else (self.total,):
            sums[0] += counts[0]
            sums[1] += counts[1]

    def percent(self) -> dict[str, float]:
        return {"first": 100 * self.first[0] / self.first[1], "all": 100 * self.total[0] / self.total[1]}


def launch(options: argparse.Namespace, kind: str, usage: str, policy: str) -> dict[str, float]:
    """Hit rates of one launch with a kind's prompts, once what is to be read at start has been read."""
    rates = Rates()
    settings: dict[str, Any] = {"slots": options.slots, "pins": options.pins, "usage": usage, "policy": policy}
    with Cluster.launch(options.model, num_workers=1, ctx=512, lookahead="off", **settings) as cluster:
        deadline = time.monotonic() + 20
        while cluster.stats()["tiers"]["waiting"] and time.monotonic() < deadline:
            time.sleep(0.05)
        for number, prompt in enumerate(KINDS[kind][: options.prompts]):
            done = cluster.generate(
                prompt,
                max_tokens=options.tokens if number else options.first,
                temperature=0.8,
                seed=number,
                ignore_eos=True,
            )
            rates.add(done.stats["cache"], is_first=number == 0)
    return rates.percent()


def bench(options: argparse.Namespace, kind: str, other: str) -> dict[str, dict[str, float]]:
    """The four launches of a kind."""
    found = {"plain": launch(options, kind, "off", "lru")}
    with tempfile.TemporaryDirectory() as folder:
        usage = str(Path(folder) / "usage")
        found["first"] = launch(options, kind, usage, options.policy)
        found["second"] = launch(options, kind, usage, options.policy)
        found["other kind"] = launch(options, other, usage, options.policy)
    return found


def compared(results: dict[str, dict[str, dict[str, float]]], part: str) -> dict[str, dict[str, float]]:
    """Points of hit rate in one `part` of the launches ("first" tokens or "all"): what is gained over what, by kind of text."""
    kinds = list(results)
    gains = {
        "second launch over first": [results[kind]["second"][part] - results[kind]["first"][part] for kind in kinds],
        "second launch over plain LRU": [
            results[kind]["second"][part] - results[kind]["plain"][part] for kind in kinds
        ],
        "first launch over plain LRU": [results[kind]["first"][part] - results[kind]["plain"][part] for kind in kinds],
        "another kind over plain LRU": [
            results[kind]["other kind"][part] - results[other]["plain"][part]
            for kind, other in zip(kinds, kinds[1:] + kinds[:1], strict=True)
        ],
    }
    return {
        name: {"median": statistics.median(points), "least": min(points), "most": max(points)}
        for name, points in gains.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--slots", type=int, default=8, help="experts a layer in memory (the built-in model has 32)")
    parser.add_argument("--pins", type=float, default=LaunchConfig.pins)
    parser.add_argument("--policy", choices=("lrfu", "lru"), default=LaunchConfig.policy)
    parser.add_argument("--prompts", type=int, default=4, help="of each kind")
    parser.add_argument("--first", type=int, default=30, help="tokens generated after the first prompt")
    parser.add_argument("--tokens", type=int, default=60, help="and after each of the others")
    options = parser.parse_args()
    kinds = list(KINDS)
    results = {}
    for kind, other in zip(kinds, kinds[1:] + kinds[:1], strict=True):
        results[kind] = found = bench(options, kind, other)
        print(
            f"{kind:10} "
            + "  ".join(f"{name}: {rates['first']:.1f} / {rates['all']:.1f}" for name, rates in found.items()),
            file=sys.stderr,
        )
    summary: dict[str, Any] = {"settings": vars(options), "hit_rates_percent": results}
    for part in ("first", "all"):
        summary[f"gains_{part}_tokens"] = found = compared(results, part)
        for name, points in found.items():
            shown = "  ".join(f"{which} {value:+.1f}" for which, value in points.items())
            print(f"{part:5} tokens, {name:28} {shown}", file=sys.stderr)
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
