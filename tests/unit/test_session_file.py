"""Session files: what was written comes back, and every damage is a named error."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from colibri_mp.errors import SessionError, WriteError
from colibri_mp.session_file import MAGIC, SessionHead, read_session, write_session

IDENTITY: dict[str, Any] = {"fingerprint": "f00d", "planes": 3}
TOKENS = list(range(70_000, 70_032))
BLOCKS = [np.arange(40, dtype=np.uint8), np.full(40, 7, np.uint8)]
STATE = np.arange(100, 130, dtype=np.uint8)


class Received:
    """All that a file holds."""

    def __init__(self) -> None:
        self.heads: list[SessionHead] = []
        self.blocks: list[NDArray[np.uint8]] = []
        self.states: list[NDArray[np.uint8]] = []

    def start(self, head: SessionHead) -> None:
        self.heads.append(head)

    def take_block(self, idx: int, data: NDArray[np.uint8]) -> None:
        assert idx == len(self.blocks)
        self.blocks.append(data.copy())

    def take_state(self, data: NDArray[np.uint8]) -> None:
        self.states.append(data.copy())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a file of two blocks and a state."""
    path = tmp_path_factory.mktemp("session") / "a"
    assert write_session(path, IDENTITY, TOKENS, 40, BLOCKS, STATE) == path.stat().st_size
    assert path.stat().st_mode & 0o777 == 0o600
    return path.read_bytes()


def read(path: Path) -> Received:
    """Head, blocks and state."""
    received = Received()
    assert read_session(path, received) == path.stat().st_size
    return received


def test_comes_back_as_it_was(saved: bytes, tmp_path: Path) -> None:
    """Identity, tokens, blocks and state, bit for bit."""
    (tmp_path / "a").write_bytes(saved)
    received = read(tmp_path / "a")
    assert received.heads == [SessionHead(IDENTITY, TOKENS, 40, 30)]
    np.testing.assert_array_equal(received.blocks, BLOCKS)
    np.testing.assert_array_equal(received.states, [STATE])


def test_there_may_be_no_state(tmp_path: Path) -> None:
    """A model without recurrent layers has none, and none is received."""
    write_session(tmp_path / "a", IDENTITY, TOKENS, 40, BLOCKS)
    received = read(tmp_path / "a")
    np.testing.assert_array_equal(received.blocks, BLOCKS)
    assert received.states == []


def test_bytes_are_as_documented(saved: bytes) -> None:
    """Magic, version, header size, header, tokens, blocks, state, checksum."""
    header = json.dumps({"identity": IDENTITY, "num_tokens": 32, "block_bytes": 40, "state_bytes": 30}).encode()
    body = b"CLBRSESS" + struct.pack("<II", 2, len(header)) + header
    body += struct.pack("<32i", *TOKENS) + bytes(range(40)) + b"\x07" * 40 + bytes(range(100, 130))
    assert saved == body + xxhash.xxh3_128_digest(body)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damage_is_found(saved: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A flipped bit anywhere, a cut anywhere, bytes too many: a `SessionError`, never data."""
    changed = bytearray(saved)
    match data.draw(st.sampled_from(["flip", "cut", "longer"])):
        case "flip":
            changed[data.draw(st.integers(0, len(saved) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        case "cut":
            del changed[data.draw(st.integers(0, len(saved) - 1)) :]
        case "longer":
            changed += data.draw(st.binary(min_size=1, max_size=40))
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(changed)
    with pytest.raises(SessionError):
        read(path)


ODD = b'{"identity":{},"num_tokens":17,"block_bytes":40,"state_bytes":0}'


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "ends 16 bytes too early"),
        (b"no session at all, but long enough", "is no session file"),
        (MAGIC + struct.pack("<II", 9, 2) + b"{}", "version 9"),
        (MAGIC + struct.pack("<II", 2, 1 << 30), "header is to have 1073741824 bytes"),
        (MAGIC + struct.pack("<II", 2, 2) + b"{}", "header cannot be read"),
        (MAGIC + struct.pack("<II", 2, len(ODD)) + ODD, "make no sense"),
        (MAGIC + struct.pack("<II", 1, 2) + b"{}", "version 1"),
    ],
)
def test_what_is_no_session_says_so(content: bytes, what: str, tmp_path: Path) -> None:
    """The message says what is wrong, and with which file."""
    path = tmp_path / "bad"
    path.write_bytes(content)
    with pytest.raises(SessionError, match=what) as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """No file is an error of the session, not of the program."""
    with pytest.raises(SessionError, match="No such file"):
        read(tmp_path / "nothing")


def test_a_write_that_fails_leaves_what_was_there(saved: bytes, tmp_path: Path) -> None:
    """The old file stays as it was, and no part of a new one is left."""
    path = tmp_path / "a"
    path.write_bytes(saved)

    def breaks_off() -> Any:
        yield BLOCKS[0]
        raise OSError(28, "No space left on device")

    with pytest.raises(WriteError, match="No space left"):
        write_session(path, IDENTITY, TOKENS, 40, breaks_off())
    assert path.read_bytes() == saved
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(WriteError, match="No such file"):
        write_session(tmp_path / "nowhere" / "a", IDENTITY, TOKENS, 40, BLOCKS)
