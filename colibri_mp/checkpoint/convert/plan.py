"""What a conversion will do, known in full before anything is written: the source checked, each layer's form, all sizes."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import msgspec

from colibri_mp.checkpoint.container import (
    CONTAINER_VERSION,
    METADATA_KEY,
    RESIDENT_NAME,
    LayerHeader,
    Marker,
    ResidentHeader,
    Rounding,
    experts_name,
    piece_table,
    slabs_name,
)
from colibri_mp.checkpoint.convert.files import Entry, header_block, header_room
from colibri_mp.checkpoint.experts import PROJECTIONS, ExpertLayer
from colibri_mp.checkpoint.safetensors_header import TensorInfo
from colibri_mp.checkpoint.source import Checkpoint
from colibri_mp.errors import CheckpointError, ConfigError
from colibri_mp.formats import Encoding, ExpertBits
from colibri_mp.kernels.layout import LAYOUT_VERSION, Bytes, ExpertShape
from colibri_mp.models import load_model
from colibri_mp.recoding import GROUP_SIZES, Recoding, choose


@dataclass(frozen=True)
class Options:
    """`bits` of the experts; `group_size`: weights that share a scale, of what is quantised, 0 with "stored"."""

    bits: ExpertBits = "stored"
    group_size: int = 0

    @staticmethod
    def of(bits: Literal["4", "8", "mixed"] | None, group_size: int | None) -> "Options":
        """The options that flags stand for; None: not given. Raises `ConfigError`."""
        return Options(bits or "stored", group_size or (max(GROUP_SIZES) if bits else 0))

    def __post_init__(self) -> None:
        if self.bits not in get_args(ExpertBits):
            raise ConfigError(f"bits must be one of {', '.join(get_args(ExpertBits))}, not {self.bits!r}")
        if self.bits == "stored" and self.group_size:
            raise ConfigError("--group-size needs --bits: without it, experts keep their stored encoding")
        if self.bits != "stored" and self.group_size not in GROUP_SIZES:
            raise ConfigError(f"--group-size must be one of {', '.join(map(str, GROUP_SIZES))}, not {self.group_size}")


@dataclass(frozen=True)
class LayerJob:
    """One experts file. `header` is its metadata without checksums and rounding; slabs start at byte `room`."""

    experts: ExpertLayer
    recodings: tuple[Recoding, Recoding, Recoding]
    shape: ExpertShape
    header: LayerHeader
    room: int

    @property
    def name(self) -> str:
        """Name of the file."""
        return experts_name(self.experts.layer)

    @property
    def data_bytes(self) -> int:
        """Bytes of all slabs."""
        return self.experts.num_experts * self.shape.slab_bytes

    @property
    def file_bytes(self) -> int:
        """Bytes of the file."""
        return self.room + self.data_bytes

    def header_block(self, checksums: list[str], rounding: dict[str, Rounding]) -> Bytes:
        """The header of the finished file."""
        return header_block(*_layer_header(self.header, checksums, rounding), self.room)


@dataclass(frozen=True)
class ResidentJob:
    """The resident file: `tensors` in the order of the source's files; data starts at byte `room`."""

    tensors: tuple[TensorInfo, ...]
    source_metadata: dict[str, str]
    header: ResidentHeader
    room: int
    name: str = RESIDENT_NAME

    @property
    def data_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self.tensors)

    @property
    def file_bytes(self) -> int:
        """Bytes of the file."""
        return self.room + self.data_bytes

    def header_block(self, checksum: str) -> Bytes:
        """The header of the finished file."""
        header = msgspec.structs.replace(self.header, checksum=checksum)
        return header_block(*_resident_header(self.tensors, self.source_metadata, header), self.room)


@dataclass(frozen=True)
class Plan:
    """The whole conversion."""

    checkpoint: Checkpoint
    marker: Marker
    resident: ResidentJob
    layers: tuple[LayerJob, ...]

    @property
    def jobs(self) -> tuple[ResidentJob | LayerJob, ...]:
        """All weight files."""
        return (self.resident, *self.layers)


def make_plan(checkpoint: Checkpoint, options: Options) -> Plan:
    """Check the source, all of its headers, and decide what becomes of every tensor; reads no weights but the fingerprint's.

    Raises `CheckpointError` if the source is damaged, is not understood, or is a container; `ConfigError` if the groups
    that are asked for do not divide its matrices.
    """
    if checkpoint.marker is not None:
        raise CheckpointError(
            f"{checkpoint.path}: is a container already; convert the checkpoint that it was made from"
        )
    model = load_model(checkpoint, predicts=True)
    layers = model.expert_layers
    marker = Marker(
        version=CONTAINER_VERSION,
        layout=LAYOUT_VERSION,
        source=checkpoint.fingerprint,
        bits=options.bits,
        group_size=options.group_size,
        layers=tuple(layer.layer for layer in layers),
    )
    return Plan(
        checkpoint=checkpoint,
        marker=marker,
        resident=_resident_job(checkpoint, layers, marker),
        layers=tuple(_layer_job(layer, marker, model.model_type) for layer in layers),
    )


def _layer_job(layer: ExpertLayer, marker: Marker, model_type: str) -> LayerJob:
    gate, up, down = (
        _recoding(layer, projection, encoding, cols, marker)
        for projection, encoding, cols in zip(
            PROJECTIONS, (layer.gate, layer.up, layer.down), (layer.hidden, layer.hidden, layer.width), strict=True
        )
    )
    formats = gate.target.format, up.target.format, down.target.format
    shape = ExpertShape(layer.hidden, layer.width, *formats, has_bias=bool(layer.bias), clamp=layer.clamp)
    header = LayerHeader(
        version=CONTAINER_VERSION,
        layout=LAYOUT_VERSION,
        source=marker.source,
        model_type=model_type,
        layer=layer.layer,
        num_experts=layer.num_experts,
        hidden=layer.hidden,
        width=layer.width,
        slab_bytes=shape.slab_bytes,
        encodings=(gate.target, up.target, down.target),
        pieces=piece_table(shape),
        checksums=(),
        rounding={},
    )
    room = header_room(*_layer_header(header, ["0" * 16] * layer.num_experts, {}))
    return LayerJob(layer, (gate, up, down), shape, header, room)


def _recoding(layer: ExpertLayer, projection: str, stored: Encoding, cols: int, marker: Marker) -> Recoding:
    recoding = choose(stored, projection, marker.bits, marker.group_size)
    if not recoding.target.is_supported(cols):
        fitting = [size for size in GROUP_SIZES if cols % size == 0]
        cure = f"give --group-size {fitting[-1]}" if fitting else "convert without --bits"
        raise ConfigError(
            f"layer {layer.layer}: the rows of {projection}_proj have {cols} weights, which do not divide into groups of "
            f"{marker.group_size}: {cure}"
        )
    return recoding


def _layer_header(
    header: LayerHeader, checksums: Sequence[str], rounding: dict[str, Rounding]
) -> tuple[list[Entry], dict[str, str]]:
    """The tensor and the metadata of an experts file."""
    shape = (header.num_experts, header.slab_bytes)
    complete = msgspec.structs.replace(header, checksums=tuple(checksums), rounding=rounding)
    entry = Entry(slabs_name(header.layer), "U8", shape, math.prod(shape))
    return [entry], {METADATA_KEY: msgspec.json.encode(complete).decode()}


def _resident_job(checkpoint: Checkpoint, layers: Sequence[ExpertLayer], marker: Marker) -> ResidentJob:
    tensors = tuple(_resident_tensors(checkpoint, layers))
    header = ResidentHeader(version=CONTAINER_VERSION, source=marker.source, checksum="")
    draft = msgspec.structs.replace(header, checksum="0" * 16)
    room = header_room(*_resident_header(tensors, checkpoint.metadata, draft))
    return ResidentJob(tensors, checkpoint.metadata, header, room)


def _resident_header(
    tensors: Sequence[TensorInfo], source_metadata: dict[str, str], header: ResidentHeader
) -> tuple[list[Entry], dict[str, str]]:
    """The tensors and the metadata of the resident file: the source's and our own."""
    entries = [Entry(info.name, info.dtype, info.shape, info.nbytes) for info in tensors]
    return entries, {**source_metadata, METADATA_KEY: msgspec.json.encode(header).decode()}


def _resident_tensors(checkpoint: Checkpoint, layers: Sequence[ExpertLayer]) -> Iterator[TensorInfo]:
    """Every tensor in which no piece of an expert begins, in the order of the files."""
    begins = {
        place
        for layer in layers
        for place in zip(layer.file_idx.ravel().tolist(), layer.offset.ravel().tolist(), strict=True)
    }
    for info in sorted(checkpoint.tensors.values(), key=lambda info: (info.file_idx, info.offset)):
        if (info.file_idx, info.offset) not in begins or not info.nbytes:
            yield info
