"""The header of one safetensors file: where each tensor lies, or one clear error for each defect.

    offset 0   u64 little-endian        n = bytes of the header
    offset 8   n bytes of JSON          {"__metadata__": {str: str},
                                         "<tensor>": {"dtype": str, "shape": [int], "data_offsets": [begin, end]}, ...}
    offset 8+n data                     begin and end count from here; the tensors fill it without gap or overlap

`transformers` pads the header so that the data starts at a multiple of 8; MLX does not: nothing may be assumed of
alignment. Follows https://github.com/huggingface/safetensors (README "Format", `safetensors/src/tensor.rs`), with its
limit of 100 MB on a header. Not covered: which tensors a model needs (`models`).
"""

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from colibri_mp.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
DTYPE_BITS: dict[str, int] = {
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
_LFS_POINTER = b"version https://git-lfs"
_INCOMPLETE = "the download or copy is incomplete: fetch the file again"
_DAMAGED = "the file is damaged: fetch it again"


class TensorInfo(NamedTuple):
    """One tensor: `dtype` as safetensors names it, `offset` in bytes from the start of file `file_idx`.

    `added` is not in the file: a vector's values are that much more than what is stored (norms that are stored as w and used as 1 + w).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file_idx: int
    offset: int
    nbytes: int
    added: float = 0.0


class Header(NamedTuple):
    """A file's tensors and metadata; `digest` is the sha256 of the JSON as stored."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    digest: bytes
    file_bytes: int


_Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[_Count, ...]
    data_offsets: tuple[_Count, _Count]


def read_header(path: Path, file_idx: int = 0) -> Header:
    """Read and check the header of `path`; no tensor data is read.

    Raises `CheckpointError` naming file, tensor, values and cure for every defect.
    """
    try:
        with path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            header_bytes = _header_bytes(path, file.read(64), file_bytes)
            file.seek(8)
            raw = file.read(header_bytes)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    entries, metadata = _parse(path, raw)
    data_start = 8 + header_bytes
    _check_layout(path, entries, file_bytes - data_start)
    tensors = {}
    for name, entry in entries.items():
        begin, end = entry.data_offsets
        tensors[name] = TensorInfo(name, entry.dtype, entry.shape, file_idx, data_start + begin, end - begin)
    return Header(tensors, metadata, hashlib.sha256(raw).digest(), file_bytes)


def _header_bytes(path: Path, start: bytes, file_bytes: int) -> int:
    """The header's length from the first bytes of the file, after ruling out what is no safetensors file at all."""
    if file_bytes == 0:
        raise CheckpointError(f"{path}: the file is empty (0 bytes): {_INCOMPLETE}")
    if start.startswith(_LFS_POINTER):
        raise CheckpointError(
            f"{path}: is a git-lfs pointer, not the weights: run `git lfs pull` in that folder, or download the file"
        )
    if file_bytes < 8:
        raise CheckpointError(f"{path}: {file_bytes} bytes are too few for a safetensors file: {_INCOMPLETE}")
    header_bytes = int.from_bytes(start[:8], "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path}: states a header of {header_bytes} bytes, over the limit of {MAX_HEADER_BYTES}: "
            "this is not a safetensors file, or it is damaged"
        )
    if 8 + header_bytes > file_bytes:
        raise CheckpointError(
            f"{path}: truncated: the header alone needs {8 + header_bytes} bytes, the file has {file_bytes}: "
            f"{_INCOMPLETE}"
        )
    return header_bytes


def _parse(path: Path, raw: bytes) -> tuple[dict[str, _Entry], dict[str, str]]:
    """The header's JSON as the entry of each tensor, and the metadata."""
    name = ""
    try:
        parts = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(parts.pop("__metadata__", b"{}"), type=dict[str, str])
        decode = msgspec.json.Decoder(_Entry).decode
        entries = {}
        for name, part in parts.items():
            entries[name] = decode(part)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        where = f"tensor {name!r}: " if name else ""
        raise CheckpointError(f"{path}: {where}the header is not valid ({error}): {_DAMAGED}") from error
    _refuse_duplicates(path, raw, len(entries))
    return entries, metadata


def _refuse_duplicates(path: Path, raw: bytes, num_tensors: int) -> None:
    """Refuse a key given twice in one object; the slow exact search runs only if a cheap count is not as expected."""
    keys = (b'"dtype"', b'"shape"', b'"data_offsets"')
    if b"\\" not in raw and all(raw.count(key) == num_tensors for key in keys):
        return

    def unique(pairs: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise CheckpointError(f"{path}: the header names {key!r} twice: {_DAMAGED}")
            seen.add(key)

    try:
        json.loads(raw.decode(), object_pairs_hook=unique)
    except RecursionError as error:
        raise CheckpointError(f"{path}: the header is nested too deeply: {_DAMAGED}") from error


def _check_layout(path: Path, entries: dict[str, _Entry], data_bytes: int) -> None:
    """Check each tensor's size, then that all of them together fill the data exactly."""
    spans = np.empty((len(entries), 2), np.int64)  # [tensors, (begin, end)]
    for row, (name, entry) in enumerate(entries.items()):
        bits = DTYPE_BITS.get(entry.dtype)
        if bits is None:
            raise CheckpointError(
                f"{path}: tensor {name!r} has the unknown dtype {entry.dtype!r}; known: {', '.join(DTYPE_BITS)}"
            )
        begin, end = spans[row] = entry.data_offsets
        if (end - begin) * 8 != math.prod(entry.shape) * bits:
            raise CheckpointError(
                f"{path}: tensor {name!r}: {entry.dtype} {list(entry.shape)} needs {math.prod(entry.shape) * bits} "
                f"bits, its offsets [{begin}, {end}] span {(end - begin) * 8}: {_DAMAGED}"
            )
    _check_spans(path, list(entries), spans, data_bytes)


def _check_spans(path: Path, names: list[str], spans: npt.NDArray[np.int64], data_bytes: int) -> None:
    """Check that `spans` [tensors, (begin, end)], sorted, run from 0 to `data_bytes` without gap or overlap."""
    needed = int(spans[:, 1].max(initial=0))
    if needed > data_bytes:
        name = names[int(spans[:, 1].argmax())]
        raise CheckpointError(
            f"{path}: truncated, or an offset out of range: tensor {name!r} ends at byte {needed} of the data, "
            f"the file has {data_bytes}: {_INCOMPLETE}"
        )
    if needed < data_bytes:
        raise CheckpointError(f"{path}: {data_bytes - needed} bytes after the last tensor belong to none: {_DAMAGED}")
    order = np.lexsort((spans[:, 1], spans[:, 0]))
    begins, ends = spans[order, 0], spans[order, 1]
    previous_ends = np.concatenate(([0], ends[:-1]))
    for row in np.flatnonzero(begins != previous_ends)[:1]:
        name, begin, previous_end = names[order[row]], int(begins[row]), int(previous_ends[row])
        if begin < previous_end:
            raise CheckpointError(
                f"{path}: tensors {names[order[row - 1]]!r} and {name!r} overlap: the first ends at byte "
                f"{previous_end} of the data, the second begins at {begin}: {_DAMAGED}"
            )
        raise CheckpointError(
            f"{path}: {begin - previous_end} bytes before tensor {name!r} (data offset {begin}) belong to none: "
            f"{_DAMAGED}"
        )
