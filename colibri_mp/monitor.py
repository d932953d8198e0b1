"""Watches memory while a cluster runs: a thread of the coordinator that reads, asks the governor, and passes decisions on.

    monitor thread    every TICK_S: rooms, pools ─▶ Governor ─▶ decision ─▶ log, history, `act`
    engine thread     what `act` left for it: `Resize` to the workers between two steps, admission of new requests

Reading takes 0.3 ms. A reading that fails ends the watch, with a message: the cluster then keeps to its plan unwatched.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from colibri_mp.config import format_size
from colibri_mp.limits import Room
from colibri_mp.pressure import Decision, Governor, Reading

TICK_S = 0.25
_HISTORY = 20  # changes that `status` shows
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Change:
    """A decision as `status --json` shows it; `time_s` is since 1970."""

    time_s: float
    slab_bytes: int
    admits: bool
    reason: str


class Monitor:
    """See the module docstring. `read` is called in the monitor's thread, and so is `act`."""

    def __init__(self, governor: Governor, read: Callable[[], Reading], act: Callable[[Decision], None]) -> None:
        self._governor = governor
        self._read = read
        self._act = act
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monitor")
        self._last_rooms: tuple[Room, ...] = ()
        self._changes: deque[Change] = deque(maxlen=_HISTORY)
        self._num_changes = 0

    def start(self) -> None:
        """Look once, and begin to watch."""
        if self._look():
            self._thread.start()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._end.set()
        if self._thread.ident is not None:
            self._thread.join()

    def status(self) -> dict[str, Any]:
        """What `status --json` shows of it."""
        return {
            "is_watching": self._thread.is_alive(),
            "admits_requests": self._governor.admits,
            "slab_limit_bytes": self._governor.limit_bytes,
            "slab_full_bytes": self._governor.full_bytes,
            "rooms": [
                {
                    "name": room.name,
                    "size_bytes": room.size_bytes,
                    "free_bytes": room.free_bytes,
                    "low_bytes": room.low_bytes,
                    "high_bytes": room.high_bytes,
                }
                for room in self._last_rooms
            ],
            "num_changes": self._num_changes,
            "changes": [vars(change) for change in list(self._changes)],
        }

    def tick(self) -> None:
        """Read once, and act on it."""
        reading = self._read()
        self._last_rooms = tuple(reading.rooms)
        before = self._governor.limit_bytes
        decision = self._governor.observe(reading)
        if decision is None:
            return
        self._num_changes += 1
        self._changes.append(Change(time.time(), decision.slab_bytes, decision.admits, decision.reason))
        _log.warning("%s", describe(decision, before))
        self._act(decision)

    def _run(self) -> None:
        while not self._end.wait(TICK_S) and self._look():
            pass

    def _look(self) -> bool:
        """Whether memory could be read."""
        try:
            self.tick()
        except (OSError, ValueError, KeyError) as error:
            _log.error("memory is not watched any more: it cannot be read (%r)", error)
            return False
        return True


def describe(decision: Decision, before_bytes: int) -> str:
    """A decision in words."""
    if decision.slab_bytes == before_bytes:
        pools = f"expert pools stay at {format_size(before_bytes)}"
    else:
        verb = "shrink" if decision.slab_bytes < before_bytes else "may grow"
        pools = f"expert pools {verb} from {format_size(before_bytes)} to {format_size(decision.slab_bytes)}"
    requests = "new requests are admitted" if decision.admits else "new requests wait"
    return f"{pools}, {requests}: {decision.reason}"
