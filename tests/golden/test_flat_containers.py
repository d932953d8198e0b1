"""Containers of the C engine colibrì, read where they lie: made here of golden checkpoints, and held against a plain forward pass."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from plain_forward import PlainModel
from safetensors.numpy import save_file
from test_parity import ONE_CLUSTER, TOLERANCE

from colibri_mp import Cluster
from colibri_mp.checkpoint import Checkpoint
from colibri_mp.checkpoint.convert import Options, convert
from colibri_mp.errors import CheckpointError
from colibri_mp.formats import Encoding
from colibri_mp.models import load_model

TINY = Path(__file__).parent / "tiny"
IDS = np.arange(3, 23, dtype=np.int32)
Array = NDArray[np.generic]
Floats = NDArray[np.float32]
Stored = tuple[NDArray[np.uint8], Floats]


def int8(values: Floats) -> Stored:
    """Signed bytes, a scale for each row."""
    scales = np.abs(values).max(axis=1) / np.float32(127)
    return np.rint(values / scales[:, None]).astype(np.int8).view(np.uint8).reshape(-1), scales


def int4(values: Floats, group: int) -> Stored:
    """Value + 8 in nibbles, the low one first; a scale for each group of a row."""
    groups = values.reshape(-1, group)
    scales = np.abs(groups).max(axis=1) / np.float32(7)
    codes = np.rint(groups / scales[:, None]).astype(np.int8).reshape(-1) + 8
    return (codes[0::2] | codes[1::2] << 4).astype(np.uint8), scales


def as_qwen(name: str, values: Floats) -> dict[str, Array]:
    """Attention in int4 by groups, experts by rows but for down, which is int8 as the ends are; norms and routers plain."""
    if values.ndim == 1 or name.endswith(".gate.weight"):
        return {name: values}
    if "self_attn" in name:
        weight, scales = int4(values, 16 if "v_proj" in name else 32)
    elif "experts" in name and "down" not in name:
        weight, scales = int4(values, values.shape[1])
    else:
        weight, scales = int8(values)
    return {name: weight, f"{name}.qs": scales}


def as_olmoe(name: str, values: Floats) -> dict[str, Array]:
    """Everything but the experts, which `merge` takes."""
    return {name: values}


def merge(tensors: dict[str, Array]) -> dict[str, Array]:
    """OLMoE: an expert's three matrices in one tensor."""
    kept = {name: values for name, values in tensors.items() if ".experts." not in name}
    for expert in sorted({found[0] for name in tensors if (found := re.match(r".*\.experts\.\d+", name))}):
        stored = [int8(tensors[f"{expert}.{part}_proj.weight"].astype(np.float32)) for part in ("gate", "up", "down")]
        kept[f"{expert}.merged_weight"] = np.concatenate([weight for weight, _ in stored]).view(np.int8)
        kept[f"{expert}.qs"] = np.concatenate([scales for _, scales in stored])
    return kept


def made(folder: Path, fixture: str, store: Callable[[str, Floats], dict[str, Array]]) -> Path:
    """A container of a golden checkpoint, in two files as the engine names them."""
    source = Checkpoint.open(TINY / fixture)
    folder.mkdir()
    shutil.copy(TINY / fixture / "config.json", folder)
    tensors: dict[str, Array] = {}
    for name, info in source.tensors.items():
        tensors |= store(name, source.read_vector(info))
    tensors = merge(tensors) if store is as_olmoe else tensors
    names = sorted(tensors)
    for i, part in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in part}, folder / f"out-{i:05d}.safetensors")
    return folder


@pytest.mark.parametrize(("fixture", "store"), [("qwen3_moe", as_qwen), ("olmoe", as_olmoe)])
def test_container_gives_what_its_values_give(
    tmp_path: Path, fixture: str, store: Callable[[str, Floats], dict[str, Array]]
) -> None:
    """Logits are those of a plain forward pass over the same codes and scales, and converting does not change a bit."""
    folder = made(tmp_path / "colibri", fixture, store)
    expected = PlainModel(Checkpoint.open(folder)).logits(IDS)
    with Cluster.launch(folder, **ONE_CLUSTER) as cluster:
        logits = cluster.logits(IDS.tolist())
    np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)
    convert(folder, tmp_path / "packed", Options(), Silent())
    with Cluster.launch(tmp_path / "packed", **ONE_CLUSTER) as cluster:
        np.testing.assert_array_equal(cluster.logits(IDS.tolist()), logits)


class Silent:
    """Is told how far a conversion is."""

    def show(self, doing: str, done_bytes: int, total_bytes: int) -> None:
        """Progress."""

    def note(self, text: str) -> None:
        """Something that the user should know."""


def test_forms_are_told_by_their_bytes(tmp_path: Path) -> None:
    """Each of the forms is found, and the slab has the size of what is stored."""
    model = load_model(Checkpoint.open(made(tmp_path / "colibri", "qwen3_moe", as_qwen)))
    tensors, experts = model.layers[0].tensors, model.expert_layers[0]
    assert [matrix.encoding for matrix in tensors.matrices][1:3] == [
        Encoding("grouped", 4, 32, "f32"),
        Encoding("grouped", 4, 16, "f32"),
    ]
    assert (experts.gate, experts.down) == (Encoding("row", 4, 64, "f32"), Encoding("row", 8, 32, "f32"))
    assert model.embed.encoding == Encoding("row", 8, 64, "f32")
    assert experts.shape.nbytes == experts.stored_bytes


DAMAGE: dict[str, Callable[[dict[str, Array]], object]] = {
    r"U8 \[4095\] with scales F32 \[128\] is no matrix of 64 rows and 64 columns": lambda tensors: tensors.update(
        {"model.layers.0.self_attn.q_proj.weight": np.zeros(4095, np.uint8)}
    ),
    r"U8 \[2048\] with scales F32 \[65\] is no matrix": lambda tensors: tensors.update(
        {"model.layers.0.self_attn.q_proj.weight.qs": np.ones(65, np.float32)}
    ),
    r"U8 \[64, 32\] with scales": lambda tensors: tensors.update(
        {"model.layers.0.self_attn.q_proj.weight": np.zeros((64, 32), np.uint8)}
    ),
}


@pytest.mark.parametrize(("message", "damage"), DAMAGE.items(), ids=range(len(DAMAGE)))
def test_other_bytes_are_refused(tmp_path: Path, message: str, damage: Callable[[dict[str, Array]], object]) -> None:
    """Bytes that fit no form are an error with both sizes."""

    def store(name: str, values: Floats) -> dict[str, Array]:
        found = as_qwen(name, values)
        if name == "model.layers.0.self_attn.q_proj.weight":
            damage(found)
        return found

    with pytest.raises(CheckpointError, match=message):
        load_model(Checkpoint.open(made(tmp_path / "colibri", "qwen3_moe", store)))
