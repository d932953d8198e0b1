"""Files of a conversion: each appears under its name only when it is whole and on the disk; headers; checksums read back.

    experts-00003.safetensors.partial   data from byte `room` on, the header last, since it holds the checksums
              │ fsync, rename, fsync of the folder
    experts-00003.safetensors           read back from the disk and held against the checksums at the end

Every error of the system becomes one that names the file and says how to go on.
"""

import contextlib
import errno
import fcntl
import json
import mmap
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
import numpy as np
import xxhash

from colibri_mp.checkpoint.container import (
    ALIGNMENT,
    LayerHeader,
    ResidentHeader,
    read_layer_header,
    read_resident_header,
    slabs_name,
)
from colibri_mp.checkpoint.safetensors_header import read_header
from colibri_mp.checkpoint.source import fill
from colibri_mp.errors import CheckpointError, WriteError
from colibri_mp.kernels.layout import Bytes

CHUNK_BYTES = 4 << 20
PARTIAL_SUFFIX = ".partial"
_SPARE = 2048
"""Bytes by which a header may grow when its last numbers are known."""


class Entry(NamedTuple):
    """A tensor to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def header_room(entries: Iterable[Entry], metadata: Mapping[str, str]) -> int:
    """Bytes to keep free for a header of about this metadata: where the data starts, a multiple of 4096."""
    return _round_up(8 + len(_header_json(entries, metadata)) + _SPARE)


def header_block(entries: Iterable[Entry], metadata: Mapping[str, str], room: int) -> Bytes:
    """The header, padded with spaces to `room` bytes, in memory that starts on a page."""
    text = _header_json(entries, metadata)
    assert 8 + len(text) <= room, f"a header of {len(text)} bytes does not fit {room}"
    block = page_aligned(room)
    block[:] = np.frombuffer((room - 8).to_bytes(8, "little") + text.ljust(room - 8), np.uint8)
    return block


def page_aligned(nbytes: int) -> Bytes:
    """Zeroed memory that starts on a page, as direct writes need it."""
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


def checksum(data: Bytes) -> str:
    """xxh3-64 as containers state it."""
    return xxhash.xxh3_64_hexdigest(data.data)


class PartialFile:
    """A file being written; a context manager. Without `commit` nothing of it is left."""

    def __init__(self, path: Path, direct: bool = False) -> None:
        """`direct`: past the page cache where the file system allows it; all writes must be whole pages then.

        Raises `WriteError` if it cannot be made.
        """
        self._path = path
        self._partial = path.with_name(path.name + PARTIAL_SUFFIX)
        with explained(self._path):
            path.parent.mkdir(exist_ok=True)
            self._fd = os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._is_direct = direct and _set_direct(self._fd, True)

    def write(self, data: Bytes, offset: int) -> None:
        """Write all of `data` at `offset`. Raises `WriteError`."""
        left = data.data
        with explained(self._path):
            while left:
                count = self._write_some(left, offset)
                left, offset = left[count:], offset + count

    def commit(self) -> None:
        """Bring the file to the disk and give it its name. Raises `WriteError`."""
        with explained(self._path):
            os.fsync(self._fd)
            self._partial.rename(self._path)
            sync_folder(self._path.parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
        self._partial.unlink(missing_ok=True)

    def _write_some(self, data: memoryview, offset: int) -> int:
        try:
            return os.pwrite(self._fd, data, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._is_direct:
                raise
        self._is_direct = _set_direct(self._fd, False)  # some file systems refuse direct writes only now
        return os.pwrite(self._fd, data, offset)


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """What the system refuses in the block becomes a `WriteError` about `path`."""
    try:
        yield
    except OSError as error:
        raise WriteError(
            f"{path}: cannot be written: {error.strerror or error}. What is finished is kept: remove the cause (make "
            "room, if the disk is full) and run the same command again"
        ) from error


def write_whole(path: Path, content: bytes) -> None:
    """A small file, whole or not at all. Raises `WriteError`."""
    with PartialFile(path) as file:
        file.write(np.frombuffer(content, np.uint8), 0)
        file.commit()


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def verify_layer(path: Path, expected: LayerHeader, progress: Callable[[int], None]) -> LayerHeader:
    """Read an experts file back and hold every slab against its checksum; returns its header.

    `expected`: the header without checksums and rounding. `progress` is told bytes read. Raises `CheckpointError` that
    names the expert, or says what else is wrong.
    """
    header = read_header(path)
    found = read_layer_header(path, header)
    if msgspec.structs.replace(found, checksums=(), rounding={}) != expected:
        raise CheckpointError(f"{path}: is not of this conversion")
    slabs = header.tensors.get(slabs_name(expected.layer))
    if slabs is None or slabs.nbytes != expected.num_experts * expected.slab_bytes:
        raise CheckpointError(f"{path}: does not hold {expected.num_experts} slabs of {expected.slab_bytes} bytes")
    chunks = _chunks_on_disk(path, slabs.offset, slabs.nbytes, expected.slab_bytes)
    for expert, (slab, stated) in enumerate(zip(chunks, found.checksums, strict=True)):
        if checksum(slab) != stated:
            raise CheckpointError(
                f"{path}: layer {expected.layer}, expert {expert} is damaged: its {slab.nbytes} bytes at "
                f"{slabs.offset + expert * slab.nbytes} have the checksum {checksum(slab)}, not {stated}"
            )
        progress(slab.nbytes)
    return found


def verify_resident(path: Path, expected: ResidentHeader, progress: Callable[[int], None]) -> None:
    """Read the resident file back and hold it against its checksum. `expected`: its header without the checksum."""
    header = read_header(path)
    found = read_resident_header(path, header)
    if msgspec.structs.replace(found, checksum="") != expected:
        raise CheckpointError(f"{path}: is not of this conversion")
    start = min((info.offset for info in header.tensors.values()), default=header.file_bytes)
    digest = xxhash.xxh3_64()
    for chunk in _chunks_on_disk(path, start, header.file_bytes - start, CHUNK_BYTES):
        digest.update(chunk.data)
        progress(chunk.nbytes)
    if digest.hexdigest() != found.checksum:
        raise CheckpointError(
            f"{path}: is damaged: its data has the checksum {digest.hexdigest()}, not {found.checksum}"
        )


def _chunks_on_disk(path: Path, offset: int, nbytes: int, chunk_bytes: int) -> Iterator[Bytes]:
    """Pieces of a file as they are on the disk, not as the page cache remembers them; each is valid until the next."""
    buffer = page_aligned(chunk_bytes)
    try:
        with path.open("rb", buffering=0) as file:
            if sys.platform == "linux":
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            file.seek(offset)
            for start in range(0, nbytes, chunk_bytes):
                chunk = buffer[: min(chunk_bytes, nbytes - start)]
                fill(file, chunk)
                yield chunk
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read back: {error.strerror or error}") from error


def _header_json(entries: Iterable[Entry], metadata: Mapping[str, str]) -> bytes:
    fields: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for entry in entries:
        place = [offset, offset + entry.nbytes]
        fields[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": place}
        offset += entry.nbytes
    return json.dumps(fields, separators=(",", ":")).encode()


def _set_direct(fd: int, wanted: bool) -> bool:
    """Turn direct writes on or off; whether they are on now."""
    if not hasattr(os, "O_DIRECT"):
        return False
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT)
    except OSError:
        return False
    return wanted


def _round_up(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
