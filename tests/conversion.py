"""Conversions of small checkpoints for the tests: made without a word, and compared."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from colibri_mp.checkpoint import Checkpoint, ExpertLayer
from colibri_mp.checkpoint.arrangement import take_rows
from colibri_mp.checkpoint.convert import Options, Report, convert
from colibri_mp.kernels import reference
from colibri_mp.kernels.layout import Bytes, pack


class Silent:
    """A listener that keeps what it is told."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.notes: list[str] = []
        self.last = (0, 0)

    def show(self, doing: str, done_bytes: int, total_bytes: int) -> None:
        """Progress of one phase."""
        if not self.phases or self.phases[-1] != doing:
            self.phases.append(doing)
        self.last = (done_bytes, total_bytes)

    def note(self, text: str) -> None:
        """Something that the user should know."""
        self.notes.append(text)


def made(source: Path, folder: Path, options: Options | None = None, listener: Silent | None = None) -> Report:
    """Convert `source` into `folder`."""
    return convert(source, folder, options or Options(), listener or Silent())


def files_of(folder: Path) -> dict[str, bytes]:
    """Name and contents of every file."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def packed_slab(checkpoint: Checkpoint, layer: ExpertLayer, expert: int) -> Bytes:
    """The slab of an expert of a published layout, padded with zeros: each matrix packed as a whole."""
    shape = layer.shape
    slab = np.zeros(shape.slab_bytes, np.uint8)
    places = zip(layer.file_idx[expert], layer.offset[expert], layer.piece_bytes, strict=True)
    pieces = [checkpoint.read(int(file_idx), int(offset), int(nbytes)) for file_idx, offset, nbytes in places]
    bounds = (shape.gate_offset, shape.up_offset, shape.down_offset, shape.bias_offsets[0])
    wide, narrow = (layer.width, layer.hidden), (layer.hidden, layer.width)
    for i, (encoding, dims) in enumerate(((layer.gate, wide), (layer.up, wide), (layer.down, narrow))):
        source = layer.matrix_sources[i]
        parts = [take_rows(source, *dims, pieces[source.first_piece + part]) for part in range(len(encoding.parts))]
        pack(encoding, *dims, parts, slab[bounds[i] : bounds[i + 1]])
    for i, rows in enumerate((layer.width, layer.width, layer.hidden) if layer.bias else ()):
        source, start = layer.bias_sources[i], shape.bias_offsets[i]
        values = reference.elements(take_rows(source, rows, 1, pieces[source.first_piece]), layer.bias)
        slab[start : start + values.nbytes] = values.view(np.uint8)
    return slab


class Nth:
    """Stands in for a function: the call of that number (from 0) raises, all others go through."""

    def __init__(self, function: Callable[..., object], number: int, error: BaseException) -> None:
        self._function, self._left, self._error = function, number, error

    def __call__(self, *arguments: object) -> object:
        """Call it, or raise."""
        self._left -= 1
        if self._left == -1:
            raise self._error
        return self._function(*arguments)
