"""Qwen3-MoE. Reference: transformers/models/qwen3_moe/modeling_qwen3_moe.py.

Grouped-query attention with an RMS norm over each head of q and k; softmax router, weights renormalised if
`norm_topk_prob`. A layer is dense (`intermediate_size`) if it is in `mlp_only_layers` or off the beat of
`decoder_sparse_step`. `sliding_window` counts only with `use_sliding_window`, and then for every layer (as in
transformers 5).
"""

from colibri_mp.checkpoint.experts import ExpertDims
from colibri_mp.checkpoint.matrices import TensorTable
from colibri_mp.models.config import ConfigReader
from colibri_mp.models.decoder import build_dense, build_model, build_moe, read_decoder_config, read_router
from colibri_mp.models.structure import DenseSpec, ModelSpec, MoeSpec


def build(config: ConfigReader, table: TensorTable) -> ModelSpec:
    """The model in `table`. Raises `CheckpointError` where config and tensors disagree."""
    bias = config.flag("attention_bias", default=False)
    windowed = config.flag("use_sliding_window", default=False)
    decoder = read_decoder_config(
        config,
        qk_norm="head",
        window=config.whole("sliding_window", default=4096) if windowed else None,
        qkv_bias=bias,
        o_bias=bias,
        default_theta=10_000.0,
        default_eps=1e-6,
    )
    router = read_router(config, norm_topk_prob=config.flag("norm_topk_prob", default=False))
    step, dense_layers = config.whole("decoder_sparse_step", default=1), config.whole_list("mlp_only_layers")
    dims = ExpertDims(
        router.num_experts, decoder.hidden, config.whole("moe_intermediate_size"), "moe_intermediate_size"
    )

    def build_mlp(table: TensorTable, layer: int) -> MoeSpec | DenseSpec:
        path = f"model.layers.{layer}.mlp"
        if layer in dense_layers or (layer + 1) % step:
            return build_dense(table, path, decoder.hidden, config.whole("intermediate_size"))
        return build_moe(table, layer, path, router, dims)

    return build_model("qwen3_moe", table, decoder, build_mlp)
