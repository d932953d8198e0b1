"""Speed of the kernels on this machine: `python scripts/bench_kernels.py [--threads 1 2] [--formats q4/64 q8/64 bf16]`.

    read       a plain read of memory, the limit of decode
    linear     x W^T with W of many MiB, T = 1: GB/s of weights;  T > 1: GFLOP/s
    experts    an expert FFN step of an OLMoE-shaped layer (hidden 2048, width 1024, top-8), T = 1: GB/s;  T > 1: GFLOP/s
    pack       MLX form -> packed form, GB/s on one thread

Each figure is best (median) over the repetitions; then the best by CPU time, of all threads together (an estimate of one thread's
speed on a machine that is busy otherwise); then the CPU time that other processes took meanwhile, as a share of one core: figures
of several threads mean something only if that is near 0. The last line of the output is all of it as JSON.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
from llvmlite import ir
from numba import types
from numba.core import cgutils

from colibri_mp.formats import AFFINE_BITS, Encoding
from colibri_mp.kernels import emit, isa
from colibri_mp.kernels.expert import ExpertStage
from colibri_mp.kernels.jit import Native, operation
from colibri_mp.kernels.layout import ExpertShape, PackedMatrix, pack, packed_bytes
from colibri_mp.kernels.linear import FRAME, LINEAR_STAGE, describe, row_table
from colibri_mp.kernels.team import PHASE_0, ThreadTeam, aligned_bytes, barrier, done, take
from colibri_mp.kernels.vectors import record_at, set_i64

HIDDEN, WIDTH, TOP_K = 2048, 1024, 8
TOTAL_BYTES = 460_000_000
"""Weights that a decode figure walks through: far more than any cache holds."""
ENCODINGS = {
    "bf16": Encoding("bf16"),
    "f16": Encoding("f16"),
    "f32": Encoding("f32"),
    "fp8": Encoding("fp8", 8, 128, "f32"),
    "mxfp4": Encoding("mxfp4", 4, 32, "u8"),
    "mxfp8": Encoding("mxfp8", 8, 32, "u8"),
    "nvfp4": Encoding("nvfp4", 4, 16, "u8"),
    "int8": Encoding("row", 8, 128, "f32"),
    "int4": Encoding("row", 4, 128, "f32"),
    "int4/64": Encoding("grouped", 4, 64, "f32"),
    **{f"q{bits}/{group}": Encoding("affine", bits, group, "bf16") for bits in AFFINE_BITS for group in (32, 64, 128)},
}
Row = dict[str, Any]


def measure(run: Callable[[], object], amount: float, repetitions: int) -> Row:
    """Best and median of `amount` / seconds / 1e9, the best by CPU seconds of this process, and the share of a core that others used."""
    run()
    seconds, cpu_seconds = [], []
    started, before, own = time.perf_counter(), psutil.cpu_times(), time.process_time()
    for _ in range(repetitions):
        start, cpu_start = time.perf_counter(), time.process_time()
        run()
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu_start)
    after = psutil.cpu_times()
    busy = sum(after[i] - before[i] for i, name in enumerate(after._fields) if name in ("user", "nice", "system"))
    foreign = (busy - (time.process_time() - own)) / (time.perf_counter() - started)
    rates = [amount / value / 1e9 for value in seconds]
    row = {"best": max(rates), "median": statistics.median(rates), "best_by_cpu": amount / min(cpu_seconds) / 1e9}
    return {name: round(rate, 2) for name, rate in row.items()} | {"foreign_cpu": round(max(0.0, foreign), 2)}


# ---- plain read


@operation(types.int64, types.int64, types.int64)
def _read(builder: Any, start: Any, num_bytes: Any) -> Any:
    """Read 512 bytes at a time into eight vectors; something that depends on all of it."""
    sums = [cgutils.alloca_once_value(builder, emit.constant(emit.V16I, 0)) for _ in range(8)]
    with cgutils.for_range(builder, builder.sdiv(num_bytes, emit.constant(emit.I64, 512)), intp=emit.I64) as loop:
        at = builder.add(start, builder.mul(loop.index, emit.constant(emit.I64, 512)))
        for i, total in enumerate(sums):
            value = emit.load(builder, emit.offset(builder, at, 64 * i), emit.V16I)
            builder.store(builder.xor(builder.load(total), value), total)
    value = builder.load(sums[0])
    for total in sums[1:]:
        value = builder.xor(value, builder.load(total))
    return builder.sext(builder.extract_element(value, ir.Constant(emit.I32, 0)), emit.I64)


READ_FRAME = np.dtype([("data", np.int64), ("chunk_bytes", np.int64), ("num_chunks", np.int64), ("sums", np.int64)])


def _read_stage(frame: int, control: int, tag: int) -> None:
    job = record_at(frame, READ_FRAME)
    chunk = take(control, tag, PHASE_0, job.num_chunks)
    while chunk >= 0:
        set_i64(job.sums + 8 * chunk, _read(job.data + chunk * job.chunk_bytes, job.chunk_bytes))
        done(control, PHASE_0)
        chunk = take(control, tag, PHASE_0, job.num_chunks)
    barrier(control, tag, PHASE_0, job.num_chunks)


READ_STAGE = Native(_read_stage)


def bench_read(team: ThreadTeam, data: np.ndarray, repetitions: int) -> Row:
    """GB/s of a plain read in pieces of 64 KiB."""
    frame, num_chunks = np.zeros(1, READ_FRAME), data.nbytes >> 16
    sums = np.zeros(num_chunks, np.int64)
    frame["data"], frame["chunk_bytes"], frame["num_chunks"], frame["sums"] = (
        data.ctypes.data,
        1 << 16,
        num_chunks,
        sums.ctypes.data,
    )
    return measure(lambda: team.run(READ_STAGE, frame), num_chunks << 16, repetitions)


# ---- weights


def random_parts(encoding: Encoding, rows: int, cols: int) -> list[np.ndarray]:
    """Stored parts without NaN: random codes, constant scales; dense: ones."""
    rng = np.random.default_rng(1)
    ones = {
        "bf16": np.full(1, 0x3C00, np.uint16),
        "f16": np.full(1, 0x2400, np.uint16),
        "f32": np.full(1, 0.01, np.float32),
        "u8": np.full(1, 118 if encoding.kind != "nvfp4" else 24, np.uint8),
    }
    sizes = encoding.part_bytes(rows, cols)
    kinds = ("codes", encoding.scale, encoding.scale)[: len(sizes)] if encoding.group_size else (encoding.kind,)
    codes = 0x77 if encoding.kind in ("fp8", "mxfp8") else 0xFF
    return [
        rng.integers(0, 256, size, np.uint8) & codes if kind == "codes" else np.resize(ones[kind].view(np.uint8), size)
        for kind, size in zip(kinds, sizes, strict=True)
    ]


def pack_matrix(encoding: Encoding, rows: int, cols: int) -> np.ndarray:
    """One packed matrix."""
    out = aligned_bytes(packed_bytes(encoding.format, rows, cols))
    pack(encoding, rows, cols, random_parts(encoding, rows, cols), out)
    return out


def bench_pack(encoding: Encoding, repetitions: int) -> Row:
    """GB/s of packed bytes, one thread."""
    parts, rows, num_matrices = random_parts(encoding, HIDDEN, HIDDEN), HIDDEN, 20
    outs = [aligned_bytes(packed_bytes(encoding.format, rows, HIDDEN)) for _ in range(num_matrices)]

    def run() -> None:
        for out in outs:
            pack(encoding, rows, HIDDEN, parts, out)

    return measure(run, sum(out.nbytes for out in outs), repetitions)


def bench_linear(team: ThreadTeam, encoding: Encoding, num_tokens: int, repetitions: int) -> Row:
    """One matrix [2048 * n, 2048], n so that T = 1 walks through TOTAL_BYTES, 1 for T > 1."""
    one = pack_matrix(encoding, HIDDEN, HIDDEN)
    copies = max(1, TOTAL_BYTES // one.nbytes) if num_tokens == 1 else 1
    data = aligned_bytes(one.nbytes * copies)
    data.reshape(copies, -1)[:] = one
    matrix = PackedMatrix(encoding.format, HIDDEN * copies, HIDDEN, data)
    x, y = np.ones((num_tokens, HIDDEN), np.float32), np.empty((num_tokens, matrix.rows), np.float32)
    frame = np.zeros(1, FRAME)
    frame["weight"] = describe(matrix)
    row_bytes = int(frame["weight"]["prepared_bytes"][0])
    prepared = aligned_bytes(num_tokens * row_bytes)
    tables = row_table(prepared.ctypes.data, row_bytes, num_tokens), row_table(y.ctypes.data, y.strides[0], num_tokens)
    for name, array in zip(("x", "prepared", "xs", "ys"), (x, prepared, *tables), strict=True):
        frame[name] = array.ctypes.data
    frame["num_tokens"] = num_tokens
    amount = data.nbytes if num_tokens == 1 else 2 * num_tokens * matrix.rows * HIDDEN
    return measure(lambda: team.run(LINEAR_STAGE, frame), amount, repetitions)


def bench_experts(team: ThreadTeam, encoding: Encoding, num_tokens: int, repetitions: int) -> Row:
    """Steps of top-8 of 16 experts; T = 1 takes other experts each time, out of TOTAL_BYTES."""
    kind = encoding.format
    shape = ExpertShape(HIDDEN, WIDTH, kind, kind, kind)
    num_experts = max(2 * TOP_K, TOTAL_BYTES // shape.slab_bytes if num_tokens == 1 else 0) // TOP_K * TOP_K
    slabs = aligned_bytes(num_experts * shape.slab_bytes, 4096).reshape(num_experts, -1)
    slabs[:, : shape.down_offset] = np.tile(pack_matrix(encoding, WIDTH, HIDDEN), 2)
    slabs[:, shape.down_offset : shape.nbytes] = pack_matrix(encoding, HIDDEN, WIDTH)
    addresses = slabs.ctypes.data + shape.slab_bytes * np.arange(num_experts, dtype=np.int64)
    stage, rng = ExpertStage(team, shape, num_experts, num_tokens, TOP_K), np.random.default_rng(2)
    x = rng.standard_normal((num_tokens, HIDDEN)).astype(np.float32)
    weights, out, step = np.full((num_tokens, TOP_K), 0.125, np.float32), np.empty_like(x), 0

    def run() -> None:
        nonlocal step
        step += 1
        if num_tokens == 1:
            ids = (np.arange(TOP_K) + step * TOP_K).astype(np.int32)[None] % num_experts
        else:
            ids = np.array([rng.permutation(2 * TOP_K)[:TOP_K] for _ in range(num_tokens)], np.int32)
        union = np.unique(ids)
        stage.begin(x, ids, weights)
        stage.compute(union, addresses[union])
        stage.finish(out)

    amount = TOP_K * shape.nbytes if num_tokens == 1 else 6 * num_tokens * TOP_K * HIDDEN * WIDTH
    return measure(run, amount, repetitions * (20 if num_tokens == 1 else 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--formats", nargs="+", choices=ENCODINGS, default=["q4/64", "q8/64", "bf16"])
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[1, 4, 16, 64, 256], help="batch sizes; 1 is decode, in GB/s"
    )
    parser.add_argument("--repetitions", type=int, default=9)
    options = parser.parse_args()
    print(f"{isa.current().value} ({isa.current().reason}); best (median) unit, best by CPU time, foreign CPU in cores")
    rows: list[Row] = []

    def report(name: str, unit: str, row: Row, **labels: object) -> None:
        rows.append({"name": name, "unit": unit, **labels, **row})
        label = " ".join(f"{key} {value}" for key, value in labels.items())
        figures = (
            f"{row['best']:8.1f} ({row['median']:7.1f}) {unit:8s} {row['best_by_cpu']:8.1f} {row['foreign_cpu']:5.2f}"
        )
        print(f"{name:8s} {label:34s} {figures}", flush=True)

    data = aligned_bytes(TOTAL_BYTES)
    data[:] = 1
    for name in options.formats:
        report("pack", "GB/s", bench_pack(ENCODINGS[name], options.repetitions), format=name)
    for num_threads in options.threads:
        with ThreadTeam(num_threads) as team:
            report("read", "GB/s", bench_read(team, data, options.repetitions), threads=num_threads)
            for name in options.formats:
                for num_tokens in options.tokens:
                    labels = {"threads": num_threads, "format": name, "tokens": num_tokens}
                    unit = "GB/s" if num_tokens == 1 else "GFLOP/s"
                    report(
                        "linear", unit, bench_linear(team, ENCODINGS[name], num_tokens, options.repetitions), **labels
                    )
                    report(
                        "experts", unit, bench_experts(team, ENCODINGS[name], num_tokens, options.repetitions), **labels
                    )
    print(json.dumps({"isa": isa.current().value, "cpus": psutil.cpu_count(logical=False), "rows": rows}))


if __name__ == "__main__":
    main()
