"""One expert at a time: its pieces read from the source, recoded and packed into a slab.

    pieces ─▶ row blocks of each projection, in threads: recode, pack ─▶ slab
    meanwhile the system reads the next expert's pieces ahead

Memory: the pieces of one expert, its slab, and a row block a thread.
"""

import contextlib
import itertools
import math
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from typing import NamedTuple

import numpy as np

from colibri_mp.checkpoint.arrangement import take_rows
from colibri_mp.checkpoint.container import Rounding
from colibri_mp.checkpoint.convert.files import page_aligned
from colibri_mp.checkpoint.convert.plan import LayerJob, Plan
from colibri_mp.checkpoint.experts import PROJECTIONS
from colibri_mp.checkpoint.source import Checkpoint, fill
from colibri_mp.errors import CheckpointError, ReadError
from colibri_mp.kernels.layout import BLOCK_ROWS, Bytes, fill_bias, packed_bytes
from colibri_mp.recoding import Recoding, add, recode_rows

_BLOCK_VALUES = 1 << 20


class _Rows(NamedTuple):
    """Rows `first ... first + num_rows` of a projection of `cols` columns whose packed form starts at `slab_offset`."""

    projection: str
    recoding: Recoding
    cols: int
    first: int
    num_rows: int
    slab_offset: int


class SlabMaker:
    """Makes the slabs of a plan; a context manager, which holds the source's files open."""

    def __init__(self, plan: Plan, num_threads: int) -> None:
        """Raises `ReadError` if a file of the source cannot be opened."""
        with contextlib.ExitStack() as stack:
            self._files = _SourceFiles(plan.checkpoint, stack)
            self._threads = stack.enter_context(ThreadPoolExecutor(num_threads, "colibri-convert"))
            self._resources = stack.pop_all()
        self._pieces = np.empty(max(job.experts.stored_bytes for job in plan.layers), np.uint8)
        self._slab = page_aligned(max(job.shape.slab_bytes for job in plan.layers))

    def __enter__(self) -> "SlabMaker":
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def make(self, job: LayerJob, expert: int) -> tuple[Bytes, dict[str, Rounding]]:
        """The slab of one expert, valid until the next is made, and what rounding cost in the projections it happened in.

        Raises `ReadError` if the source cannot be read, `CheckpointError` if weights to be quantised are not finite.
        """
        pieces = self._read(job, expert)
        if expert + 1 < job.experts.num_experts:
            self._files.read_ahead(job, expert + 1)
        slab = self._slab[: job.shape.slab_bytes]
        slab[job.shape.nbytes :] = 0
        parts = _parts(job, pieces)
        _fill_biases(job, pieces, slab)
        blocks = list(_row_blocks(job))
        costs = list(self._threads.map(lambda rows: _fill_rows(rows, parts[rows.projection], slab), blocks))
        rounding = {
            projection: add(
                cost for rows, cost in zip(blocks, costs, strict=True) if cost and rows.projection == projection
            )
            for projection, recoding in zip(PROJECTIONS, job.recodings, strict=True)
            if recoding.is_quantised
        }
        _refuse_infinite(job, expert, rounding)
        return slab, rounding

    def check_source(self) -> None:
        """Raises `CheckpointError` if a file of the source has changed since it was opened."""
        self._files.check_unchanged()

    def _read(self, job: LayerJob, expert: int) -> list[Bytes]:
        """The pieces of an expert."""
        found = []
        ends = list(itertools.accumulate(job.experts.piece_bytes.tolist(), initial=0))
        for piece, (start, end) in enumerate(itertools.pairwise(ends)):
            found.append(self._pieces[start:end])
            self._files.read(job, expert, piece, found[-1])
        return found


class _SourceFiles:
    """The source's files, open, and as they were when they were opened."""

    def __init__(self, checkpoint: Checkpoint, stack: contextlib.ExitStack) -> None:
        try:
            self._files = [stack.enter_context(path.open("rb", buffering=0)) for path in checkpoint.files]
        except OSError as error:
            raise ReadError(f"{error.filename}: cannot be opened: {error.strerror}") from error
        self._states = [_state(file) for file in self._files]

    def read(self, job: LayerJob, expert: int, piece: int, out: Bytes) -> None:
        """Read one piece of an expert."""
        file_idx, offset = int(job.experts.file_idx[expert, piece]), int(job.experts.offset[expert, piece])
        file = self._files[file_idx]
        try:
            file.seek(offset)
            fill(file, out)
        except OSError as error:
            raise ReadError(
                f"layer {job.experts.layer}, expert {expert}: {out.nbytes} bytes at {offset} of {file.name} cannot be "
                f"read: {error.strerror or error}"
            ) from error

    def check_unchanged(self) -> None:
        """Raises `CheckpointError` if size or time of a file are not what they were."""
        for file, state in zip(self._files, self._states, strict=True):
            if _state(file) != state:
                raise CheckpointError(
                    f"{file.name}: has changed since the conversion began: wait until it is complete, then convert it "
                    "into an empty folder"
                )

    def read_ahead(self, job: LayerJob, expert: int) -> None:
        """Have the system read an expert's pieces into its page cache."""
        if sys.platform == "linux":
            layer = job.experts
            for file_idx, offset, nbytes in zip(
                layer.file_idx[expert], layer.offset[expert], layer.piece_bytes, strict=True
            ):
                os.posix_fadvise(self._files[file_idx].fileno(), int(offset), int(nbytes), os.POSIX_FADV_WILLNEED)


def _state(file: FileIO) -> tuple[int, int]:
    stats = os.fstat(file.fileno())
    return stats.st_size, stats.st_mtime_ns


def _row_blocks(job: LayerJob) -> Iterator[_Rows]:
    """Blocks of about a million values, whole row blocks of the packed layout and whole tiles of what is stored."""
    for piece, recoding in zip(job.header.pieces, job.recodings, strict=False):  # biases come after the matrices
        block = max(BLOCK_ROWS, recoding.stored.row_tile)
        step = max(_BLOCK_VALUES // piece.cols // block, 1) * block
        for first in range(0, piece.rows, step):
            num_rows = min(step, piece.rows - first)
            yield _Rows(piece.projection, recoding, piece.cols, first, num_rows, piece.offset)


def _parts(job: LayerJob, pieces: Sequence[Bytes]) -> dict[str, list[Bytes]]:
    """The stored parts of gate, up and down, each contiguous."""
    found, layer = {}, job.experts
    encodings = (layer.gate, layer.up, layer.down)
    for piece, encoding, source in zip(job.header.pieces, encodings, layer.matrix_sources, strict=False):
        stored = pieces[source.first_piece : source.first_piece + len(encoding.parts)]
        found[piece.projection] = [take_rows(source, piece.rows, piece.cols, part) for part in stored]
    return found


def _fill_biases(job: LayerJob, pieces: Sequence[Bytes], slab: Bytes) -> None:
    for bias, source in zip(job.header.pieces[len(PROJECTIONS) :], job.experts.bias_sources, strict=False):
        stored = take_rows(source, bias.rows, 1, pieces[source.first_piece])
        fill_bias(job.experts.bias, stored, slab[bias.offset : bias.offset + bias.nbytes])


def _fill_rows(block: _Rows, parts: Sequence[Bytes], slab: Bytes) -> Rounding | None:
    """Recode and pack some rows into their place in the slab; what rounding cost."""
    _, recoding, cols, first, num_rows, slab_offset = block
    target = recoding.target.format
    slices = recoding.stored.take_rows(parts, cols, first, num_rows)
    start = slab_offset + packed_bytes(target, first, cols)
    return recode_rows(recoding, num_rows, cols, slices, slab[start : start + packed_bytes(target, num_rows, cols)])


def _refuse_infinite(job: LayerJob, expert: int, rounding: dict[str, Rounding]) -> None:
    for projection, cost in rounding.items():
        if not math.isfinite(cost.squared_weights):
            raise CheckpointError(
                f"layer {job.experts.layer}, expert {expert}: {projection}_proj has weights that are not finite, or above 1e18: "
                "they cannot be quantised; fetch the checkpoint again, or convert without --bits"
            )
