"""GLM-4.5, GLM-4.6. Reference: transformers/models/glm4_moe/modeling_glm4_moe.py.

Grouped-query attention; `attention_bias` gives biases to q, k and v, not to o; RMS norm over each head of q and k if `use_qk_norm`; the
first half of a head turns (`partial_rotary_factor`). Router: sigmoid, corrected for the choice only, times `routed_scaling_factor`. Beside
the routed experts there is a shared one of width `n_shared_experts` * `moe_intermediate_size`, always with weight 1. The first
`first_k_dense_replace` layers are dense. The layers after the last (`num_nextn_predict_layers`) predict further tokens.
"""

from colibri_mp.checkpoint.matrices import TensorTable
from colibri_mp.models.config import ConfigReader
from colibri_mp.models.decoder import build_model, read_decoder_config, read_grouped_router, read_num_predictors
from colibri_mp.models.shared_experts import dense_then_shared
from colibri_mp.models.structure import ModelSpec


def build(config: ConfigReader, table: TensorTable) -> ModelSpec:
    """The model in `table`. Raises `CheckpointError` where config and tensors disagree."""
    decoder = read_decoder_config(
        config,
        qk_norm="head" if config.flag("use_qk_norm", default=False) else "none",
        qkv_bias=config.flag("attention_bias", default=False),
        partial_rotary=0.5,
        default_theta=10_000.0,
        default_eps=1e-5,
    )
    router = read_grouped_router(config)
    build_mlp = dense_then_shared(config, decoder.hidden, router, default_dense=1, default_shared=1, corrected=True)
    return build_model("glm4_moe", table, decoder, build_mlp, read_num_predictors(config))
