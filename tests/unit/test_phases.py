"""The clock of the steps: every second has one place, and unions are counted by rows."""

import pytest

from colibri_mp import phases
from colibri_mp.messages import StepCounters
from colibri_mp.phases import ATTENTION, COMPUTE, PHASES, StepClock


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is one second later each time it is looked at."""
    time = iter(range(1_000_000))
    monkeypatch.setattr(phases, "perf_counter", lambda: float(next(time)))


def step(clock: StepClock, num_rows: int, asked: int, dense: bool = False) -> None:
    """Two layers, one second a stage; the worker computed for 0.25 s and waited for 0.5 s."""
    clock.start_step()
    for layer in range(2):
        clock.start_layer(layer)
        if dense and layer == 0:
            clock.lap(ATTENTION)
            clock.lap(COMPUTE)
            continue
        clock.lap_block(phases.perf_counter())
        clock.lap_workers(StepCounters(hits=asked - 1, misses=1, wait_s=0.5, compute_s=0.25), num_rows, 3 * num_rows)
        clock.end_layer()
    clock.start_head()
    clock.end_step()


def test_every_second_has_one_place(ticks: None) -> None:
    """Phases of the layers and what is outside add up to the steps."""
    clock = StepClock(2)
    step(clock, 1, 3)
    assert (clock.step_s, clock.layer_s) == (12.0, 4.0)
    step(clock, 1, 3)
    found = clock.describe()
    assert found["steps"] == 2
    assert found["total_s"] == 24.0
    assert found["seconds"] == {
        "attention": 4.0, "route": 4.0, "ipc": 1.0, "fetch_wait": 2.0, "compute": 1.0, "combine": 4.0, "head": 2.0, "other": 6.0
    }  # fmt: skip
    assert [layer["total_s"] for layer in found["layers"]] == [8.0, 8.0]
    assert found["layers"][1]["seconds"] == {
        "attention": 2.0, "route": 2.0, "ipc": 0.5, "fetch_wait": 1.0, "compute": 0.5, "combine": 2.0
    }  # fmt: skip
    assert list(found["seconds"]) == list(PHASES)


def test_dense_layers_compute(ticks: None) -> None:
    """A block without experts has compute time and no unions."""
    clock = StepClock(2)
    step(clock, 1, 3, dense=True)
    first, second = clock.describe()["layers"]
    assert first["seconds"]["compute"] == 1.0
    assert first["unions"] == []
    assert second["unions"] == [{"least_rows": 1, "most_rows": 1, "count": 1, "mean": 3.0, "largest": 3}]


def test_unions_are_kept_by_rows(ticks: None) -> None:
    """Rows are gathered by powers of two; experts a token are an average over all rows."""
    clock = StepClock(2)
    for num_rows, asked in ((1, 3), (4, 8), (7, 12), (512, 30)):
        step(clock, num_rows, asked)
    found = clock.describe()
    assert found["unions"] == [
        {"least_rows": 1, "most_rows": 1, "count": 2, "mean": 3.0, "largest": 3},
        {"least_rows": 4, "most_rows": 7, "count": 4, "mean": 10.0, "largest": 12},
        {"least_rows": 512, "most_rows": 1023, "count": 2, "mean": 30.0, "largest": 30},
    ]
    assert found["experts_per_token"] == 3.0


def test_nothing_yet() -> None:
    """A cluster that has computed nothing can be asked."""
    found = StepClock(3).describe()
    assert (found["steps"], found["total_s"], found["experts_per_token"], found["unions"]) == (0, 0.0, 0.0, [])
