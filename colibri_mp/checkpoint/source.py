"""A checkpoint folder: config, the headers of all weight files, and bytes on demand.

Weight files are those of `model.safetensors.index.json`, else `model.safetensors`, else every `*.safetensors` of the
folder; of a container (`container`) those that its marker in config.json calls for. Opening reads headers only; index
and files must agree in both directions. What a model needs is up to `models`.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri_mp.checkpoint.container import (
    MARKER_KEY,
    UNFINISHED_NAME,
    Marker,
    PackedLayer,
    container_files,
    read_container,
    read_marker,
)
from colibri_mp.checkpoint.json_file import read_json_object
from colibri_mp.checkpoint.matrices import StoredMatrix, TensorTable
from colibri_mp.checkpoint.quantisation import Quantisation, read_quantisation
from colibri_mp.checkpoint.safetensors_header import Header, TensorInfo, read_header
from colibri_mp.errors import CheckpointError, ReadError

Bytes = npt.NDArray[np.uint8]

INDEX_NAME = "model.safetensors.index.json"
_SHARD_NAME = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")
_SAMPLES_PER_FILE, _SAMPLE_BYTES = 8, 256


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint. A value: holds no file, can be pickled."""

    path: Path
    files: tuple[Path, ...]
    file_bytes: tuple[int, ...]
    header_digests: tuple[bytes, ...]
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    config: dict[str, Any]
    generation_config: dict[str, Any]
    quantisation: Quantisation
    marker: Marker | None = None
    packed_layers: Mapping[int, PackedLayer] = field(default_factory=dict)

    @staticmethod
    def open(path: str | os.PathLike[str]) -> "Checkpoint":
        """Read config and headers of the folder `path`. `marker` and `packed_layers` are those of a container.

        Raises `CheckpointError` for the first defect found: missing or damaged file, index and files that disagree,
        unsupported quantisation.
        """
        folder = Path(path)
        _check_folder(folder)
        config = read_json_object(folder / "config.json")
        quantisation = read_quantisation(config)
        marker = read_marker(config)
        files, weight_map = _weight_files(folder, marker)
        headers = [read_header(file, i) for i, file in enumerate(files)]
        tensors = _merge(files, headers)
        if weight_map is not None:
            _check_index(folder, files, tensors, weight_map)
        generation = folder / "generation_config.json"
        return Checkpoint(
            path=folder,
            files=tuple(files),
            file_bytes=tuple(header.file_bytes for header in headers),
            header_digests=tuple(header.digest for header in headers),
            tensors=tensors,
            metadata={key: value for header in headers for key, value in header.metadata.items()},
            config=config,
            generation_config=read_json_object(generation) if generation.exists() else {},
            quantisation=quantisation,
            marker=marker,
            packed_layers=read_container(files, headers, marker) if marker else {},
        )

    @property
    def total_bytes(self) -> int:
        """Bytes of all weight files."""
        return sum(self.file_bytes)

    @cached_property
    def fingerprint(self) -> str:
        """Hex sha256 over config, names, dtypes, shapes, offsets, sizes, and samples of 256 bytes of every file.

        The samples tell apart two trainings of one architecture. Independent of place and time stamps.
        """
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for i, (header_digest, nbytes) in enumerate(zip(self.header_digests, self.file_bytes, strict=True)):
            digest.update(header_digest + nbytes.to_bytes(8, "little"))
            size = min(_SAMPLE_BYTES, nbytes)
            for k in range(1, _SAMPLES_PER_FILE + 1):
                digest.update(self.read(i, (nbytes - size) * k // _SAMPLES_PER_FILE, size).tobytes())
        return digest.hexdigest()

    def table(self, finds_predictors: bool = False) -> TensorTable:
        """The tensors, to be looked up by what a model needs; see `TensorTable`."""
        return TensorTable(self.tensors, self.quantisation, self.packed_layers, finds_predictors)

    def read(self, file_idx: int, offset: int, nbytes: int) -> Bytes:
        """`nbytes` bytes at `offset` of a weight file, as a new array uint8 [nbytes]. Raises `ReadError`."""
        path = self.files[file_idx]
        data = np.empty(nbytes, np.uint8)
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(offset)
                fill(file, data)
        except OSError as error:
            raise ReadError(f"{path}: cannot read {nbytes} bytes at {offset}: {error.strerror or error}") from error
        return data

    def read_parts(self, matrix: StoredMatrix) -> list[Bytes]:
        """The stored parts of `matrix`, uint8 1-D each, in the order of its encoding's `parts`."""
        read = [self.read(*piece) for piece in matrix.pieces]
        runs = len(read) // len(matrix.encoding.parts)
        return [np.concatenate(read[i : i + runs]) if runs > 1 else read[i] for i in range(0, len(read), runs)]

    def read_vector(self, info: TensorInfo) -> npt.NDArray[np.float32]:
        """A norm weight or bias as float32, of the tensor's shape."""
        raw = self.read(info.file_idx, info.offset, info.nbytes)
        values = to_float32(raw, info.dtype).reshape(info.shape)
        return values + np.float32(info.added) if info.added else values


def has_all_files(folder: Path) -> bool:
    """Whether `folder` holds config.json and every weight file that its index, or a container's marker, calls for."""
    try:
        _weight_files(folder, read_marker(read_json_object(folder / "config.json")))
    except CheckpointError:
        return False
    return True


def to_float32(raw: Bytes, dtype: str) -> npt.NDArray[np.float32]:
    """The little-endian bytes `raw` of dtype "BF16", "F16" or "F32" as a new float32 array [elements]."""
    match dtype:
        case "BF16":
            return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
        case "F16":
            return raw.view("<f2").astype(np.float32)
        case "F32":
            return raw.view("<f4").astype(np.float32)
        case _:
            raise CheckpointError(f"dtype {dtype} is no float type that can be read; supported are BF16, F16, F32")


def fill(file: FileIO, data: Bytes) -> None:
    """Read from the file's position until `data` is full. Raises `OSError`, also where the file ends before."""
    view = data.data
    while view:
        count = file.readinto(view)
        if not count:
            raise OSError(f"the file ends at byte {file.tell()}; it was truncated after it had been opened")
        view = view[count:]


def _check_folder(folder: Path) -> None:
    if not folder.exists():
        raise CheckpointError(f"{folder}: no such folder; give the one that holds config.json and *.safetensors files")
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: is a file; give the folder that holds config.json and *.safetensors files")
    if (folder / UNFINISHED_NAME).exists() and not (folder / "config.json").exists():
        raise CheckpointError(
            f"{folder}: is a conversion that has not been finished: go on with `colibri-cluster convert`, with the same "
            "arguments as before"
        )


def _weight_files(folder: Path, marker: Marker | None) -> tuple[list[Path], dict[str, str] | None]:
    """The weight files, and the index's tensor -> file name if there is an index."""
    if marker is not None:
        files = container_files(folder, marker)
        _refuse_missing(folder, files, f"config.json ({MARKER_KEY})")
        return files, None
    if (folder / INDEX_NAME).exists():
        weight_map = _read_weight_map(folder / INDEX_NAME)
        files = [folder / name for name in sorted(set(weight_map.values()))]
        _refuse_missing(folder, files, INDEX_NAME)
        return files, weight_map
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"], None
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(_explain_no_weights(folder))
    _refuse_missing(folder, _shards_by_name(files), "the numbering of the shards")
    return files, None


def _read_weight_map(path: Path) -> dict[str, str]:
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: has no weight_map (tensor name -> file name): fetch the file again")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
            raise CheckpointError(f"{path}: tensor {tensor!r} is said to be in {name!r}, which is no file name")
    return weight_map


def _shards_by_name(files: list[Path]) -> list[Path]:
    """All the shards that names such as model-00001-of-00003.safetensors speak of."""
    matches = [match for file in files if (match := _SHARD_NAME.fullmatch(file.name))]
    stems = {(m[1], len(m[2]), m[3]) for m in matches if int(m[3]) <= 100_000}
    return [
        files[0].with_name(f"{stem}-{number:0{digits}}-of-{count}.safetensors")
        for stem, digits, count in sorted(stems)
        for number in range(1, int(count) + 1)
    ]


def _refuse_missing(folder: Path, files: Iterable[Path], source: str) -> None:
    files = list(files)
    missing = [file.name for file in files if not file.exists()]
    if missing:
        names = ", ".join(missing[:4]) + (", ..." if len(missing) > 4 else "")
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(files)} weight files that {source} calls for are missing: {names}; "
            "the download or copy is incomplete: fetch them"
        )


def _explain_no_weights(folder: Path) -> str:
    others = sorted(file.name for pattern in ("*.gguf", "*.bin", "*.pth", "*.pt") for file in folder.glob(pattern))
    found = f" It has {', '.join(others[:3])}, a format that is not read." if others else ""
    return f"{folder}: no *.safetensors file in this folder.{found} Use a checkpoint in safetensors format"


def _merge(files: list[Path], headers: list[Header]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for header in headers:
        for name in tensors.keys() & header.tensors.keys():
            first, second = files[tensors[name].file_idx], files[header.tensors[name].file_idx]
            raise CheckpointError(f"tensor {name!r} is in two files, {first} and {second.name}: remove the wrong one")
        tensors.update(header.tensors)
    return tensors


def _check_index(folder: Path, files: list[Path], tensors: dict[str, TensorInfo], weight_map: dict[str, str]) -> None:
    """Index and headers must name the same tensors in the same files."""
    for name, file_name in weight_map.items():
        if name not in tensors:
            raise CheckpointError(
                f"{folder / INDEX_NAME}: says that tensor {name!r} is in {file_name}, but it is not there: "
                "index and weight files do not belong together; fetch both again"
            )
        if files[tensors[name].file_idx].name != file_name:
            raise CheckpointError(
                f"{folder / INDEX_NAME}: says that tensor {name!r} is in {file_name}, but it is in "
                f"{files[tensors[name].file_idx].name}: index and weight files do not belong together; fetch both again"
            )
    for name in tensors.keys() - weight_map.keys():
        raise CheckpointError(
            f"{files[tensors[name].file_idx]}: has the tensor {name!r}, which {INDEX_NAME} does not name: "
            "index and weight files do not belong together; fetch both again"
        )
