"""Conversion: what is kept and quantised, interruptions and full disks at any moment, and what is refused before writing."""

import errno
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
from checkpoint_cases import copy_of, edit_json, edit_tensors, fixture
from conversion import Nth, Silent, files_of, made, packed_slab
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from colibri_mp.checkpoint import Checkpoint
from colibri_mp.checkpoint.container import LayerHeader
from colibri_mp.checkpoint.convert import Options, conversion, files, slabs
from colibri_mp.checkpoint.convert.files import Entry, header_block, header_room
from colibri_mp.checkpoint.hub import resolve
from colibri_mp.checkpoint.safetensors_header import read_header
from colibri_mp.errors import CheckpointError, ColibriError, ConfigError, ReadError, WriteError
from colibri_mp.formats import Encoding
from colibri_mp.kernels import reference
from colibri_mp.kernels.layout import pack
from colibri_mp.kernels.quantising import quantise
from colibri_mp.models import load_model
from colibri_mp.recoding import choose

BF16, Q3, Q4, Q6, Q8 = (
    Encoding("bf16"), *(Encoding("affine", bits, 64, "bf16") for bits in (3, 4, 6, 8)),
)  # fmt: skip
MXFP4, MXFP8 = Encoding("mxfp4", 4, 32, "u8"), Encoding("mxfp8", 8, 32, "u8")
FP8 = Encoding("fp8", 8, 128, "f32")
REALLY_OPEN = Checkpoint.open
Q4_32, Q8_32 = Encoding("affine", 4, 32, "bf16"), Encoding("affine", 8, 32, "bf16")


# -- what becomes of an encoding ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "bits", "target"),
    [
        *((stored, "stored", stored) for stored in (BF16, Q3, Q4, MXFP4, MXFP8)),
        *((BF16, bits, target) for bits, target in (("4", Q4_32), ("8", Q8_32), ("mixed", Q8_32))),
        *((Q8, bits, target) for bits, target in (("4", Q4_32), ("8", Q8), ("mixed", Q8))),
        *((Q4, bits, Q4) for bits in ("4", "8", "mixed")),
        *((Q3, bits, Q3) for bits in ("4", "8", "mixed")),
        *((Q6, bits, target) for bits, target in (("4", Q4_32), ("8", Q6))),
        *((MXFP4, bits, MXFP4) for bits in ("4", "8", "mixed")),
        *((stored, bits, target) for stored in (MXFP8, FP8) for bits, target in (("4", Q4_32), ("8", stored))),
    ],
)
def test_choice(stored: Encoding, bits: Any, target: Encoding) -> None:
    """Nothing becomes wider than it was, and nothing is rounded that need not be (down, groups of 32)."""
    recoding = choose(stored, "down", bits, 32)
    assert recoding.target == target
    assert recoding.is_quantised == (target in (Q4_32, Q8_32))


def test_mixed_is_wider_in_down() -> None:
    """Gate and up 4 bits, down 8."""
    widths = [choose(BF16, projection, "mixed", 64).target.bits for projection in ("gate", "up", "down")]
    assert widths == [4, 4, 8]


# -- quantised containers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "bits"),
    [*itertools.product(("olmoe", "qwen3_moe_fused"), ("4", "8", "mixed")), ("qwen3_moe_mxfp8", "4")],
)
def test_quantised_slabs(tmp_path: Path, name: str, bits: Any) -> None:
    """Slabs hold what the quantiser gives for whole matrices, in the encodings of the header; errors are stated truly."""
    report = made(fixture(name), tmp_path / "out", Options(bits, 32))
    before, after = Checkpoint.open(fixture(name)), Checkpoint.open(tmp_path / "out")
    assert load_model(after).expert_layers[0].gate == Q4_32 if bits != "8" else Q8_32
    layer = load_model(before).expert_layers[1]
    packed = after.packed_layers[layer.layer].header
    quantised = {projection: packed.encodings[i] for i, projection in enumerate(("gate", "up", "down"))}
    sums = np.zeros((3, 3))
    for expert in range(layer.num_experts):
        matrices = iter(expert_matrices(before, layer, expert))
        parts: list[np.ndarray] = []
        for i, (encoding, values) in enumerate(zip(quantised.values(), matrices, strict=True)):
            done = quantise(values, encoding.bits, 32)
            parts += done[:3]
            sums[i] += [errors.sum(dtype=float) for errors in done[3:]]
        expected = pack_parts(packed, parts)
        place = load_model(after).expert_layers[1]
        found = after.read(int(place.file_idx[expert, 0]), int(place.offset[expert, 0]), packed.slab_bytes)
        np.testing.assert_array_equal(found, expected)
    stated = [msgspec.structs.astuple(packed.rounding[projection]) for projection in quantised]
    np.testing.assert_allclose(stated, sums, rtol=1e-12)
    for found_projection in report.projections:
        assert found_projection.error is not None
        assert found_projection.plain_error is not None
        assert 0 < found_projection.error < found_projection.plain_error < 0.2


def expert_matrices(checkpoint: Checkpoint, layer: Any, expert: int) -> list[np.ndarray]:
    """gate, up, down as float32."""
    places = zip(layer.file_idx[expert], layer.offset[expert], layer.piece_bytes, strict=True)
    pieces = iter([checkpoint.read(*map(int, place)) for place in places])
    wide, narrow = (layer.width, layer.hidden), (layer.hidden, layer.width)
    return [
        reference.dequantise(encoding, *dims, [next(pieces) for _ in encoding.parts])
        for encoding, dims in ((layer.gate, wide), (layer.up, wide), (layer.down, narrow))
    ]


def pack_parts(header: LayerHeader, parts: list[np.ndarray]) -> np.ndarray:
    """A slab from the parts of its three matrices."""
    slab = np.zeros(header.slab_bytes, np.uint8)
    for i, (encoding, piece) in enumerate(zip(header.encodings, header.pieces, strict=True)):
        out = slab[piece.offset : piece.offset + piece.nbytes]
        pack(encoding, piece.rows, piece.cols, parts[3 * i : 3 * i + 3], out)
    return slab


def test_row_blocks_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large matrices are converted in blocks of rows, in several threads: the same bytes."""
    for name, values in (("whole", 1 << 20), ("blocks", 1024)):
        monkeypatch.setattr(slabs, "_BLOCK_VALUES", values)
        monkeypatch.setattr(conversion, "usable_cores", lambda: (3, "for the test"))
        made(fixture("qwen3_moe"), tmp_path / name, Options("mixed", 32))
    assert files_of(tmp_path / "whole") == files_of(tmp_path / "blocks")


def test_stored_experts_that_are_narrow_enough_are_kept(tmp_path: Path) -> None:
    """A 4-bit source asked for 8 bits: the bytes of a lossless conversion, and a report that says why."""
    report = made(fixture("qwen3_moe_q4"), tmp_path / "eight", Options("8", 64))
    made(fixture("qwen3_moe_q4"), tmp_path / "stored")
    name = "experts-00000.safetensors"
    assert (tmp_path / "eight" / name).read_bytes() == (tmp_path / "stored" / name).read_bytes()
    assert report.projections[0].reason == "as stored: 4 bits are no more than 8"


# -- what goes along ---------------------------------------------------------------------------------------------------


def test_other_files(tmp_path: Path) -> None:
    """Tokenizer, templates, settings and licence go along; what else lies in the folder does not."""
    source = copy_of("qwen3_moe_q4", tmp_path)
    (source / "additional_chat_templates").mkdir()
    wanted = ["generation_config.json", "additional_chat_templates/tools.jinja", "LICENSE.txt", "merges.txt"]
    for name in [*wanted, "usage.json", "notes.txt"]:
        (source / name).write_text("{}")
    edit_json(source / "config.json", lambda config: config.update(odd={"__float__": "Infinity"}))
    made(source, tmp_path / "out")
    weights = ["resident.safetensors", "experts-00000.safetensors", "experts-00001.safetensors"]
    texts = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
    assert sorted(files_of(tmp_path / "out")) == sorted([*weights, *texts, *wanted, "config.json"])
    for name in [*wanted, *texts]:
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config.pop("colibri_container")
    assert config == json.loads((source / "config.json").read_text())


def test_progress_and_report(tmp_path: Path) -> None:
    """Every phase ends at its total, and the report counts what is on the disk."""
    listener = Silent()
    report = made(fixture("qwen3_moe_mxfp4"), tmp_path / "out", listener=listener)
    assert listener.phases == ["converting", "reading back"]
    assert listener.last[0] == listener.last[1] == report.expert_bytes + report.resident_bytes
    assert report.stored_expert_bytes < report.expert_bytes <= report.stored_expert_bytes + 16 * 4096
    assert report.written_bytes == sum(len(data) for name, data in files_of(tmp_path / "out").items() if "safe" in name)
    assert json.loads(json.dumps(report.as_dict()))["projections"][2]["packed"] == "mxfp4 4 bit in groups of 32"


entries = st.lists(
    st.builds(
        lambda name, size: Entry(name, "U8", (size,), size),
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=20).filter(lambda name: name != "__metadata__"),
        st.integers(0, 5000),
    ),
    max_size=5,
    unique_by=lambda entry: entry.name,
)


@given(entries=entries, value=st.text(max_size=50), more=st.text("0123456789", max_size=600))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_headers_are_valid(tmp_path: Path, entries: list[Entry], value: str, more: str) -> None:
    """Whatever the names and values: our own reader, which is as strict as safetensors', finds the data on a page."""
    room = header_room(entries, {"colibri": value})
    block = header_block(entries, {"colibri": value + more}, room)
    path = tmp_path / "x.safetensors"
    path.write_bytes(block.tobytes() + bytes(sum(entry.nbytes for entry in entries)))
    header = read_header(path)
    assert header.metadata == {"colibri": value + more}
    offsets = [info.offset for info in header.tensors.values()]
    assert room % 4096 == block.ctypes.data % 4096 == 0
    assert offsets == [room + sum(entry.nbytes for entry in entries[:i]) for i in range(len(entries))]


# -- interruptions -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of an undisturbed conversion."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    made(fixture("qwen3_moe_mixed"), folder, Options("4", 32))
    return files_of(folder)


@pytest.mark.parametrize("function", ["pwrite", "fsync"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))], ids=str)
def test_interrupted_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, bytes], function: str, error: BaseException
) -> None:
    """Whichever write fails: nothing half is left, and the next run keeps what was finished and gives the same bytes."""
    source, options = fixture("qwen3_moe_mixed"), Options("4", 32)
    number, was_interrupted = 0, True
    while was_interrupted:
        folder = tmp_path / str(number)
        with monkeypatch.context() as patch:
            patch.setattr(files.os, function, Nth(getattr(os, function), number, error))
            was_interrupted = is_interrupted(source, folder, options)
        if was_interrupted:
            names = files_of(folder)
            assert not [name for name in names if name.endswith(".partial")]
            report = made(source, folder, options)
            assert report.kept_files == len([name for name in names if name.endswith(".safetensors")])
        assert files_of(folder) == whole
        number += 5 if function == "pwrite" else 2
    assert number > 10


def is_interrupted(source: Path, folder: Path, options: Options) -> bool:
    """Whether a conversion ends with Ctrl-C or a full disk; any other error is raised."""
    try:
        made(source, folder, options)
    except KeyboardInterrupt:
        return True
    except WriteError as error:
        return "No space left on device" in str(error)
    return False


def test_killed_in_the_middle(tmp_path: Path, whole: dict[str, bytes]) -> None:
    """SIGKILL while a layer is written: the next run removes the torn file, keeps the finished ones, same bytes."""
    script = f"""
import os, signal
from pathlib import Path
from colibri_mp.checkpoint.convert import Options, convert, files
from conversion import Silent
write = files.PartialFile.write
def write_and_die(self, data, offset):
    write(self, data, offset)
    if self._path.name == "experts-00003.safetensors" and offset > 3 * data.nbytes:
        os.kill(os.getpid(), signal.SIGKILL)
files.PartialFile.write = write_and_die
convert(Path({str(fixture("qwen3_moe_mixed"))!r}), Path({str(tmp_path / "out")!r}), Options("4", 32), Silent())
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", script], env=environment, timeout=100)
    assert done.returncode == -9
    left = set(files_of(tmp_path / "out"))
    finished = {"resident.safetensors", "experts-00000.safetensors", "experts-00001.safetensors"}
    assert left == {"conversion.json", "experts-00003.safetensors.partial"} | finished
    with pytest.raises(CheckpointError, match="has not been finished"):
        Checkpoint.open(tmp_path / "out")
    listener = Silent()
    report = made(fixture("qwen3_moe_mixed"), tmp_path / "out", Options("4", 32), listener)
    assert listener.phases == ["verifying what is there", "converting", "reading back"]
    assert report.kept_files == len(finished)
    assert files_of(tmp_path / "out") == whole


def interrupted(source: Path, folder: Path, options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversion that was stopped after its last layer."""
    with monkeypatch.context() as patch:
        patch.setattr(conversion._Conversion, "copy_texts", Nth(print, 0, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            made(source, folder, options)


@pytest.mark.parametrize("name", ["resident.safetensors", "experts-00001.safetensors"])
@pytest.mark.parametrize("place", [0.3, 0.99, 1.0])
def test_damaged_while_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, bytes], name: str, place: float
) -> None:
    """A flipped byte in a finished file, header or data, is found, said, and the file written again."""
    folder = tmp_path / "out"
    interrupted(fixture("qwen3_moe_mixed"), folder, Options("4", 32), monkeypatch)
    flip(folder / name, int(place * (len(whole[name]) - 1)))
    listener = Silent()
    report = made(fixture("qwen3_moe_mixed"), folder, Options("4", 32), listener)
    assert (len(listener.notes), report.kept_files) == (1, 3)
    assert name in listener.notes[0]
    assert "written again" in listener.notes[0]
    assert files_of(folder) == whole


def flip(path: Path, offset: int) -> None:
    """Change one byte of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("experts-00003.safetensors", r"layer 3, expert 7 is damaged: its \d+ bytes at \d+ have the checksum"),
        ("resident.safetensors", r"resident.safetensors: is damaged: its data has the checksum"),
    ],
)
def test_final_check_finds_a_flipped_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, bytes], name: str, wanted: str
) -> None:
    """A disk that does not give back what was written: an error that names the expert; the next run mends it."""
    folder, copy_texts = tmp_path / "out", conversion._Conversion.copy_texts

    def copy_and_flip(self: conversion._Conversion) -> None:
        copy_texts(self)
        flip(folder / name, len(whole[name]) - 100)

    with monkeypatch.context() as patch:
        patch.setattr(conversion._Conversion, "copy_texts", copy_and_flip)
        with pytest.raises(WriteError, match=wanted + ".*Run the same command again"):
            made(fixture("qwen3_moe_mixed"), folder, Options("4", 32))
    assert not (folder / "config.json").exists()
    assert made(fixture("qwen3_moe_mixed"), folder, Options("4", 32)).kept_files == 3
    assert files_of(folder) == whole


# -- refusals ----------------------------------------------------------------------------------------------------------


def refused(kind: type[ColibriError], message: str, source: Path, folder: Path, options: Options | None = None) -> None:
    """The conversion ends with this error, and the folder is as it was before."""
    before = files_of(folder) if folder.exists() else None
    with pytest.raises(kind, match=message):
        made(source, folder, options)
    assert (files_of(folder) if folder.exists() else None) == before


def test_foreign_folder(tmp_path: Path) -> None:
    """A folder with something else in it, a finished container included, and a file are left alone."""
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "thesis.tex").write_text("...")
    refused(ConfigError, r"some: is not empty.*\(thesis.tex\)", fixture("olmoe"), tmp_path / "some")
    refused(ConfigError, "is a file", fixture("olmoe"), tmp_path / "some" / "thesis.tex")
    made(fixture("olmoe"), tmp_path / "out")
    refused(ConfigError, r"is not empty.*config.json", fixture("olmoe"), tmp_path / "out")


def test_other_source_or_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unfinished conversion goes on with the same source and options only."""
    folder = tmp_path / "out"
    interrupted(fixture("qwen3_moe"), folder, Options("4", 32), monkeypatch)
    refused(ConfigError, "with bits = '4', this one has '8'", fixture("qwen3_moe"), folder, Options("8", 32))
    refused(ConfigError, "with source = '", fixture("olmoe"), folder, Options("4", 32))
    (folder / "conversion.json").write_text("{")
    refused(ConfigError, "conversion.json cannot be read", fixture("qwen3_moe"), folder, Options("4", 32))


def test_two_at_once(tmp_path: Path) -> None:
    """A second process is refused while one converts."""
    (tmp_path / "out").mkdir()
    with (tmp_path / "out" / "conversion.json").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        refused(ConfigError, "another process is converting", fixture("olmoe"), tmp_path / "out")
    made(fixture("olmoe"), tmp_path / "out")


def test_full_disk_before_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused with both numbers before the folder is made; what is there already does not count."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**6))
    refused(WriteError, r"\d+ kB are still to be written, 1 MB are free", fixture("olmoe"), tmp_path / "a" / "out")


def test_container_as_source(tmp_path: Path) -> None:
    """A container is not converted again."""
    made(fixture("olmoe"), tmp_path / "out")
    refused(CheckpointError, "is a container already", tmp_path / "out", tmp_path / "again")


def test_damaged_source(tmp_path: Path) -> None:
    """All headers are checked before anything is written."""
    source = copy_of("olmoe", tmp_path)
    edit_tensors(source, lambda tensors: tensors.pop("model.layers.3.mlp.experts.7.down_proj.weight"))
    refused(CheckpointError, "'model.layers.3.mlp.experts.7.down_proj.weight'", source, tmp_path / "out")


def test_groups_that_do_not_fit(tmp_path: Path) -> None:
    """The experts' width, 32, is no multiple of 64: refused with the size that fits."""
    wanted = "rows of down_proj have 32 weights.*groups of 64: give --group-size 32"
    refused(ConfigError, wanted, fixture("olmoe"), tmp_path / "out", Options("4", 64))


@pytest.mark.parametrize(
    ("bits", "group_size", "message"),
    [(None, 32, "--group-size needs --bits"), ("4", 128, "must be one of 32, 64, not 128"), ("5", 64, "bits must be")],
)
def test_impossible_options(bits: Any, group_size: int, message: str) -> None:
    """Options that contradict each other are refused."""
    with pytest.raises(ConfigError, match=message):
        Options.of(bits, group_size)


@pytest.mark.parametrize(("element", "word"), [("nan", b"\xc0\x7f"), ("infinite", b"\x80\x7f")])
def test_weights_that_are_not_finite(tmp_path: Path, element: str, word: bytes) -> None:
    """Named with layer, expert and projection when they are to be quantised; kept when they are not."""
    source = copy_of("olmoe", tmp_path)
    name = "model.layers.2.mlp.experts.5.up_proj.weight"

    def damage(tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
        dtype, shape, raw = tensors[name]
        tensors[name] = (dtype, shape, raw[:400] + word + raw[402:])

    edit_tensors(source, damage)
    with pytest.raises(CheckpointError, match=r"layer 2, expert 5: up_proj has weights that are not finite"):
        made(source, tmp_path / "four", Options("4", 32))
    made(source, tmp_path / "out")
    before, after = (Checkpoint.open(folder) for folder in (source, tmp_path / "out"))
    layer, packed = (load_model(checkpoint).expert_layers[2] for checkpoint in (before, after))
    found = after.read(int(packed.file_idx[5, 0]), int(packed.offset[5, 0]), packed.stored_bytes)
    np.testing.assert_array_equal(found, packed_slab(before, layer, 5))


@pytest.mark.parametrize(
    ("kind", "size", "wanted"),
    [
        (
            ReadError,
            -200_000,
            r"layer \d, expert \d: \d+ bytes at \d+ of .*model.safetensors cannot be read: the file ends",
        ),
        (CheckpointError, 0, r"model.safetensors: has changed since the conversion began"),
    ],
)
def test_source_that_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[ColibriError], size: int, wanted: str
) -> None:
    """A source file cut or rewritten during the conversion: what was made of it since is not kept."""
    source = copy_of("qwen3_moe_q4", tmp_path)
    weights, write_layer = source / "model.safetensors", conversion._Conversion._write_layer

    def change_and_write(self: conversion._Conversion, *arguments: Any) -> None:
        os.truncate(weights, weights.stat().st_size + size)
        os.utime(weights, ns=(1, 1))
        write_layer(self, *arguments)

    monkeypatch.setattr(conversion._Conversion, "_write_layer", change_and_write)
    with pytest.raises(kind, match=wanted):
        made(source, tmp_path / "out")
    assert sorted(files_of(tmp_path / "out")) == ["conversion.json", "resident.safetensors"]


def test_memory_is_that_of_an_expert(tmp_path: Path) -> None:
    """Neither a layer's experts (1.8 MB) nor all resident tensors (1.3 MB) are in memory at once."""
    source = resolve("demo")
    made(source, tmp_path / "warm")
    checkpoint = Checkpoint.open(source)
    tracemalloc.start()
    try:
        with patch.object(Checkpoint, "open", lambda folder: checkpoint if folder == source else REALLY_OPEN(folder)):
            made(source, tmp_path / "out")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000
