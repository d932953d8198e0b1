"""Matrices of a checkpoint by module path: shape, encoding and the pieces of files that hold it.

A matrix `path` [rows, cols] is stored as the tensor `<path>.weight`, with `<path>.scales` and `<path>.biases` if it is
quantised (not to be confused with `<path>.bias`, the addend of a linear layer), or with `<path>.weight_scale_inv` in fp8.
A stack of matrices has leading dims. colibrì's containers have `<path>.weight.qs` (`flat`).
Shapes are held against what the config asks for; a difference is an error that names both. Encodings: `quantisation`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from colibri_mp.checkpoint.container import PackedLayer
from colibri_mp.checkpoint.flat import SCALES, flat_encoding
from colibri_mp.checkpoint.quantisation import Quantisation, fp8_encoding, grouped_encoding, plain_encoding
from colibri_mp.checkpoint.safetensors_header import TensorInfo
from colibri_mp.errors import CheckpointError
from colibri_mp.formats import TILE, Encoding

VECTOR_DTYPES = ("BF16", "F16", "F32")


class Piece(NamedTuple):
    """A run of bytes in file `file_idx` of the checkpoint."""

    file_idx: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix [rows, cols] as stored; `pieces` are in the order of `encoding.parts`, each row-major.

    Of a matrix whose rows come from several places there are several pieces a part, as many for each, which follow one another.
    """

    name: str
    rows: int
    cols: int
    encoding: Encoding
    pieces: tuple[Piece, ...]

    @property
    def stored_bytes(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.nbytes for piece in self.pieces)


def take_rows(matrix: StoredMatrix, runs: Sequence[tuple[int, int]]) -> StoredMatrix:
    """The matrix that is made of runs (first row, number of rows) of another one, in this order.

    Raises `CheckpointError` if its scales belong to more rows than a run has.
    """
    assert len(matrix.pieces) == len(matrix.encoding.parts)
    encoding, cols = matrix.encoding, matrix.cols
    for first, count in runs:
        if first % encoding.row_tile or count % encoding.row_tile:
            raise CheckpointError(
                f"{matrix.name}: rows {first} to {first + count} cannot be taken by themselves, "
                f"stored as {encoding.describe()}; use a checkpoint with another quantisation of this matrix"
            )
    pieces = tuple(
        Piece(piece.file_idx, piece.offset + encoding.part_bytes(first, cols)[i], encoding.part_bytes(count, cols)[i])
        for i, piece in enumerate(matrix.pieces)
        for first, count in runs
    )
    return replace(matrix, rows=sum(count for _, count in runs), pieces=pieces)


class Shape(NamedTuple):
    """What the config asks of a tensor: dims, and the config fields that they come from."""

    dims: tuple[int, ...]
    meaning: str


class TensorTable:
    """All tensors of a checkpoint, looked up by what a model needs; remembers which have been used.

    `packed_layers`: of a container, the layers whose experts are in the kernels' layout. `finds_predictors`: whether the layers
    that predict further tokens are wanted too; else families leave them out.
    """

    def __init__(
        self,
        tensors: Mapping[str, TensorInfo],
        quantisation: Quantisation,
        packed_layers: Mapping[int, PackedLayer] | None = None,
        finds_predictors: bool = False,
    ) -> None:
        self.tensors = tensors
        self.finds_predictors = finds_predictors
        self.quantisation = quantisation
        self.packed_layers = packed_layers or {}
        self.used: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def tensor(self, name: str, shape: Shape) -> TensorInfo:
        """The tensor `name`, of exactly this shape. Raises `CheckpointError` if it is missing or differs."""
        info = self._get(name)
        if info.shape != shape.dims:
            raise CheckpointError(
                f"config and tensors disagree: {name!r} is {info.dtype} {list(info.shape)} in the file, "
                f"config.json asks for {list(shape.dims)} ({shape.meaning})"
            )
        return info

    def vector(self, name: str, shape: Shape) -> TensorInfo:
        """The norm weight or bias `name`; bf16, f16 or f32."""
        info = self.tensor(name, shape)
        if info.dtype not in VECTOR_DTYPES:
            raise CheckpointError(f"tensor {name!r} has dtype {info.dtype}; supported are {', '.join(VECTOR_DTYPES)}")
        return info

    def matrix(self, path: str, shape: Shape) -> StoredMatrix:
        """The matrix `path` of `shape` [rows, cols]."""
        rows, cols = shape.dims
        encoding, parts = self.parts(path, shape)
        pieces = tuple(Piece(part.file_idx, part.offset, part.nbytes) for part in parts)
        return StoredMatrix(path, rows, cols, encoding, pieces)

    def parts(self, path: str, shape: Shape) -> tuple[Encoding, tuple[TensorInfo, ...]]:
        """Encoding of the matrix or stack `path` [..., rows, cols], and its tensors in the order of the encoding."""
        cols = shape.dims[-1]
        if f"{path}{SCALES}" in self.tensors and len(shape.dims) == 2:
            weight, scales = self._get(f"{path}.weight"), self._get(f"{path}{SCALES}")
            return flat_encoding(weight, scales, *shape.dims), (weight, scales)
        encoding = self._encoding(path, cols)
        if not encoding.group_size:
            return encoding, (self.tensor(f"{path}.weight", shape),)
        if encoding.kind == "fp8":
            return encoding, self._tiled(f"{path}.weight", f"{path}.{encoding.parts[1]}", encoding, shape)
        *lead, _ = shape.dims
        words = Shape((*lead, cols * encoding.bits // 32), f"{shape.meaning} in {encoding.bits}-bit codes")
        groups = Shape((*lead, cols // encoding.group_size), f"{shape.meaning} in groups of {encoding.group_size}")
        weight = self.tensor(f"{path}.weight", words)
        return encoding, (weight, *(self.tensor(f"{path}.{part}", groups) for part in encoding.parts[1:]))

    def plain(self, name: str, shape: Shape) -> tuple[Encoding, TensorInfo]:
        """Encoding and tensor of an unquantised matrix or stack that is stored under its bare `name`."""
        info = self.tensor(name, shape)
        return plain_encoding(info), info

    def bare(self, name: str, shape: Shape) -> tuple[Encoding, tuple[TensorInfo, ...]]:
        """Encoding and tensors of a matrix or stack under its bare `name`: plain, or fp8 with `<name>_scale_inv`."""
        scales = self.tensors.get(f"{name}_scale_inv")
        if scales is None:
            plain, info = self.plain(name, shape)
            return plain, (info,)
        encoding = fp8_encoding(self._get(name), scales, shape.dims[-1])
        return encoding, self._tiled(name, scales.name, encoding, shape)

    def leave_out(self, prefix: str) -> None:
        """Count the tensors of a part of the checkpoint that the model does not need as used."""
        self.used.update(name for name in self.tensors if name.startswith(prefix))

    def has_experts(self, layer: int) -> bool:
        """Whether the experts of a layer could be here: a container made without a layer's has them nowhere."""
        return not self.packed_layers or layer in self.packed_layers

    def unused(self) -> list[str]:
        """Names of the tensors that nothing has asked for, in the order of the files."""
        return [name for name in self.tensors if name not in self.used]

    def _tiled(self, weight: str, scales: str, encoding: Encoding, shape: Shape) -> tuple[TensorInfo, TensorInfo]:
        *lead, rows, cols = shape.dims
        tiles = Shape((*lead, *encoding.groups(rows, cols)), f"{shape.meaning} in tiles of {TILE} x {TILE}, rounded up")
        return self.tensor(weight, shape), self.tensor(scales, tiles)

    def _encoding(self, path: str, cols: int) -> Encoding:
        weight, scales = self._get(f"{path}.weight"), self.tensors.get(f"{path}.scales")
        if f"{path}.global_scale" in self.tensors:
            raise CheckpointError(
                f"tensor '{path}.global_scale': nvfp4 with a global scale is not supported; "
                "use a checkpoint without it, or another quantisation of this model"
            )
        if scales is not None:
            biases = self.tensors.get(f"{path}.biases")
            return grouped_encoding(path, cols, weight, scales, biases, self.quantisation)
        if (tiled := self.tensors.get(f"{path}.weight_scale_inv")) is not None:
            return fp8_encoding(weight, tiled, cols)
        if self.quantisation.overrides.get(path):
            raise CheckpointError(f"config.json says that {path} is quantised, but there is no tensor '{path}.scales'")
        return plain_encoding(weight)

    def _get(self, name: str) -> TensorInfo:
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError(self._explain_missing(name))
        self.used.add(name)
        return info

    def _explain_missing(self, name: str) -> str:
        module = name.rsplit(".", 1)[0] + "."
        near = [other for other in self.tensors if other.startswith(module)]
        hint = f" (there are {', '.join(near[:4])})" if near else ""
        if any(other.endswith((".qweight", ".weight_packed", ".weight_scale")) for other in near):
            hint += ": a quantisation other than MLX's, which is not supported"
        return f"tensor {name!r}, which config.json calls for, is in none of the checkpoint's files{hint}"
