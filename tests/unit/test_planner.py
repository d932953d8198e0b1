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
from colibri_mp.kernels.kv_cache8 import CACHES
from colibri_mp.limits import Room
from colibri_mp.models import load_model
from colibri_mp.plan_terms import LIBRARY_BYTES, max_logit_rows, table_bytes
from colibri_mp.planner import ALLOWANCE, Plan, make_plan, split_layers, split_slabs

CHECKPOINT = Checkpoint.open(Path(__file__).parents[1] / "golden" / "tiny" / "qwen3_moe")
MODEL = load_model(CHECKPOINT)
MACHINE = Room("the system", 16_000_000_000, 8_000_000_000)


def plan(room: Room = MACHINE, free_shm: int | None = None, **settings: Any) -> Plan:
    """A plan of the small fixture: 4 layers of 8 experts, top 2, 12 kB an expert, context 512."""
    config = LaunchConfig(num_threads=1, **settings)
    return make_plan(MODEL, config, room, table_bytes(CHECKPOINT), free_shm=free_shm)


def refusal(room: Room = MACHINE, **settings: Any) -> str:
    """What the plan says when it refuses."""
    with pytest.raises(MemoryPlanError) as refused:
        plan(room, **settings)
    return str(refused.value)


def needed_bytes(message: str) -> int:
    """The size that a refusal asks for."""
    return int(message.partition("at least ")[2].partition("(")[2].partition(" bytes")[0])


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


def test_total_is_what_is_needed() -> None:
    """When the whole model fits, more memory changes nothing but the budget; the allowance is a share of the rest."""
    small, large = plan(ram="1GB", num_workers=1, ctx=128), plan(ram="7GB", num_workers=1, ctx=128)
    assert small.terms == large.terms
    *others, allowance = large.terms
    assert allowance.nbytes == int(sum(term.nbytes for term in others) * ALLOWANCE)
    assert large.planned_bytes < 300_000_000


def test_pools_shrink_to_one_tokens_experts_and_no_further() -> None:
    """The least budget gives top-k slots a layer; a byte less is refused with that size."""
    needed = needed_bytes(refusal(ram=100_000_000, num_workers=1, ctx=128))
    least = plan(ram=needed, num_workers=1, ctx=128)
    assert set(least.workers[0].num_slots) == {2}
    assert least.workers[0].slab_bytes == least.workers[0].floor_bytes
    assert needed_bytes(refusal(ram=needed - 1000, num_workers=1, ctx=128)) == needed


@pytest.mark.parametrize("settings", [{}, {"ctx": 512, "prefill_chunk": 512}, {"num_workers": 4}, {"io_threads": 64}])
def test_smallest_budget_can_be_given_with_automatic_choices(settings: dict[str, Any]) -> None:
    """The size of a refusal works although a larger budget chooses more context, and it is the least that does."""
    needed = needed_bytes(refusal(ram=1_000_000, **settings))
    assert plan(ram=needed, **settings).planned_bytes <= needed
    assert needed_bytes(refusal(ram=needed - 1000, **settings)) == needed
    assert needed_bytes(refusal(ram="900GB", **settings)) == needed


def test_refusal_names_the_term_that_does_not_fit() -> None:
    """The first term that passes the budget is named, whichever it is, and all are listed."""
    settings = {"num_workers": 2, "ctx": 256, "prefill_chunk": 64}
    terms = [term for term in plan(ram="1GB", **settings).terms if "pool" not in term.name and term.process != "all"]
    total = LIBRARY_BYTES
    for term in terms:
        message = refusal(ram=total + term.nbytes - 1, **settings)
        assert f"what does not fit any more is {term.name} ({term.process})" in message
        assert all(f"{other.process}: {other.name}" in message for other in terms)
        total += term.nbytes
    assert "is expert pools, one token's experts in each layer (workers)" in refusal(ram=total + 1, **settings)


def test_slots_cap_the_pool() -> None:
    """`slots` limits every layer, and may not go below what one token needs."""
    assert plan(ram="1GB", slots=3, num_workers=1).workers[0].num_slots == (3, 3, 3, 3)
    with pytest.raises(ConfigError, match="--slots 1 is less than the 2 experts"):
        plan(ram="1GB", slots=1)


def test_more_than_the_system_has_is_refused() -> None:
    """The room that counts is named, and the size that would do; what this process takes itself is available."""
    group = Room("control group x", 10_000_000_000, 8_000_000_000)
    message = refusal(group, ram="9GB")
    assert "9 GB is more than the 8 GB that are available (8 GB free in control group x)" in message
    assert message.endswith("lower it")
    assert make_plan(MODEL, LaunchConfig(ram="9GB"), group, taken=1_000_000_000).budget_bytes == 9_000_000_000
    assert "free memory" in refusal(Room("control group x", 10_000_000_000, 80_000_000), ram="1GB")


@pytest.mark.parametrize(
    ("size", "free", "left"),
    [
        (16_000_000_000, 8_000_000_000, 1_200_000_000),  # 15 % of what is free
        (16_000_000_000, 4_000_000_000, 1_024_000_000),  # the high mark
        (2_000_000_000, 1_950_000_000, 292_500_000),
        (600_000_000, 590_000_000, 128_000_000),
    ],
)
def test_auto_leaves_room_for_the_system(size: int, free: int, left: int) -> None:
    """`auto` leaves a share of what is free, at least the mark below which nothing grows, and says so."""
    made = plan(Room("the system", size, free))
    assert made.budget_bytes == free - left
    assert "for everything else there (15%, at least" in made.notes[0]
    assert "free in the system" in made.notes[0]


def test_auto_that_is_too_small_says_so() -> None:
    """The refusal of `auto` names the size that it would have been."""
    assert "--ram auto, here 172 MB, is too small" in refusal(Room("control group x", 500_000_000, 300_000_000))


def test_budget_that_will_not_last_is_noted() -> None:
    """What leaves less than the high mark is planned as asked, with a warning."""
    notes = plan(Room("the system", 16_000_000_000, 1_000_000_000), ram="900MB", slots=2, num_workers=1).notes
    assert any("below 512 MB the expert pools shrink" in note for note in notes)
    assert not any("the expert pools shrink" in note for note in plan(ram="1GB").notes)


def test_second_worker_only_where_memory_allows() -> None:
    """A worker costs an interpreter: with little memory there is one, and the reason is said."""
    assert len(plan(ram="3GB").workers) == 2
    assert len(plan(ram="500MB").workers) == 1
    assert any("workers 1: a second one would take" in note for note in plan(ram="500MB").notes)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"num_workers": 5}, "--workers 5 is more than the model's 4 layers"),
        ({"ctx": 513}, "--ctx 513 .* 512 tokens"),
        ({"ctx": 256, "kv_tokens": 255}, "--kv-tokens 255 is less than --ctx 256"),
    ],
)
def test_settings_beyond_the_model(settings: dict[str, int], what: str) -> None:
    """More workers than layers, or more context than the model has, is refused with both numbers."""
    with pytest.raises(ConfigError, match=what):
        plan(ram="1GB", **settings)


def test_small_shared_memory_is_refused() -> None:
    """Pools larger than /dev/shm are refused before anything is created, with the size that would fit if there is one."""
    assert "/dev/shm has 10 kB free; enlarge it" in (message := refusal(ram="1GB", free_shm=10_000))
    assert "--shm-size" in message
    assert "lower --ram" not in message
    message = refusal(ram="1GB", num_workers=1, free_shm=200_000)
    lower = int(message.partition("lower --ram to ")[2].partition("(")[2].partition(" bytes")[0])
    assert sum(share.pool_bytes for share in plan(ram=lower, num_workers=1).workers) <= 200_000


def test_auto_takes_what_shared_memory_has() -> None:
    """With `auto` the pools are as large as /dev/shm allows, and a note says so."""
    made = plan(free_shm=200_000)
    assert 150_000 < sum(share.pool_bytes for share in made.workers) <= 200_000
    assert any("/dev/shm has no more free" in note for note in made.notes)
    assert "enlarge it" in refusal(free_shm=10_000)


def test_limited_address_space_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `ulimit -v` a process that could not map what it needs is named, with both sizes."""
    monkeypatch.setattr("colibri_mp.planner.address_space_bytes", lambda: 1_000_000_000)
    assert "coordinator needs 1.1" in (message := refusal(ram="1GB", num_workers=1))
    assert "`ulimit -v` (RLIMIT_AS) allows 1 GB" in message
    monkeypatch.setattr("colibri_mp.planner.address_space_bytes", lambda: 3_000_000_000)
    assert "worker 0 needs" in refusal(ram="1GB", num_workers=1, io_threads=64)
    assert plan(ram="1GB", num_workers=1).workers


def test_tables_follow_the_checkpoint(tmp_path: Path) -> None:
    """A tokenizer is paid for by the size of its file, and every tensor by its entry."""
    demo = Checkpoint.open(Path(__file__).parents[2] / "colibri_mp" / "demo_model")
    assert table_bytes(CHECKPOINT) < 1_000_000
    assert 3_000_000 < table_bytes(demo) < 4_000_000


def test_pressure_is_shared_by_size() -> None:
    """A smaller limit for all slabs leaves each worker its floor and an equal share of what it had beyond."""
    workers = plan(ram="1GB", num_workers=3).workers
    full = sum(share.slab_bytes for share in workers)
    floor = sum(share.floor_bytes for share in workers)
    assert split_slabs(workers, full) == [share.slab_bytes for share in workers]
    assert split_slabs(workers, 0) == [share.floor_bytes for share in workers]
    half = split_slabs(workers, (full + floor) // 2)
    assert sum(half) <= (full + floor) // 2
    assert half == [(share.slab_bytes + share.floor_bytes) // 2 for share in workers]


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


def test_kv_in_8_bits_is_priced_as_what_it_takes() -> None:
    """The term of the KV cache is the size of the cache that will be made, in either width."""
    attention = MODEL.layers[0].attention
    for bits, kind in CACHES.items():
        made = plan(ram="1GB", ctx=512, kv_bits=bits)
        term = next(term for term in made.terms if term.name.startswith("KV cache, 512 tokens"))
        cache = kind(len(MODEL.layers), 512 // 16, attention.num_kv_heads, attention.head_dim)
        assert term.nbytes == cache.tiles.nbytes
        assert ("8 bits" in term.name) == (bits == 8)


def test_kv_memory_for_more_sessions_than_one_context() -> None:
    """KV memory for many sessions is priced by its own size and leaves the context as it is; less of it limits the context."""
    made = plan(ram="1GB", ctx=256, kv_tokens=4096)
    assert (made.ctx_tokens, made.kv_tokens) == (256, 4096)
    assert "KV cache, 4096 tokens" in {term.name for term in made.terms}
    one = plan(ram="1GB", ctx=256)
    assert one.kv_tokens == 256
    per_token = len(MODEL.layers) * MODEL.layers[0].attention.num_kv_heads * 4 * 2 * MODEL.layers[0].attention.head_dim
    assert made.planned_bytes - one.planned_bytes == pytest.approx((4096 - 256) * per_token * (1 + ALLOWANCE), abs=4)
    assert plan(ram="1GB", kv_tokens=100).ctx_tokens == 100
