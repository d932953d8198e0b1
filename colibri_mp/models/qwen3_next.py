"""Qwen3-Next. Reference: transformers/models/qwen3_next/modeling_qwen3_next.py.

Three layers of gated delta net, then one of gated attention (`full_attention_interval`, or `layer_types`); a quarter of a head turns;
norms are zero-centred. Experts, shared expert and dense layers as in Qwen2-MoE, weights renormalised by default. What predicts further
tokens is below `mtp`.
"""

from colibri_mp.checkpoint.matrices import TensorTable
from colibri_mp.models.config import ConfigReader
from colibri_mp.models.decoder import BuildMlp
from colibri_mp.models.gated_delta import build_hybrid, find_grouped_delta_net, read_hybrid_config
from colibri_mp.models.qwen2_moe import read_mlps
from colibri_mp.models.structure import ModelSpec


def build(config: ConfigReader, table: TensorTable) -> ModelSpec:
    """The model in `table`. Raises `CheckpointError` where config and tensors disagree."""
    decoder = read_hybrid_config(config)
    renormalises = config.flag("norm_topk_prob", default=True)

    def read(root: str, first: int) -> BuildMlp:
        return read_mlps(config, decoder.hidden, renormalises, root, first)

    return build_hybrid("qwen3_next", table, decoder, read, find_grouped_delta_net)
