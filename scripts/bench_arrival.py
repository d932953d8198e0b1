#!/usr/bin/env python3
"""A short request that arrives in the middle of a long prefill, against the time of one chunk of that prefill. Prints JSON last.

    scripts/bench_arrival.py [MODEL] [--tokens 2000] [--short 16] [--arrivals 6] [--ram SIZE] [--chunk 512]

Each arrival has a long prompt of its own (random tokens, nothing cached). The short request is sent some way into one of its chunks,
at moments spread evenly over the prefill. Its first token, as this client sees it, must not come later than one chunk takes:
the median time between two messages of progress of the long prompts that nobody interrupts.
"""

import argparse
import json
import statistics
import time
from itertools import pairwise

import numpy as np

from colibri_mp import Cluster
from colibri_mp.messages import Failed, Finished, Piece, Progress

QUIET_RUNS = 2


def prefill(
    cluster: Cluster, prompt: list[int], short: list[int], arrival_s: float | None
) -> tuple[list[float], float]:
    """Moments at which the chunks of `prompt` had ended, and seconds to the first token of `short`, sent `arrival_s` after the start."""
    started = time.perf_counter()
    long_id = cluster.submit(prompt, max_tokens=1, temperature=0.0, ignore_eos=True, progress=True)
    short_id, sent_s, first_s, ends = -1, 0.0, 0.0, [0.0]
    while True:
        wait_s = None if short_id >= 0 or arrival_s is None else max(0.0, arrival_s - (time.perf_counter() - started))
        found = cluster.next_event(wait_s)
        now_s = time.perf_counter() - started
        if found is None and (short_id >= 0 or arrival_s is None):
            return ends, first_s
        if found is None:
            sent_s = now_s
            short_id = cluster.submit(short, max_tokens=1, temperature=0.0, ignore_eos=True)
            continue
        request, event = found
        if isinstance(event, Failed):
            raise SystemExit(f"a request failed: {event.message}")
        if request == short_id and isinstance(event, Piece):
            first_s = now_s - sent_s
        if request == long_id and isinstance(event, Progress | Piece):
            ends.append(now_s)
        if request == long_id and isinstance(event, Finished) and short_id < 0 and arrival_s is not None:
            raise SystemExit(
                f"the prefill ended within {now_s:.2f} s, before the short request came; give more --tokens"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--short", type=int, default=16)
    parser.add_argument("--arrivals", type=int, default=6)
    parser.add_argument("--ram", default="auto")
    parser.add_argument("--chunk", type=int, default=512, help="rows a step, at most")
    args = parser.parse_args()
    rng = np.random.default_rng(1)

    def tokens(count: int) -> list[int]:
        return [int(token) for token in rng.integers(5, 1000, count)]

    settings = {"ram": args.ram, "ctx": args.tokens + 48, "prefill_chunk": args.chunk, "usage": "off"}
    with Cluster.launch(args.model, kv_tokens=2 * args.tokens + 256, **settings) as cluster:
        cluster.generate(tokens(args.short), max_tokens=2)
        quiet = [prefill(cluster, tokens(args.tokens), [], None)[0] for _ in range(QUIET_RUNS)]
        # The last chunk is shorter than the others, unless the prompt is a multiple of the chunk.
        chunk_s = statistics.median(after - before for ends in quiet for before, after in list(pairwise(ends))[:-1])
        whole_s = min(ends[-1] for ends in quiet)
        firsts = []
        for number in range(args.arrivals):
            arrival_s = whole_s * (number + 0.5) / args.arrivals * 0.75
            firsts.append(prefill(cluster, tokens(args.tokens), tokens(args.short), arrival_s)[1])
            print(f"sent {arrival_s:.2f} s into a prefill of {whole_s:.2f} s: first token after {firsts[-1]:.3f} s")
        alone = cluster.generate(tokens(args.short), max_tokens=1, ignore_eos=True).stats["ttft_s"]
    report = {
        "model": args.model, "tokens": args.tokens, "short": args.short, "chunk": args.chunk, "chunk_s": chunk_s,
        "prefill_s": whole_s, "short_alone_s": alone, "first_token_s": firsts, "worst_share_of_chunk": max(firsts) / chunk_s,
    }  # fmt: skip
    print(f"one chunk takes {chunk_s:.3f} s; the worst first token {max(firsts):.3f} s")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
