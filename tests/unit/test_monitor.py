"""The watch: what becomes of readings and decisions."""

import logging

import pytest

from colibri_mp.limits import Room
from colibri_mp.monitor import Monitor, describe
from colibri_mp.pressure import Decision, Governor, Reading

FULL, FLOOR = 1_000_000_000, 100_000_000


class Watched:
    """A monitor, the reading that it gets next, and the decisions it passes on."""

    def __init__(self) -> None:
        self.free = 8_000_000_000
        self.decisions: list[Decision] = []
        self.monitor = Monitor(Governor(FULL, FLOOR), self.read, self.decisions.append)

    def read(self) -> Reading:
        if self.free < 0:
            raise OSError("gone")
        return Reading(0.0, [Room("the system", 16_000_000_000, self.free)], FULL, FULL)


def test_decisions_are_logged_remembered_and_passed_on(caplog: pytest.LogCaptureFixture) -> None:
    """One change: a log line with sizes and reason, an entry in the status, a call of `act`."""
    watched = Watched()
    watched.monitor.tick()
    assert watched.decisions == []
    watched.free = 400_000_000
    with caplog.at_level(logging.WARNING, "colibri_mp.monitor"):
        watched.monitor.tick()
        watched.monitor.tick()
    (decision,) = watched.decisions
    assert decision.slab_bytes == FULL - 624_000_000
    status = watched.monitor.status()
    assert status["rooms"] == [
        {
            "name": "the system",
            "size_bytes": 16_000_000_000,
            "free_bytes": 400_000_000,
            "low_bytes": 512_000_000,
            "high_bytes": 1_024_000_000,
        }
    ]
    assert (status["admits_requests"], status["slab_limit_bytes"]) == (False, decision.slab_bytes)
    (change,) = status["changes"]
    assert (change["slab_bytes"], change["admits"]) == (decision.slab_bytes, False)
    wanted = "expert pools shrink from 1 GB to 376 MB, new requests wait: 400 MB free in the system, the low-water mark is 512 MB"
    assert wanted in caplog.text


def test_history_is_bounded() -> None:
    """A machine that never rests does not fill the memory."""
    watched = Watched()
    for _ in range(40):
        watched.free = 100_000_000
        watched.monitor.tick()
        watched.monitor._governor = Governor(FULL, FLOOR)
    status = watched.monitor.status()
    assert (status["num_changes"], len(status["changes"])) == (40, 20)


@pytest.mark.parametrize("looks_before", [0, 1])
def test_watch_ends_when_memory_cannot_be_read(looks_before: int, caplog: pytest.LogCaptureFixture) -> None:
    """At the start or later: one message, no thread, and `close` works."""
    watched = Watched()
    if not looks_before:
        watched.free = -1
    with caplog.at_level(logging.ERROR, "colibri_mp.monitor"):
        watched.monitor.start()
        watched.free = -1
        watched.monitor._thread.join(5) if looks_before else None
    assert not watched.monitor.status()["is_watching"]
    assert caplog.text.count("memory is not watched any more") == 1
    watched.monitor.close()


def test_words_for_growth_and_for_admission_alone() -> None:
    """The log tells growth from mere admission."""
    assert (
        describe(Decision(FULL, True, "x"), FLOOR)
        == "expert pools may grow from 100 MB to 1 GB, new requests are admitted: x"
    )
    assert describe(Decision(FLOOR, True, "x"), FLOOR) == "expert pools stay at 100 MB, new requests are admitted: x"
