"""Options that change the logits: what they make of a model, and that they are named."""

import dataclasses
from pathlib import Path

import pytest

from colibri_mp.checkpoint.source import Checkpoint
from colibri_mp.config import LaunchConfig, flag_of
from colibri_mp.errors import ConfigError
from colibri_mp.limits import Room
from colibri_mp.lossy import lossy_options, with_lossy_options
from colibri_mp.models import load_model
from colibri_mp.models.structure import DenseSpec
from colibri_mp.planner import make_plan
from colibri_mp.specs import RouterSpec

TINY = Path(__file__).parents[1] / "golden" / "tiny"
MODEL = load_model(Checkpoint.open(TINY / "qwen3_moe_mixed"))  # dense layers among those with experts


def test_nothing_asked_changes_nothing() -> None:
    """The defaults give an equal model and no options."""
    assert with_lossy_options(MODEL, LaunchConfig()) == MODEL
    assert lossy_options(MODEL, LaunchConfig()) == ()
    assert lossy_options(MODEL, LaunchConfig(expert_top_k=2)) == ()  # the model's own


def test_every_router_is_changed() -> None:
    """All layers with experts get the options, dense ones stay, and a tied head stays tied."""
    model = with_lossy_options(MODEL, LaunchConfig(expert_top_k=1, expert_top_p=0.6))
    assert any(isinstance(layer.mlp, DenseSpec) for layer in model.layers)
    routers = {layer.mlp.router for layer in model.layers if not isinstance(layer.mlp, DenseSpec)}
    assert routers == {RouterSpec(MODEL.router.num_experts, 1, MODEL.router.norm_topk_prob, 0.6)}
    assert model.tied == MODEL.tied
    assert model.expert_layers == MODEL.expert_layers


def test_options_are_named_with_their_values() -> None:
    """Coarse activations are among them."""
    config = LaunchConfig(expert_top_k=1, expert_top_p=0.6, planes=1, kv_bits=8)
    assert lossy_options(MODEL, config) == (
        "--expert-top-k 1 (the model's is 2)",
        "--expert-top-p 0.6",
        "--planes 1",
        "--kv-bits 8",
    )


def test_help_says_lossy() -> None:
    """Each of these flags is named lossy where it is offered."""
    help_texts = {flag_of(spec): spec.metadata["help"] for spec in dataclasses.fields(LaunchConfig)}
    assert {flag for flag, text in help_texts.items() if "lossy" in text} == {
        "--expert-top-k",
        "--expert-top-p",
        "--planes",
        "--expert-bits",
        "--kv-bits",
    }


def test_fewer_experts_need_fewer_slots() -> None:
    """The plan's floor follows k: one slot a layer is enough for one expert a token."""
    config = LaunchConfig(expert_top_k=1, slots=1, num_threads=1, num_workers=1, ctx=128)
    plan = make_plan(with_lossy_options(MODEL, config), config, Room("a machine", 10**9, 10**9))
    assert set(plan.workers[0].num_slots) == {1}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"expert_top_k": 3}, "--expert-top-k 3 is more than the 2 experts a token of this model"),
        ({"expert_top_k": -1}, "--expert-top-k must be at least 0"),
        ({"expert_top_p": 0.0}, "--expert-top-p must be at least 0.01"),
        ({"expert_top_p": 1.1}, "--expert-top-p must be at most 1.0"),
    ],
)
def test_impossible_values(settings: dict[str, float], message: str) -> None:
    """Refused with the limit."""
    with pytest.raises(ConfigError, match=message):
        with_lossy_options(MODEL, LaunchConfig(**settings))  # type: ignore[arg-type]
