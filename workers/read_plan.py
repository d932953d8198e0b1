"""How one expert is read: cut into tasks of about 1 MiB, each with few large reads, pure arithmetic.

    pieces of an expert        gate.weight ▓▓▓▓▓▓▓▓  gate.scales ▒  gate.biases ▒  up.weight ▓▓▓▓▓▓▓▓ ...
    tasks (row blocks)         [rows 0..511: ▓▓▓▓ ▒ ▒]  [rows 512..1023: ▓▓▓▓ ▒ ▒]  ...      read and packed in parallel
    ranges of a task           sorted by file and offset, merged where they touch or nearly do

A small expert is one task, and one read where its pieces lie together; a large one is spread over the I/O threads, so
that a single miss already keeps the disk busy and scratch memory stays small. Rows are cut in multiples of 16, the row
block of the packed layout, whose blocks follow each other: a task packs into a part of the slab of its own.

A layer that is packed already (a container's) has one task of one aligned range an expert, read into the slab itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from colibri_mp.checkpoint.experts import ExpertLayer
from colibri_mp.formats import Encoding
from colibri_mp.kernels.layout import packed_bytes

TASK_BYTES = 5 << 18  # with gaps and alignment it stays below 2 MiB, one huge page of scratch memory a thread
GAP_BYTES = 64 << 10  # a gap below this is read through: cheaper than another request
ALIGNMENT = 4096  # of offset, length and memory in direct mode
ROW_BLOCK = 16


class Slice(NamedTuple):
    """Part of piece `piece_idx` of an expert: `nbytes` from byte `start` of the piece."""

    piece_idx: int
    start: int
    nbytes: int


class MatrixRows(NamedTuple):
    """Some rows of one projection: its slices in the order of `encoding.parts`, and where they go in the slab."""

    encoding: Encoding
    rows: int
    cols: int
    slices: tuple[Slice, ...]
    slab_offset: int
    packed_bytes: int


class FileRange(NamedTuple):
    """Bytes to read from one file into a scratch buffer, from byte `scratch_offset` on (a multiple of 4096)."""

    file_idx: int
    offset: int
    nbytes: int
    scratch_offset: int


@dataclass(frozen=True, slots=True)
class ReadTask:
    """What one I/O thread does at a time: read `ranges`, then pack each of `matrices`.

    `part_offsets` has, for each matrix, where in the scratch buffer each of its parts starts. Of a packed expert there is
    nothing to pack: its one range goes straight `into_slab`.
    """

    ranges: tuple[FileRange, ...]
    matrices: tuple[MatrixRows, ...]
    part_offsets: tuple[tuple[int, ...], ...]
    into_slab: bool = False


class LayerPlan:
    """The read plan of a layer: the same cut for each of its experts."""

    def __init__(self, layer: ExpertLayer) -> None:
        self.layer = layer
        self._cuts = [] if layer.is_packed else _cut(layer)
        self.slab_bytes = layer.shape.slab_bytes
        self.scratch_bytes = max((_scratch_bound(matrices) for matrices in self._cuts), default=ALIGNMENT)

    def tasks(self, expert: int) -> list[ReadTask]:
        """The tasks that together fill the slab of `expert`."""
        files, offsets = self.layer.file_idx[expert].tolist(), self.layer.offset[expert].tolist()
        if self.layer.is_packed:
            return [ReadTask((FileRange(files[0], offsets[0], self.slab_bytes, 0),), (), (), into_slab=True)]
        return [_task(matrices, files, offsets) for matrices in self._cuts]


def _cut(layer: ExpertLayer) -> list[tuple[MatrixRows, ...]]:
    """The matrices (or row blocks of them) of each task."""
    shape = layer.shape
    first = 0
    projections = []
    for encoding, rows, cols, slab_offset in (
        (layer.gate, layer.width, layer.hidden, shape.gate_offset),
        (layer.up, layer.width, layer.hidden, shape.up_offset),
        (layer.down, layer.hidden, layer.width, shape.down_offset),
    ):
        projections.append((encoding, rows, cols, slab_offset, first))
        first += len(encoding.parts)
    if layer.stored_bytes <= TASK_BYTES:
        return [tuple(_rows(*projection, 0, projection[1]) for projection in projections)]
    return [
        (_rows(*projection, start, min(num_rows, projection[1] - start)),)
        for projection in projections
        for num_rows in [_rows_per_task(*projection[:3])]
        for start in range(0, projection[1], num_rows)
    ]


def _rows_per_task(encoding: Encoding, rows: int, cols: int) -> int:
    """Rows of about TASK_BYTES, a multiple of 16, such that the tasks of a matrix are about equal."""
    num_tasks = -(-sum(encoding.part_bytes(rows, cols)) // TASK_BYTES)
    return -(-rows // (num_tasks * ROW_BLOCK)) * ROW_BLOCK


def _rows(
    encoding: Encoding, rows: int, cols: int, slab_offset: int, first_piece: int, start: int, num_rows: int
) -> MatrixRows:
    """Rows `start ... start + num_rows` of a projection whose parts are the pieces from `first_piece` on."""
    one_row = [nbytes // rows for nbytes in encoding.part_bytes(rows, cols)]
    return MatrixRows(
        encoding,
        num_rows,
        cols,
        tuple(Slice(first_piece + i, start * nbytes, num_rows * nbytes) for i, nbytes in enumerate(one_row)),
        slab_offset + packed_bytes(encoding.format, start, cols),
        packed_bytes(encoding.format, num_rows, cols),
    )


def _scratch_bound(matrices: Sequence[MatrixRows]) -> int:
    """Scratch bytes that a task of these matrices can need at most, wherever its pieces lie."""
    slices = [piece for matrix in matrices for piece in matrix.slices]
    return sum(piece.nbytes + GAP_BYTES + 2 * ALIGNMENT for piece in slices)


def _task(matrices: tuple[MatrixRows, ...], files: Sequence[int], offsets: Sequence[int]) -> ReadTask:
    """Place the slices of one expert: sort them, merge what lies close together, and lay the ranges out in scratch."""
    slices = [piece for matrix in matrices for piece in matrix.slices]
    places = [(files[piece.piece_idx], offsets[piece.piece_idx] + piece.start) for piece in slices]
    ranges: list[FileRange] = []
    found = [0] * len(slices)
    for i in sorted(range(len(slices)), key=places.__getitem__):
        file_idx, offset = places[i]
        last = ranges[-1] if ranges else None
        if last is None or file_idx != last.file_idx or offset - (last.offset + last.nbytes) >= GAP_BYTES:
            last = FileRange(file_idx, offset, 0, _next_scratch_offset(last))
            ranges.append(last)
        end = max(offset + slices[i].nbytes, last.offset + last.nbytes)
        ranges[-1] = last._replace(nbytes=end - last.offset)
        found[i] = last.scratch_offset + last.offset % ALIGNMENT + offset - last.offset
    placed = iter(found)
    part_offsets = tuple(tuple(next(placed) for _ in matrix.slices) for matrix in matrices)
    return ReadTask(tuple(ranges), matrices, part_offsets)


def _next_scratch_offset(last: FileRange | None) -> int:
    """Behind the aligned superset of the range before. A range starts at its own offset modulo 4096 in scratch."""
    if last is None:
        return 0
    used = last.offset % ALIGNMENT + last.nbytes
    return last.scratch_offset + -(-used // ALIGNMENT) * ALIGNMENT
