"""When the expert pools shrink and grow, and when new requests wait: readings in, decisions out, no process, no clock.

    a room is short (below its low mark)   ─▶ shrink at once, back to the high mark; new requests wait
    tasks stand still for memory           ─▶ shrink by a step; new requests wait
    the cluster is beyond its budget       ─▶ shrink by what is too much
    no room near its low mark for CALM_S   ─▶ new requests are admitted, the pools grow by what is free above the high marks
    in between                             ─▶ nothing changes

Sizes follow from what the pools hold now, not from what they may hold: a pool that has not been filled frees nothing by
a lower limit, and what it has yet to fill is not free. So a decision is the same while workers are still obeying it.
Standing still (PSI) counts only where memory is rather short: reading a file through the page cache of a full control
group makes tasks wait as well, and smaller pools would make it worse.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from colibri_mp.config import format_size
from colibri_mp.limits import Room

CALM_S = 3.0  # without pressure before anything grows, and between two steps of growth
STALL_WINDOW_S = 1.0  # over which standing still is measured
STALL_SHARE = 0.25  # of the time: more is pressure
STALL_STEP = 0.1  # of the pools is given up for a window of it,
STALL_FLOOR = 0.5  # down to this share of their full size
_STALL_ROOM = 2  # times the high mark: with more free than that, standing still has another reason
_LEAST_STEP = 0.01  # of the pools: smaller changes are not worth a message
_BUDGET_MARGIN = 0.02  # of the pools: they do not grow closer to the budget, lest they have to shrink again


@dataclass(frozen=True)
class Reading:
    """What was seen at `now_s` (any clock that only goes forward).

    `slab_bytes`: memory that the pools take now. `unspent_bytes`: budget minus all that the cluster takes; may be negative.
    """

    now_s: float
    rooms: Sequence[Room]
    slab_bytes: int
    unspent_bytes: int


@dataclass(frozen=True)
class Decision:
    """Limit the pools to `slab_bytes` together, and admit new requests or let them wait."""

    slab_bytes: int
    admits: bool
    reason: str


class Governor:
    """Turns readings into decisions; remembers the last one."""

    def __init__(self, full_bytes: int, floor_bytes: int) -> None:
        """`full_bytes`: the slabs of the pools as planned; `floor_bytes`: those that they cannot do without."""
        self.full_bytes, self.floor_bytes = full_bytes, floor_bytes
        self.limit_bytes, self.admits = full_bytes, True
        self._least_step = max(1, int(full_bytes * _LEAST_STEP))
        self._calm_since: float | None = None
        self._stalls: dict[str, tuple[float, int]] = {}  # by room: start of its window, `stalled_us` then

    def observe(self, reading: Reading) -> Decision | None:
        """What to do now; None: nothing new."""
        stalled = self._stalled_room(reading)
        short = [room for room in reading.rooms if room.free_bytes < room.low_bytes]
        if short:
            worst = max(short, key=_missing_bytes)
            reason = f"{worst}, the low-water mark is {format_size(worst.low_bytes)}"
            return self._press(reading.slab_bytes - _missing_bytes(worst), reason)
        if stalled is not None:
            room, share = stalled
            limit = max(self.full_bytes * STALL_FLOOR, reading.slab_bytes - self.full_bytes * STALL_STEP)
            return self._press(int(limit), f"tasks stand still for memory {share:.0%} of the time, {room}")
        limit_within_budget = self._clamp(reading.slab_bytes + reading.unspent_bytes)
        if reading.unspent_bytes < 0 and self._is_less(limit_within_budget):
            reason = f"the cluster takes {format_size(-reading.unspent_bytes)} more than its budget"
            return self._decide(limit_within_budget, self.admits, reason)
        return self._recover(reading)

    def _press(self, target: int, reason: str) -> Decision | None:
        """Shrink to `target` unless that is about where the limit is, and admit nobody."""
        self._calm_since = None
        limit = self._clamp(target)
        if not self._is_less(limit):
            limit = self.limit_bytes
        return None if limit == self.limit_bytes and not self.admits else self._decide(limit, False, reason)

    def _recover(self, reading: Reading) -> Decision | None:
        """Admit and grow after a calm time."""
        if any(room.free_bytes < (room.low_bytes + room.high_bytes) // 2 for room in reading.rooms):
            self._calm_since = None
            return None
        if self._calm_since is None:
            self._calm_since = reading.now_s
        if reading.now_s - self._calm_since < CALM_S:
            return None
        limit = self._clamp(reading.slab_bytes + _spare_bytes(reading, self.full_bytes * _BUDGET_MARGIN))
        if limit - self.limit_bytes < self._least_step and not limit == self.full_bytes > self.limit_bytes:
            limit = self.limit_bytes
        if limit == self.limit_bytes and self.admits:
            return None
        self._calm_since = reading.now_s
        return self._decide(limit, True, str(min(reading.rooms, key=lambda room: room.free_bytes)))

    def _decide(self, limit: int, admits: bool, reason: str) -> Decision:
        self.limit_bytes, self.admits = limit, admits
        return Decision(limit, admits, reason)

    def _clamp(self, nbytes: int) -> int:
        return min(max(nbytes, self.floor_bytes), self.full_bytes)

    def _is_less(self, limit: int) -> bool:
        """Whether a limit is so far below the present one that it is worth a message."""
        return self.limit_bytes - limit >= self._least_step or limit == self.floor_bytes < self.limit_bytes

    def _stalled_room(self, reading: Reading) -> tuple[Room, float] | None:
        """A room that is rather short and in which tasks stood still for too much of the last window, and how much."""
        found = None
        for room in reading.rooms:
            if room.stalled_us is None:
                continue
            since, before = self._stalls.setdefault(room.name, (reading.now_s, room.stalled_us))
            if reading.now_s - since < STALL_WINDOW_S:
                continue
            self._stalls[room.name] = reading.now_s, room.stalled_us
            share = (room.stalled_us - before) / 1e6 / (reading.now_s - since)
            if share > STALL_SHARE and room.free_bytes < _STALL_ROOM * room.high_bytes:
                found = room, share
        return found


def _missing_bytes(room: Room) -> int:
    """What would bring the room to its high mark."""
    return room.high_bytes - room.free_bytes


def _spare_bytes(reading: Reading, margin: float) -> int:
    """What the pools may take beyond what they hold: in every room, and in the budget but for a margin."""
    return min(*(-_missing_bytes(room) for room in reading.rooms), int(reading.unspent_bytes - margin))
