"""Decode of one layer of latent attention as DeepSeek-V3 has it: `python scripts/bench_latent.py [--threads 1 2] [--contexts 1 512 4096]`.

Hidden 7168, 128 heads, query rank 1536, latents of 512, 128 + 64 of a head, values of 128, all matrices in 4 bits. For each context: the
time of a step of one token, the bytes of the weights and of what is cached for its positions, the time of a plain read of as many bytes
on as many threads, and the ratio of the two; then the time beyond a context of one, as products a second of scores and sums.

Times are medians over the repetitions. The last line of the output is all of it as JSON.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from bench_kernels import ENCODINGS, READ_FRAME, READ_STAGE, random_parts

from colibri_mp.kernels import isa
from colibri_mp.kernels.attention_inputs import Batch
from colibri_mp.kernels.latent_cache import LATENT_CACHES
from colibri_mp.kernels.layout import PackedMatrix, pack, packed_bytes
from colibri_mp.kernels.mla import MlaStage
from colibri_mp.kernels.mla_weights import MlaWeights, absorb
from colibri_mp.kernels.rope import rope_tables
from colibri_mp.kernels.team import ThreadTeam, aligned_bytes
from colibri_mp.specs import MlaSpec, RopeSpec

SPEC = MlaSpec(7168, 128, 1536, 512, nope_dim=128, rope_dim=64, v_dim=128, scale=192**-0.5, norm_eps=1e-6)
ENCODING = ENCODINGS["q4/64"]
MATRICES = ("q_a", "q", "kv_a", "uk", "uv", "o")


def make_weights() -> MlaWeights:
    """Random codes."""

    def matrix(rows: int, cols: int) -> PackedMatrix:
        out = aligned_bytes(packed_bytes(ENCODING.format, rows, cols))
        pack(ENCODING, rows, cols, random_parts(ENCODING, rows, cols), out)
        return PackedMatrix(ENCODING.format, rows, cols, out)

    rows = SPEC.num_heads * (SPEC.nope_dim + SPEC.v_dim)
    return MlaWeights(
        norm=np.ones(SPEC.hidden, np.float32),
        q_a=matrix(1536, SPEC.hidden),
        q_a_norm=np.ones(1536, np.float32),
        q=matrix(SPEC.q_width, 1536),
        kv_a=matrix(SPEC.kv_lora_rank + SPEC.rope_dim, SPEC.hidden),
        kv_a_norm=np.ones(SPEC.kv_lora_rank, np.float32),
        o=matrix(SPEC.hidden, SPEC.num_heads * SPEC.v_dim),
        **absorb(ENCODING, random_parts(ENCODING, rows, SPEC.kv_lora_rank), SPEC),
    )


def median_s(run: Callable[[], object], repetitions: int) -> float:
    """Seconds of a run."""
    run()
    seconds = []
    for _ in range(repetitions):
        started_s = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started_s)
    return statistics.median(seconds)


def read_s(team: ThreadTeam, data: np.ndarray, repetitions: int) -> float:
    """Seconds of a plain read of all of it, in pieces of 64 KiB."""
    frame, num_chunks = np.zeros(1, READ_FRAME), data.nbytes >> 16
    sums = np.zeros(num_chunks, np.int64)
    frame["data"], frame["sums"] = data.ctypes.data, sums.ctypes.data
    frame["chunk_bytes"], frame["num_chunks"] = 1 << 16, num_chunks
    return median_s(lambda: team.run(READ_STAGE, frame), repetitions)


def bench(team: ThreadTeam, weights: MlaWeights, context: int, kv_bits: int, repetitions: int) -> dict[str, Any]:
    """A step at the last of `context` positions."""
    kind, num_blocks = LATENT_CACHES[kv_bits], -(-context // 16)
    cache = kind(1, num_blocks, SPEC.kv_lora_rank, SPEC.rope_dim)
    rng = np.random.default_rng(1)
    cache.tiles[:] = rng.standard_normal(cache.tiles.shape) if kv_bits == 32 else rng.integers(0, 60, cache.tiles.shape)
    stage = MlaStage(team, SPEC, rope_tables(RopeSpec(1e4, 64), context), 1, context, kv_bits=kv_bits)
    table = rng.permutation(num_blocks).astype(np.int32)[None]
    batch = Batch(np.array([context - 1], np.int32), np.zeros(1, np.int32), np.ascontiguousarray(table))
    x = rng.standard_normal((1, SPEC.hidden)).astype(np.float32)
    seconds = median_s(lambda: stage(x.copy(), weights, cache, 0, batch), repetitions)
    num_bytes = sum(getattr(weights, name).data.nbytes for name in MATRICES) + cache.tiles.nbytes
    reading = read_s(team, np.ones(num_bytes, np.uint8), repetitions)
    return {"ms": seconds * 1e3, "bytes": num_bytes, "read_ms": reading * 1e3, "ratio": seconds / reading}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1, 512, 4096])
    parser.add_argument("--kv-bits", type=int, choices=[8, 32], default=32)
    parser.add_argument("--repetitions", type=int, default=9)
    options = parser.parse_args()
    weights, rows = make_weights(), []
    per_position = SPEC.num_heads * (2 * SPEC.kv_lora_rank + SPEC.rope_dim)
    print(
        f"{isa.current().value}; ms a step, MB of weights and state, ms of reading them, ratio, G products/s of attention"
    )
    for num_threads in options.threads:
        with ThreadTeam(num_threads) as team:
            least_ms = 0.0
            for context in options.contexts:
                row = bench(team, weights, context, options.kv_bits, options.repetitions)
                least_ms = least_ms or row["ms"]
                row["rate"] = per_position * context / max(1e-9, row["ms"] - least_ms) / 1e6 if rows else 0.0
                rows.append({"threads": num_threads, "context": context, **row})
                print(
                    f"{num_threads} threads, {context:6d} positions: {row['ms']:7.2f} ms, {row['bytes'] / 1e6:6.1f} MB, "
                    f"{row['read_ms']:6.2f} ms, {row['ratio']:5.2f}, {row['rate']:6.1f}",
                    flush=True,
                )
    print(json.dumps({"isa": isa.current().value, "rows": rows}))


if __name__ == "__main__":
    main()
