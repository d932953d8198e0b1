"""gpt-oss. Reference: transformers/models/gpt_oss/modeling_gpt_oss.py.

Grouped-query attention with biases of q, k, v and o, and a learned sink for each head; every other layer sees a window (`layer_types`).
Rotary embedding by yarn, in the published models without rounding its range. The router has a bias; its weights are a softmax over the
chosen experts, which is the softmax over all of them, renormalised. Experts have biases, and a clamped activation (`swiglu_limit`,
`swiglu_alpha`).
"""

from colibri_mp.checkpoint.experts import ExpertDims
from colibri_mp.checkpoint.matrices import Shape, TensorTable
from colibri_mp.checkpoint.shared_pieces import find_shared_experts
from colibri_mp.errors import CheckpointError
from colibri_mp.models.config import ConfigReader
from colibri_mp.models.decoder import build_model, read_decoder_config, read_layer_windows, read_router
from colibri_mp.models.structure import ModelSpec, MoeSpec
from colibri_mp.specs import ClampedSwiGLU


def build(config: ConfigReader, table: TensorTable) -> ModelSpec:
    """The model in `table`. Raises `CheckpointError` where config and tensors disagree."""
    if not (config.has("rope_scaling") or config.has("rope_parameters")):
        raise CheckpointError("config.json: has no rope_scaling or rope_parameters, which this model type needs")
    bias = config.flag("attention_bias", default=True)
    decoder = read_decoder_config(
        config, qk_norm="none", qkv_bias=bias, o_bias=bias, sinks=True, default_theta=150_000.0, default_eps=1e-5
    )
    kinds = ("sliding_attention", "full_attention")
    decoder = read_layer_windows(config, decoder, [kinds[layer % 2] for layer in range(decoder.num_layers)])
    router = read_router(config, norm_topk_prob=True)
    clamp = ClampedSwiGLU(config.positive("swiglu_limit", default=7.0), config.positive("swiglu_alpha", default=1.702))
    width = config.whole("intermediate_size")
    dims = ExpertDims(router.num_experts, decoder.hidden, width, "intermediate_size", has_bias=True, clamp=clamp)

    def build_mlp(table: TensorTable, layer: int) -> MoeSpec:
        path = f"model.layers.{layer}.mlp"
        gate = table.matrix(
            f"{path}.router", Shape((router.num_experts, decoder.hidden), "num_local_experts, hidden_size")
        )
        bias = table.vector(f"{path}.router.bias", Shape((router.num_experts,), "num_local_experts"))
        experts = find_shared_experts(table, layer, f"{path}.experts", dims)
        return MoeSpec(router, gate, experts, gate_bias=bias)

    return build_model("gpt_oss", table, decoder, build_mlp)
