"""From a training checkpoint to the shipped files."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from .checkpoint import (
    Tensors,
    dequantised_tensors,
    mlx_name,
    per_expert,
    quantised_tensors,
    write_json,
    write_mlx,
    write_safetensors,
    write_text_files,
)
from .checkpoint import config as plain_config
from .model import Model, Shape
from .quantise import to_bf16


def load_run(run: Path) -> dict[str, Any]:
    """The last checkpoint of a training run: model, shape, recipe, step."""
    state: dict[str, Any] = torch.load(run / "checkpoint.pt", weights_only=True)
    return state


def tensors_of(run: dict[str, Any]) -> Tensors:
    return {name: value.float().numpy() for name, value in run["model"].items()}


def model_with(shape: dict[str, Any], tensors: Tensors) -> Model:
    """The training model with these weights, for evaluation."""
    model = Model(Shape(**shape))
    model.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in tensors.items()})
    return model.eval()


def as_stored(tensors: Tensors) -> Tensors:
    """What is left of the weights once stored: quantised and dequantised, under their training names."""
    plain = dequantised_tensors(quantised_tensors(tensors))
    return {name: plain[mlx_name(name)] for name in tensors}


def export_shipped(run: Path, tokenizer: Path, out: Path) -> None:
    """The 4-bit model in mlx-lm's layout."""
    state = load_run(run)
    write_mlx(out, tensors_of(state), state["shape"], tokenizer)


def export_hugging_face(run: Path, tokenizer: Path, out: Path) -> None:
    """The unquantised model in bf16, a tensor an expert, as the hub has Qwen3-MoE."""
    state = load_run(run)
    out.mkdir(parents=True, exist_ok=True)
    tensors = per_expert({mlx_name(name): to_bf16(value) for name, value in tensors_of(state).items()})
    write_safetensors(out / "model.safetensors", tensors, {"format": "pt"})
    write_json(out / "config.json", plain_config(state["shape"]))
    write_text_files(out, tokenizer)
