"""What a real run shows: its trace, which the simulation reproduces exactly, its phase times, and lossy options."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from colibri_mp import Cluster
from colibri_mp.config import LaunchConfig
from colibri_mp.errors import ConfigError, MemoryPlanError
from colibri_mp.planner import plan_for
from colibri_mp.simulate.grid import simulate
from colibri_mp.simulate.sizes import sizes_by_slots
from colibri_mp.trace import FILL, LAYER, PIN, STEP, Trace, read_trace

TINY = Path(__file__).parents[1] / "golden" / "tiny"
PROMPT = "Once upon a time there was a king who lived in a castle by the sea, and every morning"


def generate(cluster: Cluster, num_tokens: int) -> None:
    """A prompt, decode, and two prompts scored as one batch in chunks."""
    cluster.generate(PROMPT, max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    cluster.logits_batch([list(range(3, 40)), list(range(50, 61))], chunk=7)


def small_ram(**settings: Any) -> str:
    """The least memory that the built-in model runs in with these settings, and 4 MB more: not all experts fit."""
    with pytest.raises(MemoryPlanError) as refusal:
        plan_for(LaunchConfig(ram="100MB", ctx=256, num_threads=2, **settings), lambda _: None)
    return str(int(str(refusal.value).split("(")[1].split(" bytes")[0]) + 4_000_000)


@pytest.mark.parametrize(
    "settings",
    [
        {"slots": 4, "num_workers": 1},  # the floor: one token's experts; every prompt takes rounds
        {"slots": 9, "num_workers": 3, "expert_top_p": 0.8, "policy": "lru"},
        {"ram": "", "num_workers": 1, "prefill_chunk": 16},  # layers of different sizes
    ],
    ids=["floor", "three workers, top-p, LRU", "by memory"],
)
def test_simulation_is_the_run(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Hits, misses and evictions of every layer and step are equal, and add up to the cluster's own counters."""
    if "ram" in settings:
        settings = {**settings, "ram": small_ram(num_workers=1, prefill_chunk=16)}
    plain = {"usage": "off", "lookahead": "off", "ctx": 256, "num_threads": 2, "trace": str(tmp_path / "t")}
    with Cluster.launch("demo", **{**plain, **settings}) as cluster:
        generate(cluster, 60)
        stats = cluster.stats()
        assert any(str(tmp_path / "t") in note for note in cluster.notes)
    trace = read_trace(tmp_path / "t")
    largest = max(layer.num_experts for layer in trace.header.layers)
    made = simulate(trace, sizes_by_slots(trace.header, [largest]), ["lru", "belady"], None, lambda _: None)
    run, cache = made.as_run, stats["cache"]
    assert trace.notes == ()
    assert run.is_exact
    assert (run.simulated_hits, run.simulated_misses, run.simulated_evictions) == (
        cache["hits"], cache["misses"], cache["evictions"]
    )  # fmt: skip
    assert run.simulated_evictions > 100
    assert made.cells[0].misses == made.cells[1].misses == len(set(asked_pairs(trace.of_kind(LAYER))))
    check_steps(trace.of_kind(STEP), stats)
    check_phases(stats, is_exact="expert_top_p" not in settings)


def test_simulation_follows_pins_fills_and_reads_ahead(tmp_path: Path) -> None:
    """With everything that reads beside the steps: promoted experts are misses of the simulation, pins and fills are events.

    The second launch starts with what the first has learned, which its trace says and the simulation needs.
    """
    settings = {
        "usage": str(tmp_path / "usage"),
        "pins": 0.5,
        "lookahead": "on",
        "slots": 12,
        "num_workers": 2,
        "repin": 8,
    }
    for launch in range(2):
        with Cluster.launch("demo", ctx=256, num_threads=2, trace=str(tmp_path / "t"), **settings) as cluster:
            for _ in range(3):
                generate(cluster, 20)
            stats = cluster.stats()
        trace = read_trace(tmp_path / "t")
        run = simulate(trace, sizes_by_slots(trace.header, [12]), ["lru"], None, lambda _: None).as_run
        cache, tiers = stats["cache"], stats["tiers"]
        assert run.is_exact, f"launch {launch}"
        assert (run.simulated_hits, run.simulated_misses) == (cache["hits"], cache["misses"] + cache["promoted"])
        assert cache["promoted"] > 0
        assert tiers["reads_ahead"]["issued"] >= cache["promoted"]
    assert all(max(layer.prior) > 1 for layer in trace.header.layers)
    assert not is_exact_without_prior(trace)
    assert tiers["pins"] == 6 * 4, "half of the slots above one token's four"
    assert len(trace.of_kind(FILL)) > 0
    assert len(trace.of_kind(PIN)) >= 24


def is_exact_without_prior(trace: Trace) -> bool:
    """Whether the simulation agrees with the run if the pools had started from nothing."""
    layers = tuple(msgspec.structs.replace(layer, prior=()) for layer in trace.header.layers)
    cold = replace(trace, header=msgspec.structs.replace(trace.header, layers=layers))
    return simulate(cold, sizes_by_slots(cold.header, [12]), ["lru"], None, lambda _: None).as_run.is_exact


def check_steps(steps: Any, stats: dict[str, Any]) -> None:
    """The trace has every step, decode and prefill apart."""
    assert len(steps) == stats["progress"]["steps"]
    assert steps["num_rows"].sum() == stats["progress"]["tokens"]
    assert 59 <= steps["num_rows"][steps["num_prefill_rows"] == 0].sum() <= 61
    assert steps["num_prefill_rows"].max() > 4


def check_phases(stats: dict[str, Any], is_exact: bool) -> None:
    """Every phase of every layer has taken time, the sums fit, and unions grow with the rows of a step."""
    found = stats["phases"]
    assert found["steps"] == stats["progress"]["steps"]
    assert (found["experts_per_token"] == 4.0) == is_exact
    assert sum(found["seconds"].values()) == pytest.approx(found["total_s"])
    assert len(found["layers"]) == 6
    for layer in found["layers"]:
        assert min(layer["seconds"].values()) > 0
        assert sum(layer["seconds"].values()) == pytest.approx(layer["total_s"])
    assert found["seconds"]["compute"] == pytest.approx(stats["cache"]["compute_s"])
    assert found["seconds"]["fetch_wait"] == pytest.approx(stats["cache"]["wait_s"])
    means = [entry["mean"] for entry in found["unions"]]
    assert means == sorted(means)
    assert sum(entry["count"] for entry in found["unions"]) == 6 * found["steps"]


def asked_pairs(visits: Any) -> list[tuple[int, int]]:
    """Every (layer, expert) that was asked for."""
    bits = np.unpackbits(visits["asked"], axis=1, bitorder="little")
    return [(int(visits["layer"][row]), int(expert)) for row, expert in zip(*np.nonzero(bits), strict=True)]


def test_trace_from_the_command_line(tmp_path: Path) -> None:
    """`run --trace` and `simulate --json`, as a user has them."""
    command = [sys.executable, "-m", "colibri_mp"]
    options = [
        "--max-tokens",
        "8",
        "--temp",
        "0",
        "--ctx",
        "256",
        "--workers",
        "1",
        "--slots",
        "6",
        "--usage",
        "off",
        "--lookahead",
        "off",
        "--json",
    ]
    done = subprocess.run(
        [*command, "run", "Once", *options, "--trace", "t"], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    cache = json.loads(done.stdout.splitlines()[-1])["cache"]
    asked = [*command, "simulate", "t", "--ram", "1GB", "--slots", "6", "--policy", "lrfu,belady", "--json"]
    made = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert made.returncode == 0, made.stderr
    found = json.loads(made.stdout.splitlines()[-1])
    assert found["as_run"]["is_exact"]
    assert found["as_run"]["simulated_misses"] == found["cells"][2]["misses"] == cache["misses"]
    assert found["cells"][0]["resident_share"] == 1.0


def test_trace_that_cannot_be_written() -> None:
    """The launch is refused by name, and nothing is left behind."""
    with pytest.raises(ConfigError, match="--trace /no/such/folder/t: cannot be written"):
        Cluster.launch("demo", ctx=256, num_workers=1, trace="/no/such/folder/t")


def test_lossy_options_are_reported_and_change_the_logits_alike_everywhere() -> None:
    """Fewer experts a token; named in notes and statistics; the same bits for any pool and number of workers."""
    lossy = [
        launch_lossy({"expert_top_p": 0.6}, "--expert-top-p 0.6"),
        launch_lossy({"expert_top_p": 0.6, "num_workers": 2, "slots": 2, "num_threads": 2}, "--expert-top-p 0.6"),
        launch_lossy({"expert_top_k": 1, "slots": 1}, "--expert-top-k 1 (the model's is 2)"),
    ]
    assert lossy[0] == lossy[1]
    assert len({logits for logits, _ in lossy}) == 2
    assert 1 == lossy[2][1] < lossy[0][1] < 2


def launch_lossy(settings: dict[str, Any], option: str) -> tuple[bytes, float]:
    """Logits of a prompt, and experts a token; the option must be named."""
    with Cluster.launch(TINY / "olmoe", **{"ctx": 128, "num_threads": 1, "num_workers": 1, **settings}) as cluster:
        logits = cluster.logits([9, 8, 7, 100, 3, 42])
        stats = cluster.stats()
        assert stats["lossy"] == [option]
        assert any(note.startswith(f"lossy: {option}") for note in cluster.notes)
    return logits.tobytes(), stats["phases"]["experts_per_token"]
