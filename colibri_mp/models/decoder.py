"""Building blocks that the families share: a pre-norm decoder with grouped-query attention, found in a tensor table.

Names follow Hugging Face's `model.layers.N...`. Each function looks up and checks the tensors of one part.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from colibri_mp.checkpoint.experts import STANDARD_NAMES, ExpertDims, find_experts
from colibri_mp.checkpoint.matrices import Shape, TensorTable
from colibri_mp.checkpoint.safetensors_header import TensorInfo
from colibri_mp.errors import CheckpointError
from colibri_mp.models.config import ConfigReader, read_max_context, read_rope
from colibri_mp.models.structure import (
    AttentionTensors,
    DenseSpec,
    LayerSpec,
    MixerSpec,
    MixerTensors,
    ModelSpec,
    MoeSpec,
    PredictorSpec,
)
from colibri_mp.specs import AttentionSpec, QKNorm, RopeSpec, RouterSpec

MOST_PREDICTORS = 16
BuildMlp = Callable[[TensorTable, int], MoeSpec | DenseSpec]
FindMixer = Callable[[TensorTable, str, Any], MixerTensors]


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The fields of config.json that every family has. `layer_mixers`: of each layer, where they are not all `attention`.

    `root` and `head`: where the decoder and the head are among the tensors.
    """

    hidden: int
    num_layers: int
    vocab_size: int
    max_context: int
    norm_eps: float
    tied: bool
    attention: MixerSpec
    rope: RopeSpec
    layer_mixers: tuple[MixerSpec, ...] = ()
    root: str = "model"
    head: str = "lm_head"


def read_decoder_config(
    config: ConfigReader,
    *,
    qk_norm: QKNorm,
    window: int | None = None,
    clip_qkv: float | None = None,
    qkv_bias: bool = False,
    o_bias: bool = False,
    sinks: bool = False,
    gated: bool = False,
    partial_rotary: float | None = None,
    default_theta: float,
    default_eps: float,
) -> DecoderConfig:
    """Read the common fields; what differs between the families is given."""
    config.require("hidden_act", config.text("hidden_act", default="silu"), "silu")
    hidden, num_heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    num_kv_heads = config.whole("num_key_value_heads", default=num_heads)
    _refuse_remainder("num_attention_heads", num_heads, "num_key_value_heads", num_kv_heads)
    head_dim = _head_dim(config, hidden, num_heads)
    norm_eps = config.positive("rms_norm_eps", default=default_eps)
    rope = read_rope(config, head_dim, default_theta, partial_rotary)
    attention = AttentionSpec(
        hidden=hidden,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        qk_norm=qk_norm,
        norm_eps=norm_eps,
        clip_qkv=clip_qkv,
        window=window,
        scale=head_dim**-0.5,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        sinks=sinks,
        gated=gated,
    )
    return decoder_with(config, attention, rope)


def decoder_with(config: ConfigReader, mixer: MixerSpec, rope: RopeSpec) -> DecoderConfig:
    """The common fields that are left when all layers have this mixer."""
    return DecoderConfig(
        hidden=mixer.hidden,
        num_layers=config.whole("num_hidden_layers"),
        vocab_size=config.whole("vocab_size"),
        max_context=read_max_context(config, rope),
        norm_eps=mixer.norm_eps,
        tied=config.flag("tie_word_embeddings", default=False),
        attention=mixer,
        rope=rope,
    )


def read_router(config: ConfigReader, *, norm_topk_prob: bool) -> RouterSpec:
    """The router's fields: number of experts, and how many of them a token chooses."""
    num_experts, top_k = config.whole("num_experts", "num_local_experts"), config.whole("num_experts_per_tok")
    if top_k > num_experts:
        raise CheckpointError(f"config.json: num_experts_per_tok = {top_k} is more than num_experts = {num_experts}")
    return RouterSpec(num_experts, top_k, norm_topk_prob)


def read_grouped_router(config: ConfigReader) -> RouterSpec:
    """The fields of a noaux_tc router: sigmoid scores, a correction for the choice, groups, scaling."""
    num_experts = config.whole("n_routed_experts", "num_local_experts", "num_experts")
    top_k = config.whole("num_experts_per_tok")
    if top_k > num_experts:
        raise CheckpointError(
            f"config.json: num_experts_per_tok = {top_k} is more than n_routed_experts = {num_experts}"
        )
    config.require("scoring_func", config.text("scoring_func", default="sigmoid"), "sigmoid")
    config.require("topk_method", config.text("topk_method", default="noaux_tc"), "noaux_tc")
    return RouterSpec(
        num_experts,
        top_k,
        norm_topk_prob=config.flag("norm_topk_prob", default=True),
        scoring="sigmoid",
        num_groups=config.whole("n_group", default=1),
        kept_groups=config.whole("topk_group", default=1),
        scaling=config.positive("routed_scaling_factor", default=1.0),
    )


def read_layer_windows(config: ConfigReader, decoder: DecoderConfig, default_types: Sequence[str]) -> DecoderConfig:
    """Where some layers see a `sliding_window` and others everything, as `layer_types` says."""
    types = config.text_list("layer_types") or list(default_types)
    if len(types) != decoder.num_layers:
        raise CheckpointError(
            f"config.json: layer_types names {len(types)} layers, num_hidden_layers = {decoder.num_layers}"
        )
    for name in types:
        config.require("layer_types", name, "sliding_attention", "full_attention")
    assert isinstance(decoder.attention, AttentionSpec)
    windowed = replace(decoder.attention, window=config.whole("sliding_window"))
    specs = tuple(windowed if name == "sliding_attention" else decoder.attention for name in types)
    return replace(decoder, layer_mixers=specs)


def read_num_predictors(config: ConfigReader) -> int:
    """How many layers predict tokens after the next one."""
    num_predictors = config.whole("num_nextn_predict_layers", "num_mtp_layers", default=0, least=0)
    if num_predictors > MOST_PREDICTORS:
        raise CheckpointError(
            f"config.json: num_nextn_predict_layers = {num_predictors} cannot be meant, at most {MOST_PREDICTORS} are expected"
        )
    return num_predictors


def find_norm(table: TensorTable, path: str, hidden: int) -> TensorInfo:
    """The weight of an RMS norm over the hidden state."""
    return table.vector(f"{path}.weight", Shape((hidden,), "hidden_size"))


def find_attention(table: TensorTable, layer_path: str, spec: AttentionSpec) -> AttentionTensors:
    """The tensors of grouped-query attention of the layer `layer_path`."""
    path = f"{layer_path}.self_attn"
    q_rows = Shape((spec.q_rows, spec.hidden), f"{'2 * ' * spec.gated}num_attention_heads * head_dim, hidden_size")
    kv_rows = Shape((spec.kv_width, spec.hidden), "num_key_value_heads * head_dim, hidden_size")
    o_rows = Shape((spec.hidden, spec.q_width), "hidden_size, num_attention_heads * head_dim")
    return AttentionTensors(
        norm=find_norm(table, f"{layer_path}.input_layernorm", spec.hidden),
        q=table.matrix(f"{path}.q_proj", q_rows),
        k=table.matrix(f"{path}.k_proj", kv_rows),
        v=table.matrix(f"{path}.v_proj", kv_rows),
        o=table.matrix(f"{path}.o_proj", o_rows),
        **_biases(table, path, spec),
        **_qk_norms(table, path, spec),
        sinks=table.vector(f"{path}.sinks", Shape((spec.num_heads,), "num_attention_heads")) if spec.sinks else None,
    )


def build_model(
    model_type: str,
    table: TensorTable,
    decoder: DecoderConfig,
    build_mlp: BuildMlp,
    num_predictors: int = 0,
    find_mixer: FindMixer = find_attention,
) -> ModelSpec:
    """The whole model. What the family adds, for its layers and, after these, its predictors:

    `build_mlp(table, layer)`, and `find_mixer(table, layer_path, spec)`, which gives the tensors of `decoder`'s mixers.
    """
    embed_shape = Shape((decoder.vocab_size, decoder.hidden), "vocab_size, hidden_size")
    embed = table.matrix(f"{decoder.root}.embed_tokens", embed_shape)
    specs = decoder.layer_mixers or (decoder.attention,) * decoder.num_layers
    layers = tuple(build_layer(table, decoder, i, spec, build_mlp, find_mixer) for i, spec in enumerate(specs))
    if not any(isinstance(layer.mlp, MoeSpec) for layer in layers):
        raise CheckpointError("config.json: no layer has experts; only mixture-of-experts models are supported")
    return ModelSpec(
        model_type=model_type,
        hidden=decoder.hidden,
        vocab_size=decoder.vocab_size,
        max_context=decoder.max_context,
        norm_eps=decoder.norm_eps,
        rope=decoder.rope,
        embed=embed,
        head=embed if decoder.tied else table.matrix(decoder.head, embed_shape),
        final_norm=find_norm(table, f"{decoder.root}.norm", decoder.hidden),
        layers=layers,
        predictors=tuple(_predictors(table, decoder, build_mlp, num_predictors, find_mixer)),
    )


def build_moe(
    table: TensorTable,
    layer: int,
    path: str,
    router: RouterSpec,
    dims: ExpertDims,
    names: Mapping[str, str] = STANDARD_NAMES,
) -> MoeSpec:
    """The mixture-of-experts block `path` of one layer: its router `gate` and its experts."""
    gate = table.matrix(f"{path}.gate", Shape((router.num_experts, dims.hidden), "num_experts, hidden_size"))
    return MoeSpec(router, gate, find_experts(table, layer, path, dims, names))


def read_correction(table: TensorTable, path: str, router: RouterSpec) -> TensorInfo:
    """The correction of the scores of the router in block `path`."""
    return table.vector(
        f"{path}.gate.e_score_correction_bias", Shape((router.num_experts,), "number of routed experts")
    )


def build_dense(
    table: TensorTable, path: str, hidden: int, width: int, width_field: str = "intermediate_size"
) -> DenseSpec:
    """The dense block or shared expert `path`; `width_field`: what the config says of its width."""
    wide = Shape((width, hidden), f"{width_field}, hidden_size")
    narrow = Shape((hidden, width), f"hidden_size, {width_field}")
    return DenseSpec(
        gate=table.matrix(f"{path}.gate_proj", wide),
        up=table.matrix(f"{path}.up_proj", wide),
        down=table.matrix(f"{path}.down_proj", narrow),
    )


def _predictors(
    table: TensorTable, decoder: DecoderConfig, build_mlp: BuildMlp, num_predictors: int, find_mixer: FindMixer
) -> Iterator[PredictorSpec]:
    """The layers after the last, where the checkpoint has them and they are wanted. Their copies of embedding and head are not."""
    hidden = decoder.hidden
    for i in range(decoder.num_layers, decoder.num_layers + num_predictors):
        path = f"model.layers.{i}"
        if table.finds_predictors and table.has_experts(i) and f"{path}.eh_proj.weight" in table:
            yield PredictorSpec(
                embed_norm=find_norm(table, f"{path}.enorm", hidden),
                hidden_norm=find_norm(table, f"{path}.hnorm", hidden),
                merge=table.matrix(f"{path}.eh_proj", Shape((hidden, 2 * hidden), "hidden_size, 2 * hidden_size")),
                layer=build_layer(table, decoder, i, decoder.attention, build_mlp, find_mixer),
                final_norm=find_norm(table, f"{path}.shared_head.norm", hidden),
            )
        table.leave_out(f"{path}.")


def build_layer(
    table: TensorTable, decoder: DecoderConfig, i: int, spec: MixerSpec, build_mlp: BuildMlp, find_mixer: FindMixer
) -> LayerSpec:
    """Layer `i` below the decoder's root."""
    path = f"{decoder.root}.layers.{i}"
    return LayerSpec(
        attention=spec,
        tensors=find_mixer(table, path, spec),
        mlp_norm=find_norm(table, f"{path}.post_attention_layernorm", spec.hidden),
        mlp=build_mlp(table, i),
    )


def _biases(table: TensorTable, path: str, spec: AttentionSpec) -> Mapping[str, TensorInfo]:
    rows = {"q": spec.q_width, "k": spec.kv_width, "v": spec.kv_width} if spec.qkv_bias else {}
    if spec.o_bias:
        rows["o"] = spec.hidden
    shapes = {name: Shape((size,), f"rows of {name}_proj; attention_bias is true") for name, size in rows.items()}
    return {f"{name}_bias": table.vector(f"{path}.{name}_proj.bias", shape) for name, shape in shapes.items()}


def _qk_norms(table: TensorTable, path: str, spec: AttentionSpec) -> Mapping[str, TensorInfo]:
    match spec.qk_norm:
        case "none":
            return {}
        case "head":
            shapes = {name: Shape((spec.head_dim,), "head_dim") for name in ("q_norm", "k_norm")}
        case "full":
            shapes = {"q_norm": Shape((spec.q_width,), "num_attention_heads * head_dim")}
            shapes["k_norm"] = Shape((spec.kv_width,), "num_key_value_heads * head_dim")
    return {name: table.vector(f"{path}.{name}.weight", shape) for name, shape in shapes.items()}


def _head_dim(config: ConfigReader, hidden: int, num_heads: int) -> int:
    if not config.has("head_dim"):
        _refuse_remainder("hidden_size", hidden, "num_attention_heads", num_heads)
    head_dim = config.whole("head_dim", default=hidden // num_heads)
    if head_dim % 2:
        raise CheckpointError(f"config.json: head_dim = {head_dim} must be even, rotary embedding works on pairs")
    return head_dim


def _refuse_remainder(name: str, value: int, by_name: str, by: int) -> None:
    if value % by:
        raise CheckpointError(f"config.json: {name} = {value} is no multiple of {by_name} = {by}")
