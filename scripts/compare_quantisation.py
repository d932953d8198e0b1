#!/usr/bin/env python3
"""What quantising a model's experts costs: `convert --bits` against plain rounding, in weights and in what the model says.

    scripts/compare_quantisation.py MODEL --text FILE [--windows 8] [--group-size 64]

MODEL is unquantised. Each choice of bits is converted into a temporary folder, twice: with the searched range, and with
plain rounding in its place. Errors of the weights are relative (root mean square). The divergence is the mean of
KL(original || quantised) over the positions of windows of FILE, in nats; `same_top`: how often the likeliest token is the same.
Prints a line a variant, and JSON last.
"""

import argparse
import functools
import json
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from colibri_mp import Cluster, recoding
from colibri_mp.checkpoint.convert import Options, Report, convert
from colibri_mp.checkpoint.hub import resolve
from colibri_mp.kernels.quantising import STEPS, quantise
from colibri_mp.tokenizer import Tokenizer

WINDOW_TOKENS = 256
Floats = NDArray[np.float32]


class Silent:
    """A listener that says nothing."""

    def show(self, doing: str, done_bytes: int, total_bytes: int) -> None:
        """Progress."""

    def note(self, text: str) -> None:
        """A note."""


def windows_of(model: Path, text: Path, num_windows: int) -> list[list[int]]:
    """Windows of tokens, evenly spread over the text."""
    tokenizer = Tokenizer.load(model)
    if tokenizer is None:
        raise SystemExit(f"{model}: has no tokenizer.json")
    ids = tokenizer.encode(text.read_text(encoding="utf-8"))
    starts = np.linspace(0, max(len(ids) - WINDOW_TOKENS, 0), num_windows).astype(int)
    return [ids[start : start + WINDOW_TOKENS] for start in starts]


def log_probabilities(model: Path, windows: list[list[int]]) -> Floats:
    """Of every position of every window, [positions, V]."""
    with Cluster.launch(str(model), ctx=WINDOW_TOKENS) as cluster:
        logits = np.concatenate([cluster.logits(window) for window in windows]).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))).astype(np.float32)


def compare(expected: Floats, found: Floats) -> dict[str, float]:
    """Divergence and agreement."""
    divergence = (np.exp(expected) * (expected - found)).sum(axis=1)
    same = expected.argmax(axis=1) == found.argmax(axis=1)
    return {"divergence": float(divergence.mean()), "same_top": float(same.mean())}


def weight_errors(report: Report, is_plain: bool) -> dict[str, float]:
    """The relative error of each projection."""
    found = {part.projection: part.plain_error if is_plain else part.error for part in report.projections}
    return {projection: round(error, 5) for projection, error in found.items() if error is not None}


def main() -> None:
    """Convert, run and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True, help="text of the kind that the model knows")
    parser.add_argument(
        "--windows", type=int, default=8, help=f"windows of {WINDOW_TOKENS} tokens (default %(default)s)"
    )
    parser.add_argument("--group-size", type=int, default=64, choices=(32, 64))
    args = parser.parse_args()
    model = resolve(args.model)
    windows = windows_of(model, args.text, args.windows)
    expected = log_probabilities(model, windows)
    results: list[dict[str, Any]] = []
    for bits in ("4", "mixed", "8"):
        for rounding, steps in (("searched", STEPS), ("plain", STEPS[:0])):
            with (
                tempfile.TemporaryDirectory() as folder,
                patch.object(recoding, "quantise", functools.partial(quantise, steps=steps)),
            ):
                out = Path(folder) / "model"
                report = convert(model, out, Options.of(bits, args.group_size), Silent())
                scores = compare(expected, log_probabilities(out, windows))
            errors = weight_errors(report, rounding == "plain")
            results.append(
                {"bits": bits, "rounding": rounding, "bytes": report.expert_bytes, "errors": errors, **scores}
            )
            print(f"{bits:>5} {rounding:<8} {report.expert_bytes / 1e6:8.2f} MB  {errors}  {scores}", flush=True)
    tokens = sum(map(len, windows))
    print(json.dumps({"model": args.model, "group_size": args.group_size, "tokens": tokens, "results": results}))


if __name__ == "__main__":
    main()
