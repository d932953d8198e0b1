"""Building blocks of the families with gated delta nets (Qwen3-Next, Qwen3.5): layers of linear attention, every few of them one of gated
attention, a shared expert with a gate, and norms that are stored as w and used as 1 + w.

How rows are arranged in a checkpoint is settled here: what is loaded is always all of q, then k, then v.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from colibri_mp.checkpoint.matrices import Shape, TensorTable, take_rows
from colibri_mp.checkpoint.safetensors_header import TensorInfo
from colibri_mp.errors import CheckpointError
from colibri_mp.models.config import ConfigReader
from colibri_mp.models.decoder import (
    BuildMlp,
    DecoderConfig,
    FindMixer,
    build_layer,
    build_model,
    find_attention,
    find_norm,
    read_decoder_config,
)
from colibri_mp.models.structure import (
    AttentionTensors,
    DeltaNetTensors,
    LayerSpec,
    MixerTensors,
    ModelSpec,
    PredictorSpec,
)
from colibri_mp.specs import AttentionSpec, DeltaNetSpec

ReadMlps = Callable[[str, int], BuildMlp]
_PREDICTOR_ROOTS = ("mtp", "language_model.mtp")
_TYPES = ("linear_attention", "full_attention")


def read_hybrid_config(config: ConfigReader) -> DecoderConfig:
    """The decoder's fields, with the mixer of each layer."""
    config.require("attention_bias", config.flag("attention_bias", default=False), False)
    decoder = read_decoder_config(
        config, qk_norm="head", gated=True, partial_rotary=0.25, default_theta=10_000.0, default_eps=1e-6
    )
    delta = DeltaNetSpec(
        hidden=decoder.hidden,
        num_key_heads=config.whole("linear_num_key_heads", default=16),
        num_value_heads=config.whole("linear_num_value_heads", default=32),
        key_dim=config.whole("linear_key_head_dim", default=128),
        value_dim=config.whole("linear_value_head_dim", default=128),
        conv_tokens=config.whole("linear_conv_kernel_dim", default=4),
        norm_eps=decoder.norm_eps,
    )
    types = _layer_types(config, decoder.num_layers)
    return replace(
        decoder, layer_mixers=tuple(delta if name == "linear_attention" else decoder.attention for name in types)
    )


def _layer_types(config: ConfigReader, num_layers: int) -> Sequence[str]:
    """What `layer_types` says, or every `full_attention_interval`-th layer is full attention."""
    if not (types := config.text_list("layer_types")):
        interval = config.whole("full_attention_interval", default=4)
        return [_TYPES[(layer + 1) % interval == 0] for layer in range(num_layers)]
    if len(types) != num_layers:
        raise CheckpointError(f"config.json: layer_types names {len(types)} layers, num_hidden_layers = {num_layers}")
    for name in types:
        config.require("layer_types", name, *_TYPES)
    return types


def find_gated_attention(table: TensorTable, layer_path: str, spec: AttentionSpec) -> AttentionTensors:
    """Attention whose q_proj has for each head the rows of q and then those of its gate."""
    tensors, size = find_attention(table, layer_path, spec), spec.head_dim
    runs = [((2 * head + part) * size, size) for part in range(2) for head in range(spec.num_heads)]
    return replace(tensors, q=take_rows(tensors.q, runs))


def find_grouped_delta_net(table: TensorTable, layer_path: str, spec: DeltaNetSpec) -> DeltaNetTensors:
    """A delta net whose in_proj_qkvz and in_proj_ba hold for each key head the rows of q, k, v and z, and of b and a (Qwen3-Next)."""
    path, group, heads = f"{layer_path}.linear_attn", spec.group_size, range(spec.num_key_heads)
    rows = Shape((spec.conv_width + spec.value_width, spec.hidden), "rows of q, k, v and z, hidden_size")
    qkvz = table.matrix(f"{path}.in_proj_qkvz", rows)
    ba = table.matrix(
        f"{path}.in_proj_ba", Shape((2 * spec.num_value_heads, spec.hidden), "2 * linear_num_value_heads, hidden_size")
    )
    sizes = (spec.key_dim, spec.key_dim, group * spec.value_dim, group * spec.value_dim)
    q, k, v, z = (
        [(sum(sizes) * head + sum(sizes[:part]), sizes[part]) for head in heads] for part in range(len(sizes))
    )
    b, a = ([((2 * head + part) * group, group) for head in heads] for part in range(2))
    return DeltaNetTensors(
        qkv=take_rows(qkvz, [*q, *k, *v]), z=take_rows(qkvz, z), b=take_rows(ba, b), a=take_rows(ba, a),
        **_common(table, layer_path, spec),
    )  # fmt: skip


def find_flat_delta_net(table: TensorTable, layer_path: str, spec: DeltaNetSpec) -> DeltaNetTensors:
    """A delta net with a matrix for each of its inputs (Qwen3.5)."""
    path = f"{layer_path}.linear_attn"
    gate = Shape((spec.num_value_heads, spec.hidden), "linear_num_value_heads, hidden_size")
    return DeltaNetTensors(
        qkv=table.matrix(
            f"{path}.in_proj_qkv", Shape((spec.conv_width, spec.hidden), "rows of q, k and v, hidden_size")
        ),
        z=table.matrix(f"{path}.in_proj_z", Shape((spec.value_width, spec.hidden), "rows of v, hidden_size")),
        b=table.matrix(f"{path}.in_proj_b", gate),
        a=table.matrix(f"{path}.in_proj_a", gate),
        **_common(table, layer_path, spec),
    )


def _common(table: TensorTable, layer_path: str, spec: DeltaNetSpec) -> dict[str, Any]:
    path, heads = f"{layer_path}.linear_attn", Shape((spec.num_value_heads,), "linear_num_value_heads")
    taps = (1, spec.conv_tokens) if not _is_mlx(table, path) else (spec.conv_tokens, 1)
    return {
        "norm": find_norm(table, f"{layer_path}.input_layernorm", spec.hidden),
        "out": table.matrix(f"{path}.out_proj", Shape((spec.hidden, spec.value_width), "hidden_size, rows of v")),
        "conv": table.vector(
            f"{path}.conv1d.weight", Shape((spec.conv_width, *taps), "channels, linear_conv_kernel_dim")
        ),
        "a_log": table.vector(f"{path}.A_log", heads),
        "dt_bias": table.vector(f"{path}.dt_bias", heads),
        "head_norm": table.vector(f"{path}.norm.weight", Shape((spec.value_dim,), "linear_value_head_dim")),
    }


def _is_mlx(table: TensorTable, path: str) -> bool:
    """MLX has the channels of the convolution last, and stores 1 + w for norms (mlx_lm/models/qwen3_next.py, `sanitize`)."""
    info = table.tensors.get(f"{path}.conv1d.weight")
    return info is not None and info.shape[-1] == 1


def build_hybrid(
    model_type: str, table: TensorTable, decoder: DecoderConfig, read_mlps: ReadMlps, find_delta_net: FindMixer
) -> ModelSpec:
    """The whole model. `read_mlps(root, first)`: experts and dense blocks of the layers below a root, which count from `first`."""

    def find_mixer(table: TensorTable, layer_path: str, spec: Any) -> MixerTensors:
        is_delta = isinstance(spec, DeltaNetSpec)
        return find_delta_net(table, layer_path, spec) if is_delta else find_gated_attention(table, layer_path, spec)

    model = build_model(model_type, table, decoder, read_mlps(decoder.root, 0), find_mixer=find_mixer)
    model = replace(model, predictors=_predictors(table, decoder, read_mlps))
    paths = (f"{decoder.root}.layers.{layer}.linear_attn" for layer in range(decoder.num_layers))
    if any(_is_mlx(table, path) for path in paths):
        return model
    return replace(
        model,
        final_norm=_zero_centred(model.final_norm),
        layers=tuple(_with_zero_centred_norms(layer) for layer in model.layers),
        predictors=tuple(_predictor_with_zero_centred_norms(predictor) for predictor in model.predictors),
    )


def _predictors(table: TensorTable, decoder: DecoderConfig, read_mlps: ReadMlps) -> tuple[PredictorSpec, ...]:
    """The one predictor, a layer of gated attention below `mtp`, where the checkpoint has it and it is wanted."""
    found: tuple[PredictorSpec, ...] = ()
    for root in _PREDICTOR_ROOTS:
        is_here = f"{root}.fc.weight" in table and table.has_experts(decoder.num_layers)
        if table.finds_predictors and is_here and not found:
            found = (_predictor(table, replace(decoder, root=root), read_mlps(root, decoder.num_layers)),)
        table.leave_out(f"{root}.")
    table.leave_out(f"model.layers.{decoder.num_layers}.")  # its experts in a container
    return found


def _predictor(table: TensorTable, decoder: DecoderConfig, build_mlp: BuildMlp) -> PredictorSpec:
    root, hidden = decoder.root, decoder.hidden
    return PredictorSpec(
        embed_norm=find_norm(table, f"{root}.pre_fc_norm_embedding", hidden),
        hidden_norm=find_norm(table, f"{root}.pre_fc_norm_hidden", hidden),
        merge=table.matrix(f"{root}.fc", Shape((hidden, 2 * hidden), "hidden_size, 2 * hidden_size")),
        layer=build_layer(table, decoder, 0, decoder.attention, build_mlp, find_gated_attention),
        final_norm=find_norm(table, f"{root}.norm", hidden),
    )


def _predictor_with_zero_centred_norms(predictor: PredictorSpec) -> PredictorSpec:
    return replace(
        predictor,
        embed_norm=_zero_centred(predictor.embed_norm),
        hidden_norm=_zero_centred(predictor.hidden_norm),
        layer=_with_zero_centred_norms(predictor.layer),
        final_norm=_zero_centred(predictor.final_norm),
    )


def _zero_centred(info: TensorInfo | None) -> TensorInfo:
    assert info is not None
    return info._replace(added=1.0)


def _with_zero_centred_norms(layer: LayerSpec) -> LayerSpec:
    """All but the norm of a delta net's heads, which is as everywhere."""
    tensors = replace(layer.tensors, norm=_zero_centred(layer.tensors.norm))
    if isinstance(tensors, AttentionTensors):
        tensors = replace(tensors, q_norm=_zero_centred(tensors.q_norm), k_norm=_zero_centred(tensors.k_norm))
    return replace(layer, mlp_norm=_zero_centred(layer.mlp_norm), tensors=tensors)
