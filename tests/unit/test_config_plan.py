"""The plan from a config.json alone: it is the plan of the checkpoint, and meets what is published of large models."""

import dataclasses
import functools
import json
from pathlib import Path

import pytest

from colibri_mp.checkpoint.invented import StoredAs
from colibri_mp.checkpoint.source import Checkpoint
from colibri_mp.cli import main
from colibri_mp.config import LaunchConfig
from colibri_mp.config_plan import ConfigPlan, plan_from_config
from colibri_mp.forecast import Machine
from colibri_mp.limits import Room
from colibri_mp.models import load_model
from colibri_mp.planner import make_plan, smallest_budget

TESTS = Path(__file__).parents[1]
MACHINE = Machine(disk=2 * 10**9, memory=20 * 10**9)
PLAIN = StoredAs.of("16", "16", "16", 64)
MIXED = StoredAs.of("4", "4", "8", 64)
FAMILIES = (
    *("deepseek_v2", "deepseek_v3", "glm4_moe", "glm_moe_dsa_shared", "mixtral", "olmoe", "qwen2_moe", "qwen3_5_moe"),
    *("qwen3_moe", "qwen3_next"),
)

# Parameters in billions as published, experts with those of the predictors, MB of an expert's 4-bit codes.
GIANTS = {
    "qwen3-235b-a22b": (235.1, 94 * 128, 9.44),
    "gpt-oss-120b": (116.8, 36 * 128, 12.44),
    "glm-4.5": (352.8, 90 * 160, 11.8),
    "deepseek-v3": (671.0, 59 * 256, 22.02),
    "kimi-k2": (1026.4, 60 * 384, 22.02),
    "glm-5.2": (743.4, 76 * 256, 18.87),
}


@functools.cache
def plan_giant(name: str, stored: StoredAs = MIXED, ram: int | str = "auto", machine: Machine = MACHINE) -> ConfigPlan:
    """The plan of one of the published configs."""
    path = TESTS / "configs" / f"{name}.json"
    return plan_from_config(path, LaunchConfig(num_threads=4, ram=ram), stored, machine)


@pytest.mark.parametrize("family", FAMILIES)
def test_config_alone_gives_the_plan_of_the_checkpoint(family: str) -> None:
    """Every term is that of the checkpoint's own plan, but for the tokenizer's and the allowance on it."""
    folder = TESTS / "golden" / "tiny" / family
    config = LaunchConfig(num_threads=1, ram="1GB")
    model = load_model(Checkpoint.open(folder))
    real = make_plan(model, config, Room("a machine", 2 * 10**9, 2 * 10**9))
    (made,) = plan_from_config(folder, config, PLAIN, MACHINE).sizes

    def terms(plan: object) -> list[tuple[str, int]]:
        assert isinstance(plan, type(real))
        return [(term.name, term.nbytes) for term in plan.terms if not term.name.startswith(("tokenizer", "allowance"))]

    assert terms(made.plan) == terms(real)
    assert made.plan.workers == real.workers


@pytest.mark.parametrize("name", GIANTS)
def test_giants_have_the_sizes_that_are_published(name: str) -> None:
    """All parameters together, the number of experts and the bytes of one are those of the model cards."""
    billions, num_experts, code_megabytes = GIANTS[name]
    facts = plan_giant(name, PLAIN, "4TB").facts
    num_counted = facts.num_experts - facts.num_predictor_experts
    parameters = (facts.resident_code_bytes + num_counted * facts.expert_code_bytes) / 2
    assert parameters / 1e9 == pytest.approx(billions, rel=2e-3)
    assert facts.num_experts == num_experts
    quantised = plan_giant(name, MIXED, "64GB").facts
    assert quantised.expert_code_bytes / 1e6 == pytest.approx(code_megabytes, rel=1e-3)
    assert quantised.expert_extra_bytes >= quantised.expert_code_bytes / 8  # bf16 scale and bias for 64 weights


def test_resident_part_of_glm_5_2_is_what_is_published() -> None:
    """About 9.9 GB with attention, shared and dense parts at 4 bit and embedding and head at 8 bit; scales come on top."""
    facts = plan_giant("glm-5.2", MIXED, "64GB").facts
    assert (facts.resident_code_bytes - facts.router_code_bytes) / 1e9 == pytest.approx(9.9, rel=0.05)
    assert facts.resident_extra_bytes / 1e9 == pytest.approx(1.155, rel=0.01)
    assert facts.expert_extra_bytes / 1e6 == pytest.approx(2.36, rel=0.01)


def test_smallest_ram_is_legal_and_a_byte_less_is_not() -> None:
    """The size that is named gives the experts of one token in each layer; the refusal of less names the same size."""
    made = plan_giant("glm-4.5")
    (least,) = plan_giant("glm-4.5", ram=made.smallest_ram_bytes).sizes
    assert (least.least_slots, least.most_slots) == (8, 8)
    model_settings = ["plan", "--config-only", str(TESTS / "configs" / "glm-4.5.json"), "--threads", "4"]
    assert main([*model_settings, "--ram", str(made.smallest_ram_bytes - 100_000)]) == 4


def test_sizes_go_from_the_smallest_to_all_experts() -> None:
    """Without a size there is a line for each usual one; more memory is never slower, and all experts are never read."""
    made = plan_giant("gpt-oss-120b", StoredAs.of("mxfp4", "16", "16", 64))
    shares = [size.plan.resident_share for size in made.sizes]
    speeds = [size.forecast.tokens_per_s for size in made.sizes]
    assert made.sizes[0].plan.budget_bytes == made.smallest_ram_bytes
    assert shares == sorted(shares)
    assert speeds == sorted(speeds)
    assert shares[-1] == 1.0 > shares[-2]
    assert made.sizes[-1].forecast.disk_bytes_per_token == 0


def test_forecast_follows_disk_memory_and_hits() -> None:
    """Half the hits of a disk twice as fast take as long; the two terms add up to the time of a token."""
    machine = dataclasses.replace(MACHINE, hit_rate=0.5)
    (size,) = plan_giant("qwen3-235b-a22b", ram="48GB", machine=machine).sizes
    (faster,) = plan_giant("qwen3-235b-a22b", ram="48GB", machine=Machine(4 * 10**9, 20 * 10**9, 0.0)).sizes
    speed, facts = size.forecast, plan_giant("qwen3-235b-a22b").facts
    stored = facts.expert_code_bytes + facts.expert_extra_bytes
    assert speed.disk_bytes_per_token == 94 * 8 * stored // 2
    assert speed.read_s == pytest.approx(speed.disk_bytes_per_token / 2e9)
    assert faster.forecast.read_s == pytest.approx(speed.read_s)
    assert 1 / speed.tokens_per_s == pytest.approx(speed.read_s + speed.memory_s)
    assert speed.bound == "disk"
    assert speed.most_tokens_per_s == pytest.approx(1 / speed.read_s)


def test_command_prints_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    """`--json` has facts, the smallest size and the forecast, as the options say; the text names the formula."""
    arguments = [
        "plan",
        "--config-only",
        str(TESTS / "configs" / "gpt-oss-120b.json"),
        "--ram",
        "24GB",
        "--ctx",
        "2048",
    ]
    assert main([*arguments, "--bits", "8", "--disk", "1GB/s", "--hit-rate", "0.25", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["stored"]["experts"] == "affine 8 bit in groups of 64"
    assert found["sizes"][0]["forecast"]["hit_rate"] == 0.25
    assert found["sizes"][0]["plan"]["ctx_tokens"] == 2048
    assert found["smallest_ram_bytes"] < 24_000_000_000
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "tokens/s = 1 /" in text
    assert "smallest --ram" in text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (None, "no such file; give the config.json of a model"),
        ({"model_type": "llama"}, "model_type 'llama' is not supported"),
        ({"mlp_only_layers": list(range(94))}, "no layer has experts"),
        ({"num_experts": None}, "has no num_experts"),
    ],
)
def test_configs_that_are_no_model_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fields: dict[str, object] | None, message: str
) -> None:
    """A missing file, another kind of model and a model without experts are named."""
    path = tmp_path / "config.json"
    if fields is not None:
        published = json.loads((TESTS / "configs" / "qwen3-235b-a22b.json").read_text())
        path.write_text(json.dumps({**published, **fields}))
    assert main(["plan", "--config-only", str(path)]) == 3
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--bits", "4"], "goes with --config-only"),
        (["--config-only", "c.json", "--bits", "7"], "not '7'"),
        (["--config-only", "c.json", "--group-size", "48"], "32, 64, 128 weights, not 48"),
        (["--config-only", "c.json", "--hit-rate", "50"], "--hit-rate takes a share from 0 to 1, not '50'"),
        (["--config-only", "c.json", "--disk", "fast"], "--disk takes bytes a second"),
        (["--config-only", "c.json", "--model", "demo"], "either --model or --config-only"),
    ],
)
def test_options_that_cannot_be_are_refused(capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    """Each wrong option is named with what it takes."""
    assert main(["plan", *flags]) == 2
    assert message in capsys.readouterr().err


def test_smallest_budget_grows_with_the_context() -> None:
    """More context needs more memory."""
    model = load_model(Checkpoint.open(TESTS / "golden" / "tiny" / "qwen3_moe"))
    short, long = (smallest_budget(model, LaunchConfig(num_threads=1, ctx=ctx)) for ctx in (64, 512))
    assert short < long


def test_a_refused_size_still_tells_what_the_model_takes(capsys: pytest.CaptureFixture[str]) -> None:
    """GLM-5.2 in 24 GB: bytes of an expert, other sizes and the smallest one, then the error with its exit code."""
    assert main(["plan", "--config-only", str(TESTS / "configs" / "glm-5.2.json"), "--bits", "4", "--ram", "24GB"]) == 4
    told = capsys.readouterr()
    assert "18.9 MB of weights and 2.36 MB of scales" in told.out
    assert "smallest --ram: " in told.out
    assert "--ram 24 GB is too small" in told.err
