"""Decode speed of mixers with Qwen3-Next's numbers: `python scripts/bench_mixers.py [--threads 1 2] [--format q4/64]`.

    read         a plain read of memory, the limit of decode
    delta net    one token through gated delta nets, each with weights and a state of its own: GB/s of weights and states
    attention    one token through gated attention after --context positions: GB/s of weights, keys and values

Layers are so many that no cache holds them. `times` is how much longer a step takes than reading once what it has to read, by the best of
either, and by the best CPU times. Other figures, and the JSON at the end, as in bench_kernels.py.
"""

import argparse
import json

import numpy as np
import psutil
from bench_kernels import ENCODINGS, TOTAL_BYTES, Row, bench_read, measure, pack_matrix

from colibri_mp.formats import Encoding
from colibri_mp.kernels import isa
from colibri_mp.kernels.attention import AttentionStage, AttentionWeights, Batch
from colibri_mp.kernels.delta_net import DeltaNetStage, DeltaNetWeights, DeltaStates
from colibri_mp.kernels.kv_cache import KVCache, num_blocks_for
from colibri_mp.kernels.layout import PackedMatrix
from colibri_mp.kernels.rope import rope_tables
from colibri_mp.kernels.team import Arena, ThreadTeam, aligned_bytes
from colibri_mp.specs import AttentionSpec, DeltaNetSpec, RopeSpec

HIDDEN, EPS = 2048, 1e-6
DELTA_NET = DeltaNetSpec(HIDDEN, 16, 32, 128, 128, 4, EPS)
ATTENTION = AttentionSpec(HIDDEN, 16, 2, 256, 256**-0.5, EPS, qk_norm="head", gated=True)


def matrices(encoding: Encoding, shapes: dict[str, tuple[int, int]], num_layers: int) -> list[dict[str, PackedMatrix]]:
    """For each layer matrices of these shapes, all of memory of their own."""
    first = {name: pack_matrix(encoding, *shape) for name, shape in shapes.items()}
    layers, arena = [], Arena(num_layers * sum(data.nbytes for data in first.values()))
    for _ in range(num_layers):
        copies = {name: arena.take(data.nbytes) for name, data in first.items()}
        for name, data in copies.items():
            data[:] = first[name]
        layers.append({name: PackedMatrix(encoding.format, *shapes[name], data) for name, data in copies.items()})
    return layers


def bench_delta_net(team: ThreadTeam, encoding: Encoding, repetitions: int) -> tuple[Row, int]:
    """Steps of one token, and the bytes of weights and states of one layer."""
    spec, heads = DELTA_NET, DELTA_NET.num_value_heads
    shapes = {"qkv": (spec.conv_width, HIDDEN), "z": (spec.value_width, HIDDEN), "out": (HIDDEN, spec.value_width)}
    shapes |= {"b": (heads, HIDDEN), "a": (heads, HIDDEN)}
    weight_bytes = sum(matrix.data.nbytes for matrix in matrices(encoding, shapes, 1)[0].values())
    num_layers = TOTAL_BYTES // weight_bytes
    rng = np.random.default_rng(1)
    ones = np.ones(HIDDEN, np.float32)
    layers = [
        DeltaNetWeights(
            norm=ones, conv=rng.standard_normal((4, spec.conv_width)).astype(np.float32),
            rate=np.full(heads, -0.1, np.float32), dt_bias=np.zeros(heads, np.float32), head_norm=ones[:128].copy(), **each,
        )
        for each in matrices(encoding, shapes, num_layers)
    ]  # fmt: skip
    states, stage = DeltaStates(spec, num_layers, 1), DeltaNetStage(team, spec, 1)
    x, zero = rng.standard_normal((1, HIDDEN)).astype(np.float32), np.zeros(1, np.int32)
    begins, goes_on = (
        Batch(zero, zero, zero.reshape(1, 1), np.array([[0, 1, source, 0]], np.int32)) for source in (-1, 0)
    )
    for idx, weights in enumerate(layers):
        stage(x.copy(), weights, states, idx, begins)

    def run() -> None:
        for idx, weights in enumerate(layers):
            stage(x.copy(), weights, states, idx, goes_on)

    layer_bytes = weight_bytes + states.slot_bytes // num_layers
    return measure(run, num_layers * layer_bytes, repetitions), layer_bytes


def bench_attention(team: ThreadTeam, encoding: Encoding, context: int, repetitions: int) -> tuple[Row, int]:
    """Steps of one token after `context` positions, and the bytes of weights, keys and values of one layer."""
    spec = ATTENTION
    shapes = {"q": (spec.q_rows, HIDDEN), "k": (spec.kv_width, HIDDEN), "v": (spec.kv_width, HIDDEN)}
    shapes |= {"o": (HIDDEN, spec.q_width)}
    weight_bytes = sum(matrix.data.nbytes for matrix in matrices(encoding, shapes, 1)[0].values())
    kv_bytes = KVCache.nbytes(1, num_blocks_for(context + 1), spec.num_kv_heads, spec.head_dim)
    num_layers = TOTAL_BYTES // (weight_bytes + kv_bytes)
    ones = np.ones(HIDDEN, np.float32)
    head = ones[: spec.head_dim].copy()
    layers = [
        AttentionWeights(norm=ones, q_norm=head, k_norm=head, **each) for each in matrices(encoding, shapes, num_layers)
    ]
    kv, rng = (
        KVCache(num_layers, num_blocks_for(context + 1), spec.num_kv_heads, spec.head_dim),
        np.random.default_rng(2),
    )
    kv.tiles[:] = rng.standard_normal(kv.tiles.shape[1:], np.float32)
    tables = rope_tables(RopeSpec(1e7, spec.head_dim // 4), context + 1)
    stage = AttentionStage(team, spec, tables, 1, context + 1)
    x, zero = rng.standard_normal((1, HIDDEN)).astype(np.float32), np.zeros(1, np.int32)
    batch = Batch(np.full(1, context, np.int32), zero, np.arange(kv.num_blocks, dtype=np.int32)[None, :])

    def run() -> None:
        for idx, weights in enumerate(layers):
            stage(x.copy(), weights, kv, idx, batch)

    return measure(run, num_layers * (weight_bytes + kv_bytes), repetitions), weight_bytes + kv_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--format", choices=ENCODINGS, default="q4/64")
    parser.add_argument("--context", type=int, nargs="+", default=[1024, 16384], help="positions before the token")
    parser.add_argument("--repetitions", type=int, default=9)
    options = parser.parse_args()
    print(
        f"{isa.current().value} ({isa.current().reason}); GB/s: best (median), best by CPU time, foreign CPU in cores"
    )
    rows: list[Row] = []
    data, encoding = aligned_bytes(TOTAL_BYTES), ENCODINGS[options.format]
    data[:] = 1

    def report(num_threads: int, name: str, result: tuple[Row, int], read: Row | None) -> None:
        row, num_bytes = result
        more = {}
        if read is not None:
            ratios = {name: round(read[name] / row[name], 2) for name in ("best", "best_by_cpu")}
            more = {"MB": round(num_bytes / 1e6, 1), "times": ratios["best"], "times_by_cpu": ratios["best_by_cpu"]}
        rows.append({"name": name, "threads": num_threads, **more, **row})
        figures = f"{row['best']:6.1f} ({row['median']:6.1f}) {row['best_by_cpu']:6.1f} {row['foreign_cpu']:5.2f}"
        print(f"{name:24s} threads {num_threads} {figures}  {more}", flush=True)

    for num_threads in options.threads:
        with ThreadTeam(num_threads) as team:
            read = bench_read(team, data, options.repetitions)
            report(num_threads, "read", (read, data.nbytes), None)
            report(num_threads, "delta net", bench_delta_net(team, encoding, options.repetitions), read)
            for context in options.context:
                result = bench_attention(team, encoding, context, options.repetitions)
                report(num_threads, f"attention at {context}", result, read)
    print(json.dumps({"isa": isa.current().value, "cpus": psutil.cpu_count(logical=False), "rows": rows}))


if __name__ == "__main__":
    main()
