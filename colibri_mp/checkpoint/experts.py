"""One layer's routed experts, in any published layout, as tables of offsets that a worker can read from.

    per expert   <block>.experts.N.{gate,up,down}_proj.weight [rows, cols] (mixtral: w1 gate, w3 up, w2 down)
    fused        <block>.experts.gate_up_proj [E, 2F, D] (rows: gate, then up), .down_proj [E, D, F]; no ".weight"; in fp8 with
                 .gate_up_proj_scale_inv and .down_proj_scale_inv
    stacked      <block>.switch_mlp.{gate,up,down}_proj.{weight,scales,biases} [E, rows, ...], as MLX writes
    shared       gpt_oss's gate_up_proj, with biases: see `shared_pieces`
    merged       <block>.experts.N.merged_weight, I8, gate, up and down one after the other, and .qs (`merged`)
    packed       a container's slabs [E, slab_bytes], in the layout that the kernels read (`container`)

All end as: piece p of expert e is `piece_bytes[p]` bytes at `offset[e, p]` of file `file_idx[e, p]`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from colibri_mp.checkpoint.arrangement import Arrangement, Source, bias_sources, matrix_sources
from colibri_mp.checkpoint.container import PackedLayer, PackedPiece, piece_table
from colibri_mp.checkpoint.matrices import Piece, Shape, TensorTable
from colibri_mp.checkpoint.merged import merged_projections
from colibri_mp.checkpoint.safetensors_header import TensorInfo
from colibri_mp.errors import CheckpointError
from colibri_mp.formats import Encoding
from colibri_mp.specs import ClampedSwiGLU

if TYPE_CHECKING:
    from colibri_mp.kernels.layout import ExpertShape

PROJECTIONS = ("gate", "up", "down")
STANDARD_NAMES: Mapping[str, str] = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


@dataclass(frozen=True, slots=True, eq=False)
class ExpertLayer:
    """Where the E experts of a layer lie. Each is gate [F, D], up [F, D], down [D, F]; E experts, F width, D hidden.

    `piece_names` [P] is (projection, part) in the order gate, up, down and within each `encoding.parts`. Picklable,
    holds no file: a worker opens the files itself. `is_packed`: the file holds the slab as the kernels read it; the one
    piece is the whole slab, `shape.slab_bytes` long. `checksums` [E]: xxh3-64 of the packed slab, padding zeroed.
    `targets`: what gate, up and down become when they are read, if that is not what is stored. `bias`: element type of the biases
    of gate [F], up [F] and down [D], "" if there are none. `clamp`: see `kernels.layout.ExpertShape`.
    """

    layer: int
    num_experts: int
    hidden: int
    width: int
    gate: Encoding
    up: Encoding
    down: Encoding
    piece_names: tuple[tuple[str, str], ...]
    piece_bytes: npt.NDArray[np.int64]  # [P]
    file_idx: npt.NDArray[np.int32]  # [E, P]
    offset: npt.NDArray[np.int64]  # [E, P]
    is_packed: bool = False
    checksums: npt.NDArray[np.uint64] | None = None
    targets: tuple[Encoding, Encoding, Encoding] | None = None
    arrangement: Arrangement = "separate"
    bias: Literal["bf16", "f16", "f32", ""] = ""
    clamp: ClampedSwiGLU | None = None

    @property
    def stored_bytes(self) -> int:
        """Bytes of one expert as stored."""
        return int(self.piece_bytes.sum())

    @property
    def shape(self) -> "ExpertShape":
        """The packed form that the kernels compute with."""
        # Here, since reading a checkpoint needs no kernels.
        from colibri_mp.kernels.layout import ExpertShape

        gate, up, down = (encoding.format for encoding in self.packed_encodings)
        return ExpertShape(self.hidden, self.width, gate, up, down, bool(self.bias), self.clamp)

    @property
    def matrix_sources(self) -> tuple[Source, Source, Source]:
        """Where gate, up and down lie among the pieces."""
        return matrix_sources(self.arrangement, self._num_parts)

    @property
    def bias_sources(self) -> tuple[Source, Source, Source]:
        """Where their biases lie, if there are any."""
        return bias_sources(self.arrangement, self._num_parts)

    @property
    def _num_parts(self) -> tuple[int, int, int]:
        return len(self.gate.parts), len(self.up.parts), len(self.down.parts)

    @property
    def packed_encodings(self) -> tuple[Encoding, Encoding, Encoding]:
        """Of gate, up and down, as they are packed into slabs."""
        return self.targets or (self.gate, self.up, self.down)

    @property
    def encodings(self) -> frozenset[Encoding]:
        """Every encoding that the layer's matrices have, on disk and in slabs."""
        return frozenset({self.gate, self.up, self.down, *self.packed_encodings})


@dataclass(frozen=True, slots=True)
class ExpertDims:
    """Number, size and kind of a layer's experts, and the config fields that say so."""

    num_experts: int
    hidden: int
    width: int
    width_field: str
    has_bias: bool = False
    clamp: ClampedSwiGLU | None = None

    def shape(self, projection: str) -> Shape:
        """[rows, cols] of one projection."""
        if projection == "down":
            return Shape((self.hidden, self.width), f"hidden_size, {self.width_field}")
        return Shape((self.width, self.hidden), f"{self.width_field}, hidden_size")


# One projection of one layer: its encoding and, for each expert, its pieces in the order of `encoding.parts`.
Projection = tuple[Encoding, list[tuple[Piece, ...]]]


def find_experts(
    table: TensorTable, layer: int, path: str, dims: ExpertDims, names: Mapping[str, str] = STANDARD_NAMES
) -> ExpertLayer:
    """The experts of the block `path` of `layer`, in whichever layout the checkpoint has them.

    `names` are what the family calls the projections of a single expert. Raises `CheckpointError` if experts are
    missing, of another shape than the config says, or do not agree in encoding.
    """
    if table.packed_layers:
        return packed_experts(table, layer, dims)
    if f"{path}.switch_mlp.gate_proj.weight" in table:
        found = {p: stacked_projection(table, f"{path}.switch_mlp.{p}_proj", p, dims) for p in PROJECTIONS}
    elif f"{path}.experts.gate_up_proj" in table:
        found = _fused(table, f"{path}.experts", dims)
    elif f"{path}.experts.0.merged_weight" in table:
        found = merged_projections(table, f"{path}.experts", dims)
    else:
        found = {
            p: _per_expert(table, f"{path}.experts", names[p], dims.shape(p), dims.num_experts) for p in PROJECTIONS
        }
    return make_layer(layer, dims, found)


def packed_experts(table: TensorTable, layer: int, dims: ExpertDims) -> ExpertLayer:
    """The layer in one file of a container; its header is held against the config and the kernels' layout."""
    packed = table.packed_layers.get(layer)
    if packed is None:
        raise CheckpointError(
            f"config.json calls for experts in layer {layer}, the container has them in the layers "
            f"{sorted(table.packed_layers)}: convert the original checkpoint again"
        )
    header = packed.header
    shape = _packed_shape(packed, dims)
    if (header.slab_bytes, header.pieces) != (shape.slab_bytes, piece_table(shape)):
        raise CheckpointError(
            f"{packed.path}: {header.slab_bytes} bytes a slab and the pieces {_describe(header.pieces)} are not how the "
            f"kernels read such experts: {shape.slab_bytes} bytes, {_describe(piece_table(shape))}; "
            "convert the original checkpoint again"
        )
    slabs = table.tensor(packed.slabs.name, Shape((dims.num_experts, shape.slab_bytes), "experts, slab bytes"))
    gate, up, down = header.encodings
    return ExpertLayer(
        layer=header.layer,
        num_experts=dims.num_experts,
        hidden=dims.hidden,
        width=dims.width,
        gate=gate,
        up=up,
        down=down,
        piece_names=(("expert", "slab"),),
        piece_bytes=np.array([shape.slab_bytes], np.int64),
        file_idx=np.full((dims.num_experts, 1), slabs.file_idx, np.int32),
        offset=slabs.offset + shape.slab_bytes * np.arange(dims.num_experts, dtype=np.int64)[:, None],
        is_packed=True,
        bias="f32" if dims.has_bias else "",
        clamp=dims.clamp,
        checksums=np.array([int(text, 16) for text in header.checksums], np.uint64),
    )


def _packed_shape(packed: PackedLayer, dims: ExpertDims) -> "ExpertShape":
    from colibri_mp.kernels.layout import ExpertShape

    header = packed.header
    stated = (header.num_experts, header.hidden, header.width)
    if stated != (dims.num_experts, dims.hidden, dims.width):
        raise CheckpointError(
            f"config and container disagree: {packed.path} holds {header.num_experts} experts of hidden size "
            f"{header.hidden} and width {header.width}, config.json asks for {dims.num_experts}, {dims.hidden}, "
            f"{dims.width} (num_experts, hidden_size, {dims.width_field})"
        )
    for encoding, cols in zip(header.encodings, (dims.hidden, dims.hidden, dims.width), strict=True):
        if not encoding.is_supported(cols):
            raise CheckpointError(
                f"{packed.path}: experts stored as {encoding} with {cols} columns are not supported: "
                "convert the original checkpoint again"
            )
    gate, up, down = header.encodings
    return ExpertShape(
        dims.hidden, dims.width, gate.format, up.format, down.format, has_bias=dims.has_bias, clamp=dims.clamp
    )


def _describe(pieces: Iterable[PackedPiece]) -> str:
    return ", ".join(
        f"{piece.projection} [{piece.rows}, {piece.cols}] at {piece.offset} + {piece.nbytes}" for piece in pieces
    )


def stacked_projection(table: TensorTable, path: str, projection: str, dims: ExpertDims) -> Projection:
    """One projection of all experts in one stack `path` [E, rows, cols]."""
    one = dims.shape(projection)
    stack = Shape((dims.num_experts, *one.dims), f"experts, {one.meaning}")
    encoding, parts = table.parts(path, stack)
    return encoding, slices(parts, dims.num_experts)


def slices(stacks: Sequence[TensorInfo], num_experts: int) -> list[tuple[Piece, ...]]:
    """The pieces of each expert in tensors [E, ...]; of each half of an expert with 2 E."""
    sizes = [stack.nbytes // num_experts for stack in stacks]
    return [
        tuple(Piece(stack.file_idx, stack.offset + e * size, size) for stack, size in zip(stacks, sizes, strict=True))
        for e in range(num_experts)
    ]


def _fused(table: TensorTable, path: str, dims: ExpertDims) -> dict[str, Projection]:
    experts, hidden, width = dims.num_experts, dims.hidden, dims.width
    both = Shape((experts, 2 * width, hidden), f"experts, 2 * {dims.width_field}, hidden_size")
    single = Shape((experts, hidden, width), f"experts, hidden_size, {dims.width_field}")
    encoding, gate_up = table.bare(f"{path}.gate_up_proj", both)
    down_encoding, down = table.bare(f"{path}.down_proj", single)
    if width % encoding.row_tile:
        raise CheckpointError(
            f"{path}.gate_up_proj: {encoding.describe()}, of which one has rows of gate and of up: {dims.width_field} = {width} is no "
            f"multiple of {encoding.row_tile}; use a checkpoint with one tensor for each expert"
        )
    halves = slices(gate_up, 2 * experts)
    return {
        "gate": (encoding, halves[0::2]),
        "up": (encoding, halves[1::2]),
        "down": (down_encoding, slices(down, experts)),
    }


def _per_expert(table: TensorTable, path: str, name: str, shape: Shape, num_experts: int) -> Projection:
    matrices = [table.matrix(f"{path}.{e}.{name}", shape) for e in range(num_experts)]
    first = matrices[0]
    for matrix in matrices:
        if matrix.encoding != first.encoding:
            raise CheckpointError(
                f"the experts of one layer must be stored alike: {first.name} is {first.encoding}, "
                f"{matrix.name} is {matrix.encoding}"
            )
    return first.encoding, [matrix.pieces for matrix in matrices]


def make_layer(
    layer: int,
    dims: ExpertDims,
    found: Mapping[str, Projection],
    biases: Sequence[TensorInfo] = (),
    arrangement: Arrangement = "separate",
) -> ExpertLayer:
    """The tables of a layer. `found`: gate, up and down, or gate_up, which is both, and down; `biases` [E, rows] of the same."""
    gate, up, down = (found[name if name in found else "gate_up"][0] for name in PROJECTIONS)
    bias_pieces = slices(biases, dims.num_experts)
    by_expert = zip(*(pieces for _, pieces in found.values()), bias_pieces, strict=True)
    pieces = [list(chain.from_iterable(projections)) for projections in by_expert]
    table = np.array(pieces, np.int64)  # [E, P, (file_idx, offset, nbytes)]
    return ExpertLayer(
        layer=layer,
        num_experts=dims.num_experts,
        hidden=dims.hidden,
        width=dims.width,
        gate=gate,
        up=up,
        down=down,
        piece_names=(*_piece_names(found), *((name, "bias") for name in found if biases)),
        piece_bytes=table[0, :, 2].copy(),
        file_idx=table[:, :, 0].astype(np.int32),
        offset=table[:, :, 1].copy(),
        arrangement=arrangement,
        bias=_bias_type(biases),
        clamp=dims.clamp,
    )


def _bias_type(biases: Sequence[TensorInfo]) -> Literal["bf16", "f16", "f32", ""]:
    types: dict[str, Literal["bf16", "f16", "f32"]] = {"BF16": "bf16", "F16": "f16", "F32": "f32"}
    if not biases:
        return ""
    if len({info.dtype for info in biases}) > 1:
        raise CheckpointError(
            f"the biases of a layer's experts must be stored alike, {biases[0].name!r} and others are not"
        )
    return types[biases[0].dtype]


def _piece_names(found: Mapping[str, Projection]) -> Iterator[tuple[str, str]]:
    for projection, (encoding, _) in found.items():
        for part in encoding.parts:
            yield projection, part
