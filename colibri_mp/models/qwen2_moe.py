"""Qwen2-MoE (Qwen1.5-MoE too). Reference: transformers/models/qwen2_moe/modeling_qwen2_moe.py.

Grouped-query attention with biases of q, k and v (`qkv_bias`) and no q/k norm; softmax router, weights renormalised only if
`norm_topk_prob` (false by default). Beside the routed experts there is a shared one of width `shared_expert_intermediate_size`, whose
weight is sigmoid(`shared_expert_gate` . x). A layer is dense (`intermediate_size`) if it is in `mlp_only_layers` or off the beat of
`decoder_sparse_step`. With `use_sliding_window` the layers that `layer_types` says see a window.
"""

from dataclasses import replace

from colibri_mp.checkpoint.experts import ExpertDims
from colibri_mp.checkpoint.matrices import Shape, TensorTable
from colibri_mp.models.config import ConfigReader
from colibri_mp.models.decoder import (
    BuildMlp,
    build_dense,
    build_model,
    build_moe,
    read_decoder_config,
    read_layer_windows,
    read_router,
)
from colibri_mp.models.structure import DenseSpec, ModelSpec, MoeSpec


def build(config: ConfigReader, table: TensorTable) -> ModelSpec:
    """The model in `table`. Raises `CheckpointError` where config and tensors disagree."""
    decoder = read_decoder_config(
        config,
        qk_norm="none",
        qkv_bias=config.flag("qkv_bias", default=True),
        default_theta=10_000.0,
        default_eps=1e-6,
    )
    if config.flag("use_sliding_window", default=False):
        decoder = read_layer_windows(config, decoder, _layer_types(config, decoder.num_layers))
    build_mlp = read_mlps(config, decoder.hidden, config.flag("norm_topk_prob", default=False))
    return build_model("qwen2_moe", table, decoder, build_mlp)


def read_mlps(config: ConfigReader, hidden: int, norm_topk_prob: bool, root: str = "model", first: int = 0) -> BuildMlp:
    """Experts with a gated shared one beside them, or a dense block, for the layers below `root`; Qwen3-Next and Qwen3.5 have the same.

    `first`: the number of the first of these layers.
    """
    router = read_router(config, norm_topk_prob=norm_topk_prob)
    step, dense_layers = config.whole("decoder_sparse_step", default=1), config.whole_list("mlp_only_layers")
    width, shared_width = config.whole("moe_intermediate_size"), config.whole("shared_expert_intermediate_size")
    dims = ExpertDims(router.num_experts, hidden, width, "moe_intermediate_size")

    def build_mlp(table: TensorTable, layer: int) -> MoeSpec | DenseSpec:
        path = f"{root}.layers.{layer}.mlp"
        if layer in dense_layers or (layer + 1) % step:
            return build_dense(table, path, hidden, config.whole("intermediate_size"))
        return replace(
            build_moe(table, first + layer, path, router, dims),
            shared=build_dense(table, f"{path}.shared_expert", hidden, shared_width, "shared_expert_intermediate_size"),
            shared_gate=table.matrix(f"{path}.shared_expert_gate", Shape((1, hidden), "1, hidden_size")),
        )

    return build_mlp


def _layer_types(config: ConfigReader, num_layers: int) -> list[str]:
    """What `layer_types` is where an older config does not have it: every other layer of the first `max_window_layers`."""
    end = config.whole("max_window_layers", default=28, least=0)
    windowed = [layer < end and layer % 2 == 0 for layer in range(num_layers)]
    return ["sliding_attention" if layer else "full_attention" for layer in windowed]
