"""gpt_oss's experts, whose gate and up share tensors: the slabs that readers and conversion make of them, in every layout."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_cases import copy_of, edit_json, edit_tensors, fixture
from conversion import made

from colibri_mp.checkpoint import Checkpoint, ExpertLayer
from colibri_mp.checkpoint.arrangement import Source, take_rows
from colibri_mp.checkpoint.convert import Options
from colibri_mp.errors import CheckpointError
from colibri_mp.kernels import reference
from colibri_mp.kernels.layout import PackedMatrix, gather_rows, pack, packed_bytes
from colibri_mp.models import load_model
from colibri_mp.workers import read_plan
from colibri_mp.workers.copies import Copy, ExpertCopies
from colibri_mp.workers.expert_files import aligned_buffer
from colibri_mp.workers.expert_reader import ExpertReader, scratch_bytes

NAMES = ("gpt_oss", "gpt_oss_mxfp4")
LAYER, EXPERT, WIDTH, HIDDEN = 2, 5, 64, 64
Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


def read_slab(folder: Path, layer: int = LAYER, expert: int = EXPERT) -> np.ndarray:
    """An expert's slab as a worker reads it."""
    checkpoint = Checkpoint.open(folder)
    experts = load_model(checkpoint).expert_layers[layer]
    return read(checkpoint, experts, expert)


def read(checkpoint: Checkpoint, experts: ExpertLayer, expert: int = EXPERT) -> np.ndarray:
    """The same for given tables; the slab is full of other bytes before."""
    reader = ExpertReader(ExpertCopies([Copy(tuple(checkpoint.files))]), [experts], pack, "off")
    slab = np.frombuffer(aligned_buffer(experts.shape.slab_bytes), np.uint8)
    slab[:] = 0xA5
    try:
        reader.read(experts.layer, expert, slab, aligned_buffer(reader.scratch_bytes))
    finally:
        reader.close()
    return slab


def values_of(slab: np.ndarray, experts: ExpertLayer) -> list[np.ndarray]:
    """gate, up, down and their biases as the kernels see them."""
    shape, found = experts.shape, []
    wide, narrow = (WIDTH, HIDDEN), (HIDDEN, WIDTH)
    offsets = (shape.gate_offset, shape.up_offset, shape.down_offset)
    for start, dims, kind in zip(offsets, (wide, wide, narrow), (shape.gate, shape.up, shape.down), strict=True):
        matrix = PackedMatrix(kind, *dims, slab[start : start + packed_bytes(kind, *dims)])
        found.append(gather_rows(matrix, np.arange(dims[0], dtype=np.int32)))
    for start, rows in zip(shape.bias_offsets, (WIDTH, WIDTH, HIDDEN), strict=True):
        found.append(slab[start : start + 4 * rows].view(np.float32))
    return found


def tensor(checkpoint: Checkpoint, name: str) -> np.ndarray:
    """What the file has of one expert under that name."""
    info = checkpoint.tensors[f"model.layers.{LAYER}.mlp.experts.{name}"]
    raw = checkpoint.read(info.file_idx, info.offset, info.nbytes)
    values = raw if info.dtype == "U8" else reference.elements(raw, info.dtype.lower())
    return values.reshape(info.shape)[EXPERT]


def stored_values(name: str) -> list[np.ndarray]:
    """gate, up, down and their biases straight from the tensors."""
    checkpoint = Checkpoint.open(fixture(name))
    if name == "gpt_oss":
        both, down = tensor(checkpoint, "gate_up_proj").T, tensor(checkpoint, "down_proj").T
    else:
        both, down = (unpacked(checkpoint, f"{part}_proj") for part in ("gate_up", "down"))
    bias = tensor(checkpoint, "gate_up_proj_bias")
    return [both[0::2], both[1::2], down, bias[0::2], bias[1::2], tensor(checkpoint, "down_proj_bias")]


def unpacked(checkpoint: Checkpoint, name: str) -> np.ndarray:
    """MXFP4 by its definition."""
    blocks, scales = tensor(checkpoint, f"{name}_blocks"), tensor(checkpoint, f"{name}_scales")
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 32)
    values = reference.FP4[codes] * np.exp2(scales.astype(np.float32) - 127)[..., None]
    return values.reshape(len(scales), -1)


@pytest.mark.parametrize("task_bytes", [1 << 20, 2048])
@pytest.mark.parametrize("name", NAMES)
def test_slab_has_the_stored_values(name: str, task_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and columns that take turns are taken apart, biases follow as float32, whether an expert is one task or many."""
    monkeypatch.setattr(read_plan, "TASK_BYTES", task_bytes)
    experts = load_model(Checkpoint.open(fixture(name))).expert_layers[LAYER]
    plan = read_plan.LayerPlan(experts)
    assert plan.num_tasks == {1 << 20: 1, 2048: 2 if name == "gpt_oss" else 4}[task_bytes]
    for found, want in zip(values_of(read_slab(fixture(name)), experts), stored_values(name), strict=True):
        np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("name", NAMES)
def test_container_has_the_same_slabs(name: str, tmp_path: Path) -> None:
    """What `convert` writes is what a worker makes when it reads, and what a worker reads of the container."""
    report = made(fixture(name), tmp_path / "out")
    assert report.num_experts == 32
    slab = read_slab(fixture(name))
    np.testing.assert_array_equal(read_slab(tmp_path / "out"), slab)
    before, after = (
        load_model(Checkpoint.open(folder)).expert_layers[LAYER] for folder in (fixture(name), tmp_path / "out")
    )
    assert after.shape == before.shape
    header = Checkpoint.open(tmp_path / "out").packed_layers[LAYER].header
    assert [piece.projection for piece in header.pieces[3:]] == ["gate_bias", "up_bias", "down_bias"]


def test_quantised_when_read_as_when_converted(tmp_path: Path) -> None:
    """Fewer bits give the same slab on both ways, biases as they were."""
    made(fixture("gpt_oss"), tmp_path / "out", Options("4", 32))
    packed = load_model(Checkpoint.open(tmp_path / "out")).expert_layers[LAYER]
    checkpoint = Checkpoint.open(fixture("gpt_oss"))
    experts = replace(load_model(checkpoint).expert_layers[LAYER], targets=packed.packed_encodings)
    slab = read(checkpoint, experts)
    np.testing.assert_array_equal(read_slab(tmp_path / "out"), slab)
    for found, want in zip(values_of(slab, experts)[3:], stored_values("gpt_oss")[3:], strict=True):
        np.testing.assert_array_equal(found, want)


def as_mlx(tensors: Tensors) -> None:
    """The tensors of the MXFP4 fixture as mlx_lm stores them: gate and up apart, codes in words."""
    for layer in range(4):
        path = f"model.layers.{layer}.mlp.experts"
        for part, mlx, dtype, dims in (
            ("blocks", "weight", "U32", (8,)),
            ("scales", "scales", "U8", (2,)),
            ("bias", "bias", "BF16", ()),
        ):
            both, down = (tensors.pop(f"{path}.{name}_proj_{part}")[2] for name in ("gate_up", "down"))
            rows = np.frombuffer(both, np.uint8).reshape(8, 2 * WIDTH, -1)
            stacks = {"gate": rows[:, 0::2].tobytes(), "up": rows[:, 1::2].tobytes(), "down": down}
            for projection, raw in stacks.items():
                tensors[f"{path}.{projection}_proj.{mlx}"] = (dtype, (8, WIDTH, *dims), raw)


def test_mlx_layout_has_the_same_slabs(tmp_path: Path) -> None:
    """gate, up and down in stacks of their own, with `.bias` beside `.weight` and `.scales`."""
    folder = copy_of("gpt_oss_mxfp4", tmp_path)
    edit_tensors(folder, as_mlx)
    edit_json(folder / "config.json", lambda config: config.pop("quantization_config"))
    experts = load_model(Checkpoint.open(folder)).expert_layers[LAYER]
    assert (experts.arrangement, experts.bias, experts.piece_names[-1]) == ("separate", "bf16", ("down", "bias"))
    np.testing.assert_array_equal(read_slab(folder), read_slab(fixture("gpt_oss_mxfp4")))


def edited(name: str, change: Callable[[Tensors, str], None]) -> Callable[[Tensors], None]:
    """An edit of one tensor of layer 0's experts."""
    return lambda tensors: change(tensors, f"model.layers.0.mlp.experts.{name}")


def as_float(tensors: Tensors, name: str) -> None:
    _, shape, raw = tensors[name]
    tensors[name] = ("F32", shape, bytes(4 * len(raw) // (1 if "scales" in name else 2)))


def remove(tensors: Tensors, name: str) -> None:
    del tensors[name]


DAMAGES: dict[str, tuple[str, str, Callable[[Tensors, str], None], str]] = {
    "scales": ("gpt_oss_mxfp4", "down_proj_scales", as_float, "down_proj_scales' has dtype F32, MXFP4 is stored as U8"),
    "no bias": ("gpt_oss_mxfp4", "down_proj_bias", remove, "down_proj_bias', which config.json calls for"),
    "biases differ": ("gpt_oss", "down_proj_bias", as_float, "must be stored alike"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_what_is_refused(damage: tuple[str, str, Any, str], tmp_path: Path) -> None:
    """Each is one CheckpointError that names the tensor."""
    name, part, change, message = damage
    folder = copy_of(name, tmp_path)
    edit_tensors(folder, edited(part, change))
    with pytest.raises(CheckpointError, match=message):
        load_model(Checkpoint.open(folder))


@pytest.mark.parametrize("size", [2, 4])
def test_take_rows(size: int) -> None:
    """Every second row, every second column turned round, or all of it without a copy."""
    kind = {2: np.uint16, 4: np.uint32}[size]
    values = np.arange(6 * 8, dtype=kind).reshape(6, 8)
    raw = values.view(np.uint8).reshape(-1)
    assert take_rows(Source(0), 6, 8, raw) is raw
    for first in (0, 1):
        rows = take_rows(Source(0, first, 2), 3, 8, raw).view(kind).reshape(3, 8)
        np.testing.assert_array_equal(rows, values[first::2])
        turned = take_rows(Source(0, first, 2, is_transposed=True), 4, 6, raw).view(kind).reshape(4, 6)
        np.testing.assert_array_equal(turned, values[:, first::2].T)


@pytest.mark.parametrize(
    ("name", "copied"), [("gpt_oss", 2 * 2 * WIDTH * HIDDEN), ("gpt_oss_mxfp4", 2 * WIDTH * HIDDEN * 17 // 32)]
)
def test_copies_are_in_the_plan(name: str, copied: int) -> None:
    """A thread's memory includes what it copies to take gate and up apart."""
    experts = load_model(Checkpoint.open(fixture(name))).expert_layers[LAYER]
    plan = read_plan.LayerPlan(experts)
    assert plan.copy_bytes == copied
    assert scratch_bytes([experts], 3) >= 3 * (plan.scratch_bytes + copied)
