"""The container: experts in the kernels' layout, each of them one aligned read. Written by `convert`, opened like any checkpoint.

    config.json                  the source's, and under `MARKER_KEY` a `Marker`
    resident.safetensors         all tensors but the experts, as the source stores them
    experts-00003.safetensors    the experts of layer 3, a file a layer with experts

    0          header of an experts file, padded with spaces to a multiple of 4096; metadata: `LayerHeader` as JSON
    4096 k     slab of expert 0 ┐
    + slab     slab of expert 1 │ one tensor, U8 [E, slab_bytes]; a slab is what `ExpertShape` says, zeros after its end
    ...                         ┘

This module knows the files: whether they belong together and are aligned. Whether a layer fits the model is up to
`experts`. See docs/formats.md.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from colibri_mp.checkpoint.safetensors_header import Header, TensorInfo
from colibri_mp.errors import CheckpointError
from colibri_mp.formats import Encoding, ExpertBits

if TYPE_CHECKING:
    from colibri_mp.kernels.layout import ExpertShape

CONTAINER_VERSION = 1
ALIGNMENT = 4096
MARKER_KEY = "colibri_container"
"""In config.json."""
METADATA_KEY = "colibri"
"""In the metadata of the weight files."""
RESIDENT_NAME = "resident.safetensors"
UNFINISHED_NAME = "conversion.json"
"""A folder that has this and no config.json is a conversion that was interrupted."""
_CURE = "convert the original checkpoint again"


class Marker(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What config.json says of the container. `source`: fingerprint of the checkpoint that it was made from."""

    version: int
    layout: str
    source: str
    bits: ExpertBits
    group_size: int
    layers: tuple[int, ...]


class PackedPiece(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A matrix [rows, cols] in the slab, `nbytes` from byte `offset` on, in the packed form of its encoding's format."""

    projection: str
    offset: int
    nbytes: int
    rows: int
    cols: int


class Rounding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What quantising one projection of a layer cost: sums of squares over all its weights.

    `plain_squared_error` is what rounding between the least and the greatest weight of each group would have cost.
    """

    squared_error: float
    plain_squared_error: float
    squared_weights: float


class LayerHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The metadata of an experts file. `encodings` are what the packed values were stored as, gate, up, down.

    `checksums` [E]: xxh3-64 of each slab, all `slab_bytes` of it, 16 hexadecimal digits. `rounding`: by projection, of those
    that were quantised.
    """

    version: int
    layout: str
    source: str
    model_type: str
    layer: int
    num_experts: int
    hidden: int
    width: int
    slab_bytes: int
    encodings: tuple[Encoding, Encoding, Encoding]
    pieces: tuple[PackedPiece, ...]
    checksums: tuple[str, ...]
    rounding: dict[str, Rounding]


class ResidentHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The metadata of the resident file. `checksum`: xxh3-64 of all its data, 16 hexadecimal digits."""

    version: int
    source: str
    checksum: str


_Metadata = TypeVar("_Metadata", LayerHeader, ResidentHeader)


class PackedLayer(NamedTuple):
    """One experts file: what its header says, and where its tensor lies."""

    header: LayerHeader
    slabs: TensorInfo
    path: Path


def read_marker(config: dict[str, Any]) -> Marker | None:
    """The marker in config.json; None if the checkpoint is no container.

    Raises `CheckpointError` if it is not valid, or of a version or layout that this program does not read.
    """
    stated = config.get(MARKER_KEY)
    if stated is None:
        return None
    _check_versions("config.json", stated)
    try:
        marker = msgspec.convert(stated, Marker)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"config.json: {MARKER_KEY} is not valid ({error}): {_CURE}") from error
    if not marker.layers or list(marker.layers) != sorted(set(marker.layers)) or marker.layers[0] < 0:
        raise CheckpointError(
            f"config.json: {MARKER_KEY}.layers = {list(marker.layers)} must be ascending numbers of layers: {_CURE}"
        )
    return marker


def experts_name(layer: int) -> str:
    """Name of the experts file of a layer."""
    return f"experts-{layer:05d}.safetensors"


def slabs_name(layer: int) -> str:
    """Name of the tensor in the experts file of a layer."""
    return f"model.layers.{layer}.experts.slabs"


def container_files(folder: Path, marker: Marker) -> list[Path]:
    """The weight files: the resident one, then those of the layers."""
    return [folder / RESIDENT_NAME, *(folder / experts_name(layer) for layer in marker.layers)]


def piece_table(shape: "ExpertShape") -> tuple[PackedPiece, ...]:
    """The matrices in a slab of that shape, then its biases, float32 [rows, 1], padded with zeros to whole blocks of rows."""
    bounds = (shape.gate_offset, shape.up_offset, shape.down_offset, shape.bias_offsets[0])
    wide, narrow = (shape.width, shape.hidden), (shape.hidden, shape.width)
    pieces = tuple(
        PackedPiece(projection, bounds[i], bounds[i + 1] - bounds[i], *dims)
        for i, (projection, dims) in enumerate((("gate", wide), ("up", wide), ("down", narrow)))
    )
    return pieces + _bias_pieces(shape) if shape.has_bias else pieces


def _bias_pieces(shape: "ExpertShape") -> tuple[PackedPiece, ...]:
    bounds = (*shape.bias_offsets, shape.nbytes)
    return tuple(
        PackedPiece(f"{projection}_bias", bounds[i], bounds[i + 1] - bounds[i], rows, 1)
        for i, (projection, rows) in enumerate((("gate", shape.width), ("up", shape.width), ("down", shape.hidden)))
    )


def read_container(files: Sequence[Path], headers: Sequence[Header], marker: Marker) -> dict[int, PackedLayer]:
    """Check that the weight files, in the order of `container_files`, belong together; the layers by number."""
    resident = _metadata(files[0], headers[0], ResidentHeader)
    _check_source(files[0], resident.source, marker)
    return {
        layer: _read_layer(path, header, layer, marker)
        for layer, path, header in zip(marker.layers, files[1:], headers[1:], strict=True)
    }


def read_layer_header(path: Path, header: Header) -> LayerHeader:
    """The metadata of an experts file. Raises `CheckpointError` if it is missing, damaged or of another version."""
    return _metadata(path, header, LayerHeader)


def read_resident_header(path: Path, header: Header) -> ResidentHeader:
    """The metadata of the resident file. Raises like `read_layer_header`."""
    return _metadata(path, header, ResidentHeader)


def _read_layer(path: Path, header: Header, layer: int, marker: Marker) -> PackedLayer:
    found = read_layer_header(path, header)
    _check_source(path, found.source, marker)
    if found.layer != layer:
        raise CheckpointError(f"{path}: says that it holds layer {found.layer}, its name says {layer}: {_CURE}")
    if list(header.tensors) != [slabs_name(layer)]:
        raise CheckpointError(f"{path}: must hold the tensor {slabs_name(layer)!r} only: {_CURE}")
    slabs = header.tensors[slabs_name(layer)]
    _check_slabs(path, found, slabs)
    _check_checksums(path, found)
    return PackedLayer(found, slabs, path)


def _check_slabs(path: Path, found: LayerHeader, slabs: TensorInfo) -> None:
    expected = (found.num_experts, found.slab_bytes)
    if slabs.dtype != "U8" or slabs.shape != expected:
        raise CheckpointError(
            f"{path}: the tensor {slabs.name!r} is {slabs.dtype} {list(slabs.shape)}, the metadata says "
            f"U8 {list(expected)} (experts, slab_bytes): {_CURE}"
        )
    if slabs.offset % ALIGNMENT or found.slab_bytes % ALIGNMENT:
        raise CheckpointError(
            f"{path}: data at byte {slabs.offset} and slabs of {found.slab_bytes} bytes are not aligned, both must be "
            f"multiples of {ALIGNMENT} (has another tool rewritten the file?): {_CURE}"
        )


def _check_checksums(path: Path, found: LayerHeader) -> None:
    if len(found.checksums) != found.num_experts:
        raise CheckpointError(f"{path}: {len(found.checksums)} checksums for {found.num_experts} experts: {_CURE}")
    for expert, text in enumerate(found.checksums):
        if len(text) != 16 or not set(text) <= set("0123456789abcdef"):
            raise CheckpointError(
                f"{path}: the checksum of expert {expert} must be 16 hexadecimal digits, not {text!r}: {_CURE}"
            )


def _check_source(path: Path, source: str, marker: Marker) -> None:
    if source != marker.source:
        raise CheckpointError(
            f"{path}: was made from another checkpoint (fingerprint {source[:12]}...) than config.json says "
            f"({marker.source[:12]}...): files of two conversions have been mixed; {_CURE}"
        )


def _metadata(path: Path, header: Header, kind: type[_Metadata]) -> _Metadata:
    text = header.metadata.get(METADATA_KEY)
    if text is None:
        raise CheckpointError(
            f"{path}: has no metadata {METADATA_KEY!r}, which files of a container have (has another tool rewritten "
            f"it?): {_CURE}"
        )
    try:
        stated = msgspec.json.decode(text)
        _check_versions(str(path), stated)
        return msgspec.convert(stated, kind)
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{path}: its metadata {METADATA_KEY!r} is not valid ({error}): {_CURE}") from error


def _check_versions(where: str, stated: object) -> None:
    """Refuse other versions before anything else is looked at: what they say may be of another form."""
    from colibri_mp.kernels.layout import LAYOUT_VERSION, READABLE_LAYOUTS

    fields = stated if isinstance(stated, dict) else {}
    if (version := fields.get("version")) != CONTAINER_VERSION:
        raise CheckpointError(
            f"{where}: is a container of version {version!r}, this program reads version {CONTAINER_VERSION}: "
            f"use the program that wrote it, or {_CURE}"
        )
    if (layout := fields.get("layout", LAYOUT_VERSION)) not in READABLE_LAYOUTS:
        raise CheckpointError(
            f"{where}: experts are in the layout {layout!r}, the kernels of this program read {LAYOUT_VERSION!r}: {_CURE}"
        )
