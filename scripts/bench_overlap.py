"""Sessions that decode together as one group and as two groups in flight, from a disk of a chosen speed, alternating.

    python scripts/bench_overlap.py [MODEL] [--sessions 8] [--disk-mb-s 1000] [--slots N] [--workers 2] [--rounds 3]

The disk is paced (`paced_disk`), one for all workers. One launch for each mode and round, greedy; the modes must give the same tokens.
Ratios are of the same round. Says the share of the time that steps waited for reads, and the bytes read a token. JSON last. The
coordinator runs in this process, the workers are spawned by it.
"""

import argparse
import json
import os
import statistics
import sys
import time
from contextlib import ExitStack
from typing import Any

from paced_disk import disk_of, pace_this_worker

from colibri_mp import rundir
from colibri_mp.config import LaunchConfig
from colibri_mp.coordinator import Coordinator
from colibri_mp.engine import Engine
from colibri_mp.kernels.paged_cache import BLOCK_TOKENS
from colibri_mp.kvcache import BlockAllocator
from colibri_mp.messages import Generate, Message, Piece, Sampling
from colibri_mp.overlap import Overlap
from colibri_mp.scheduler import Scheduler

MODES = ("off", "on", "auto")

if __name__ == "__mp_main__":  # a worker
    pace_this_worker()


def decode(options: argparse.Namespace, mode: str) -> dict[str, Any]:
    """One launch: tokens/s of all sessions after --warm-up tokens of each, their tokens, and what the disk had to do."""
    memory: dict[str, Any] = {"slots": options.slots} if options.slots else {"ram": options.ram}
    ctx = 64 + options.warm_up + options.tokens
    config = LaunchConfig(
        model=options.model, ctx=ctx, kv_tokens=ctx * options.sessions, usage="off", lookahead=options.lookahead,
        io="buffered" if options.disk_mb_s else "direct", num_workers=options.workers, overlap=mode, **memory,  # type: ignore[arg-type]
    )  # fmt: skip
    tokens: dict[bytes, list[int]] = {}

    def emit(client: bytes, message: Message) -> None:
        if isinstance(message, Piece):
            tokens.setdefault(client, []).extend(message.token_ids)

    with ExitStack() as stack:
        run_dir = rundir.create(f"bench-{os.getpid()}")
        stack.callback(run_dir.remove)
        coordinator = Coordinator.launch(config, run_dir, lambda _text: None, lambda: False, stack)
        scheduler = Scheduler(BlockAllocator(coordinator.kv.num_blocks, BLOCK_TOKENS), coordinator.plan.prefill_chunk)
        overlap = Overlap(config.overlap)
        engine = Engine(coordinator, scheduler, None, {}, frozenset(), emit, overlap=overlap)
        for session in range(options.sessions):
            prompt = [(7919 * (i + 31 * session)) % 1000 + 3 for i in range(16)]
            max_tokens = options.warm_up + options.tokens + 32  # nobody ends before the measurement does
            engine.submit(b"%d" % session, Generate(1, prompt, max_tokens, Sampling(temperature=0.0), ignore_eos=True))
        while not tokens or len(tokens) < options.sessions or min(map(len, tokens.values())) < options.warm_up:
            engine.step()
        started, before, waited_s = time.perf_counter(), coordinator.cache_counters(), coordinator.fetch_wait_s
        num_before = sum(map(len, tokens.values()))
        while min(map(len, tokens.values())) < options.warm_up + options.tokens:
            engine.step()
        seconds, after = time.perf_counter() - started, coordinator.cache_counters()
        num_tokens = sum(map(len, tokens.values())) - num_before
        waited_s = coordinator.fetch_wait_s - waited_s
    return {
        "tok_s": num_tokens / seconds,
        "tokens": {client.decode(): found[: options.tokens] for client, found in sorted(tokens.items())},
        "waited_share": waited_s / seconds,
        "mb_read_per_token": (after["bytes_read"] - before["bytes_read"]) / num_tokens / 1e6,
        "disk_share": (after["bytes_read"] - before["bytes_read"]) / (options.disk_mb_s * 1e6) / seconds if options.disk_mb_s else None,
        "two_groups": overlap.describe(),
    }  # fmt: skip


def summary(rounds: list[dict[str, dict[str, Any]]], mode: str, base: str) -> dict[str, Any]:
    """Medians of a mode over the rounds."""
    ratios = [found[mode]["tok_s"] / found[base]["tok_s"] for found in rounds]
    names = ("tok_s", "waited_share", "mb_read_per_token")
    medians = {name: statistics.median(found[mode][name] for found in rounds) for name in names}
    last = rounds[-1][mode]
    return {**medians, "ratio": statistics.median(ratios), "ratios": ratios} | {
        name: last[name] for name in ("disk_share", "two_groups")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--disk-mb-s", type=int, default=0)
    parser.add_argument("--slots", type=int, default=0, help="experts a layer in memory")
    parser.add_argument("--ram", default="auto", help="memory, where --slots is not given")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--lookahead", default="off")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=16, help="tokens of each session before the measurement")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--modes", nargs="+", default=["off", "on"], choices=MODES, help="the first is the base")
    options = parser.parse_args()
    rounds: list[dict[str, dict[str, Any]]] = []
    for _ in range(options.rounds):
        with disk_of(options.disk_mb_s * 10**6):
            found = {mode: decode(options, mode) for mode in options.modes}
        assert all(run["tokens"] == found[options.modes[0]]["tokens"] for run in found.values()), "other tokens"
        rounds.append(found)
        print("  ".join(f"{mode} {run['tok_s']:.1f} tok/s" for mode, run in found.items()), file=sys.stderr)
    found_modes = {mode: summary(rounds, mode, options.modes[0]) for mode in options.modes}
    print(json.dumps({"settings": vars(options), **found_modes}))


if __name__ == "__main__":
    main()
