"""Containers are read like any checkpoint; every defect is one error with file and values before anything is allocated."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from checkpoint_cases import FIXTURE_IDS, FIXTURES, edit_json, fixture, read_file, write_file
from conversion import made, packed_slab
from safetensors import safe_open

from colibri_mp.checkpoint import Checkpoint
from colibri_mp.checkpoint.hub import has_all_files
from colibri_mp.errors import CheckpointError
from colibri_mp.models import load_model

Edit = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A container of the 4-bit fixture; tests damage copies of it."""
    folder = tmp_path_factory.mktemp("container") / "q4"
    made(fixture("qwen3_moe_q4"), folder)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(original, tmp_path / "q4"))


def edit_metadata(path: Path, edit: Edit, room: int | None = None) -> None:
    """Change the metadata of a weight file, data left where it is, or moved to byte `room`."""
    header, data = read_file(path)
    stated = json.loads(header["__metadata__"]["colibri"])
    edit(stated)
    header["__metadata__"]["colibri"] = json.dumps(stated)
    room = room or path.stat().st_size - len(data)
    write_file(path, json.dumps(header).encode().ljust(room - 8), data)


def refused(folder: Path, *wanted: str) -> None:
    """Opening the checkpoint and finding its tensors ends with one error that says `wanted`."""
    with pytest.raises(CheckpointError) as caught:
        load_model(Checkpoint.open(folder))
    for text in wanted:
        assert text in str(caught.value)


@pytest.mark.parametrize("source", FIXTURES, ids=FIXTURE_IDS)
def test_same_model_in_another_layout(source: Path, tmp_path: Path) -> None:
    """Of every fixture: resident tensors to the byte, and slabs as the streamer would pack them from the source."""
    made(source, tmp_path / "out")
    before, after = Checkpoint.open(source), Checkpoint.open(tmp_path / "out")
    layers, packed_layers = (load_model(found, predicts=True).expert_layers for found in (before, after))
    assert [layer.layer for layer in packed_layers] == [layer.layer for layer in layers]
    for layer, packed in zip(layers, packed_layers, strict=True):
        assert packed.is_packed
        assert packed.shape == layer.shape
        assert (packed.gate, packed.up, packed.down) == (layer.gate, layer.up, layer.down)
        for expert in range(layer.num_experts):
            place = int(packed.file_idx[expert, 0]), int(packed.offset[expert, 0]), int(packed.piece_bytes[0])
            slab = packed_slab(before, layer, expert)
            np.testing.assert_array_equal(after.read(*place), slab)
            assert packed.checksums is not None
            assert packed.checksums[expert] == xxhash.xxh3_64_intdigest(slab)
    for name, info in after.tensors.items():
        if info.file_idx == 0:
            stored = before.tensors[name]
            assert (info.dtype, info.shape) == (stored.dtype, stored.shape)
            assert (after.read(0, info.offset, info.nbytes) == before.read(*stored[3:6])).all()
    slabs = {f"model.layers.{layer.layer}.experts.slabs" for layer in layers}
    others = {name for name in before.tensors if not _is_routed(name)}
    assert others | slabs == set(after.tensors)


def _is_routed(name: str) -> bool:
    return ".experts." in name or "switch_mlp" in name


def test_layer_values(original: Path) -> None:
    """One aligned piece an expert, checksums as numbers; and the layer survives pickling."""
    checkpoint = Checkpoint.open(original)
    layer = pickle.loads(pickle.dumps(load_model(checkpoint).expert_layers[1]))
    assert (layer.layer, layer.num_experts, layer.hidden, layer.width) == (1, 8, 128, 64)
    assert layer.piece_names == (("expert", "slab"),)
    assert layer.stored_bytes == layer.shape.slab_bytes
    assert not (layer.offset % 4096).any()
    assert not layer.stored_bytes % 4096
    assert layer.checksums is not None
    assert (layer.checksums.dtype, len(set(layer.checksums.tolist()))) == (np.uint64, 8)
    assert checkpoint.marker is not None
    assert checkpoint.marker.source == Checkpoint.open(fixture("qwen3_moe_q4")).fingerprint
    assert checkpoint.fingerprint != checkpoint.marker.source


def test_files_are_valid_safetensors(original: Path) -> None:
    """The reference library opens every file, and its tensors are the bytes that we read."""
    checkpoint = Checkpoint.open(original)
    for path in checkpoint.files:
        with safe_open(path, "np") as reference:
            for name in reference.keys():  # noqa: SIM118  # no mapping
                info = checkpoint.tensors[name]
                if info.dtype == "BF16":
                    continue  # numpy has no bf16
                assert reference.get_tensor(name).tobytes() == checkpoint.read(*info[3:6]).tobytes()


def test_incomplete_download_is_noticed(folder: Path) -> None:
    """A folder in a cache counts as complete only with all files that the marker calls for."""
    assert has_all_files(folder)
    (folder / "experts-00000.safetensors").unlink()
    assert not has_all_files(folder)
    shutil.rmtree(folder)
    assert not has_all_files(folder)


def test_missing_layer_file(folder: Path) -> None:
    """The file is named, and what calls for it."""
    (folder / "experts-00001.safetensors").unlink()
    refused(folder, "1 of 3 weight files", "config.json (colibri_container)", "experts-00001.safetensors")


def test_truncated_layer_file(folder: Path) -> None:
    """Sizes are held against the header."""
    path = folder / "experts-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-4096])
    refused(folder, str(path), "truncated")


def test_unfinished_conversion(folder: Path) -> None:
    """A folder without config.json that says it is unfinished: the error says how to go on."""
    (folder / "config.json").rename(folder / "conversion.json")
    refused(folder, "has not been finished", "colibri-cluster convert")


MARKER_DEFECTS: list[tuple[Edit, str]] = [
    (lambda marker: marker.update(version=2), "container of version 2, this program reads version 1"),
    (lambda marker: marker.update(layout="R16S-9"), "layout 'R16S-9', the kernels of this program read 'R16S-2'"),
    (lambda marker: marker.pop("source"), "missing required field `source`"),
    (lambda marker: marker.update(color="red"), "unknown field `color`"),
    (lambda marker: marker.update(layers=[]), "layers = []"),
    (lambda marker: marker.update(layers=[1, 0]), "must be ascending"),
    (lambda marker: marker.update(layers=[0]), "experts in layer 1, the container has them in the layers [0]"),
    (lambda marker: marker.update(source="f" * 64), "resident.safetensors: was made from another checkpoint"),
]


def test_first_layout_is_read(folder: Path) -> None:
    """Containers of R16S-1 are as they would be made now, where the sizes are: 4-bit codes here."""
    edit_json(folder / "config.json", lambda config: config["colibri_container"].update(layout="R16S-1"))
    assert load_model(Checkpoint.open(folder)).expert_layers[0].is_packed


@pytest.mark.parametrize(("edit", "message"), MARKER_DEFECTS, ids=[message for _, message in MARKER_DEFECTS])
def test_defects_of_the_marker(folder: Path, edit: Edit, message: str) -> None:
    """config.json must be of this version and layout, and belong to the files."""
    edit_json(folder / "config.json", lambda config: edit(config["colibri_container"]))
    refused(folder, message)


def test_marker_that_is_no_object(folder: Path) -> None:
    """Anything but an object is refused as a version that is not known."""
    edit_json(folder / "config.json", lambda config: config.update(colibri_container="yes"))
    refused(folder, "version None")


LAYER_DEFECTS: list[tuple[Edit, str]] = [
    (lambda header: header.update(version=2), "container of version 2"),
    (lambda header: header.update(layout="R32-1"), "layout 'R32-1'"),
    (lambda header: header.update(source="0" * 64), "files of two conversions have been mixed"),
    (lambda header: header.update(layer=0), "holds layer 0, its name says 1"),
    (lambda header: header.update(num_experts=7), "U8 [7, "),
    (lambda header: header.update(slab_bytes=4096), "U8 [8, 4096]"),
    (lambda header: header.update(hidden=256), "hidden size 256 and width 64, config.json asks for 8, 128, 64"),
    (lambda header: header["checksums"].pop(), "7 checksums for 8 experts"),
    (lambda header: header["checksums"].__setitem__(3, "xyz"), "checksum of expert 3"),
    (lambda header: header["pieces"][1].update(offset=64), "up [64, 128] at 64"),
    (lambda header: header["encodings"][0].update(bits=8), "are not how the kernels read such experts"),
    (lambda header: header["encodings"][0].update(bits=7), "with 128 columns are not supported"),
    (lambda header: header["encodings"][2].update(kind="q9"), "Invalid enum value 'q9'"),
    (lambda header: header.pop("pieces"), "missing required field `pieces`"),
]


@pytest.mark.parametrize(("edit", "message"), LAYER_DEFECTS, ids=[message for _, message in LAYER_DEFECTS])
def test_defects_of_a_layer(folder: Path, edit: Edit, message: str) -> None:
    """The metadata of a layer's file must agree with its tensor, its name, config.json and the kernels."""
    edit_metadata(folder / "experts-00001.safetensors", edit)
    refused(folder, "experts-00001.safetensors", message)


def test_misaligned_data(folder: Path) -> None:
    """A header of another length moves the slabs off the pages."""
    edit_metadata(folder / "experts-00000.safetensors", lambda _: None, room=4096 * 3 + 8)
    refused(folder, "experts-00000.safetensors", "data at byte 12296", "multiples of 4096")


def test_slabs_that_are_no_pages(folder: Path) -> None:
    """Slabs of another size are refused, though tensor and metadata agree."""
    path = folder / "experts-00000.safetensors"
    header, data = read_file(path)
    stated = json.loads(header["__metadata__"]["colibri"])
    stated["slab_bytes"] = size = stated["slab_bytes"] - 64
    tensor = {"dtype": "U8", "shape": [8, size], "data_offsets": [0, 8 * size]}
    fields = {"__metadata__": {"colibri": json.dumps(stated)}, "model.layers.0.experts.slabs": tensor}
    write_file(path, json.dumps(fields).encode().ljust(8192 - 8), data[: 8 * size])
    refused(folder, f"slabs of {size} bytes are not aligned")


def test_foreign_files(folder: Path) -> None:
    """A file without our metadata, or with another tensor, is not taken for a layer."""
    path = folder / "experts-00000.safetensors"
    header, data = read_file(path)
    tensor = header.pop("model.layers.0.experts.slabs")
    write_file(path, {**header, "slabs": tensor}, data)
    refused(folder, "must hold the tensor 'model.layers.0.experts.slabs' only")
    write_file(path, {"model.layers.0.experts.slabs": tensor}, data)
    refused(folder, "has no metadata 'colibri'")
    write_file(path, {**header, "__metadata__": {"colibri": "{"}}, b"")
    refused(folder, "its metadata 'colibri' is not valid")


def test_dims_of_another_config(folder: Path) -> None:
    """config.json edited after the conversion: the difference is named with the fields."""
    edit_json(folder / "config.json", lambda config: config.update(moe_intermediate_size=32))
    refused(folder, "asks for 8, 128, 32", "moe_intermediate_size")


@pytest.fixture(autouse=True)
def _no_reads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Defects must show in the headers: a test of a defect may read no weights."""
    if "folder" in request.fixturenames:

        def refuse(*_: object) -> None:
            raise AssertionError("weights were read")

        request.getfixturevalue("folder")
        monkeypatch.setattr(Checkpoint, "read", refuse)
