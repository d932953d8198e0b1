"""Model families: config.json and tensors of a checkpoint -> a checked `ModelSpec`.

One file a family, named as its `model_type`. To add a family, write its file with a `build(config, table)` and name it
in `_FAMILIES`. Nothing here computes or allocates.
"""

import difflib
import importlib
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from colibri_mp.checkpoint import Checkpoint
from colibri_mp.checkpoint.matrices import TensorTable
from colibri_mp.errors import CheckpointError
from colibri_mp.models.config import ConfigReader
from colibri_mp.models.structure import AttentionTensors, DenseSpec, LayerSpec, ModelSpec, MoeSpec
from colibri_mp.specs import AttentionSpec, RopeSpec, RouterSpec

__all__ = [
    "AttentionSpec",
    "AttentionTensors",
    "DenseSpec",
    "LayerSpec",
    "ModelSpec",
    "MoeSpec",
    "RopeSpec",
    "RouterSpec",
    "find_model",
    "load_model",
    "supported_model_types",
]

_FAMILIES = (
    *("deepseek_v2", "deepseek_v3", "glm4_moe", "glm_moe_dsa", "gpt_oss", "mixtral", "olmoe"),
    *("qwen2_moe", "qwen3_5_moe", "qwen3_moe", "qwen3_next"),
)
_SAME_AS = {"kimi_k2": "deepseek_v3", "qwen3_5_moe_text": "qwen3_5_moe"}
"""Other names of a family."""
# Tables that old checkpoints store although they follow from the config.
_DERIVED = re.compile(r"(model\.layers\.\d+\.self_attn|model)\.rotary_emb\.inv_freq")
_log = logging.getLogger(__name__)


def supported_model_types() -> tuple[str, ...]:
    """The values of `model_type` in config.json that can be run."""
    return tuple(sorted((*_FAMILIES, *_SAME_AS)))


def load_model(checkpoint: Checkpoint, predicts: bool = False) -> ModelSpec:
    """Find and check every tensor of the model; reads no weights. `predicts`: with its predictor in use, if it has one.

    Raises `CheckpointError` for an unknown `model_type`, for settings that are not implemented, and wherever config and
    tensors disagree, tensors that the model would not use included: to ignore them would be to compute something else.
    """
    return find_model(checkpoint.config, checkpoint.table(predicts)).with_predictor()


def find_model(fields: Mapping[str, Any], table: TensorTable) -> ModelSpec:
    """The model that `fields` of a config.json describe, in `table`. Raises `CheckpointError` as `load_model`."""
    config = ConfigReader(fields)
    family = importlib.import_module(f"{__name__}.{_model_type(config)}")
    model: ModelSpec = family.build(config, table)
    _refuse_unused(table, model)
    return model


def _model_type(config: ConfigReader) -> str:
    model_type = config.text("model_type")
    if model_type in supported_model_types():
        return _SAME_AS.get(model_type, model_type)
    near = difflib.get_close_matches(model_type, supported_model_types(), 1, 0.7)
    hint = f" (nearest: {near[0]!r})" if near else ""
    raise CheckpointError(
        f"config.json: model_type {model_type!r} is not supported{hint}; supported are {', '.join(supported_model_types())}"
    )


def _refuse_unused(table: TensorTable, model: ModelSpec) -> None:
    unused = [name for name in table.unused() if not _DERIVED.fullmatch(name)]
    if model.tied:
        unused = _without_tied_head(unused)
    if unused:
        raise CheckpointError(
            f"config and tensors disagree: {len(unused)} tensors have no place in the model of config.json: "
            f"{_some(unused)}. {_unused_hint(unused, len(model.layers))}"
        )


def _without_tied_head(unused: Sequence[str]) -> list[str]:
    """Some tools save a tied head although it is never read (transformers and mlx_lm drop it as well)."""
    heads = [name for name in unused if name.startswith("lm_head.")]
    if heads:
        _log.warning("config.json ties head and embedding (tie_word_embeddings): %s is ignored", heads[0])
    return [name for name in unused if name not in heads]


def _unused_hint(unused: Sequence[str], num_layers: int) -> str:
    layers = [int(match[1]) for name in unused if (match := re.match(r"model\.layers\.(\d+)\.", name))]
    if layers and max(layers) >= num_layers:
        return f"config.json says num_hidden_layers = {num_layers}, the files have a layer {max(layers)}"
    if any(name.endswith(".bias") for name in unused):
        return "Should attention_bias be true?"
    return "Fetch config.json and weights of the same checkpoint"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
