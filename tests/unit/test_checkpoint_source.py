"""A checkpoint folder: which files belong to it, how they may disagree, and reading bytes."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from checkpoint_cases import copy_of, edit_json, fixture, header_of, read_file, write_file

from colibri_mp.checkpoint import Checkpoint
from colibri_mp.checkpoint.source import INDEX_NAME, to_float32
from colibri_mp.errors import CheckpointError, ReadError

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def remove_index_entry(weight_map: dict[str, str]) -> None:
    """Leave one tensor of the files out of the index."""
    del weight_map["model.norm.weight"]


def move_index_entry(weight_map: dict[str, str]) -> None:
    """Name the wrong file for one tensor."""
    weight_map["model.norm.weight"] = FIRST if weight_map["model.norm.weight"] == SECOND else SECOND


def edit_index(change: Callable[[dict[str, str]], object]) -> Callable[[Path], object]:
    """A defect that lies in the index."""
    return lambda folder: edit_json(folder / INDEX_NAME, lambda index: change(index["weight_map"]))


def write_text(name: str, text: str) -> Callable[[Path], object]:
    """A defect that replaces a file's contents."""
    return lambda folder: (folder / name).write_text(text)


def unlink(*names: str) -> Callable[[Path], object]:
    """A defect that removes files."""

    def damage(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return damage


def other_weights(folder: Path) -> None:
    """Only weights of a format that is not read."""
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / "model.gguf").write_bytes(b"GGUF")


def truncate(folder: Path) -> None:
    """A shard whose last byte is missing."""
    path = folder / SECOND
    path.write_bytes(path.read_bytes()[:-1])


def tensor_in_two_files(folder: Path) -> None:
    """No index, and the second shard copied under another name."""
    (folder / INDEX_NAME).unlink()
    shutil.copy(folder / SECOND, folder / "other.safetensors")


DEFECTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (unlink("config.json"), "config.json: no such file"),
    "config cut off": (write_text("config.json", '{"model_type": "qwen3'), "config.json: cannot be read as JSON"),
    "config is a list": (write_text("config.json", "[]"), "config.json: holds a list, not an object"),
    "generation config cut off": (write_text("generation_config.json", "{"), "generation_config.json: cannot be read"),
    "missing shard": (unlink(SECOND), f"1 of 2 weight files that {INDEX_NAME} calls for are missing: {SECOND}"),
    "missing shard, no index": (unlink(SECOND, INDEX_NAME), f"numbering of the shards calls for are missing: {SECOND}"),
    "no weights": (unlink(FIRST, SECOND, INDEX_NAME), r"no \*.safetensors file"),
    "other weights": (other_weights, "It has model.gguf, a format that is not read"),
    "truncated shard": (truncate, f"{SECOND}: truncated"),
    "empty shard": (write_text(FIRST, ""), f"{FIRST}: the file is empty"),
    "git-lfs pointer": (
        write_text(FIRST, "version https://git-lfs.github.com/spec/v1\n"),
        f"{FIRST}: is a git-lfs pointer",
    ),
    "index not json": (write_text(INDEX_NAME, "{"), f"{INDEX_NAME}: cannot be read as JSON"),
    "index without map": (write_text(INDEX_NAME, "{}"), f"{INDEX_NAME}: has no weight_map"),
    "index names a tensor too many": (edit_index(lambda m: m.update(extra=FIRST)), "says that tensor 'extra' is in"),
    "index names a tensor too few": (edit_index(remove_index_entry), "has the tensor 'model.norm.weight', which"),
    "index names another file": (
        edit_index(move_index_entry),
        "says that tensor 'model.norm.weight' is in .* but it is in",
    ),
    "index leads outside": (edit_index(lambda m: m.update(extra="../x.safetensors")), "which is no file name"),
    "tensor in two files": (tensor_in_two_files, "is in two files, .* and other.safetensors"),
    "gptq": (lambda folder: set_quantisation(folder, quant_method="gptq", bits=4), "method 'gptq' is not supported"),
    "bitsandbytes": (lambda folder: set_quantisation(folder, quant_method="bitsandbytes"), "MLX affine with 2, 3, 4"),
    "one bit": (
        lambda folder: set_quantisation(folder, bits=1, group_size=64),
        "1 bits, group size 64 is not supported",
    ),
    "unknown mode": (lambda folder: set_quantisation(folder, bits=4, group_size=32, mode="int"), "mode 'int'"),
    "no object": (
        lambda folder: edit_json(folder / "config.json", lambda c: c.update(quantization=4)),
        "must be an object",
    ),
}


def set_quantisation(folder: Path, **settings: object) -> None:
    """Say so in config.json."""
    edit_json(folder / "config.json", lambda config: config.update(quantization_config=settings))


@pytest.mark.parametrize("case", DEFECTS.values(), ids=DEFECTS.keys())
def test_each_defect_of_a_folder_is_named(tmp_path: Path, case: tuple[Callable[[Path], object], str]) -> None:
    """A folder with one thing wrong gives a CheckpointError that says what, when it is opened."""
    damage, message = case
    folder = copy_of("qwen3_moe_fused", tmp_path)
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(folder)


def test_folder_that_is_none(tmp_path: Path) -> None:
    """A missing folder, and a file in place of one."""
    with pytest.raises(CheckpointError, match="no such folder"):
        Checkpoint.open(tmp_path / "absent")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file; give the folder"):
        Checkpoint.open(tmp_path / "file")


def test_shards_without_index(tmp_path: Path) -> None:
    """A folder with several files and no index is read whole, and gives the same tensors."""
    folder = copy_of("qwen3_moe_fused", tmp_path)
    indexed = Checkpoint.open(folder)
    (folder / INDEX_NAME).unlink()
    assert Checkpoint.open(folder).tensors == indexed.tensors


def test_non_finite_numbers_of_transformers_5(tmp_path: Path) -> None:
    """{"__float__": "Infinity"} in config.json is a number."""
    folder = copy_of("olmoe", tmp_path)
    edit_json(folder / "config.json", lambda config: config.update(clip_qkv={"__float__": "-Infinity"}))
    assert Checkpoint.open(folder).config["clip_qkv"] == -np.inf


def test_fingerprint(tmp_path: Path) -> None:
    """It depends on weights and config, not on place or time stamps."""
    original, copy = Checkpoint.open(fixture("olmoe")), copy_of("olmoe", tmp_path)
    assert Checkpoint.open(copy).fingerprint == original.fingerprint
    edit_json(copy / "config.json", lambda config: config.update(rope_theta=5.0))
    other_config = Checkpoint.open(copy).fingerprint
    header, data = read_file(copy / "model.safetensors")
    write_file(copy / "model.safetensors", header, data[:-1] + bytes([data[-1] ^ 1]))
    assert len({original.fingerprint, other_config, Checkpoint.open(copy).fingerprint}) == 3


def test_total_bytes_and_pickle() -> None:
    """total_bytes is what the files take, and a checkpoint travels to another process as it is."""
    folder = fixture("qwen3_moe_fused")
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.total_bytes == sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert pickle.loads(pickle.dumps(checkpoint)) == checkpoint


def test_read(tmp_path: Path) -> None:
    """Bytes come from any offset; a file that has shrunk or gone since is a ReadError."""
    folder = copy_of("olmoe", tmp_path)
    checkpoint = Checkpoint.open(folder)
    content = (folder / "model.safetensors").read_bytes()
    assert checkpoint.read(0, 12345, 777).tobytes() == content[12345 : 12345 + 777]
    (folder / "model.safetensors").write_bytes(content[:13000])
    with pytest.raises(ReadError, match="cannot read 777 bytes at 12345: the file ends at byte 13000"):
        checkpoint.read(0, 12345, 777)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ReadError, match="No such file"):
        checkpoint.read(0, 0, 1)


@pytest.mark.parametrize(
    ("dtype", "raw"),
    [
        ("F32", np.array([1.5, -2.0, np.inf], np.float32).tobytes()),
        ("F16", np.array([1.5, -2.0, np.inf], np.float16).tobytes()),
    ],
)
def test_float_types(dtype: str, raw: bytes) -> None:
    """F32 and F16 become float32 without change."""
    assert to_float32(np.frombuffer(raw, np.uint8), dtype).tolist() == [1.5, -2.0, np.inf]


def test_vectors_are_float32(tmp_path: Path) -> None:
    """A bf16 norm is read as the float32 numbers that it stands for."""
    raw = np.array([0x3F80, 0xC000, 0x3FC0], "<u2").tobytes()
    write_file(tmp_path / "model.safetensors", header_of({"norm.weight": ("BF16", (3,))}), raw)
    (tmp_path / "config.json").write_text(json.dumps({}))
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.read_vector(checkpoint.tensors["norm.weight"]).tolist() == [1.0, -2.0, 1.5]
