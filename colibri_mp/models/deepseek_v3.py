"""DeepSeek-V3 and R1, and Kimi-K2, whose config calls them kimi_k2. Reference: transformers/models/deepseek_v3/modeling_deepseek_v3.py.

Latent attention (`latent`), rotary pairs are neighbours unless `rope_interleave` is false. Router: sigmoid, corrected for the choice only,
`topk_group` of `n_group` groups by the sum of their two best, times `routed_scaling_factor`. Dense layers, then a shared expert beside
the routed ones (`shared_experts`). The layers after the last (`num_nextn_predict_layers`) predict further tokens.
"""

from colibri_mp.checkpoint.matrices import TensorTable
from colibri_mp.models.config import ConfigReader
from colibri_mp.models.decoder import build_model, read_grouped_router, read_num_predictors
from colibri_mp.models.latent import find_latent_attention, read_latent_decoder
from colibri_mp.models.shared_experts import dense_then_shared
from colibri_mp.models.structure import ModelSpec


def build(config: ConfigReader, table: TensorTable) -> ModelSpec:
    """The model in `table`. Raises `CheckpointError` where config and tensors disagree."""
    config.require("moe_layer_freq", config.whole("moe_layer_freq", default=1), 1)
    decoder, router = read_latent_decoder(config), read_grouped_router(config)
    build_mlp = dense_then_shared(config, decoder.hidden, router, default_dense=3, default_shared=1, corrected=True)
    num_predictors = read_num_predictors(config)
    return build_model("deepseek_v3", table, decoder, build_mlp, num_predictors, find_latent_attention)
