"""gpt_oss's experts: gate and up share tensors, and there are biases; in any published layout.

    MXFP4    <block>.gate_up_proj_blocks [E, 2F, D / 32, 16], _scales [E, 2F, D / 32], rows g0 u0 g1 u1 ...; down_proj_* [E, D, F / 32, ...]
    plain    <block>.gate_up_proj [E, D, 2F], columns g0 u0 g1 u1 ...; down_proj [E, F, D]: (in, out), no ".weight"
    both     <block>.gate_up_proj_bias [E, 2F], down_proj_bias [E, D]
    MLX      <block>.{gate,up,down}_proj.{weight,scales,bias} [E, ...], apart

A block of MXFP4 is 32 codes in 16 bytes, low nibble first: the same bytes as MLX's.
"""

from colibri_mp.checkpoint.experts import (
    PROJECTIONS,
    ExpertDims,
    ExpertLayer,
    make_layer,
    packed_experts,
    slices,
    stacked_projection,
)
from colibri_mp.checkpoint.matrices import Shape, TensorTable
from colibri_mp.checkpoint.safetensors_header import TensorInfo
from colibri_mp.errors import CheckpointError
from colibri_mp.formats import Encoding

_MXFP4 = Encoding("mxfp4", 4, 32, "u8")


def find_shared_experts(table: TensorTable, layer: int, path: str, dims: ExpertDims) -> ExpertLayer:
    """The experts of the block `path` of `layer`. Raises `CheckpointError` as `experts.find_experts`."""
    if table.packed_layers:
        return packed_experts(table, layer, dims)
    if f"{path}.gate_proj.weight" in table:
        found = {name: stacked_projection(table, f"{path}.{name}_proj", name, dims) for name in PROJECTIONS}
        return make_layer(
            layer, dims, found, [_bias(table, f"{path}.{name}_proj.bias", name, dims) for name in PROJECTIONS]
        )
    biases = [_bias(table, f"{path}.{name}_proj_bias", name, dims) for name in ("gate_up", "down")]
    if f"{path}.gate_up_proj_blocks" in table:
        shared = {
            name: (_MXFP4, slices(_blocks(table, path, name, dims), dims.num_experts)) for name in ("gate_up", "down")
        }
        return make_layer(layer, dims, shared, biases, "interleaved")
    plain = {name: table.plain(f"{path}.{name}_proj", _transposed(name, dims)) for name in ("gate_up", "down")}
    pieces = {name: (encoding, slices([info], dims.num_experts)) for name, (encoding, info) in plain.items()}
    return make_layer(layer, dims, pieces, biases, "transposed")


def _size(name: str, dims: ExpertDims) -> tuple[int, int, str]:
    """Rows, columns and what they mean."""
    rows, cols = dims.shape("down" if name == "down" else "gate").dims
    meaning = dims.shape("down" if name == "down" else "gate").meaning
    return (2 * rows, cols, f"2 * {meaning}") if name == "gate_up" else (rows, cols, meaning)


def _bias(table: TensorTable, name: str, projection: str, dims: ExpertDims) -> TensorInfo:
    rows, _, meaning = _size(projection, dims)
    return table.vector(name, Shape((dims.num_experts, rows), f"experts, rows of {meaning}"))


def _transposed(name: str, dims: ExpertDims) -> Shape:
    rows, cols, meaning = _size(name, dims)
    return Shape((dims.num_experts, cols, rows), f"experts, then {meaning} turned round")


def _blocks(table: TensorTable, path: str, name: str, dims: ExpertDims) -> tuple[TensorInfo, TensorInfo]:
    rows, cols, meaning = _size(name, dims)
    if not _MXFP4.is_supported(cols):
        raise CheckpointError(
            f"{path}.{name}_proj: rows of {cols} weights do not divide into groups of 32, as MXFP4 needs"
        )
    groups = (dims.num_experts, rows, cols // 32)
    meaning = f"experts, {meaning} in groups of 32"
    found = (
        table.tensor(f"{path}.{name}_proj_blocks", Shape((*groups, 16), f"{meaning}, 16 bytes each")),
        table.tensor(f"{path}.{name}_proj_scales", Shape(groups, meaning)),
    )
    for info in found:
        if info.dtype != "U8":
            raise CheckpointError(f"tensor {info.name!r} has dtype {info.dtype}, MXFP4 is stored as U8")
    return found
