#!/usr/bin/env python3
"""What `--kv-bits 8` costs: the logits of a model over windows of a text, with both caches.

    scripts/compare_kv_bits.py [MODEL ...] [--text FILE] [--windows 4] [--tokens 256]

Without --text the windows are random tokens, all that a model without a tokenizer can have. For each MODEL (default: the
built-in one) a line, and JSON last: greatest and mean difference of a logit, the spread of the logits (standard deviation), the
mean of KL(32 bits || 8 bits) in nats, how often the likeliest token is the same, and the mean log loss of the text in both.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_mp import Cluster
from colibri_mp.checkpoint.hub import resolve
from colibri_mp.tokenizer import Tokenizer

Floats = NDArray[np.float64]


def windows_of(model: str, text: Path | None, num_windows: int, num_tokens: int, vocab_size: int) -> list[list[int]]:
    """Windows of tokens, evenly spread over the text, or random ones."""
    if text is None:
        return np.random.default_rng(1).integers(0, vocab_size, (num_windows, num_tokens)).tolist()
    tokenizer = Tokenizer.load(resolve(model, print))
    if tokenizer is None:
        raise SystemExit(f"{model}: has no tokenizer.json, leave --text out")
    ids = tokenizer.encode(text.read_text(encoding="utf-8"))
    starts = np.linspace(0, max(len(ids) - num_tokens, 0), num_windows).astype(int)
    return [ids[start : start + num_tokens] for start in starts]


def log_softmax(logits: Floats) -> Floats:
    """Log probabilities of each row."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def logits_of(model: str, bits: int, windows: list[list[int]]) -> Floats:
    """Of every position of every window, [positions, V]."""
    with Cluster.launch(model, ctx=len(windows[0]), kv_bits=bits, usage="off") as cluster:
        return np.concatenate([cluster.logits(window) for window in windows]).astype(np.float64)


def compare(model: str, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of one model."""
    vocab_size = json.loads((resolve(model, print) / "config.json").read_text())["vocab_size"]
    windows = windows_of(model, args.text, args.windows, args.tokens, vocab_size)
    exact, coarse = (logits_of(model, bits, windows) for bits in (32, 8))
    log_exact, log_coarse = log_softmax(exact), log_softmax(coarse)
    following = np.concatenate([window[1:] for window in windows])
    rows = np.concatenate([np.arange(len(w) - 1) + idx * len(w) for idx, w in enumerate(windows)])
    return {
        "model": model,
        "positions": len(exact),
        "max_difference": float(np.abs(exact - coarse).max()),
        "mean_difference": float(np.abs(exact - coarse).mean()),
        "spread": float(exact.std()),
        "kl_nats": float((np.exp(log_exact) * (log_exact - log_coarse)).sum(axis=1).mean()),
        "same_top": float((exact.argmax(axis=1) == coarse.argmax(axis=1)).mean()),
        "loss_32": float(-log_exact[rows, following].mean()),
        "loss_8": float(-log_coarse[rows, following].mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["demo"])
    parser.add_argument("--text", type=Path)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    args = parser.parse_args()
    found = []
    for model in args.models:
        found.append(compare(model, args))
        print({name: round(value, 6) if isinstance(value, float) else value for name, value in found[-1].items()})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
