"""Families: what each fixture's config and tensors come out as, in both config dialects, and what is refused."""

import dataclasses
import json
import math
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_cases import FIXTURE_IDS, FIXTURES, copy_of, edit_json, edit_tensors, fixture
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_mp.checkpoint import Checkpoint
from colibri_mp.checkpoint.quantisation import read_quantisation
from colibri_mp.errors import CheckpointError
from colibri_mp.models import DenseSpec, ModelSpec, MoeSpec, load_model, supported_model_types
from colibri_mp.specs import AttentionSpec, MlaSpec, RopeSpec, RouterSpec

Config = dict[str, Any]
Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


def load(folder: Path) -> ModelSpec:
    """The model in a folder."""
    return load_model(Checkpoint.open(folder))


def with_config(name: str, folder: Path, **changes: Any) -> Path:
    """A copy of a fixture with fields of its config changed; None removes a field."""
    copy = copy_of(name, folder)

    def edit(config: Config) -> None:
        config.update(changes)
        for field in [field for field, value in changes.items() if value is None]:
            del config[field]

    edit_json(copy / "config.json", edit)
    return copy


@pytest.mark.parametrize("folder", FIXTURES, ids=FIXTURE_IDS)
def test_every_fixture_loads(folder: Path) -> None:
    """All tensors of every fixture find their place, and the spec can be sent to another process."""
    checkpoint = Checkpoint.open(folder)
    model = load_model(checkpoint)
    stored = sum(matrix.stored_bytes for matrix in model.resident_matrices())
    stored += sum(layer.stored_bytes * layer.num_experts for layer in model.expert_layers)
    small = sum(info.nbytes for info in model.resident_vectors())
    left_out = ("model.visual.", "mtp.", f"model.layers.{len(model.layers)}.")
    kept = [info for info in checkpoint.tensors.values() if not info.name.startswith(left_out)]
    assert stored + small == sum(info.nbytes for info in kept)
    assert pickle.loads(pickle.dumps(model)).rope == model.rope


@pytest.mark.parametrize("name", [path.name for path in FIXTURES if (path / "config.v5.json").exists()])
def test_both_dialects_say_the_same(name: str, tmp_path: Path) -> None:
    """config.v5.json (transformers 5) gives the model that config.json gives."""
    folder = copy_of(name, tmp_path)
    old = load(folder)
    (folder / "config.v5.json").rename(folder / "config.json")
    new = load(folder)
    assert (new.rope, new.max_context, new.norm_eps, new.tied) == (old.rope, old.max_context, old.norm_eps, old.tied)
    assert [layer.attention for layer in new.layers] == [layer.attention for layer in old.layers]
    assert routers(new) == routers(old)
    assert list(new.resident_matrices()) == list(old.resident_matrices())


def routers(model: ModelSpec) -> list[RouterSpec | None]:
    """The router of each layer, None for a dense one."""
    return [layer.mlp.router if isinstance(layer.mlp, MoeSpec) else None for layer in model.layers]


def test_olmoe() -> None:
    """Whole-projection q/k norm, router not renormalised."""
    model = load(fixture("olmoe"))
    assert model.layers[0].attention == AttentionSpec(64, 4, 4, 16, scale=0.25, norm_eps=1e-5, qk_norm="full")
    assert model.layers[3].tensors.q_norm is not None
    assert model.layers[3].tensors.q_norm.shape == (64,)
    assert routers(model) == [RouterSpec(8, 2, False)] * 4
    assert model.rope == RopeSpec(10_000.0, 16)


def test_qwen3_moe_mixed() -> None:
    """Layer 2 is dense, q/k norm per head."""
    model = load(fixture("qwen3_moe_mixed"))
    assert model.layers[0].attention == AttentionSpec(64, 4, 2, 16, scale=0.25, norm_eps=1e-6, qk_norm="head")
    assert routers(model) == [RouterSpec(8, 2, False), RouterSpec(8, 2, False), None, RouterSpec(8, 2, False)]
    dense = model.layers[2].mlp
    assert isinstance(dense, DenseSpec)
    assert (dense.gate.rows, dense.down.rows, dense.down.cols) == (96, 64, 96)
    assert [layer.layer for layer in model.expert_layers] == [0, 1, 3]


def test_mixtral_window_and_tied_head() -> None:
    """A window in every layer, a head of its own size per head_dim, head and embedding one matrix."""
    model = load(fixture("mixtral_swa_tied"))
    assert {layer.attention for layer in model.layers} == {
        AttentionSpec(64, 4, 2, 24, scale=24**-0.5, norm_eps=1e-5, window=8)
    }
    assert model.tied
    assert model.head is model.embed
    assert not load(fixture("mixtral")).tied


def test_glm4_moe() -> None:
    """Biases of q, k and v alone, half of a head turns, dense layers first, corrected router, a shared expert without a gate."""
    model = load(fixture("glm4_moe"))
    spec = AttentionSpec(64, 4, 2, 16, scale=0.25, norm_eps=1e-5, qk_norm="head", qkv_bias=True)
    assert {layer.attention for layer in model.layers} == {spec}
    assert model.rope == RopeSpec(1e6, 8)
    router = RouterSpec(8, 2, True, scoring="sigmoid", scaling=2.5)
    assert routers(model) == [None, router, router, router]
    groups = load(fixture("glm4_moe_groups"))
    router = RouterSpec(16, 4, True, scoring="sigmoid", num_groups=4, kept_groups=2, scaling=1.5)
    assert routers(groups) == [None, None, router, router]
    moe = groups.layers[3].mlp
    assert isinstance(moe, MoeSpec)
    assert moe.correction is not None
    assert moe.shared is not None
    assert (moe.shared.gate.rows, moe.shared_gate) == (64, None)


def test_layers_that_predict_are_left_out(tmp_path: Path) -> None:
    """num_nextn_predict_layers says how many layers after the last one are not missed; without it they are an error."""
    folder = copy_of("glm4_moe", tmp_path)
    edit_tensors(folder, add("BF16", (64,), "model.layers.4.enorm.weight", "model.layers.4.input_layernorm.weight"))
    with pytest.raises(CheckpointError, match="the files have a layer 4"):
        load(folder)
    edit_json(folder / "config.json", lambda config: config.update(num_nextn_predict_layers=1))
    assert len(load(folder).layers) == 4


@pytest.mark.parametrize("share", [0.2, 1.5, 0.0])
def test_impossible_share_of_a_head(tmp_path: Path, share: float) -> None:
    """The turning part of a head is an even number of elements, at least two and at most all."""
    with pytest.raises(CheckpointError, match="partial_rotary_factor"):
        load(with_config("glm4_moe", tmp_path, partial_rotary_factor=share))


def test_qwen2_moe() -> None:
    """Biases of q, k and v, a window in the layers that the reference gives one, a shared expert with a gate."""
    model = load(fixture("qwen2_moe"))
    assert [layer.attention.window for layer in model.layers] == [8, None, None, None]
    assert model.layers[1].attention == AttentionSpec(64, 4, 2, 16, scale=0.25, norm_eps=1e-3, qkv_bias=True)
    assert routers(model) == [RouterSpec(8, 2, False), None, RouterSpec(8, 2, False), RouterSpec(8, 2, False)]
    moe = model.layers[2].mlp
    assert isinstance(moe, MoeSpec)
    assert moe.shared is not None
    assert moe.shared_gate is not None
    assert (moe.shared.gate.rows, moe.shared_gate.rows, moe.shared_gate.cols) == (48, 1, 64)


def test_layer_types(tmp_path: Path) -> None:
    """One name a layer, of those that are known."""
    for types, message in ((["full_attention"], "names 1 layers"), (["chunked_attention"] * 4, "chunked_attention")):
        with pytest.raises(CheckpointError, match=message):
            load(with_config("qwen2_moe", tmp_path / message.replace(" ", ""), layer_types=types))


def test_sparse_step(tmp_path: Path) -> None:
    """decoder_sparse_step 2 asks for dense layers 0 and 2: this file has none there."""
    folder = with_config("qwen3_moe_mixed", tmp_path, decoder_sparse_step=2)
    with pytest.raises(CheckpointError, match=r"'model.layers.0.mlp.gate_proj.weight', which config.json calls for"):
        load(folder)


def test_qwen3_window_needs_its_switch(tmp_path: Path) -> None:
    """sliding_window counts only with use_sliding_window."""
    assert load(with_config("qwen3_moe", tmp_path / "a", sliding_window=32)).layers[0].attention.window is None
    folder = with_config("qwen3_moe", tmp_path / "b", sliding_window=32, use_sliding_window=True)
    assert load(folder).layers[0].attention.window == 32


def test_clip_qkv(tmp_path: Path) -> None:
    """OLMoE's clamp."""
    assert load(with_config("olmoe", tmp_path, clip_qkv=8)).layers[0].attention.clip_qkv == 8.0


def test_attention_bias(tmp_path: Path) -> None:
    """attention_bias asks for a bias of q, k, v and o; without the tensors it is an error."""
    folder = with_config("qwen3_moe", tmp_path, attention_bias=True)
    with pytest.raises(CheckpointError, match=r"self_attn.q_proj.bias"):
        load(folder)

    def add_biases(tensors: Tensors) -> None:
        for layer in range(4):
            for name, rows in (("q", 64), ("k", 32), ("v", 32), ("o", 64)):
                tensors[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = ("BF16", (rows,), bytes(2 * rows))

    edit_tensors(folder, add_biases)
    tensors = load(folder).layers[1].tensors
    assert [bias.shape for bias in (tensors.q_bias, tensors.k_bias, tensors.v_bias, tensors.o_bias) if bias] == [
        (64,), (32,), (32,), (64,),
    ]  # fmt: skip
    edit_json(folder / "config.json", lambda config: config.update(attention_bias=False))
    with pytest.raises(CheckpointError, match=r"16 tensors have no place.*Should attention_bias be true"):
        load(folder)


YARN = {"factor": 4.0, "original_max_position_embeddings": 512}
ROPES: dict[str, tuple[Config, RopeSpec, int]] = {
    "yarn, old dialect": (
        {"rope_scaling": {"type": "yarn", **YARN}},
        RopeSpec(1e6, 16, "yarn", 4.0, 512),
        2048,
    ),
    "yarn, new dialect": (
        {"rope_theta": None, "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, "truncate": False, **YARN}},
        RopeSpec(5e5, 16, "yarn", 4.0, 512, truncate=False),
        2048,
    ),
    "yarn, factor from the lengths": (
        {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 128, "beta_fast": 64}},
        RopeSpec(1e6, 16, "yarn", 4.0, 128, beta_fast=64.0),
        512,
    ),
    "linear": ({"rope_scaling": {"type": "linear", "factor": 2}}, RopeSpec(1e6, 16, "linear", 2.0, 512), 1024),
    "llama3": (
        {"rope_scaling": {"rope_type": "llama3", "low_freq_factor": 1, "high_freq_factor": 3, **YARN}},
        RopeSpec(1e6, 16, "llama3", 4.0, 512, high_freq_factor=3.0),
        2048,
    ),
}


@pytest.mark.parametrize("case", ROPES.values(), ids=ROPES.keys())
def test_rope(tmp_path: Path, case: tuple[Config, RopeSpec, int]) -> None:
    """Rotary scaling in both dialects, and the context that follows from it."""
    changes, rope, max_context = case
    model = load(with_config("qwen3_moe", tmp_path, **changes))
    assert (model.rope, model.max_context) == (rope, max_context)


BAD_CONFIGS: dict[str, tuple[Config, str]] = {
    "unknown type": (
        {"model_type": "qwen3_moes"},
        "'qwen3_moes' is not supported.*nearest: 'qwen3_moe'.*mixtral, olmoe",
    ),
    "type far from all": ({"model_type": "gpt2"}, "'gpt2' is not supported; supported are"),
    "no type": ({"model_type": None}, "has no model_type"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported; supported: 'silu'"),
    "rope type": ({"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling.rope_type = 'longrope' is not supported"),
    "partial rotary": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
    "endless context": (
        {"rope_scaling": {"type": "yarn", "factor": 1e308}},
        "factor 1e.308 makes a context of inf tokens",
    ),
    "missing field": ({"hidden_size": None}, "has no hidden_size, which this model type needs"),
    "missing experts": ({"num_experts": None}, "has no num_experts or num_local_experts"),
    "text for number": ({"num_hidden_layers": "4"}, "num_hidden_layers = '4' must be a whole number"),
    "boolean for number": ({"num_experts_per_tok": True}, "num_experts_per_tok = True must be a whole number"),
    "zero": ({"num_attention_heads": 0}, "num_attention_heads = 0 must be a whole number from 1 to 2147483647"),
    "number for boolean": ({"norm_topk_prob": 1}, "norm_topk_prob = 1 must be true or false"),
    "eps": ({"rms_norm_eps": 0}, "rms_norm_eps = 0.0 must be a number above 0"),
    "list": ({"mlp_only_layers": 3}, "mlp_only_layers = 3 must be a list"),
    "top-k": ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9 is more than num_experts = 8"),
    "kv heads": ({"num_key_value_heads": 3}, "num_attention_heads = 4 is no multiple of num_key_value_heads = 3"),
    "head size": (
        {"head_dim": None, "num_attention_heads": 6},
        "hidden_size = 64 is no multiple of num_attention_heads",
    ),
    "odd head size": ({"head_dim": 15}, "head_dim = 15 must be even"),
    "hidden size": (
        {"hidden_size": 128},
        r"model.embed_tokens.weight' is BF16 \[256, 64\].*\[256, 128\] \(vocab_size, hidden",
    ),
    "vocabulary": ({"vocab_size": 300}, r"model.embed_tokens.weight' is BF16 \[256, 64\].*asks for \[300, 64\]"),
    "expert width": (
        {"moe_intermediate_size": 48},
        r"experts.0.gate_proj.weight' is .*\[32, 64\].*\[48, 64\] \(moe_inter",
    ),
    "more experts": (
        {"num_experts": 16},
        r"mlp.gate.weight' is BF16 \[8, 64\].*\[16, 64\] \(num_experts, hidden_size\)",
    ),
    "heads": (
        {"num_attention_heads": 8},
        r"q_proj.weight' is BF16 \[64, 64\].*\[128, 64\] \(num_attention_heads \* head_dim",
    ),
    "fewer layers": ({"num_hidden_layers": 3}, "num_hidden_layers = 3, the files have a layer 3"),
    "more layers": ({"num_hidden_layers": 5}, "'model.layers.4.input_layernorm.weight', which config.json calls for"),
    "no experts at all": ({"mlp_only_layers": [0, 1, 2, 3]}, "'model.layers.0.mlp.gate_proj.weight'"),
}


@pytest.mark.parametrize("case", BAD_CONFIGS.values(), ids=BAD_CONFIGS.keys())
def test_config_that_is_wrong_or_disagrees(tmp_path: Path, case: tuple[Config, str]) -> None:
    """Each is one CheckpointError that names the field or both sides."""
    changes, message = case
    folder = with_config("qwen3_moe", tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


UNUSED: dict[str, tuple[str, str]] = {
    "second router": ("model.layers.1.mlp.shared_expert_gate.weight", "1 tensors have no place.*shared_expert_gate"),
    "layer too many": ("model.layers.4.input_layernorm.weight", "the files have a layer 4"),
    "expert too many": ("model.layers.1.mlp.experts.8.up_proj.weight", "have no place.*experts.8.up_proj"),
}


@pytest.mark.parametrize("case", UNUSED.values(), ids=UNUSED.keys())
def test_tensor_without_a_place(tmp_path: Path, case: tuple[str, str]) -> None:
    """A tensor that the model would not use is an error: to ignore it would be to compute something else."""
    folder = copy_of("qwen3_moe", tmp_path)
    edit_tensors(folder, add("BF16", (64,), case[0]))
    with pytest.raises(CheckpointError, match=case[1]):
        load(folder)


def add(dtype: str, shape: tuple[int, ...], *names: str) -> Callable[[Tensors], None]:
    """Add tensors of zeros."""
    size = math.prod(shape) * {"BF16": 2, "F32": 4}[dtype]
    return lambda tensors: tensors.update({name: (dtype, shape, bytes(size)) for name in names})


def test_derived_tables_are_ignored(tmp_path: Path) -> None:
    """Old checkpoints store rotary tables; they follow from the config."""
    folder = copy_of("qwen3_moe", tmp_path)
    edit_tensors(folder, add("F32", (8,), *(f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(4))))
    assert len(load(folder).layers) == 4


def test_stored_head_of_a_tied_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is never read, as in transformers and mlx_lm, and a warning says so."""
    folder = copy_of("mixtral_swa_tied", tmp_path)
    edit_tensors(folder, add("BF16", (256, 64), "lm_head.weight"))
    assert load(folder).tied
    assert "lm_head.weight is ignored" in caplog.text


def test_deepseek_v3() -> None:
    """Latent attention with yarn's factor in its scale, pairs that are neighbours, groups of experts; a layer of predictors is left out."""
    model = load(fixture("deepseek_v3"))
    factor = 0.1 * math.log(40) + 1
    spec = MlaSpec(64, 4, 32, 32, 16, 16, 24, scale=32**-0.5 * factor**2, norm_eps=1e-3)
    assert {layer.attention for layer in model.layers} == {spec}
    assert model.rope.rotary_dim == 16
    assert model.rope.attention_scaling == 1.0
    noaux = RouterSpec(16, 4, True, scoring="sigmoid", num_groups=4, kept_groups=2, scaling=2.5)
    assert routers(model) == [None, noaux, noaux, noaux]
    assert model.predictors == ()


def test_kimi_k2_is_deepseek_v3_by_another_name(tmp_path: Path) -> None:
    """The same tensors and settings give the same model."""
    kimi, model = load(with_config("deepseek_v3", tmp_path, model_type="kimi_k2")), load(fixture("deepseek_v3"))
    assert [layer.tensors for layer in kimi.layers] == [layer.tensors for layer in model.layers]
    assert [layer.attention for layer in kimi.layers] == [layer.attention for layer in model.layers]
    assert routers(kimi) == routers(model)


def test_deepseek_v2() -> None:
    """Groups of experts by their best softmax score, scaled and not renormalised; the smaller model has no query rank and no groups."""
    model, lite = load(fixture("deepseek_v2")), load(fixture("deepseek_v2_lite"))
    greedy = RouterSpec(16, 3, False, num_groups=4, kept_groups=2, scaling=4.0)
    assert routers(model) == [None, greedy, greedy]
    assert model.rope.attention_scaling != 1.0
    assert lite.layers[0].attention == MlaSpec(64, 4, None, 32, 16, 16, 16, scale=32**-0.5, norm_eps=1e-6)
    assert routers(lite) == [None, RouterSpec(8, 2, False)]
    assert lite.layers[0].tensors.q_a is None


def test_kv_b_in_halves_as_mlx_keeps_it() -> None:
    """embed_q and unembed_out take kv_b's place, their heads one after the other."""
    tensors = load(fixture("deepseek_v3_q4")).layers[0].tensors
    assert tensors.kv_b is None
    assert (tensors.embed_q.rows, tensors.embed_q.cols) == (4 * 64, 64)
    assert (tensors.unembed.rows, tensors.unembed.cols) == (4 * 64, 64)


@pytest.mark.parametrize(
    ("name", "changes", "complaint"),
    [
        ("deepseek_v3", {"attention_bias": True}, "attention_bias = True"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method = 'greedy'"),
        ("deepseek_v3", {"kv_lora_rank": 24}, "multiple of 16, not 24"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob = True"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc'"),
        ("deepseek_v2", {"num_experts_per_tok": 17}, "more than n_routed_experts = 16"),
    ],
)
def test_what_latent_families_refuse(name: str, changes: Config, complaint: str, tmp_path: Path) -> None:
    """Settings that are not implemented are named."""
    with pytest.raises(CheckpointError, match=re.escape(complaint)):
        load(with_config(name, tmp_path, **changes))


def test_supported_types_have_a_fixture() -> None:
    """Each family is held against the reference by at least one golden checkpoint."""
    covered = {json.loads((path / "config.json").read_text())["model_type"] for path in FIXTURES}
    other_names = {"kimi_k2", "qwen3_5_moe_text"}  # `test_kimi_k2_is_deepseek_v3_by_another_name`, `test_hybrid_models`
    assert covered == set(supported_model_types()) - other_names


STATED = json.loads((fixture("qwen3_moe") / "config.json").read_text())
FIELDS = [*STATED, "rope_parameters", "quantization", "head_dim"]
ODD_NUMBERS: list[Any] = [None, True, -1, 0, 1, 2, 1.5, 1e300, 1 << 70]
ODD_VALUES = [*ODD_NUMBERS, "", "8", [], [0], [[]], {}, {"factor": 0}, {"rope_type": "yarn", "factor": 1e308}]


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), st.sampled_from(ODD_VALUES), min_size=1, max_size=3))
def test_any_config_gives_a_model_or_one_error(changes: Config) -> None:
    """Whatever stands in config.json, nothing but CheckpointError comes out."""
    checkpoint = Checkpoint.open(fixture("qwen3_moe"))
    config = {**checkpoint.config, **changes}
    try:
        quantisation = read_quantisation(config)
        model = load_model(dataclasses.replace(checkpoint, config=config, quantisation=quantisation))
    except CheckpointError:
        return
    assert len(model.layers) == 4
