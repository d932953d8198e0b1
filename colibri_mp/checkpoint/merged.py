"""Experts of colibrì's OLMoE containers: gate, up and down one after the other in one flat tensor.

<block>.experts.N.merged_weight   I8 [F D + F D + D F]: signed codes, rows one after the other
<block>.experts.N.qs              F32 [F + F + D]: a scale for each row, in the same order
"""

from typing import TYPE_CHECKING

from colibri_mp.checkpoint.matrices import Piece, Shape, TensorTable
from colibri_mp.errors import CheckpointError
from colibri_mp.formats import Encoding, row_group

if TYPE_CHECKING:
    from colibri_mp.checkpoint.experts import ExpertDims, Projection

_PROJECTIONS = ("gate", "up", "down")


def merged_projections(table: TensorTable, path: str, dims: "ExpertDims") -> "dict[str, Projection]":
    """gate, up and down of all experts. Raises `CheckpointError` if a tensor is missing or has another size or type."""
    shapes = [dims.shape(projection).dims for projection in _PROJECTIONS]
    encodings = [Encoding("row", 8, row_group(cols), "f32") for _, cols in shapes]
    if not all(encoding.is_supported(cols) for encoding, (_, cols) in zip(encodings, shapes, strict=True)):
        raise CheckpointError(
            f"{path}: hidden_size {dims.hidden} and {dims.width_field} {dims.width} must be multiples of 16 for int8 by row"
        )
    sizes = [encoding.part_bytes(*shape) for encoding, shape in zip(encodings, shapes, strict=True)]
    found: dict[str, Projection] = {
        name: (encoding, []) for name, encoding in zip(_PROJECTIONS, encodings, strict=True)
    }
    for expert in range(dims.num_experts):
        for name, pieces in zip(_PROJECTIONS, _pieces(table, f"{path}.{expert}", sizes), strict=True):
            found[name][1].append(pieces)
    return found


def _pieces(table: TensorTable, path: str, sizes: list[tuple[int, ...]]) -> list[tuple[Piece, ...]]:
    """Codes and scales of gate, up and down of one expert, which take so many bytes each."""
    codes, scales = (sum(size[part] for size in sizes) for part in range(2))
    weight = table.tensor(f"{path}.merged_weight", Shape((codes,), "weights of gate, up and down"))
    factors = table.tensor(f"{path}.qs", Shape((scales // 4,), "rows of gate, up and down"))
    if (weight.dtype, factors.dtype) != ("I8", "F32"):
        raise CheckpointError(
            f"{weight.name}: {weight.dtype} with scales of {factors.dtype}; I8 with scales of F32 is supported"
        )
    found: list[tuple[Piece, ...]] = []
    code, scale = weight.offset, factors.offset
    for code_bytes, scale_bytes in sizes:
        found.append((Piece(weight.file_idx, code, code_bytes), Piece(factors.file_idx, scale, scale_bytes)))
        code, scale = code + code_bytes, scale + scale_bytes
    return found
