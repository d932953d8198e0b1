"""GLM-5 and its successors. Reference: transformers/models/glm_moe_dsa/modeling_glm_moe_dsa.py.

Latent attention (`latent`) that reads `index_topk` positions at most, which an indexer chooses (`indexer`); layers without an indexer
take the choice of the last one that has one. Router as DeepSeek-V3's, in published models with one group. Dense layers by
`mlp_layer_types` or `first_k_dense_replace`, then a shared expert beside the routed ones (`shared_experts`). The layers after the last
(`num_nextn_predict_layers`) predict further tokens.
"""

from dataclasses import replace

from colibri_mp.checkpoint.matrices import TensorTable
from colibri_mp.models.config import ConfigReader
from colibri_mp.models.decoder import DecoderConfig, build_model, read_grouped_router, read_num_predictors
from colibri_mp.models.indexer import find_indexer, read_indexer, read_indexer_layers
from colibri_mp.models.latent import find_latent_attention, read_latent_decoder
from colibri_mp.models.shared_experts import dense_then_shared
from colibri_mp.models.structure import MlaTensors, ModelSpec
from colibri_mp.specs import MlaSpec


def build(config: ConfigReader, table: TensorTable) -> ModelSpec:
    """The model in `table`. Raises `CheckpointError` where config and tensors disagree."""
    for kind in config.text_list("layer_types"):
        config.require("layer_types", kind, "indexed_attention")
    decoder, router = _read_decoder(config, table), read_grouped_router(config)
    build_mlp = dense_then_shared(config, decoder.hidden, router, default_dense=3, default_shared=1, corrected=True)
    return build_model("glm_moe_dsa", table, decoder, build_mlp, read_num_predictors(config), _find_attention)


def _read_decoder(config: ConfigReader, table: TensorTable) -> DecoderConfig:
    """All layers; a predictor without an indexer has no layer before it to share a choice with: it reads everything."""
    decoder = read_latent_decoder(config, default_eps=1e-5)
    spec = decoder.attention
    assert isinstance(spec, MlaSpec)
    rank = config.whole("q_lora_rank", default=2048)
    indexer = read_indexer(config, spec.hidden, rank, spec.rope_dim)
    layers = read_indexer_layers(config, decoder.num_layers)
    full = replace(spec, q_lora_rank=rank, indexer=indexer)
    mixers = tuple(full if has_one else replace(full, shares_choice=True) for has_one in layers)
    predictor_chooses = f"model.layers.{decoder.num_layers}.self_attn.indexer.wq_b.weight" in table
    return replace(decoder, attention=full if predictor_chooses else spec, layer_mixers=mixers)


def _find_attention(table: TensorTable, layer_path: str, spec: MlaSpec) -> MlaTensors:
    tensors = find_latent_attention(table, layer_path, spec)
    if spec.indexer is None or spec.shares_choice:
        return tensors
    return replace(tensors, indexer=find_indexer(table, f"{layer_path}.self_attn.indexer", spec.indexer))
