"""How one expert is read: cut into tasks, each with few large reads, pure arithmetic.

    pieces of an expert        gate.weight ▓▓▓▓▓▓▓▓  gate.scales ▒  gate.biases ▒  up.weight ▓▓▓▓▓▓▓▓ ...
    tasks (row blocks)         [rows 0..511: ▓▓▓▓ ▒ ▒]  [rows 512..1023: ▓▓▓▓ ▒ ▒]  ...      read and packed in parallel
    ranges of a task           sorted by file and offset, merged where they touch or nearly do

A small expert is one task, and one read where its pieces lie together; a large one is spread over the I/O threads, so
that a single miss already keeps the disk busy and scratch memory stays small. Rows are cut in multiples of 16, the row
block of the packed layout, whose blocks follow each other: a task packs into a part of the slab of its own. Where rows share
scales (fp8), they are cut at multiples of so many.

A packed layer needs none of this: its slabs lie in the file as they are to lie in memory, on multiples of 4096. Only very
large ones are cut, into equal parts, so that several threads share them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from colibri_mp.checkpoint.arrangement import Source
from colibri_mp.checkpoint.experts import ExpertLayer
from colibri_mp.formats import ELEMENT_BYTES, Encoding
from colibri_mp.kernels.layout import ExpertShape, bias_bytes, packed_bytes

TASK_BYTES = 5 << 18  # with gaps and alignment it stays below 2 MiB, one huge page of scratch memory a thread
PACKED_TASK_BYTES = 2 << 20
GAP_BYTES = 64 << 10  # a gap below this is read through: cheaper than another request
ALIGNMENT = 4096  # of offset, length and memory in direct mode
ROW_BLOCK = 16


class Slice(NamedTuple):
    """Part of piece `piece_idx` of an expert: `nbytes` from byte `start` of the piece."""

    piece_idx: int
    start: int
    nbytes: int


class MatrixRows(NamedTuple):
    """Some rows of one projection: its slices in the order of `encoding.parts`, and where they go in the slab.

    `source`: which rows of the slices they are (`take_rows`).
    `target`: what they are packed as; another encoding than the stored one if they are to be quantised.
    """

    encoding: Encoding
    target: Encoding
    rows: int
    cols: int
    slices: tuple[Slice, ...]
    slab_offset: int
    packed_bytes: int
    source: Source


class BiasRows(NamedTuple):
    """A bias of `rows` elements of type `kind`, or two of them in turns: its one slice, and its place in the slab."""

    kind: str
    rows: int
    source: Source
    slices: tuple[Slice]
    slab_offset: int
    nbytes: int


class FileRange(NamedTuple):
    """Bytes to read from one file into a buffer, from byte `target_offset` on (a multiple of 4096)."""

    file_idx: int
    offset: int
    nbytes: int
    target_offset: int


@dataclass(frozen=True, slots=True)
class ReadTask:
    """What one I/O thread does at a time: read `ranges` into its scratch buffer, then pack each of `matrices`, and biases.

    `part_offsets` has, for each of them, where in the scratch buffer each of its parts starts. Of a packed layer there is
    nothing to pack: the one range is what the slab has from byte `slab_offset` on.
    """

    ranges: tuple[FileRange, ...]
    matrices: tuple[MatrixRows | BiasRows, ...] = ()
    part_offsets: tuple[tuple[int, ...], ...] = ()
    slab_offset: int | None = None


class LayerPlan:
    """The read plan of a layer: the same cut for each of its experts. `packed_bytes`: of a slab without its padding.

    A thread needs `scratch_bytes` to read a task, and `copy_bytes` beside them to take apart what shares pieces.
    """

    def __init__(self, layer: ExpertLayer) -> None:
        self.layer = layer
        shape = layer.shape
        self.slab_bytes, self.packed_bytes, self.copy_bytes = shape.slab_bytes, shape.nbytes, 0
        if layer.is_packed:
            self.num_tasks = -(-self.slab_bytes // PACKED_TASK_BYTES)
            self._part_bytes = -(-self.slab_bytes // (self.num_tasks * ALIGNMENT)) * ALIGNMENT
            self.scratch_bytes = self._part_bytes
        else:
            self._cuts = _cut(layer, shape)
            self.num_tasks = len(self._cuts)
            self.scratch_bytes = max(_scratch_bound(matrices) for matrices in self._cuts)
            rows = [matrix for matrices in self._cuts for matrix in matrices if isinstance(matrix, MatrixRows)]
            self.copy_bytes = max(map(_copy_bytes, rows))

    def task(self, expert: int, task_idx: int) -> ReadTask:
        """Task `task_idx` of the `num_tasks` that together fill the slab of `expert`."""
        files, offsets = self.layer.file_idx[expert].tolist(), self.layer.offset[expert].tolist()
        if self.layer.is_packed:
            return self._packed_task(files[0], offsets[0], task_idx)
        return _task(self._cuts[task_idx], files, offsets)

    def tasks(self, expert: int) -> list[ReadTask]:
        """All tasks of `expert`."""
        return [self.task(expert, task_idx) for task_idx in range(self.num_tasks)]

    def _packed_task(self, file_idx: int, offset: int, task_idx: int) -> ReadTask:
        start = task_idx * self._part_bytes
        nbytes = min(self._part_bytes, self.slab_bytes - start)
        return ReadTask((FileRange(file_idx, offset + start, nbytes, 0),), slab_offset=start)


class _Projection(NamedTuple):
    """A whole projection [rows, cols]; its parts are the pieces from `first_piece` on."""

    encoding: Encoding
    target: Encoding
    rows: int
    cols: int
    slab_offset: int
    source: Source


def _cut(layer: ExpertLayer, shape: ExpertShape) -> list[tuple[MatrixRows | BiasRows, ...]]:
    """The matrices (or row blocks of them) of each task; biases come with the last. What shares pieces is read once."""
    gate, up, down = projections = _projections(layer, shape)
    biases = _biases(layer, shape) if layer.bias else ()
    if layer.stored_bytes <= TASK_BYTES:
        return [(*(_rows(projection, 0, projection.rows) for projection in projections), *biases)]
    groups = ((gate,), (up,), (down,)) if layer.arrangement == "separate" else ((gate, up), (down,))
    *tasks, last = (task for group in groups for task in _row_blocks(group))
    return [*tasks, (*last, *biases)]


def _row_blocks(group: tuple[_Projection, ...]) -> Iterator[tuple[MatrixRows, ...]]:
    """Tasks that together are the projections of a group, which have as many rows; transposed ones cannot be cut."""
    whole = group[0]
    num_rows = whole.rows
    if not whole.source.is_transposed:
        num_rows = _rows_per_task(whole.encoding, whole.rows, whole.cols, whole.source.step)
    for start in range(0, whole.rows, num_rows):
        yield tuple(_rows(projection, start, min(num_rows, whole.rows - start)) for projection in group)


def _projections(layer: ExpertLayer, shape: ExpertShape) -> tuple[_Projection, _Projection, _Projection]:
    gate, up, down = (
        _Projection(*fields)
        for fields in zip(
            (layer.gate, layer.up, layer.down),
            layer.packed_encodings,
            (layer.width, layer.width, layer.hidden),
            (layer.hidden, layer.hidden, layer.width),
            (shape.gate_offset, shape.up_offset, shape.down_offset),
            layer.matrix_sources,
            strict=True,
        )
    )
    return gate, up, down


def _biases(layer: ExpertLayer, shape: ExpertShape) -> tuple[BiasRows, ...]:
    sizes, element = (layer.width, layer.width, layer.hidden), ELEMENT_BYTES[layer.bias]
    return tuple(
        BiasRows(
            layer.bias,
            rows,
            source,
            (Slice(source.first_piece, 0, rows * source.step * element),),
            slab_offset,
            bias_bytes(rows),
        )
        for rows, source, slab_offset in zip(sizes, layer.bias_sources, shape.bias_offsets, strict=True)
    )


def _rows_per_task(encoding: Encoding, rows: int, cols: int, step: int) -> int:
    """Rows of about TASK_BYTES, with what lies between them, whole row blocks, such that the tasks of a matrix are about equal."""
    block = max(ROW_BLOCK, encoding.row_tile)
    num_tasks = -(-step * sum(encoding.part_bytes(rows, cols)) // TASK_BYTES)
    return -(-rows // (num_tasks * block)) * block


def _rows(whole: _Projection, start: int, num_rows: int) -> MatrixRows:
    """Rows `start ... start + num_rows` of a projection."""
    encoding, target, _, cols, slab_offset, source = whole
    starts, sizes = (encoding.part_bytes(source.step * count, cols) for count in (start, num_rows))
    return MatrixRows(
        encoding,
        target,
        num_rows,
        cols,
        tuple(Slice(source.first_piece + i, *place) for i, place in enumerate(zip(starts, sizes, strict=True))),
        slab_offset + packed_bytes(target.format, start, cols),
        packed_bytes(target.format, num_rows, cols),
        source,
    )


def _scratch_bound(matrices: Sequence[MatrixRows | BiasRows]) -> int:
    """Scratch bytes that a task of these matrices can need at most, wherever its pieces lie."""
    slices = {piece for matrix in matrices for piece in matrix.slices}
    return sum(piece.nbytes + GAP_BYTES + 2 * ALIGNMENT for piece in slices)


def _copy_bytes(matrix: MatrixRows) -> int:
    """What `take_rows` copies of a matrix whose rows do not lie one after the other; of a transposed one twice."""
    if matrix.source.is_plain:
        return 0
    return 2 * sum(piece.nbytes for piece in matrix.slices) // matrix.source.step


def _task(matrices: tuple[MatrixRows | BiasRows, ...], files: Sequence[int], offsets: Sequence[int]) -> ReadTask:
    """Place the slices of one expert: sort them, merge what lies close together, and lay the ranges out in scratch.

    A range starts in scratch at its own offset modulo 4096, and its aligned superset is free of other ranges.
    """
    slices = [piece for matrix in matrices for piece in matrix.slices]
    places = sorted(
        (files[piece], offsets[piece] + start, nbytes, i) for i, (piece, start, nbytes) in enumerate(slices)
    )
    ranges: list[FileRange] = []
    found = [0] * len(slices)
    file_idx, first, end, target = -1, 0, 0, 0
    for piece_file, offset, nbytes, i in places:
        if piece_file != file_idx or offset - end >= GAP_BYTES:
            if file_idx >= 0:
                ranges.append(FileRange(file_idx, first, end - first, target))
                target += -(-(first % ALIGNMENT + end - first) // ALIGNMENT) * ALIGNMENT
            file_idx, first, end = piece_file, offset, offset
        end = max(end, offset + nbytes)
        found[i] = target + first % ALIGNMENT + offset - first
    ranges.append(FileRange(file_idx, first, end - first, target))
    placed = iter(found)
    part_offsets = tuple(tuple(next(placed) for _ in matrix.slices) for matrix in matrices)
    return ReadTask(tuple(ranges), matrices, part_offsets)
