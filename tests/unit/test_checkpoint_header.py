"""The safetensors header: what is read from good files, and the one error that each defect gives."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_cases import FIXTURE_IDS, FIXTURES, Header, data_bytes, header_of, write_file
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from colibri_mp.checkpoint.safetensors_header import DTYPE_BITS, MAX_HEADER_BYTES, read_header
from colibri_mp.errors import CheckpointError

SHAPES = {"a": ("BF16", (2, 3)), "b": ("F32", (4,)), "c": ("U8", (0, 7)), "d": ("I64", ())}


def entry(header: Header, name: str, **changes: object) -> Header:
    """The header with fields of one tensor changed."""
    return {**header, name: {**header[name], **changes}}


@pytest.mark.parametrize("folder", FIXTURES, ids=FIXTURE_IDS)
def test_agrees_with_the_reference_library(folder: Path) -> None:
    """Names, dtypes, shapes, metadata and bytes are those that the safetensors library reads."""
    for path in folder.glob("*.safetensors"):
        header, content = read_header(path), path.read_bytes()
        with safe_open(path, "np") as reference:
            assert header.tensors.keys() == set(reference.keys())
            assert header.metadata == (reference.metadata() or {})
            for name, info in header.tensors.items():
                piece = reference.get_slice(name)
                assert (info.dtype, list(info.shape)) == (piece.get_dtype(), piece.get_shape())
                if info.dtype in ("U32", "U8", "F32", "F16"):  # numpy has no bf16
                    assert reference.get_tensor(name).tobytes() == content[info.offset : info.offset + info.nbytes]


def test_small_file(tmp_path: Path) -> None:
    """Scalars and empty tensors are fine, and offsets count from the start of the file."""
    header = header_of(SHAPES)
    path = write_file(tmp_path / "x.safetensors", header, bytes(data_bytes(header)))
    tensors = read_header(path, file_idx=3).tensors
    assert [(info.nbytes, info.file_idx) for info in tensors.values()] == [(12, 3), (16, 3), (0, 3), (8, 3)]
    assert tensors["b"].offset == tensors["a"].offset + 12 == 8 + len(json.dumps(header)) + 12


GOOD = header_of(SHAPES)
TWICE = json.dumps({"a": GOOD["a"]})[:-1] + "," + json.dumps({"a": GOOD["a"]})[1:]
INNER_TWICE = '{"a": {"dtype": "U8", "dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}'
ESCAPED_TWICE = '{"a": {"dtype": "U8", "d\\u0074ype": "U8", "shape": [1], "data_offsets": [0, 1]}}'
BAD_HEADERS: dict[str, tuple[Header | bytes, int, str]] = {
    "not json": (b"{nonsense", 0, "header is not valid"),
    "not an object": (b"[1, 2]", 0, "header is not valid"),
    "not utf-8": (b'{"\xff": 1}', 0, "header is not valid"),
    "metadata not text": ({"__metadata__": {"a": 1}}, 0, "header is not valid"),
    "no shape": ({"a": {"dtype": "U8", "data_offsets": [0, 1]}}, 1, "tensor 'a'.*missing.*shape"),
    "negative": (entry(GOOD, "a", shape=[-1, 2]), 36, "tensor 'a'.*shape"),
    "fraction": (entry(GOOD, "a", shape=[1.5, 2]), 36, "tensor 'a'.*shape"),
    "huge number": (entry(GOOD, "b", data_offsets=[0, 1 << 80]), 36, "tensor 'b'.*data_offsets"),
    "unknown dtype": (entry(GOOD, "b", dtype="F31"), 36, "tensor 'b' has the unknown dtype 'F31'"),
    "wrong shape": (entry(GOOD, "b", shape=[5]), 36, r"tensor 'b': F32 \[5\] needs 160 bits.*span 128"),
    "wrong dtype": (entry(GOOD, "b", dtype="BF16"), 36, r"tensor 'b': BF16 \[4\] needs 64 bits.*span 128"),
    "end before begin": (entry(GOOD, "b", data_offsets=[16, 0]), 36, "tensor 'b'.*span -128"),
    "overlap": (entry(GOOD, "b", data_offsets=[10, 26]), 36, "'a' and 'b' overlap.*12.*10"),
    "same place": ({**GOOD, "e": GOOD["d"]}, 36, "'d' and 'e' overlap"),
    "out of range": (entry(GOOD, "d", data_offsets=[128, 136]), 36, "tensor 'd' ends at byte 136.*has 36"),
    "gap": (entry(GOOD, "d", data_offsets=[30, 38]), 38, "2 bytes before tensor 'd'.*belong to none"),
    "gap at the start": ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}, 2, "1 bytes before tensor 'a'"),
    "trailing bytes": (GOOD, 40, "4 bytes after the last tensor"),
    "no tensors but data": ({}, 4, "4 bytes after the last tensor"),
    "truncated": (GOOD, 35, "truncated.*'d' ends at byte 36.*has 35"),
    "named twice": (TWICE.encode(), 12, "names 'a' twice"),
    "field twice": (INNER_TWICE.encode(), 1, "names 'dtype' twice"),
    "field twice, escaped": (ESCAPED_TWICE.encode(), 1, "names 'dtype' twice"),
}


@pytest.mark.parametrize("case", BAD_HEADERS.values(), ids=BAD_HEADERS.keys())
def test_each_defect_of_a_header_is_named(tmp_path: Path, case: tuple[Header | bytes, int, str]) -> None:
    """Every defect is one CheckpointError that begins with the file and says what is wrong."""
    header, size, message = case
    path = write_file(tmp_path / "x.safetensors", header, bytes(size))
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(path)
    assert str(caught.value).startswith(str(path))


BAD_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "few bytes": (b"12345", "5 bytes are too few"),
    "git-lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
    "over the limit": ((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + bytes(64), "over the limit of 100000000"),
    "no safetensors": (b"<!DOCTYPE html><html>" + bytes(64), "over the limit"),
    "header cut off": ((500).to_bytes(8, "little") + b'{"a":', "truncated: the header alone needs 508 bytes.*has 13"),
}


@pytest.mark.parametrize("case", BAD_FILES.values(), ids=BAD_FILES.keys())
def test_what_is_no_safetensors_file(tmp_path: Path, case: tuple[bytes, str]) -> None:
    """Files that are something else are recognised before their contents are parsed."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(case[0])
    with pytest.raises(CheckpointError, match=case[1]):
        read_header(path)


def test_missing_file(tmp_path: Path) -> None:
    """A file that cannot be opened is a CheckpointError too."""
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        read_header(tmp_path / "absent.safetensors")


def test_only_the_header_is_read(tmp_path: Path) -> None:
    """A header that speaks of a terabyte is read from a sparse file at once."""
    header = header_of({"a": ("U8", (1 << 40,))})
    path = write_file(tmp_path / "x.safetensors", header, b"")
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + (1 << 40))
    assert read_header(path).tensors["a"].nbytes == 1 << 40


MLX_FILE = (FIXTURES[0] / "model.safetensors").read_bytes()
Edit = Callable[[bytearray], None]


@st.composite
def edits(draw: st.DrawFn) -> Edit:
    """A change of a few bytes: overwritten, removed or inserted, mostly in the header."""
    size = 8 + int.from_bytes(MLX_FILE[:8], "little")
    begin = draw(st.integers(0, size))
    length = draw(st.integers(0, 8))
    replacement = draw(st.one_of(st.binary(max_size=8), st.sampled_from([b"0", b"9", b'"', b",", b"}", b"[0,", b"U8"])))

    def edit(content: bytearray) -> None:
        content[begin : begin + length] = replacement

    return edit


@settings(max_examples=300, deadline=None)
@given(st.lists(edits(), min_size=1, max_size=4), st.integers(0, 64))
def test_damaged_files_give_an_error_or_a_consistent_table(
    tmp_path_factory: pytest.TempPathFactory, changes: list[Edit], cut: int
) -> None:
    """Whatever bytes are changed, nothing but CheckpointError comes out, or tensors that tile the file exactly."""
    content = bytearray(MLX_FILE)
    for change in changes:
        change(content)
    path = tmp_path_factory.getbasetemp() / "fuzz.safetensors"
    path.write_bytes(content[: len(content) - cut])
    try:
        tensors = read_header(path).tensors
    except CheckpointError:
        return
    position = 8 + int.from_bytes(content[:8], "little")
    for info in sorted(tensors.values(), key=lambda info: (info.offset, info.nbytes)):
        count = 1
        for dim in info.shape:
            count *= dim
        assert (info.offset, info.nbytes * 8) == (position, count * DTYPE_BITS[info.dtype])
        position += info.nbytes
    assert position == path.stat().st_size
