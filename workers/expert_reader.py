"""Brings one expert from its files into a slab, in the kernels' layout, and holds it against its checksum.

    task 0  read ─ pack ─┐
    task 1  read ─ pack ─┼─▶ finish: zero the padding, checksum of the whole slab ── wrong ──▶ read once more from each copy
    task 2  read ─ pack ─┘                                                                     still wrong: ReadError

The tasks of an expert may be done by several threads, each with its own scratch buffer; `finish` comes after all of them.
A packed layer is read in place, or through scratch where that is much faster; experts that are to have other bits than
they are stored with are quantised on the way (`quantised_rows`). With `verify` "first" an expert is checked
when it is read for the first time in this process, and whenever its file has been written to; with "always", at each
read; with "off", never. Experts without checksums are taken as they are, and refused if their file has been written to.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import xxhash
from numpy.typing import NDArray

from colibri_mp.checkpoint.arrangement import take_rows
from colibri_mp.checkpoint.experts import ExpertLayer
from colibri_mp.config import Verify
from colibri_mp.errors import ReadError
from colibri_mp.formats import Encoding
from colibri_mp.kernels.layout import fill_bias
from colibri_mp.workers.copies import CopyRead, ExpertCopies
from colibri_mp.workers.expert_files import buffer_bytes
from colibri_mp.workers.quantised_rows import quantise_rows, quantising_bytes
from colibri_mp.workers.read_meter import ReadMeter, StreamCounters
from colibri_mp.workers.read_plan import BiasRows, LayerPlan, MatrixRows, ReadTask

Bytes = NDArray[np.uint8]
Packer = Callable[[Encoding, int, int, Sequence[Bytes], Bytes], None]
"""`kernels.layout.pack`: encoding, rows, cols, stored parts (uint8), packed output (uint8); releases the lock."""

_log = logging.getLogger(__name__)


def scratch_bytes(layers: Sequence[ExpertLayer], num_threads: int) -> int:
    """Memory of `num_threads` I/O threads that read these layers, at most: scratch buffers, copies, and what quantising takes."""
    distinct = {_stored_form(layer): layer for layer in layers}.values()  # a hundred layers alike are looked at once
    plans = [LayerPlan(layer) for layer in distinct]
    buffer, copies = buffer_bytes(max(plan.scratch_bytes for plan in plans)), max(plan.copy_bytes for plan in plans)
    return num_threads * (buffer + copies + max(map(quantising_bytes, distinct)))


def _stored_form(layer: ExpertLayer) -> tuple[object, ...]:
    """All that a read plan depends on but the places in files."""
    encodings = (layer.gate, layer.up, layer.down, layer.packed_encodings)
    return (layer.shape, *encodings, layer.arrangement, layer.bias, layer.is_packed, layer.piece_bytes.tobytes())


def checksum(slab: Bytes) -> int:
    """xxh3-64 of all bytes of a slab."""
    return xxhash.xxh3_64_intdigest(slab.data)


class ExpertReader:
    """Reads the experts of some layers. Holds the files; `close` closes them. Threads may read at the same time."""

    def __init__(
        self, copies: ExpertCopies, layers: Sequence[ExpertLayer], pack: Packer, verify: Verify = "first"
    ) -> None:
        self.copies = copies
        self.meter = ReadMeter()
        self._plans = {layer.layer: LayerPlan(layer) for layer in layers}
        self._pack = pack
        self._verify = verify
        self._verified = {layer.layer: bytearray(layer.num_experts) for layer in layers}
        self.scratch_bytes = max(plan.scratch_bytes for plan in self._plans.values())
        self.largest_slab_bytes = max(plan.slab_bytes for plan in self._plans.values())

    def num_tasks(self, layer: int) -> int:
        """Tasks that an expert of `layer` is cut into."""
        return self._plans[layer].num_tasks

    def run_task(self, layer: int, expert: int, task_idx: int, slab: Bytes, scratch: memoryview) -> CopyRead:
        """Read and pack one part of an expert into its place in `slab` (uint8 [slab_bytes]).

        Raises `ReadError` that names layer and expert.
        """
        task = self._plans[layer].task(expert, task_idx)
        try:
            with self.meter.reading(len(task.ranges)) as reading:
                found = self.copies.read(task.ranges, self._target(task, slab, scratch))
                reading.nbytes = found.nbytes
            started = time.perf_counter()
            self._pack_task(task, slab, scratch)
        except ReadError as exc:
            raise _named(layer, expert, exc) from exc
        self.meter.add_pack(time.perf_counter() - started)
        return found

    def finish(self, layer: int, expert: int, slab: Bytes, scratch: memoryview, results: Sequence[CopyRead]) -> None:
        """Complete a slab whose tasks have all been run, with these `results`, in any order.

        Raises `ReadError` if the checksum is wrong, or if there is a doubt and no checksum.
        """
        plan = self._plans[layer]
        doubt = next((result.doubt for result in results if result.doubt), None)
        slab[plan.packed_bytes :] = 0
        if plan.layer.checksums is None or self._verify == "off":
            if doubt is not None:
                raise _named(layer, expert, doubt) from doubt
        elif doubt is not None or self._is_to_check(plan, expert):
            self._check(plan, expert, slab, scratch, int(plan.layer.checksums[expert]))
            self._verified[layer][expert] = True

    def read(self, layer: int, expert: int, slab: Bytes, scratch: memoryview) -> int:
        """All of it in this thread; returns bytes read."""
        results = [self.run_task(layer, expert, i, slab, scratch) for i in range(self.num_tasks(layer))]
        self.finish(layer, expert, slab, scratch, results)
        return sum(result.nbytes for result in results)

    def advise(self, layer: int, expert: int) -> None:
        """Have the system read an expert into its page cache, from the first copy."""
        for task in self._plans[layer].tasks(expert):
            self.copies.advise(task.ranges)

    def counters(self) -> StreamCounters:
        """A copy of the totals."""
        return replace(
            self.meter.counters(), num_retries=self.copies.num_retries, num_fallbacks=self.copies.num_fallbacks
        )

    def close(self) -> None:
        """Close the files; idempotent."""
        self.copies.close()

    # ── packing ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _target(self, task: ReadTask, slab: Bytes, scratch: memoryview) -> memoryview:
        """Where the task's ranges go: its part of the slab itself, or scratch."""
        if task.slab_offset is None or not self.copies.in_place:
            return scratch
        return slab.data[task.slab_offset : task.slab_offset + task.ranges[0].nbytes]

    def _pack_task(self, task: ReadTask, slab: Bytes, scratch: memoryview) -> None:
        """Bring what a task has read to its place in the slab."""
        for matrix, part_offsets in zip(task.matrices, task.part_offsets, strict=True):
            parts = [
                np.frombuffer(scratch, np.uint8, count=piece.nbytes, offset=offset)
                for piece, offset in zip(matrix.slices, part_offsets, strict=True)
            ]
            if isinstance(matrix, BiasRows):
                bias = take_rows(matrix.source, matrix.rows, 1, parts[0])
                fill_bias(matrix.kind, bias, slab[matrix.slab_offset : matrix.slab_offset + matrix.nbytes])
            else:
                self._pack_rows(matrix, parts, slab)
        if task.slab_offset is not None and not self.copies.in_place:
            nbytes = task.ranges[0].nbytes
            slab[task.slab_offset : task.slab_offset + nbytes] = np.frombuffer(scratch, np.uint8, count=nbytes)

    def _pack_rows(self, matrix: MatrixRows, parts: list[Bytes], slab: Bytes) -> None:
        parts = [take_rows(matrix.source, matrix.rows, matrix.cols, part) for part in parts]
        out = slab[matrix.slab_offset : matrix.slab_offset + matrix.packed_bytes]
        if matrix.target == matrix.encoding:
            self._pack(matrix.encoding, matrix.rows, matrix.cols, parts, out)
        else:
            quantise_rows(matrix, parts, out)

    # ── checksums ───────────────────────────────────────────────────────────────────────────────────────────────

    def _is_to_check(self, plan: LayerPlan, expert: int) -> bool:
        """Whether an expert with a checksum is held against it, however its file is."""
        return self._verify == "always" or not self._verified[plan.layer.layer][expert]

    def _check(self, plan: LayerPlan, expert: int, slab: Bytes, scratch: memoryview, expected: int) -> None:
        """Compare the slab's checksum; if it is wrong, read the expert again, from each copy."""
        found = checksum(slab)
        self.meter.add_check(found == expected)
        if found == expected:
            return
        place = self._describe_place(plan, expert)
        for copy_idx in range(len(self.copies)):
            with contextlib.suppress(ReadError):  # then that copy does not have the right bytes either
                if self._read_again(plan, expert, slab, scratch, copy_idx) == expected:
                    _log.warning("%s had the checksum %016x; read again, it is right", place, found)
                    return
        raise ReadError(
            f"{place} has the checksum {found:016x} instead of {expected:016x}, also when it is read again: the file is "
            f"damaged; restore it"
        )

    def _read_again(self, plan: LayerPlan, expert: int, slab: Bytes, scratch: memoryview, copy_idx: int) -> int:
        """Fill the slab anew from one copy, from the disk itself; returns its checksum now."""
        for task in plan.tasks(expert):
            self.copies.forget(copy_idx, task.ranges)
            self.copies.read_from(copy_idx, task.ranges, self._target(task, slab, scratch))
            self._pack_task(task, slab, scratch)
        slab[plan.packed_bytes :] = 0
        return checksum(slab)

    def _describe_place(self, plan: LayerPlan, expert: int) -> str:
        first = plan.task(expert, 0).ranges[0]
        return f"layer {plan.layer.layer}, expert {expert}, at {self.copies.describe_place(first)},"


def _named(layer: int, expert: int, error: ReadError) -> ReadError:
    return ReadError(f"layer {layer}, expert {expert}: {error}")
