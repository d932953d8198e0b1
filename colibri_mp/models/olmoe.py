"""OLMoE. Reference: transformers/models/olmoe/modeling_olmoe.py.

q and k are normed over the whole projection, before the heads are split; `clip_qkv` then clamps q, k and v. The
router's weights are renormalised only if `norm_topk_prob`. Every layer has experts, of width `intermediate_size`.
"""

from colibri_mp.checkpoint.experts import ExpertDims
from colibri_mp.checkpoint.matrices import TensorTable
from colibri_mp.models.config import ConfigReader
from colibri_mp.models.decoder import build_model, build_moe, read_decoder_config, read_router
from colibri_mp.models.structure import ModelSpec, MoeSpec


def build(config: ConfigReader, table: TensorTable) -> ModelSpec:
    """The model in `table`. Raises `CheckpointError` where config and tensors disagree."""
    bias = config.flag("attention_bias", default=False)
    decoder = read_decoder_config(
        config,
        qk_norm="full",
        clip_qkv=config.positive("clip_qkv") if config.has("clip_qkv") else None,
        qkv_bias=bias,
        o_bias=bias,
        default_theta=10_000.0,
        default_eps=1e-5,
    )
    router = read_router(config, norm_topk_prob=config.flag("norm_topk_prob", default=False))
    dims = ExpertDims(router.num_experts, decoder.hidden, config.whole("intermediate_size"), "intermediate_size")

    def build_mlp(table: TensorTable, layer: int) -> MoeSpec:
        return build_moe(table, layer, f"model.layers.{layer}.mlp", router, dims)

    return build_model("olmoe", table, decoder, build_mlp)
