"""When pools shrink and grow: the governor over a simulated machine with a clock of its own."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibri_mp.limits import Room
from colibri_mp.pressure import CALM_S, STALL_FLOOR, Decision, Governor, Reading

GB = 1_000_000_000
FULL, FLOOR = 4 * GB, GB // 2
SIZE = 16 * GB
LOW, HIGH = Room("", SIZE, 0).low_bytes, Room("", SIZE, 0).high_bytes


@dataclass
class Machine:
    """A system of which the pools take what they are allowed at once; the rest is taken by others.

    `unspent`: what full pools leave of the cluster's budget.
    """

    others: int = 6 * GB
    unspent: int = GB
    now_s: float = 100.0
    stalled_us: int = 0
    obeys: bool = True
    governor: Governor = field(default_factory=lambda: Governor(FULL, FLOOR))
    slabs: int = FULL
    decisions: list[Decision] = field(default_factory=list)

    @property
    def free(self) -> int:
        """What is free now."""
        return SIZE - self.others - self.slabs

    def run(self, seconds: float) -> list[Decision]:
        """Let time pass, four readings a second; returns the decisions."""
        made = []
        for _ in range(round(seconds * 4)):
            self.now_s += 0.25
            room = Room("the system", SIZE, max(0, self.free), self.stalled_us)
            decision = self.governor.observe(Reading(self.now_s, [room], self.slabs, self.unspent + FULL - self.slabs))
            if decision is not None:
                made.append(decision)
                if self.obeys:
                    self.slabs = min(self.slabs, decision.slab_bytes)
        self.decisions += made
        return made


def test_nothing_happens_while_there_is_memory() -> None:
    """No decision above the low mark, not even near it."""
    machine = Machine()
    assert machine.run(60) == []
    machine.others = SIZE - FULL - LOW - 1_000_000
    assert machine.run(60) == []


def test_shortage_shrinks_to_the_high_mark_at_once() -> None:
    """The first reading below the low mark gives back what is missing to the high mark, and closes admission."""
    machine = Machine(others=SIZE - FULL - LOW + 1_000_000)
    (decision,) = machine.run(0.25)
    assert machine.free == HIGH
    assert decision.slab_bytes == FULL - (HIGH - LOW) - 1_000_000
    assert not decision.admits
    assert "511 MB free in the system, the low-water mark is 512 MB" in decision.reason


def test_decision_is_made_once_while_workers_are_slow() -> None:
    """As long as nothing changes the same reading leads to the same limit: no second message."""
    machine = Machine(others=SIZE - FULL - LOW // 2, obeys=False)
    assert len(machine.run(10)) == 1


def test_pools_never_shrink_below_the_floor() -> None:
    """When everything else is gone the floor stays, and the limit does not creep."""
    machine = Machine(others=SIZE)
    machine.run(10)
    assert machine.governor.limit_bytes == machine.slabs == FLOOR
    assert len(machine.decisions) <= -(-FULL // HIGH)


def test_pools_that_are_not_full_give_up_what_they_hold() -> None:
    """The limit follows from what the slabs take, not from what they might."""
    machine = Machine(slabs=GB, others=SIZE - GB - LOW // 2)
    (decision,) = machine.run(0.25)
    assert decision.slab_bytes == GB - (HIGH - LOW // 2) or decision.slab_bytes == FLOOR
    assert decision.slab_bytes < GB


def test_growth_waits_for_calm_and_leaves_the_high_mark() -> None:
    """After the shortage: requests are admitted and the pools grow once it has been calm, by what is above the mark."""
    machine = Machine(others=SIZE - FULL - LOW // 2)
    machine.run(0.25)
    limit = machine.governor.limit_bytes
    machine.others -= GB // 2
    assert machine.run(CALM_S - 0.25) == []
    (decision,) = machine.run(0.5)
    assert decision.admits
    assert decision.slab_bytes == machine.slabs + machine.free - HIGH > limit
    machine.slabs = decision.slab_bytes
    assert machine.run(20) == []
    machine.others -= 4 * GB
    assert machine.run(CALM_S + 1)[-1].slab_bytes == FULL


def test_unfilled_growth_is_not_granted_twice() -> None:
    """Pools that have not used what they were given get no more: what they have yet to fill is not free."""
    machine = Machine(others=SIZE - FULL - LOW // 2)
    machine.run(1)
    machine.others -= GB
    machine.run(60)
    assert machine.governor.limit_bytes <= machine.slabs + machine.free - HIGH


def test_calm_is_interrupted() -> None:
    """A moment near the low mark begins the calm time anew."""
    machine = Machine(others=SIZE - FULL - LOW // 2)
    machine.run(0.25)
    machine.others -= GB
    machine.run(CALM_S - 0.25)
    machine.others += GB + (HIGH - LOW) * 3 // 4
    assert machine.run(0.25) == []
    machine.others -= GB + (HIGH - LOW) * 3 // 4
    assert machine.run(CALM_S - 0.25) == []
    assert machine.run(0.5)[0].admits


def test_admission_opens_between_the_marks() -> None:
    """Shrunk pools leave the room at its high mark or a little below: requests are admitted, though nothing grows."""
    machine = Machine(others=SIZE - FULL - LOW // 2)
    machine.run(1)
    machine.others += (HIGH - LOW) // 4
    (decision,) = machine.run(CALM_S + 1)
    assert decision.admits
    assert decision.slab_bytes == machine.slabs


def test_standing_still_shrinks_step_by_step_to_half() -> None:
    """Stalls for more than a quarter of the time, where memory is rather short, cost a tenth a second, down to half."""
    machine = Machine(others=SIZE - FULL - HIGH - 1_000_000)
    for _ in range(12):
        machine.stalled_us += 500_000
        machine.run(1)
        machine.others = SIZE - machine.slabs - HIGH - 1_000_000  # somebody else takes what was given up
    assert machine.slabs == FULL * STALL_FLOOR
    assert "tasks stand still for memory 50% of the time" in machine.decisions[0].reason
    assert 4 <= len(machine.decisions) <= 6


@pytest.mark.parametrize(("stall_us", "free"), [(200_000, HIGH + 1), (900_000, 3 * HIGH)])
def test_standing_still_with_another_reason(stall_us: int, free: int) -> None:
    """Few stalls, or stalls with plenty of memory free, change nothing."""
    machine = Machine(others=SIZE - FULL - free)
    for _ in range(10):
        machine.stalled_us += stall_us
        machine.run(1)
    assert machine.decisions == []


def test_budget_shrinks_the_pools_and_closes_nothing() -> None:
    """What the other processes take beyond the plan comes out of the pools; requests go on; no growth until it is back."""
    machine = Machine(unspent=-100_000_000)
    (decision,) = machine.run(1)
    assert decision == Decision(FULL - 100_000_000, True, "the cluster takes 100 MB more than its budget")
    machine.unspent = 0
    assert machine.run(20) == []
    machine.unspent = FULL // 20
    assert machine.run(CALM_S + 1)[-1].slab_bytes == FULL


def test_requests_are_admitted_again_although_the_budget_is_passed() -> None:
    """At the floor nothing can be given up for the budget: that must not keep requests waiting."""
    machine = Machine(others=SIZE)
    machine.run(1)
    assert not machine.governor.admits
    machine.others, machine.unspent = 6 * GB, -FULL
    machine.run(CALM_S + 1)
    assert machine.governor.admits
    assert machine.governor.limit_bytes == FLOOR


def test_worst_room_decides() -> None:
    """Of several rooms the one that lacks most is the reason."""
    governor = Governor(FULL, FLOOR)
    group = Room("control group x", 2 * GB, 10_000_000)
    system = Room("the system", SIZE, 400_000_000)
    decision = governor.observe(Reading(0.0, [group, system], FULL, GB))
    assert decision is not None
    assert decision.slab_bytes == FULL - (HIGH - 400_000_000)
    assert "the system" in decision.reason


@given(st.lists(st.tuples(st.integers(0, SIZE), st.integers(-GB, GB), st.integers(1, 12)), max_size=30))
def test_limits_stay_within_bounds_and_a_quiet_machine_gets_all_back(story: list[tuple[int, int, int]]) -> None:
    """Whatever others do, the limit is between floor and full; when they have gone the pools are full and open again."""
    machine = Machine()
    for others, unspent, quarters in story:
        machine.others, machine.unspent = others, unspent
        machine.run(quarters / 4)
        assert FLOOR <= machine.governor.limit_bytes <= FULL
        machine.slabs = min(machine.governor.limit_bytes, machine.slabs + GB // 4)
    machine.others, machine.unspent = 0, FULL
    machine.run(3 * CALM_S)
    assert (machine.governor.limit_bytes, machine.governor.admits) == (FULL, True)
