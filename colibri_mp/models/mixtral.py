"""Mixtral. Reference: transformers/models/mixtral/modeling_mixtral.py.

Grouped-query attention without q/k norm or biases; `sliding_window`, if given, holds for every layer. The router's
weights are always renormalised. Experts are called `block_sparse_moe.experts.N` with w1 gate, w3 up, w2 down.
"""

from colibri_mp.checkpoint.experts import ExpertDims
from colibri_mp.checkpoint.matrices import TensorTable
from colibri_mp.models.config import ConfigReader
from colibri_mp.models.decoder import build_model, build_moe, read_decoder_config, read_router
from colibri_mp.models.structure import ModelSpec, MoeSpec


def build(config: ConfigReader, table: TensorTable) -> ModelSpec:
    """The model in `table`. Raises `CheckpointError` where config and tensors disagree."""
    decoder = read_decoder_config(
        config,
        qk_norm="none",
        window=config.whole("sliding_window") if config.has("sliding_window") else None,
        default_theta=1_000_000.0,
        default_eps=1e-5,
    )
    router = read_router(config, norm_topk_prob=True)
    dims = ExpertDims(router.num_experts, decoder.hidden, config.whole("intermediate_size"), "intermediate_size")

    names = {"gate": "w1", "up": "w3", "down": "w2"}

    def build_mlp(table: TensorTable, layer: int) -> MoeSpec:
        return build_moe(table, layer, f"model.layers.{layer}.block_sparse_moe", router, dims, names)

    return build_model("mixtral", table, decoder, build_mlp)
