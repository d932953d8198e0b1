"""The memory plan: terms, automatic choices, refusals."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibri_mp.checkpoint.source import Checkpoint
from colibri_mp.config import LaunchConfig
from colibri_mp.errors import ConfigError, MemoryPlanError
from colibri_mp.memory import Available
from colibri_mp.models import load_model
from colibri_mp.planner import Plan, make_plan, max_logit_rows, split_layers

MODEL = load_model(Checkpoint.open(Path(__file__).parents[1] / "golden" / "tiny" / "qwen3_moe"))
MACHINE = Available(8_000_000_000, "available in the system")


def plan(available: Available = MACHINE, **settings: Any) -> Plan:
    """A plan of the small fixture: 4 layers of 8 experts, top 2, 12 kB an expert, context 512."""
    return make_plan(MODEL, LaunchConfig(num_threads=1, **settings), available)


def test_terms_add_up_and_name_every_process() -> None:
    """The sum stays within the budget, and each process has its terms."""
    made = plan(ram="1GB", num_workers=3)
    assert made.planned_bytes <= made.budget_bytes == 1_000_000_000
    assert {term.process for term in made.terms} == {"client", "coordinator", "worker 0", "worker 1", "worker 2", "all"}
    assert all(term.nbytes > 0 for term in made.terms)


def test_everything_fits_in_a_large_memory() -> None:
    """No more slots than experts."""
    made = plan(ram="2GB", num_workers=2)
    assert [share.num_slots for share in made.workers] == [(8, 8), (8, 8)]
    assert made.resident_share == 1.0


def test_pools_shrink_to_one_tokens_experts_and_no_further() -> None:
    """The least budget gives top-k slots a layer; a byte less is refused with that size."""
    with pytest.raises(MemoryPlanError) as refusal:
        plan(ram=100_000_000, num_workers=1, ctx=128)
    needed = int(str(refusal.value).split("(")[1].split(" bytes")[0])
    least = plan(ram=needed, num_workers=1, ctx=128)
    assert set(least.workers[0].num_slots) == {2}
    with pytest.raises(MemoryPlanError, match="too small"):
        plan(ram=needed - 1000, num_workers=1, ctx=128)


def test_slots_cap_the_pool() -> None:
    """`slots` limits every layer, and may not go below what one token needs."""
    assert plan(ram="1GB", slots=3, num_workers=1).workers[0].num_slots == (3, 3, 3, 3)
    with pytest.raises(ConfigError, match="--slots 1 is less than the 2 experts"):
        plan(ram="1GB", slots=1)


def test_more_than_the_system_has_is_refused() -> None:
    """The limit that counts is named."""
    with pytest.raises(MemoryPlanError, match=r"9 GB is more than the 8 GB left in control group x"):
        plan(Available(8_000_000_000, "left in control group x"), ram="9GB")


def test_auto_leaves_room_for_the_system() -> None:
    """`auto` takes a share of what is available and says so."""
    made = plan()
    assert made.budget_bytes == int(0.85 * MACHINE.nbytes)
    assert any(note.startswith("ram 6.8 GB: 85% of 8 GB") for note in made.notes)


def test_second_worker_only_where_memory_allows() -> None:
    """A worker costs an interpreter: with little memory there is one, and the reason is said."""
    assert len(plan(ram="7GB").workers) == 2
    assert len(plan(ram="500MB").workers) == 1
    assert any("workers 1: a second one would take" in note for note in plan(ram="500MB").notes)


@pytest.mark.parametrize(
    ("settings", "what"),
    [({"num_workers": 5}, "--workers 5 is more than the model's 4 layers"), ({"ctx": 513}, "--ctx 513 .* 512 tokens")],
)
def test_settings_beyond_the_model(settings: dict[str, int], what: str) -> None:
    """More workers than layers, or more context than the model has, is refused with both numbers."""
    with pytest.raises(ConfigError, match=what):
        plan(ram="1GB", **settings)


def test_small_shared_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools larger than /dev/shm are refused before anything is created."""
    monkeypatch.setattr("colibri_mp.planner.free_shm_bytes", lambda: 10_000)
    with pytest.raises(MemoryPlanError, match=r"/dev/shm has 10 kB free.*--shm-size"):
        plan(ram="1GB")


def test_logit_rows_are_bounded() -> None:
    """Logits of a step stay below 16 MB, and one row is always allowed."""
    assert max_logit_rows(50_304, 512) == 79
    assert max_logit_rows(256, 512) == 512
    assert max_logit_rows(10_000_000, 512) == 1


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.data())
def test_layers_are_split_into_contiguous_groups(sizes: list[int], data: st.DataObject) -> None:
    """Every worker gets at least one layer, in order, each layer once."""
    layers: Any = [SimpleNamespace(layer=i, num_experts=1, stored_bytes=size) for i, size in enumerate(sizes)]
    num_workers = data.draw(st.integers(1, len(sizes)))
    groups = split_layers(layers, num_workers)
    assert len(groups) == num_workers
    assert all(groups)
    assert [layer for group in groups for layer in group] == layers


def test_layers_are_balanced_by_bytes() -> None:
    """Equal layers give equal groups; a heavy one stands alone."""

    def sizes_of(sizes: list[int], num_workers: int) -> list[list[int]]:
        layers: Any = [SimpleNamespace(num_experts=1, stored_bytes=size) for size in sizes]
        return [[layer.stored_bytes for layer in group] for group in split_layers(layers, num_workers)]

    assert sizes_of([1] * 8, 4) == [[1, 1]] * 4
    assert sizes_of([1, 1, 1, 9], 2) == [[1, 1, 1], [9]]
