"""Qwen3.5-MoE, the text model. Reference: transformers/models/qwen3_5_moe/modeling_qwen3_5_moe.py.

As Qwen3-Next, with a matrix for each input of the delta nets and without dense layers; weights of experts are always renormalised. The
published checkpoints are of a model that sees: its text model is in `text_config` and below `model.language_model`; what sees
(`model.visual`, in MLX's `vision_tower`) is left out; what predicts further tokens is as in Qwen3-Next. With text alone the three
position ids of its rotary embedding are one and the same. The type of a text model by itself is `qwen3_5_moe_text`.
"""

from dataclasses import replace

from colibri_mp.checkpoint.matrices import TensorTable
from colibri_mp.models.config import ConfigReader
from colibri_mp.models.decoder import BuildMlp
from colibri_mp.models.gated_delta import build_hybrid, find_flat_delta_net, read_hybrid_config
from colibri_mp.models.qwen2_moe import read_mlps
from colibri_mp.models.structure import ModelSpec

_LAYOUTS = (
    ("model.language_model", "lm_head"),
    ("language_model.model", "language_model.lm_head"),
    ("model", "lm_head"),
)
"""Paths of decoder and head: as published, as MLX converts, and of a text model by itself."""


def build(config: ConfigReader, table: TensorTable) -> ModelSpec:
    """The model in `table`. Raises `CheckpointError` where config and tensors disagree."""
    text = config.section("text_config") if config.has("text_config") else config
    root, head = next((layout for layout in _LAYOUTS if f"{layout[0]}.norm.weight" in table), _LAYOUTS[-1])
    decoder = replace(read_hybrid_config(text), root=root, head=head)
    for prefix in ("model.visual.", "vision_tower."):
        table.leave_out(prefix)

    def read(root: str, first: int) -> BuildMlp:
        return read_mlps(text, decoder.hidden, norm_topk_prob=True, root=root, first=first)

    return build_hybrid("qwen3_5_moe", table, decoder, read, find_flat_delta_net)
