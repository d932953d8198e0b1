"""DeepSeek-V2 and V2-Lite, DeepSeek-Coder-V2. Reference: transformers/models/deepseek_v2/modeling_deepseek_v2.py.

Latent attention (`latent`), without a query rank in V2-Lite, rotary pairs always neighbours. Router: softmax over all experts, weights not
renormalised but times `routed_scaling_factor`; with `topk_method` "group_limited_greedy" only the `topk_group` groups with the best
single experts count, with "greedy" all. Dense layers, then a shared expert beside the routed ones (`shared_experts`).
"""

from colibri_mp.checkpoint.matrices import TensorTable
from colibri_mp.errors import CheckpointError
from colibri_mp.models.config import ConfigReader
from colibri_mp.models.decoder import build_model
from colibri_mp.models.latent import find_latent_attention, read_latent_decoder
from colibri_mp.models.shared_experts import dense_then_shared
from colibri_mp.models.structure import ModelSpec
from colibri_mp.specs import RouterSpec


def build(config: ConfigReader, table: TensorTable) -> ModelSpec:
    """The model in `table`. Raises `CheckpointError` where config and tensors disagree."""
    config.require("moe_layer_freq", config.whole("moe_layer_freq", default=1), 1)
    decoder, router = read_latent_decoder(config), _read_router(config)
    build_mlp = dense_then_shared(config, decoder.hidden, router, default_dense=0, default_shared=2, corrected=False)
    return build_model("deepseek_v2", table, decoder, build_mlp, find_mixer=find_latent_attention)


def _read_router(config: ConfigReader) -> RouterSpec:
    """The reference ignores `norm_topk_prob`, older code did not: only false means the same to both."""
    config.require("scoring_func", config.text("scoring_func", default="softmax"), "softmax")
    config.require("norm_topk_prob", config.flag("norm_topk_prob", default=False), False)
    method = config.text("topk_method", default="greedy")
    config.require("topk_method", method, "greedy", "group_limited_greedy")
    num_experts, top_k = config.whole("n_routed_experts", "num_experts"), config.whole("num_experts_per_tok")
    if top_k > num_experts:
        raise CheckpointError(
            f"config.json: num_experts_per_tok = {top_k} is more than n_routed_experts = {num_experts}"
        )
    grouped = method == "group_limited_greedy"
    return RouterSpec(
        num_experts,
        top_k,
        norm_topk_prob=False,
        num_groups=config.whole("n_group") if grouped else 1,
        kept_groups=config.whole("topk_group") if grouped else 1,
        scaling=config.positive("routed_scaling_factor", default=1.0),
    )
