#!/usr/bin/env python3
"""Time from typing the command to the first token, as a user waits for it. Prints JSON last.

    scripts/bench_start.py [MODEL] [--repeat 5]

Runs `colibri-cluster run --max-tokens 1` and times the first byte of its output. Kernels are compiled by a run that does not
count; the page cache is as the runs before left it (warm).
"""

import argparse
import json
import statistics
import subprocess
import sys
import time


def first_byte_s(model: str) -> float:
    """Seconds until the first text of one run."""
    command = [sys.executable, "-P", "-m", "colibri_mp", "run", "--prompt-ids", "5,6,7", "--model", model]
    command += ["--max-tokens", "1", "--temp", "0", "--json"]
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        seconds = time.perf_counter() - started
        process.stdout.read()
    if process.returncode or first != b"{":
        raise SystemExit(
            f"the run failed with exit code {process.returncode}: try `colibri-cluster run --model {model}`"
        )
    return seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    first_byte_s(args.model)
    seconds = [first_byte_s(args.model) for _ in range(args.repeat)]
    print(
        json.dumps(
            {"model": args.model, "median_s": statistics.median(seconds), "min_s": min(seconds), "max_s": max(seconds)}
        )
    )


if __name__ == "__main__":
    main()
