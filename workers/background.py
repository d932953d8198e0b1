"""What a worker reads while nobody waits for it: hints of what the next steps need, and experts to keep.

    hint      predicted for a layer that comes soon ─▶ staging slot ─▶ promoted by the step that asks for it, or dropped
    wish      worth keeping (learned usage) ─▶ a free slot of its layer, or a pin ─▶ stays as any other, or for good

All reads have background rank in the streamer, behind every read that a step waits for. Hints are read first, since they are worth
something for milliseconds only; a few wishes are under way at a time, so that their slots, which cannot be evicted while they are
being read, never stand in the way of a step. What happens to the layers beside the steps is told in `events`, for the route trace.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from colibri_mp.errors import PoolError
from colibri_mp.messages import PoolEvent, Wish
from colibri_mp.shm.pool import ExpertPool, Held

MOST_WISHES = 4
"""Wishes that are being read at a time."""

StartRead = Callable[[int, int, int, int], None]
"""(layer, expert, slot, generation): begin a background read into the slot."""


_NONE: set[int] = set()


@dataclass(slots=True)
class Misses:
    """The misses of steps for which hints had come: what the prediction did for them."""

    dropped: int = 0  # predicted, but the read was called off or its result dropped before the step asked
    unpredicted: int = 0


@dataclass(slots=True)
class _Staged:
    layer: int
    expert: int
    generation: int


@dataclass(slots=True)
class Background:
    """See the module docstring. `cancel(slot)`: whether a read was called off before it began."""

    pool: ExpertPool
    start: StartRead
    cancel: Callable[[int], bool]
    events: list[PoolEvent] = field(default_factory=list)
    misses: Misses = field(default_factory=Misses)
    refusal: str = ""
    _landed: list[tuple[Wish, Held]] = field(default_factory=list)  # fills that have been read, still held
    _wishes: deque[Wish] = field(default_factory=deque)
    _kept: dict[int, tuple[Wish, Held | None]] = field(default_factory=dict)  # by slot: being read; a pin is not held
    _staged: dict[int, _Staged] = field(default_factory=dict)  # by slot: being read for a hint
    _hinted: dict[int, set[int]] = field(default_factory=dict)  # by layer: predicted for its next step

    @property
    def num_waiting(self) -> int:
        """Wishes that are not in memory yet, or may not be evicted yet."""
        return len(self._wishes) + len(self._kept) + len(self._landed)

    def under_way(self, layer: int) -> set[int]:
        """The experts of a layer that are being read for wishes."""
        return {wish.expert for wish, _ in self._kept.values() if wish.layer == layer} if self._kept else _NONE

    # ── hints ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def hint(self, layer: int, experts: Iterable[int]) -> None:
        """Read what is not in memory of the experts that `layer` will probably need, the likeliest first."""
        hinted = self._hinted.setdefault(layer, set())
        for expert in experts:
            hinted.add(expert)
            if (found := self._stage(layer, expert)) is not None:
                slot, generation = found
                self._staged[slot] = _Staged(layer, expert, generation)
                self.start(layer, expert, slot, generation)

    def _stage(self, layer: int, expert: int) -> tuple[int, int] | None:
        try:
            return self.pool.stage(layer, expert)
        except PoolError as error:  # no shared memory is left: a step would have to do without it as well
            self.refusal = str(error)
            return None

    def step_acquired(self, held: Held) -> list[int]:
        """A step has its slots: count what prediction did for it, and call off hints that are out of date.

        Returns the slots of background reads that the step waits for now.
        """
        if held.layer in self._hinted:
            hinted = self._hinted.pop(held.layer)
            num_dropped = len(hinted.intersection(held.misses))
            self.misses.dropped += num_dropped
            self.misses.unpredicted += len(held.misses) - num_dropped
        for slot in held.pending_slots:
            self._staged.pop(slot, None)
            self._claim(slot)
        for slot in [slot for slot, staged in self._staged.items() if staged.layer == held.layer]:
            if self.cancel(slot):
                self.pool.fail(slot, self._staged.pop(slot).generation)
        return held.pending_slots

    def _claim(self, slot: int) -> None:
        """The step holds a slot that a wish is being read into, and will release it: it is a step's read from now on."""
        wish, held = self._kept.get(slot, (None, None))
        if wish is not None and held is not None:
            del self._kept[slot]
            self.pool.release(held)

    # ── wishes ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def keep(self, wishes: Iterable[Wish]) -> None:
        """Have these experts in memory, read in this order when there is time."""
        self._wishes.extend(wishes)

    def let_go(self, layer: int, expert: int) -> None:
        """A pin may be evicted again."""
        if expert in self.pool.pinned(layer):
            self.pool.unpin(layer, expert)
            self.events.append(PoolEvent("unpin", layer, expert))

    def given_up(self, layer: int, experts: Iterable[int]) -> None:
        """The pool, made smaller, has no place for these pins any more."""
        self.events.extend(PoolEvent("drop", layer, expert) for expert in sorted(experts))

    def read_on(self) -> None:
        """Begin what may begin now; for moments without a step."""
        self.settle()
        while self._wishes and len(self._kept) < MOST_WISHES and not self._must_wait(self._wishes[0]):
            wish = self._wishes.popleft()
            try:
                begin = self._begin_pin if wish.is_pinned else self._begin_fill
                begin(wish)
            except PoolError as error:
                self.refusal = str(error)
                self._wishes.clear()

    def _must_wait(self, wish: Wish) -> bool:
        """Whether a fill would leave a step no slot now, while others of its layer are not settled, which a step can have then."""
        unsettled = (held for _, held in (*self._kept.values(), *self._landed) if held is not None)
        return (
            not wish.is_pinned
            and self.pool.num_available(wish.layer) < 2
            and any(held.layer == wish.layer for held in unsettled)
        )

    def _begin_pin(self, wish: Wish) -> None:
        layer, expert = wish.layer, wish.expert
        if self.pool.pin(layer, expert):
            self.events.append(PoolEvent("pin", layer, expert))
        elif (found := self.pool.load_pinned(layer, expert)) is not None:
            slot, generation = found
            self._kept[slot] = (wish, None)
            self.events.append(PoolEvent("load", layer, expert))
            self.start(layer, expert, slot, generation)

    def _begin_fill(self, wish: Wish) -> None:
        """An expert for a slot that nobody has used yet; nothing is evicted for it."""
        layer, expert = wish.layer, wish.expert
        held = self.pool.fill(layer, expert)
        if held is None:
            return
        (slot,), (generation,) = held.miss_slots, held.generations
        self._kept[slot] = (wish, held)
        self.events.append(PoolEvent("fill", layer, expert))
        self.start(layer, expert, slot, generation)

    # ── ends of reads ───────────────────────────────────────────────────────────────────────────────────────────────

    def landed(self, slot: int, error: Exception | None) -> None:
        """A read has ended, and the pool knows; whose it was is looked up here."""
        self._staged.pop(slot, None)
        wish, held = self._kept.pop(slot, (None, None))
        if wish is None:
            return
        if held is not None and error is None:
            self._landed.append((wish, held))
            return
        if held is not None:
            self.pool.release(held)
        self.events.append(PoolEvent("drop" if error else "pin", wish.layer, wish.expert))

    def settle(self) -> None:
        """What has been filled may be evicted from now on; between two steps, so that a step's victims do not depend on the disk."""
        landed, self._landed = self._landed, []
        for wish, held in landed:
            self.pool.release(held)
            self.events.append(PoolEvent("unpin", wish.layer, wish.expert))

    def take_events(self) -> list[PoolEvent]:
        """The events since the last call."""
        events, self.events = self.events, []
        return events
