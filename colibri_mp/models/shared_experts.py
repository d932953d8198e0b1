"""Layers as DeepSeek has them and others took over: some dense ones, then routed experts beside a shared one that is always used."""

from dataclasses import replace

from colibri_mp.checkpoint.experts import ExpertDims
from colibri_mp.checkpoint.matrices import TensorTable
from colibri_mp.errors import CheckpointError
from colibri_mp.models.config import ConfigReader
from colibri_mp.models.decoder import BuildMlp, build_dense, build_moe, read_correction
from colibri_mp.models.structure import DenseSpec, MoeSpec
from colibri_mp.specs import RouterSpec


def dense_then_shared(
    config: ConfigReader, hidden: int, router: RouterSpec, *, default_dense: int, default_shared: int, corrected: bool
) -> BuildMlp:
    """The first `first_k_dense_replace` layers are dense, or those that `mlp_layer_types` says; the shared expert has the width of
    `n_shared_experts` routed ones.

    `corrected`: the router has a correction of its scores.
    """
    num_dense, kinds = config.whole("first_k_dense_replace", default=default_dense, least=0), _mlp_kinds(config)
    width = config.whole("moe_intermediate_size")
    shared_width = width * config.whole("n_shared_experts", default=default_shared)
    dims = ExpertDims(router.num_experts, hidden, width, "moe_intermediate_size")

    def build_mlp(table: TensorTable, layer: int) -> MoeSpec | DenseSpec:
        path = f"model.layers.{layer}.mlp"
        if kinds[layer] == "dense" if kinds else layer < num_dense:
            return build_dense(table, path, hidden, config.whole("intermediate_size"))
        shared_field = "n_shared_experts * moe_intermediate_size"
        return replace(
            build_moe(table, layer, path, router, dims),
            correction=read_correction(table, path, router) if corrected else None,
            shared=build_dense(table, f"{path}.shared_experts", hidden, shared_width, shared_field),
        )

    return build_mlp


def _mlp_kinds(config: ConfigReader) -> list[str]:
    """`mlp_layer_types`, which may go on with the layers that predict further tokens; empty if it is not there."""
    kinds, num_layers = config.text_list("mlp_layer_types"), config.whole("num_hidden_layers")
    for kind in kinds:
        config.require("mlp_layer_types", kind, "dense", "sparse")
    if kinds and len(kinds) < num_layers:
        raise CheckpointError(
            f"config.json: mlp_layer_types names {len(kinds)} layers, num_hidden_layers = {num_layers}"
        )
    return kinds
