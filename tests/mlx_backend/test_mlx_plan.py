"""The memory plan of a cluster on MLX: experts on the device within the budget, never at the pools' floor, all of them where all fit."""

from pathlib import Path

import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed: pip install 'colibri-mp[mlx]'")

from colibri_mp.checkpoint.source import Checkpoint
from colibri_mp.config import LaunchConfig
from colibri_mp.errors import MemoryPlanError
from colibri_mp.limits import Room
from colibri_mp.mlx_backend.expert_tier import slot_bytes, tier_slots
from colibri_mp.mlx_backend.sizes import DEVICE_SHARE
from colibri_mp.models import load_model
from colibri_mp.planner import Plan, make_plan, smallest_budget

MODEL = load_model(Checkpoint.open(Path(__file__).parents[1] / "golden" / "tiny_mlx" / "qwen3_moe_q4"))
ALL_BYTES = sum(layer.num_experts * slot_bytes(layer.shape) for layer in MODEL.expert_layers)


def plan(ram: int) -> Plan:
    """With one worker, on a machine of a gigabyte."""
    config = LaunchConfig(
        backend="mlx", ram=ram, num_workers=1, num_threads=1, ctx=64, prefill_chunk=16, lookahead="off"
    )
    return make_plan(MODEL, config, Room("a machine", 10**9, 10**9))


def smallest() -> int:
    """The least budget for such a plan."""
    return smallest_budget(
        MODEL,
        LaunchConfig(backend="mlx", ram=1, num_workers=1, num_threads=1, ctx=64, prefill_chunk=16, lookahead="off"),
    )


def test_the_least_budget() -> None:
    """It holds one token's experts in pools and on the device; a byte less is refused."""
    found = plan(smallest())
    (worker,) = found.workers
    top_k = MODEL.router.top_k
    assert worker.device_bytes == top_k * slot_bytes(MODEL.expert_layers[0].shape)
    assert set(worker.num_slots) == {top_k}
    assert found.planned_bytes <= found.budget_bytes
    with pytest.raises(MemoryPlanError, match="too small"):
        plan(smallest() - 1000)


@pytest.mark.parametrize("part", [0.3, 0.8, 1.5])
def test_what_is_left_is_shared(part: float) -> None:
    """The device has its share of what the experts get; pools hold everything before it has more."""
    found = plan(smallest() + int(part * ALL_BYTES))
    (worker,) = found.workers
    experts = worker.device_bytes + worker.slab_bytes
    assert found.planned_bytes <= found.budget_bytes
    if found.resident_share < 1:
        assert worker.device_bytes <= DEVICE_SHARE * experts * 1.1
    else:
        assert worker.device_bytes > DEVICE_SHARE * experts


def test_all_on_the_device() -> None:
    """With memory enough all experts are in both places, and no more is planned."""
    (worker,) = plan(900_000_000).workers
    assert worker.device_bytes == ALL_BYTES
    shapes = {layer.shape: 0 for layer in MODEL.expert_layers}
    for layer in MODEL.expert_layers:
        shapes[layer.shape] += layer.num_experts
    assert tier_slots(shapes, worker.device_bytes) == shapes
