#!/usr/bin/env python3
"""Speed of reading experts, without a model around it, against plain reads of the same disk in the same run. Prints JSON last.

    scripts/bench_reader.py MODEL [MODEL ...] [--io auto] [--depth 8] [--rounds 12] [--amount 140MB]

A round reads as many bytes in each of these ways, one right after the other, in an order that changes each time: a disk whose
speed drifts, or that grants bursts, treats all alike.

    reader    random experts through the streamer into shared memory, packed for the kernels and held against checksums as a
              first read does, 2 x `depth` asked for at a time
    plain     sequential direct reads as large as an expert, `depth` at a time, into ordinary memory (as `fio` reads)
    huge      the same into huge pages, which a disk may fill faster: the most that it can give

No expert is read twice while there are others, and before each round the system forgets the files, so all figures are cold;
`from_disk` checks it: the share of the reader's bytes that the system fetched from the disk (1: all of them).
All files are read once before the first round: whatever lies below this system (a host's cache, a disk's) knows all of them
alike then, and what is compared is the way of reading.
`--io auto` reads as a launch without page cache would (direct reads where they are faster, through a buffer where that is).
"""

import argparse
import json
import mmap
import os
import random
import secrets
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
from bench_model import ForeignCpu, forget_pages

from colibri_mp.checkpoint.experts import ExpertLayer
from colibri_mp.checkpoint.source import Checkpoint
from colibri_mp.config import LaunchConfig, parse_size
from colibri_mp.disks import ExpertMemory, choose_copies
from colibri_mp.kernels.layout import pack
from colibri_mp.models import load_model
from colibri_mp.shm.segment import Segment, segment_name
from colibri_mp.workers.copies import Copy, ExpertCopies
from colibri_mp.workers.expert_files import aligned_buffer
from colibri_mp.workers.expert_reader import ExpertReader
from colibri_mp.workers.main import SWITCH_S
from colibri_mp.workers.read_plan import ALIGNMENT
from colibri_mp.workers.streamer import Streamer

Expert = tuple[ExpertLayer, int]
Row = dict[str, float]
TIMEOUT_S = 30.0


class Rate(NamedTuple):
    """One measurement: GB/s, cores of this process in use, and the share of the bytes that came from the disk."""

    gb_s: float
    cores: float
    from_disk: float


class Stopwatch:
    """Wall and CPU time, and what this process has fetched from disks, since it was made."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._fetched = self._process.io_counters().read_bytes
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def rate(self, nbytes: int) -> Rate:
        """Speed at which `nbytes` were read since."""
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        fetched = self._process.io_counters().read_bytes - self._fetched
        return Rate(nbytes / wall / 1e9, cpu / wall, fetched / nbytes)


class PlainReads:
    """Sequential direct reads of one size, from a random place of a random file each time."""

    def __init__(self, files: list[Path], buffers: list[memoryview], rng: random.Random) -> None:
        self._buffers, self._rng, self._read_bytes = buffers, rng, len(buffers[0])
        self._files = [path for path in files if path.stat().st_size > 4 * self._read_bytes]
        for buffer in buffers:
            buffer[:] = bytes(len(buffer))  # its pages are taken now

    def run(self, amount: int) -> Rate:
        """Read about `amount` bytes, fewer if the file has not as many."""
        path = self._rng.choice(self._files)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        num_blocks = path.stat().st_size // self._read_bytes
        num_reads = min(num_blocks, max(1, amount // self._read_bytes))
        first = self._rng.randrange(num_blocks - num_reads + 1)
        left = iter(range(first, first + num_reads))

        def work(buffer: memoryview) -> None:
            for block in left:
                os.preadv(fd, [buffer], block * self._read_bytes)

        threads = [threading.Thread(target=work, args=(buffer,)) for buffer in self._buffers]
        watch = Stopwatch()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rate = watch.rate(num_reads * self._read_bytes)
        os.close(fd)
        return rate


class ReaderRounds:
    """Random experts through the streamer, into slabs in shared memory."""

    def __init__(self, streamer: Streamer, experts: Iterator[Expert], slabs: list[np.ndarray]) -> None:
        self._streamer, self._experts, self._slabs = streamer, experts, slabs

    def run(self, amount: int) -> Rate:
        """Read experts of `amount` bytes as stored, at least one."""
        sizes: dict[int, int] = {}
        asked = done = 0
        watch = Stopwatch()

        def submit(tag: int) -> None:
            nonlocal asked
            if asked < amount:
                layer, expert = next(self._experts)
                sizes[tag] = layer.stored_bytes
                asked += layer.stored_bytes
                self._streamer.submit(layer.layer, expert, self._slabs[tag][: layer.shape.slab_bytes], tag)

        for tag in range(len(self._slabs)):
            submit(tag)
        while sizes:
            landed = self._streamer.landed(TIMEOUT_S)
            if not landed:
                raise TimeoutError(f"the disk has not delivered an expert within {TIMEOUT_S} s")
            for one in landed:
                if one.error:
                    raise one.error
                done += sizes.pop(one.tag)
                submit(one.tag)
        return watch.rate(done)


def shuffled(layers: list[ExpertLayer], rng: random.Random) -> Iterator[Expert]:
    """All experts in random order, again and again."""
    experts = [(layer, expert) for layer in layers for expert in range(layer.num_experts)]
    while True:
        rng.shuffle(experts)
        yield from experts


def read_once(files: list[Path]) -> None:
    """Read everything past this system's page cache."""
    buffer = aligned_buffer(16 << 20)
    for path in files:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        for offset in range(0, path.stat().st_size, len(buffer)):
            os.preadv(fd, [buffer], offset)
        os.close(fd)


def copy_to_read(checkpoint: Checkpoint, layers: list[ExpertLayer], io: str) -> Copy:
    """How the files are read: as a launch with `--io` would whose page cache is of no use."""
    stored = sum(layer.num_experts * layer.stored_bytes for layer in layers)
    memory = ExpertMemory(stored, pools=stored // 4, page_cache=0)
    [copy] = choose_copies(checkpoint, layers, LaunchConfig(io=io), memory, lambda text: print(text, file=sys.stderr))
    return copy


def measure(model: str, args: argparse.Namespace) -> dict[str, Any]:
    """All rounds for one model."""
    checkpoint, rng = Checkpoint.open(model), random.Random(args.seed)
    layers = list(load_model(checkpoint).expert_layers)
    read_bytes = max(ALIGNMENT, layers[0].stored_bytes // ALIGNMENT * ALIGNMENT)
    slab_bytes = max(layer.shape.slab_bytes for layer in layers)
    files, num_slabs = list(checkpoint.files), 2 * args.depth
    read_once(files)
    copy = copy_to_read(checkpoint, layers, args.io)
    reader = ExpertReader(ExpertCopies([copy]), layers, pack)
    with (
        Segment.create(segment_name(secrets.token_hex(4), 0), num_slabs * slab_bytes) as segment,
        closing(Streamer(reader, args.depth)) as streamer,
    ):
        segment.reserve(0, num_slabs * slab_bytes)
        slabs = list(segment.buffer[: num_slabs * slab_bytes].reshape(num_slabs, slab_bytes))
        sides = {
            "reader": ReaderRounds(streamer, shuffled(layers, rng), slabs),
            "plain": PlainReads(files, [ordinary(read_bytes) for _ in range(args.depth)], rng),
            "huge": PlainReads(files, [aligned_buffer(read_bytes)[:read_bytes] for _ in range(args.depth)], rng),
        }
        sides["reader"].run(1)  # the packing kernel is loaded
        rows = []
        for _ in range(args.rounds):
            forget_pages(Path(model))
            rows.append(run_round(sides, args.amount, rng))
        del slabs, sides
    head = {"model": model, "packed": layers[0].is_packed, "read_bytes": read_bytes, "depth": args.depth}
    return head | {"io": copy.mode, "in_place": copy.in_place, "why": copy.reason} | summary(rows)


def ordinary(nbytes: int) -> memoryview:
    """Anonymous memory in pages of 4 KiB, as an allocator gives it."""
    return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def run_round(sides: dict[str, Any], amount: int, rng: random.Random) -> Row:
    """All sides once, in a random order."""
    others = ForeignCpu()
    rates = {name: sides[name].run(amount) for name in rng.sample(sorted(sides), len(sides))}
    speed = {name: rate.gb_s for name, rate in rates.items()}
    row = {f"{name}_gb_s": value for name, value in sorted(speed.items())}
    row |= {"of_plain": speed["reader"] / speed["plain"], "of_huge": speed["reader"] / speed["huge"]}
    row |= {"reader_cores": rates["reader"].cores, "foreign_cores": others.cores()}
    row |= {"from_disk": rates["reader"].from_disk}
    print(" ".join(f"{name} {value:5.2f}" for name, value in row.items()), flush=True)
    return row


def summary(rows: list[Row]) -> dict[str, Any]:
    """Median, least and most of each figure."""
    return {
        name: {
            "median": round(statistics.median(row[name] for row in rows), 3),
            "min": round(min(row[name] for row in rows), 3),
            "max": round(max(row[name] for row in rows), 3),
        }
        for name in rows[0]
    }


def main() -> None:
    """Measure each model and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--io", choices=("auto", "direct", "buffered", "drop"), default="auto")
    parser.add_argument("--depth", type=int, default=LaunchConfig.io_threads, help="reads in flight, on all sides")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--amount", type=parse_size, default=140_000_000, help="bytes of a round, each way")
    parser.add_argument(
        "--seed", type=int, default=None, help="of the choice of experts; default: another one each run"
    )
    args = parser.parse_args()
    sys.setswitchinterval(SWITCH_S)
    found = []
    for model in args.models:
        print(model, flush=True)
        found.append(measure(model, args))
        medians = {name: found[-1][name]["median"] for name in ("of_plain", "of_huge")}
        print(f"{found[-1]['io']}, in place: {found[-1]['in_place']}; medians {medians}", flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
