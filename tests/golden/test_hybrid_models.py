"""Families of gated delta nets: the layouts that a checkpoint can have are the same model, and what cannot be meant is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from plain_forward import PlainModel
from safetensors.numpy import save_file

from colibri_mp.checkpoint import Checkpoint
from colibri_mp.errors import CheckpointError
from colibri_mp.models import AttentionSpec, ModelSpec, load_model
from colibri_mp.specs import DeltaNetSpec

TINY = Path(__file__).parent / "tiny"
Tensors = dict[str, NDArray[Any]]


def changed(name: str, folder: Path, change: Callable[[Tensors, dict[str, Any]], object]) -> Path:
    """A copy of a fixture with float32 weights, and tensors and config changed; a change to both is in place."""
    checkpoint = Checkpoint.open(TINY / name)
    tensors = {info.name: checkpoint.read_vector(info) for info in checkpoint.tensors.values()}
    config = json.loads((TINY / name / "config.json").read_text())
    change(tensors, config)
    save_file({key: np.ascontiguousarray(value) for key, value in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def as_mlx(tensors: Tensors, config: dict[str, Any]) -> None:
    """What mlx_lm makes of it: channels of the convolution last, norms as 1 + w; Qwen3.5 below other names."""
    del config
    for name in list(tensors):
        if "conv1d" in name:
            tensors[name] = tensors[name].transpose(0, 2, 1)
        elif name.endswith("norm.weight") and "linear_attn.norm" not in name:
            tensors[name] = tensors[name] + 1
        if name.startswith("mtp"):
            del tensors[name]
    if any(name.startswith("model.visual") for name in tensors):
        renamed = {
            "model.language_model": "language_model.model",
            "lm_head": "language_model.lm_head",
            "model.visual": "vision_tower",
        }
        for name in list(tensors):
            old = next(prefix for prefix in renamed if name.startswith(prefix))
            tensors[name.replace(old, renamed[old], 1)] = tensors.pop(name)


def as_text_alone(tensors: Tensors, config: dict[str, Any]) -> None:
    """What transformers saves of the text model by itself."""
    for name in [name for name in tensors if not name.startswith(("lm_head", "model.language_model"))]:
        del tensors[name]
    for name in [name for name in tensors if name.startswith("model.language_model")]:
        tensors[name.replace("model.language_model", "model")] = tensors.pop(name)
    text = config.pop("text_config")
    config.clear()
    config.update(text)


@pytest.mark.parametrize(
    ("name", "change"), [("qwen3_next", as_mlx), ("qwen3_5_moe", as_mlx), ("qwen3_5_moe", as_text_alone)]
)
def test_other_layouts_are_the_same_model(
    name: str, change: Callable[[Tensors, dict[str, Any]], object], tmp_path: Path
) -> None:
    """The reference's logits."""
    golden = np.load(TINY / name / "golden.npz")
    logits = PlainModel(Checkpoint.open(changed(name, tmp_path, change))).logits(golden["input_ids"])
    np.testing.assert_allclose(logits, golden["logits"][: len(logits)], rtol=0, atol=4e-5)


def test_qwen3_next() -> None:
    """Three delta nets and an attention with a gate of which a quarter turns; norms of layers are one more than stored."""
    model = load_model(Checkpoint.open(TINY / "qwen3_next"))
    delta = DeltaNetSpec(64, 2, 4, 16, 16, 4, 1e-6)
    attention = AttentionSpec(64, 4, 2, 32, scale=32**-0.5, norm_eps=1e-6, qk_norm="head", gated=True)
    assert [layer.attention for layer in model.layers] == [delta, delta, delta, attention]
    assert model.rope.rotary_dim == 8
    assert {info.added for info in added_to(model, "norm", "q_norm", "k_norm")} == {1.0}
    assert {info.added for info in added_to(model, "head_norm", "dt_bias")} == {0.0}


def added_to(model: ModelSpec, *names: str) -> list[Any]:
    """The vectors of these names of all layers."""
    found = [getattr(layer.tensors, name, None) for layer in model.layers for name in names]
    return [info for info in found if info is not None]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"layer_types": ["linear_attention", "sliding_attention"] * 2}, "sliding_attention"),
        ({"layer_types": ["full_attention"]}, "names 1 layers"),
        ({"attention_bias": True}, "attention_bias"),
        ({"linear_key_head_dim": 24}, "linear_key_head_dim"),
        ({"linear_num_value_heads": 3}, "2 key heads and 3"),
        ({"linear_num_value_heads": 6}, "rows of q, k, v and z"),
        ({"full_attention_interval": 2}, "self_attn.q_proj"),
    ],
)
def test_what_config_and_tensors_do_not_share_is_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    """One error that names the field or the tensor."""
    folder = changed("qwen3_next", tmp_path, lambda _, stated: stated.update(config))
    with pytest.raises(CheckpointError, match=message):
        load_model(Checkpoint.open(folder))
