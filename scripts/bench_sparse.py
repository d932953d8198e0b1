"""Sparse against dense attention, with GLM-5.2's numbers: `python scripts/bench_sparse.py [--context 32768] [--threads 1 2]`.

One token through one layer after --context random positions, ms: best, best by CPU time of all threads together, foreign CPU in cores.

    projections   at position 0: what does not depend on the context
    dense         latent attention that reads all positions
    shared        reads the 2,048 positions that another layer has chosen
    full          chooses them itself

`times` is how much faster the part is that depends on the context (what is above the projections, by CPU time) than dense attention's;
`bar` what it must be: positions read by dense over positions read, within 1.5. The last line is all of it as JSON.
"""

import argparse
import json
from dataclasses import replace

import numpy as np
import psutil
from bench_kernels import ENCODINGS, Row, measure, pack_matrix, random_parts

from colibri_mp.formats import Encoding
from colibri_mp.kernels import isa
from colibri_mp.kernels.attention_inputs import Batch
from colibri_mp.kernels.indexer import IndexerWeights
from colibri_mp.kernels.latent_cache import LatentCache
from colibri_mp.kernels.layout import PackedMatrix
from colibri_mp.kernels.mla import MlaStage
from colibri_mp.kernels.mla_weights import MlaWeights, absorb
from colibri_mp.kernels.paged_cache import num_blocks_for
from colibri_mp.kernels.rope import rope_tables
from colibri_mp.kernels.team import ThreadTeam
from colibri_mp.specs import IndexerSpec, MlaSpec, RopeSpec

INDEXER = IndexerSpec(6144, 2048, num_heads=32, head_dim=128, rotary_dim=64, top_k=2048)
SPARSE = MlaSpec(6144, 64, 2048, 512, 192, 64, 256, scale=256**-0.5, norm_eps=1e-5, indexer=INDEXER)
DENSE = replace(SPARSE, indexer=None)


def make_weights(encoding: Encoding) -> tuple[MlaWeights, IndexerWeights]:
    """Of one layer, random."""

    def matrix(rows: int, cols: int) -> PackedMatrix:
        return PackedMatrix(encoding.format, rows, cols, pack_matrix(encoding, rows, cols))

    def ones(size: int) -> np.ndarray:
        return np.ones(size, np.float32)

    spec = DENSE
    kv_b = (spec.num_heads * (spec.nope_dim + spec.v_dim), spec.kv_lora_rank)
    weights = MlaWeights(
        norm=ones(spec.hidden),
        q_a=matrix(2048, spec.hidden),
        q_a_norm=ones(2048),
        q=matrix(spec.q_width, 2048),
        kv_a=matrix(spec.kv_lora_rank + spec.rope_dim, spec.hidden),
        kv_a_norm=ones(spec.kv_lora_rank),
        o=matrix(spec.hidden, spec.num_heads * spec.v_dim),
        **absorb(encoding, random_parts(encoding, *kv_b), spec),
    )
    indexer = IndexerWeights(
        matrix(INDEXER.q_width, 2048), matrix(INDEXER.head_dim, 6144), matrix(INDEXER.num_heads, 6144),
        ones(INDEXER.head_dim), np.zeros(INDEXER.head_dim, np.float32),
    )  # fmt: skip
    return weights, indexer


def bench(team: ThreadTeam, encoding: Encoding, context: int, repetitions: int) -> dict[str, Row]:
    """ms of each kind of layer."""
    rng, num_blocks = np.random.default_rng(1), num_blocks_for(context + 1)
    weights, indexer = make_weights(encoding)
    tables = rope_tables(RopeSpec(1e6, DENSE.rope_dim), context + 1)
    dense, sparse = (MlaStage(team, spec, tables, 1, context + 1) for spec in (DENSE, SPARSE))
    cache, with_keys = (
        LatentCache(1, num_blocks, DENSE.kv_lora_rank, DENSE.rope_dim, width) for width in (0, INDEXER.head_dim)
    )
    for each in (cache, with_keys):
        each.tiles[:] = rng.standard_normal(each.tiles.shape, np.float32)
    table, zero = rng.permutation(num_blocks).astype(np.int32)[None, :], np.zeros(1, np.int32)
    first, last = Batch(zero, zero, table), Batch(np.full(1, context, np.int32), zero, table)
    x, full = rng.standard_normal((1, DENSE.hidden)).astype(np.float32), replace(weights, indexer=indexer)
    runs = {
        "projections": lambda: dense(x.copy(), weights, cache, 0, first),
        "dense": lambda: dense(x.copy(), weights, cache, 0, last),
        "full": lambda: sparse(x.copy(), full, with_keys, 0, last),
        "shared": lambda: sparse(x.copy(), weights, cache, 0, last),
    }
    return {name: milliseconds(measure(run, 1e12, repetitions)) for name, run in runs.items()}


def milliseconds(row: Row) -> Row:
    """From 1,000 calls / seconds."""
    times = {name: round(1e6 / row[name], 3) for name in ("best", "median", "best_by_cpu")}
    return times | {"foreign_cpu": row["foreign_cpu"]}


def compared(rows: dict[str, Row], context: int) -> dict[str, dict[str, float]]:
    """How much faster the part that depends on the context is."""
    base = rows["projections"]["best_by_cpu"]
    dense = rows["dense"]["best_by_cpu"] - base
    times = {name: round(dense / (rows[name]["best_by_cpu"] - base), 2) for name in ("shared", "full")}
    return {name: {"times": times[name], "bar": round((context + 1) / INDEXER.top_k / 1.5, 2)} for name in times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--format", choices=ENCODINGS, default="q4/64")
    parser.add_argument("--context", type=int, default=32767, help="positions before the token")
    parser.add_argument("--repetitions", type=int, default=9)
    options = parser.parse_args()
    print(f"{isa.current().value} ({isa.current().reason})")
    found = []
    for num_threads in options.threads:
        with ThreadTeam(num_threads) as team:
            rows = bench(team, ENCODINGS[options.format], options.context, options.repetitions)
        ratios = compared(rows, options.context)
        for name, row in rows.items():
            print(f"threads {num_threads} {name:12s} {row} {ratios.get(name, '')}", flush=True)
            found.append({"threads": num_threads, "name": name, **row, **ratios.get(name, {})})
    print(json.dumps({"isa": isa.current().value, "cpus": psutil.cpu_count(logical=False), "rows": found}))


if __name__ == "__main__":
    main()
