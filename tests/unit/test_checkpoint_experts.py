"""Experts in every published layout end as the same tables of offsets."""

import pickle
from pathlib import Path

import numpy as np
import pytest
from checkpoint_cases import copy_of, edit_tensors, fixture, header_of
from safetensors import safe_open

from colibri_mp.checkpoint import Checkpoint, ExpertLayer, TensorInfo
from colibri_mp.checkpoint.experts import ExpertDims, find_experts
from colibri_mp.checkpoint.matrices import TensorTable
from colibri_mp.checkpoint.quantisation import Quantisation
from colibri_mp.errors import CheckpointError
from colibri_mp.models import load_model


def layers(folder: Path) -> tuple[Checkpoint, tuple[ExpertLayer, ...]]:
    """A checkpoint and its layers of experts."""
    checkpoint = Checkpoint.open(folder)
    return checkpoint, load_model(checkpoint).expert_layers


def expert_bytes(checkpoint: Checkpoint, layer: ExpertLayer, expert: int) -> list[bytes]:
    """The pieces of one expert, read as a worker reads them."""
    places = zip(layer.file_idx[expert], layer.offset[expert], layer.piece_bytes, strict=True)
    return [checkpoint.read(int(file_idx), int(offset), int(nbytes)).tobytes() for file_idx, offset, nbytes in places]


def test_fused_and_per_expert_are_the_same_weights() -> None:
    """The fused 3-D tensors of one fixture hold the per-expert tensors of the other, piece by piece."""
    (fused, fused_layers), (single, single_layers) = layers(fixture("qwen3_moe_fused")), layers(fixture("qwen3_moe"))
    for fused_layer, single_layer in zip(fused_layers, single_layers, strict=True):
        assert fused_layer.piece_names == single_layer.piece_names
        for expert in range(8):
            assert expert_bytes(fused, fused_layer, expert) == expert_bytes(single, single_layer, expert)


def test_per_expert_pieces_are_the_named_tensors() -> None:
    """Mixtral's w1, w3, w2 are gate, up, down."""
    checkpoint, found = layers(fixture("mixtral"))
    assert found[2].piece_names == (("gate", "weight"), ("up", "weight"), ("down", "weight"))
    for piece, name in enumerate(("w1", "w3", "w2")):
        info = checkpoint.tensors[f"model.layers.2.block_sparse_moe.experts.5.{name}.weight"]
        assert (found[2].offset[5, piece], found[2].piece_bytes[piece]) == (info.offset, info.nbytes)


@pytest.mark.parametrize("name", ["qwen3_moe_q4", "qwen3_moe_q3_g32", "qwen3_moe_mxfp4", "qwen3_moe_nvfp4"])
def test_stacked_pieces_are_slices_of_the_stack(name: str) -> None:
    """Piece p of expert e is row e of MLX's stacked tensor."""
    checkpoint, found = layers(fixture(name))
    with safe_open(checkpoint.files[0], "np") as reference:
        for piece, (projection, part) in enumerate(found[1].piece_names):
            tensor = f"model.layers.1.mlp.switch_mlp.{projection}_proj.{part}"
            if checkpoint.tensors[tensor].dtype == "BF16":
                continue  # numpy has no bf16
            stack = reference.get_tensor(tensor)
            for expert in range(8):
                assert expert_bytes(checkpoint, found[1], expert)[piece] == stack[expert].tobytes()


def fused_fp8(width: int) -> ExpertLayer:
    """Three fused experts of hidden size 136 in fp8, whose tensors exist only in name."""
    shapes = {
        "b.experts.gate_up_proj": ("F8_E4M3", (3, 2 * width, 136)),
        "b.experts.gate_up_proj_scale_inv": ("F32", (3, -(-2 * width // 128), 2)),
        "b.experts.down_proj": ("F8_E4M3", (3, 136, width)),
        "b.experts.down_proj_scale_inv": ("F32", (3, 2, -(-width // 128))),
    }
    infos = {
        name: TensorInfo(name, entry["dtype"], tuple(entry["shape"]), 0, start, end - start)
        for name, entry in header_of(shapes).items()
        for start, end in [entry["data_offsets"]]
    }
    return find_experts(TensorTable(infos, Quantisation()), 0, "b", ExpertDims(3, 136, width, "moe_intermediate_size"))


def test_fused_experts_in_tiles() -> None:
    """gate has the first half of an expert's rows and tiles, up the second; down its own."""
    layer = fused_fp8(256)
    assert layer.piece_names == tuple(
        (p, part) for p in ("gate", "up", "down") for part in ("weight", "weight_scale_inv")
    )
    assert layer.piece_bytes.tolist() == [256 * 136, 16, 256 * 136, 16, 136 * 256, 16]
    one, scales, down = 2 * 256 * 136, 3 * 2 * 256 * 136, 3 * 2 * 256 * 136 + 3 * 32
    expected = [2 * one, scales + 64, 2 * one + one // 2, scales + 80, down + one, down + 3 * one // 2 + 32]
    assert layer.offset[2].tolist() == expected


def test_fused_experts_that_share_a_tile_are_refused() -> None:
    """A tile with rows of gate and of up belongs to neither."""
    with pytest.raises(CheckpointError, match="moe_intermediate_size = 192 is no multiple of 128"):
        fused_fp8(192)


def test_layer_values() -> None:
    """Sizes, encodings, order of the pieces; and the layer survives pickling."""
    _, found = layers(fixture("qwen3_moe_mixed_4_6"))
    layer = found[1]
    assert (layer.layer, layer.num_experts, layer.hidden, layer.width) == (1, 8, 128, 64)
    assert [(e.bits, e.group_size) for e in (layer.gate, layer.up, layer.down)] == [(4, 64), (4, 64), (6, 64)]
    assert layer.piece_names[:4] == (("gate", "weight"), ("gate", "scales"), ("gate", "biases"), ("up", "weight"))
    assert layer.stored_bytes == sum(sum(e.part_bytes(64, 128)) for e in (layer.gate, layer.up, layer.down))
    copy = pickle.loads(pickle.dumps(layer))
    assert (copy.offset == layer.offset).all()
    assert (copy.file_idx.dtype, copy.offset.dtype, copy.piece_bytes.dtype) == (np.int32, np.int64, np.int64)


def test_shape_is_the_kernels() -> None:
    """`shape` gives the kernels' packed shape of the same formats."""
    _, found = layers(fixture("qwen3_moe_q4"))
    shape = found[0].shape
    assert (shape.hidden, shape.width, shape.gate.kind, shape.down.group_size) == (128, 64, "q4", 64)


def test_experts_of_one_layer_must_be_stored_alike(tmp_path: Path) -> None:
    """One expert in another element type is refused: all slots of a layer have one size."""
    folder = copy_of("qwen3_moe", tmp_path)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"

    def widen(tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
        tensors[name] = ("F32", tensors[name][1], tensors[name][2] * 2)

    edit_tensors(folder, widen)
    with pytest.raises(
        CheckpointError, match=r"experts of one layer must be stored alike.*experts.3.up_proj is .*'f32'"
    ):
        layers(folder)


def test_missing_expert(tmp_path: Path) -> None:
    """An expert that the config counts and the file lacks is named."""
    folder = copy_of("mixtral", tmp_path)
    edit_tensors(folder, lambda tensors: tensors.pop("model.layers.3.block_sparse_moe.experts.7.w2.weight"))
    with pytest.raises(
        CheckpointError, match=r"'model.layers.3.block_sparse_moe.experts.7.w2.weight', which config.json"
    ):
        layers(folder)
