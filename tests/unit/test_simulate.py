"""From a trace to figures: what the run was, what sizes mean, what is predicted, and how it is shown."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trace_fixture import READ_BYTES, header, write_run

from colibri_mp import cli
from colibri_mp.checkpoint.source import Checkpoint
from colibri_mp.config import LaunchConfig
from colibri_mp.errors import ConfigError, TraceError
from colibri_mp.limits import Room
from colibri_mp.messages import StepCounters
from colibri_mp.models import load_model
from colibri_mp.planner import make_plan
from colibri_mp.simulate.cache import POLICIES
from colibri_mp.simulate.grid import Simulation, simulate
from colibri_mp.simulate.prediction import measure_costs
from colibri_mp.simulate.sizes import Size, default_sizes, sizes_by_memory, sizes_by_slots
from colibri_mp.simulate.workload import workload_of
from colibri_mp.trace import LOAD, PIN, RESIZE, STEP, Trace, TraceHeader, read_trace
from colibri_mp.trace_writer import TraceWriter

MODEL = Path(__file__).parents[1] / "golden" / "tiny" / "qwen3_moe"


def random_steps(num_steps: int = 400, num_layers: int = 2, num_experts: int = 12) -> list[list[list[int]]]:
    """Choices of two experts by a router that likes some better than others."""
    rng = np.random.default_rng(5)
    weights = np.arange(1, num_experts + 1) / (num_experts * (num_experts + 1) / 2)
    return [
        [rng.choice(num_experts, 2, replace=False, p=weights).tolist() for _ in range(num_layers)]
        for _ in range(num_steps)
    ]


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """400 tokens of decode; a visit that misses takes 100 us and 200 us for each miss, beside 1 ms."""
    path = tmp_path_factory.mktemp("trace") / "t"
    return write_run(path, header(), random_steps(), miss_s=200e-6, visit_s=100e-6)


def simulated(trace: Trace, slots: list[int], policies: list[str], disk: int | None = None) -> Simulation:
    """By slots."""
    return simulate(trace, sizes_by_slots(trace.header, slots), policies, disk, lambda _: None)


def test_run_itself_is_reproduced_and_costs_are_found(traced: Trace) -> None:
    """Equal counts in every visit; latency, bandwidth and busy time are those that the trace was made with."""
    made = simulated(traced, [5, 12], ["lru"])
    run = made.as_run
    assert run.is_exact
    assert (run.simulated_hits, run.simulated_misses) == (run.measured_hits, run.measured_misses)
    assert run.simulated_evictions == run.measured_evictions == run.measured_misses - 10
    assert made.costs.latency_s == pytest.approx(100e-6, rel=1e-3)
    assert made.costs.bandwidth == pytest.approx(READ_BYTES / 200e-6, rel=1e-3)
    assert made.costs.busy_s == pytest.approx(2e-3, rel=0.02)
    same, everything = made.cells
    assert same.tokens_per_s == pytest.approx(run.decode_tok_s, rel=1e-6)
    assert same.hits == run.measured_hits
    assert everything.misses == 24
    assert everything.tokens_per_s == pytest.approx(1 / 2e-3, rel=0.05)


def test_prediction_follows_the_formula(traced: Trace) -> None:
    """Tokens/s of a cell from its own misses; another disk changes the bandwidth alone."""
    (cell,) = simulated(traced, [3], ["lru"]).cells
    (fast,) = simulated(traced, [3], ["lru"], disk=10**9).cells
    workload = workload_of(traced)
    outcomes = [layer.run(POLICIES["lru"].make(layer.unions, 3, 2)) for layer in workload.layers]
    visits = sum(int((outcome.misses > 0).sum()) for outcome in outcomes)
    spent_s = visits * 100e-6 + cell.misses * 200e-6
    assert cell.misses == sum(int(outcome.misses.sum()) for outcome in outcomes)
    assert cell.decode_bytes_per_token == pytest.approx(cell.misses * READ_BYTES / 400)
    assert cell.tokens_per_s == pytest.approx(1 / (2e-3 + spent_s / 400), rel=0.02)
    assert fast.tokens_per_s == pytest.approx(1 / (2e-3 + (visits * 100e-6 + cell.misses * 1e-6) / 400), rel=0.02)


def test_nothing_read_means_no_speed_with_misses(tmp_path: Path) -> None:
    """Without a read there is no bandwidth: said, and cured by --disk; prefill alone gives rates and no speeds."""
    head = header(num_slots=12)
    warm = write_run(tmp_path / "w", head, [[[0, 1], [2, 3]]] * 5)
    decode = TraceWriter(tmp_path / "t", head)
    for number in range(3):
        decode.start_step(number, 1, 0)
        for layer in range(2):
            decode.add_layer(layer, np.array([[0, 1]], np.int32), 2, StepCounters(hits=2), 1e-3)
        decode.end_step(2e-3)
    decode.close()
    made = simulated(read_trace(tmp_path / "t"), [2, 12], ["lru"])
    assert [cell.tokens_per_s for cell in made.cells] == [None, None]
    assert any("give --disk" in note for note in made.notes)
    assert not made.as_run.is_exact  # a run cannot hit what it never read
    assert any("trust neither" in note for note in made.notes)
    assert simulated(read_trace(tmp_path / "t"), [2], ["lru"], disk=10**9).cells[0].tokens_per_s is not None
    prefill = Trace(warm.header, warm.records.copy(), ())
    prefill.records["num_prefill_rows"] = 1
    (cell,) = simulated(prefill, [12], ["lru"]).cells
    assert (cell.hits, cell.tokens_per_s, cell.decode_hit_rate) == (16, None, None)


def test_costs_of_noise_stay_sensible(tmp_path: Path) -> None:
    """Where misses seem to make a layer faster, what compute waited is taken; speeds fall with misses all the same."""
    trace = write_run(tmp_path / "t", header(), random_steps(60), miss_s=1e-4)
    records = trace.records.copy()
    records["seconds"] = np.where(records["kind"] == STEP, 4e-3, 2e-3 - 1e-4 * records["misses"])
    costs = measure_costs(workload_of(Trace(trace.header, records, ())), None)
    assert costs.latency_s == 0
    assert costs.bandwidth == pytest.approx(READ_BYTES / 1e-4, rel=1e-3)
    assert 0 < costs.busy_s < 4e-3


def test_events_are_replayed(tmp_path: Path) -> None:
    """Pins and sizes of the run are part of it: with them its counts are exact, without them they are not."""
    writer = TraceWriter(tmp_path / "t", header(num_layers=1, num_slots=3))
    number = 0

    def step(experts: list[int], misses: int, evictions: int, promoted: int = 0) -> None:
        nonlocal number
        number += 1
        counters = StepCounters(hits=len(experts) - misses - promoted, misses=misses, evictions=evictions)
        writer.start_step(number, 1, 0)
        writer.add_layer(0, np.array([experts], np.int32), len(experts), counters, 1e-3)
        writer.end_step(1e-3)

    step([0, 1], 2, 0)
    writer.add_event(PIN, 0, 0)
    step([2, 3], 2, 1)  # 1 goes, 0 stays
    step([0, 3], 0, 0)
    writer.add_event(LOAD, 0, 7)  # 2 goes
    step([3, 7], 1, 0)
    writer.add_event(PIN, 0, 7)
    writer.add_event(RESIZE, 0, 4)
    step([1, 2], 2, 1)  # 3 goes
    step([0, 7], 0, 0)
    writer.close()
    trace = read_trace(tmp_path / "t")
    assert simulated(trace, [3], ["lru"]).as_run.is_exact
    without = Trace(trace.header, trace.records[trace.records["kind"] <= STEP], ())
    assert not simulated(without, [3], ["lru"]).as_run.is_exact


def test_impossible_events_and_empty_traces_are_refused(tmp_path: Path) -> None:
    """By name, with numbers."""
    writer = TraceWriter(tmp_path / "t", header(num_layers=1))
    writer.flush()
    with pytest.raises(TraceError, match="the trace has no steps"):
        simulated(read_trace(tmp_path / "t"), [2], ["lru"])
    writer.start_step(1, 1, 0)
    writer.add_layer(0, np.array([[0, 1]], np.int32), 2, StepCounters(misses=2), 1e-3)
    writer.add_event(PIN, 0, 0)
    writer.add_event(RESIZE, 0, 1)
    writer.add_event(PIN, 0, 2)
    writer.close()
    with pytest.raises(TraceError, match="1 slots cannot hold 1 pins"):
        simulated(read_trace(tmp_path / "t"), [2], ["lru"])


# -- sizes -------------------------------------------------------------------------------------------------------------


def traced_header(**settings: Any) -> TraceHeader:
    """A run of the small fixture, which has 4 layers of 8 experts, top 2."""
    config = LaunchConfig(model=str(MODEL), num_workers=1, num_threads=1, ctx=128, **settings)
    fingerprint = Checkpoint.open(MODEL).fingerprint
    return header(4, 8, 2, model=str(MODEL), fingerprint=fingerprint, settings=dataclasses.asdict(config))


def test_memory_sizes_are_the_planners() -> None:
    """Slots of a budget are what a launch with these settings would get, without the slots of the traced run."""
    sizes = sizes_by_memory(traced_header(slots=2, ram=10**12, trace="x"), ["300MB", "8TB", "1MB"], "")
    config = LaunchConfig(model=str(MODEL), num_workers=1, num_threads=1, ctx=128, ram="300MB")
    plan = make_plan(load_model(Checkpoint.open(MODEL)), config, Room("a machine", 10**12, 10**12))
    assert sizes[0] == Size("300 MB", plan.workers[0].num_slots, 300_000_000)
    assert sizes[1].num_slots == (8, 8, 8, 8)
    assert not sizes[2].num_slots
    assert sizes[2].refusal.startswith("--ram 1 MB is too small, this run needs at least")


def test_pools_beyond_this_machines_shared_memory_can_be_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts is the machine that might be bought."""
    monkeypatch.setattr("colibri_mp.planner.free_shm_bytes", lambda: 10_000)
    assert sizes_by_memory(traced_header(), ["300MB"], "")[0].num_slots


def test_checkpoint_must_be_the_traced_one(tmp_path: Path) -> None:
    """Gone, another one, or settings that this program does not know."""
    gone = dataclasses.asdict(LaunchConfig())
    for head, model, kind, message in (
        (header(model="/gone", settings=gone), "", ConfigError, r"/gone, is not there: give --model"),
        (header(model="/gone", settings=gone), str(MODEL), ConfigError, "is not the checkpoint of the trace"),
    ):
        with pytest.raises(kind, match=message):
            sizes_by_memory(head, ["1GB"], model)
    fingerprint = Checkpoint.open(MODEL).fingerprint
    with pytest.raises(TraceError, match="unknown setting 'turbo'"):
        sizes_by_memory(header(model=str(MODEL), fingerprint=fingerprint, settings={"turbo": 1}), ["1GB"], "")


def test_slots() -> None:
    """At most the experts, at least one token's; by default from these to all."""
    assert [size.num_slots for size in sizes_by_slots(header(), [2, 99])] == [(2, 2), (12, 12)]
    assert [size.num_slots[0] for size in default_sizes(header())] == [2, 3, 6, 9, 12]
    with pytest.raises(ConfigError, match="--slots 1 is less than the 2 experts"):
        sizes_by_slots(header(), [1])


# -- command line ------------------------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """`colibri-cluster simulate ...`: exit code, stdout, stderr."""
    code = cli.main(["simulate", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def trace_file(tmp_path: Path) -> str:
    """A run on disk."""
    write_run(tmp_path / "t", header(), random_steps(50), miss_s=1e-4)
    return str(tmp_path / "t")


def test_table(capsys: pytest.CaptureFixture[str], trace_file: str) -> None:
    """All policies and the default sizes; the formula, the check against the run and the reservations are said."""
    code, out, _ = run(capsys, trace_file)
    assert code == 0
    assert "the simulation agrees in every step" in out
    assert "seconds a token = busy + (latency * visits that miss + bytes read / bandwidth) / tokens" in out
    assert all(f" {name} " in out for name in POLICIES)
    assert all(f" {count} slots " in out for count in (2, 3, 6, 9, 12))
    assert "reads only: trace a run with less memory" in out


def test_json_and_plot(capsys: pytest.CaptureFixture[str], trace_file: str, tmp_path: Path) -> None:
    """One object as the last line, in the order asked for, and a PNG."""
    plot = tmp_path / "p.png"
    options = ["--slots", "3, 6", "--policy", "belady,lru", "--disk", "1GB", "--json", "--plot", str(plot)]
    code, out, _ = run(capsys, trace_file, *options)
    made = json.loads(out.splitlines()[-1])
    assert code == 0
    assert [(cell["size"], cell["policy"]) for cell in made["cells"]] == [
        ("3 slots", "belady"), ("3 slots", "lru"), ("6 slots", "belady"), ("6 slots", "lru")
    ]  # fmt: skip
    assert made["as_run"]["is_exact"]
    assert made["costs"]["bandwidth"] == 10**9
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_refused_memory_is_listed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A size that cannot run is a line of its own, beside those that can."""
    write_run(tmp_path / "t", traced_header(), random_steps(50, num_layers=4, num_experts=8))
    code, out, _ = run(capsys, str(tmp_path / "t"), "--ram", "1MB,400MB", "--policy", "lru")
    assert code == 0
    assert "1 MB: --ram 1 MB is too small, this run needs at least" in out
    assert " 400 MB " in out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ["{trace}", "--policy", "lru,mru"],
            2,
            "--policy must be some of lrfu, lru, lfu, lru-freq, lru+pins, belady, not 'mru'",
        ),
        (["{trace}", "--slots", "3,x"], 2, "--slots takes integers"),
        (["{trace}", "--ram", "much"], 2, "not a size: 'much'"),
        (["{trace}", "--plot", "/no/such/p.png", "--slots", "3"], 2, "--plot /no/such/p.png: cannot be written"),
        (["/no/such/trace"], 11, "/no/such/trace cannot be read"),
        ([__file__], 11, "is no route trace"),
    ],
)
def test_wrong_usage(
    capsys: pytest.CaptureFixture[str], trace_file: str, arguments: list[str], code: int, message: str
) -> None:
    """Named, with an exit code, and nothing on stdout."""
    got, out, err = run(capsys, *(argument.format(trace=trace_file) for argument in arguments))
    assert (got, out) == (code, "")
    assert message in err


def test_missing_matplotlib_names_the_extra(
    capsys: pytest.CaptureFixture[str], trace_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says what to install."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, err = run(capsys, trace_file, "--slots", "3", "--plot", "p.png")
    assert code == 2
    assert "pip install 'colibri-mp[plot]'" in err
