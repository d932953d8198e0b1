"""A session on disk: the token ids, the KV blocks that were computed for them, the state of recurrent layers after them.

Format: docs/formats.md.

    0        <8s magic><u32 version><u32 header bytes n>
    16       n bytes of JSON: identity, num_tokens, block_bytes, state_bytes
    16 + n   token ids <i4 [num_tokens], then num_tokens / 16 blocks of block_bytes, then a state of state_bytes
    end      xxh3-128 of all bytes before

Files are written whole or not at all, and read in one pass: nothing of a file counts before its checksum was right.
"""

import json
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from colibri_mp.errors import SessionError, WriteError
from colibri_mp.kernels.paged_cache import BLOCK_TOKENS
from colibri_mp.user_cache import replacing

MAGIC = b"CLBRSESS"
VERSION = 2
_START = struct.Struct("<8sII")
_MOST_HEADER_BYTES = 1 << 16
_CHECKSUM_BYTES = 16

Bytes = NDArray[np.uint8]


class _Header(msgspec.Struct):
    identity: dict[str, Any]
    num_tokens: int
    block_bytes: int
    state_bytes: int


@dataclass(frozen=True)
class SessionHead:
    """What a file says before its blocks: `identity` of the model and its settings, and the tokens, whole blocks of them.

    `state_bytes`: 0 where there is no state, as for a model without recurrent layers.
    """

    identity: dict[str, Any]
    token_ids: list[int]
    block_bytes: int
    state_bytes: int

    @property
    def num_blocks(self) -> int:
        """Blocks that follow."""
        return len(self.token_ids) // BLOCK_TOKENS


class SessionReceiver(Protocol):
    """Takes a file as it is read. Arrays are valid for the call."""

    def start(self, head: SessionHead) -> None:
        """What the file is; called first."""

    def take_block(self, idx: int, data: Bytes) -> None:
        """One block, uint8 [block_bytes], in order."""

    def take_state(self, data: Bytes) -> None:
        """The state after all tokens, uint8 [state_bytes], if there is one."""


NO_STATE: Bytes = np.zeros(0, np.uint8)


def write_session(
    path: Path,
    identity: dict[str, Any],
    token_ids: Sequence[int],
    block_bytes: int,
    blocks: Iterable[Bytes],
    state: Bytes = NO_STATE,
) -> int:
    """Write a file (0600), which takes the place of one that is there; returns its size in bytes.

    blocks: uint8 [block_bytes] each, one for 16 tokens; state: uint8, what recurrent layers know after them.

    Raises:
        WriteError: the system refuses; nothing is left behind, and a file that was there is as it was.
    """
    assert len(token_ids) % BLOCK_TOKENS == 0
    sizes = {"num_tokens": len(token_ids), "block_bytes": block_bytes, "state_bytes": state.nbytes}
    header = json.dumps({"identity": identity, **sizes}).encode()
    start = _START.pack(MAGIC, VERSION, len(header)) + header + np.array(token_ids, "<i4").tobytes()
    checksum = xxhash.xxh3_128(start)
    try:
        with replacing(path, sync=True) as file:
            file.write(start)
            for block in chain(blocks, [state]):
                checksum.update(block.data)
                file.write(block.data)
            file.write(checksum.digest())
            return file.tell()
    except OSError as error:
        raise WriteError(
            f"cannot save the session to {path}: {error.strerror or error}; choose a place with room that may be written to"
        ) from error


def read_session(path: Path, receiver: SessionReceiver) -> int:
    """Read a file into `receiver`.

    Returns the file's size. When this returns, the checksum was right; what was taken before must not be used if it raises.

    Raises:
        SessionError: no session file, of another version, truncated or damaged. What the receiver raises passes through.
    """
    try:
        with path.open("rb") as file:
            return _Reader(path, file).read(receiver)
    except OSError as error:
        raise SessionError(f"cannot read the session file {path}: {error.strerror or error}") from error


class _Reader:
    """One pass over a file, with the checksum of what was read so far."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._checksum = xxhash.xxh3_128()

    def read(self, receiver: SessionReceiver) -> int:
        magic, version, header_bytes = _START.unpack(self._take(_START.size))
        if magic != MAGIC:
            raise SessionError(f"{self._path} is no session file: it begins with {magic!r}, not {MAGIC!r}")
        if version != VERSION:
            raise SessionError(f"{self._path} has version {version} of the format, this is {VERSION}; save it again")
        header = self._header(header_bytes)
        size: int = _START.size + header_bytes + 4 * header.num_tokens + _CHECKSUM_BYTES
        size += header.num_tokens // BLOCK_TOKENS * header.block_bytes + header.state_bytes
        if (actual := os.fstat(self._file.fileno()).st_size) != size:
            raise self._damaged(f"it has {actual} bytes and should have {size}")
        token_ids = np.frombuffer(self._take(4 * header.num_tokens), "<i4").tolist()
        head = SessionHead(header.identity, token_ids, header.block_bytes, header.state_bytes)
        receiver.start(head)
        for idx in range(head.num_blocks):
            receiver.take_block(idx, np.frombuffer(self._take(header.block_bytes), np.uint8))
        if head.state_bytes:
            receiver.take_state(np.frombuffer(self._take(header.state_bytes), np.uint8))
        if self._file.read() != self._checksum.digest():
            raise self._damaged("its checksum is wrong")
        return size

    def _header(self, num_bytes: int) -> _Header:
        if num_bytes > _MOST_HEADER_BYTES:
            raise self._damaged(f"its header is to have {num_bytes} bytes")
        try:
            header = msgspec.json.decode(self._take(num_bytes), type=_Header)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._damaged(f"its header cannot be read ({error})") from error
        makes_sense = header.num_tokens >= 0 and header.num_tokens % BLOCK_TOKENS == 0 and header.block_bytes > 0
        if not makes_sense or header.state_bytes < 0:
            raise self._damaged(
                f"{header.num_tokens} tokens, blocks of {header.block_bytes} bytes and a state of {header.state_bytes} make no sense"
            )
        return header

    def _take(self, num_bytes: int) -> bytes:
        data = self._file.read(num_bytes)
        if len(data) != num_bytes:
            raise self._damaged(f"it ends {num_bytes - len(data)} bytes too early")
        self._checksum.update(data)
        return data

    def _damaged(self, how: str) -> SessionError:
        return SessionError(f"the session file {self._path} is damaged: {how}; save it again")
