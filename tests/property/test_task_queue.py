"""The order of reads under random operations: demand first, background bounded and only while nothing else goes on."""

import queue
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from colibri_mp.workers.task_queue import QueuedRead, TaskQueue

MAX_BACKGROUND = 2


class PatientQueue(TaskQueue[QueuedRead]):
    """Returns "nothing" where the real one waits."""

    def try_take(self) -> tuple[QueuedRead, int] | None:
        """What a sleeping thread would do now: nothing if there is no ticket, or all tickets are in vain."""
        while not self._tickets.empty():
            self._tickets.get()
            with self._lock:
                read = self._next()
                if read is not None:
                    return read, self._begin(read)
        return None


class Reads(RuleBasedStateMachine):
    """Random submissions, takes and ends against a model that knows every task by name."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = PatientQueue(MAX_BACKGROUND)
        self.waiting: dict[bool, list[QueuedRead]] = {False: [], True: []}  # in the order in which they are to begin
        self.active: list[QueuedRead] = []
        self.taken: Counter[QueuedRead] = Counter()

    @rule(num_tasks=st.integers(1, 4), background=st.booleans())
    def put(self, num_tasks: int, background: bool) -> None:
        """A new read."""
        read = QueuedRead(num_tasks, background)
        self.queue.put(read)
        self.waiting[background].append(read)

    @rule()
    def take(self) -> None:
        """A thread looks for work: it finds exactly what the rules allow."""
        num_background = sum(read.background for read in self.active)
        expected = None
        if self.waiting[False]:
            expected = self.waiting[False][0]
        elif self.waiting[True] and num_background == len(self.active) < MAX_BACKGROUND:
            expected = self.waiting[True][0]
        found = self.queue.try_take()
        assert found == ((expected, self.taken[expected]) if expected else None)
        if expected:
            self.active.append(expected)
            self.taken[expected] += 1
            if self.taken[expected] == expected.num_tasks:
                self.waiting[expected.background].remove(expected)

    @precondition(lambda self: self.active)
    @rule(data=st.data())
    def done(self, data: st.DataObject) -> None:
        """Some task ends."""
        self.queue.done(self.active.pop(data.draw(st.integers(0, len(self.active) - 1))))

    @precondition(lambda self: self.waiting[True] or self.active)
    @rule(data=st.data())
    def promote(self, data: st.DataObject) -> None:
        """A read, begun or not, is wanted at once; for a demand read that changes nothing."""
        read = data.draw(st.sampled_from([*self.waiting[True], *self.active]))
        if read in self.waiting[True]:
            self.waiting[True].remove(read)
            self.waiting[False].append(read)
        self.queue.promote(read)
        assert not read.background

    @precondition(lambda self: self.waiting[True] or self.active)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """Only a background read of which nothing has begun can be taken back."""
        read = data.draw(st.sampled_from([*self.waiting[True], *self.active]))
        possible = read in self.waiting[True] and not self.taken[read]
        assert self.queue.cancel(read) == possible
        if possible:
            self.waiting[True].remove(read)

    @invariant()
    def never_too_many_in_the_background(self) -> None:
        """The bound holds whatever happens."""
        assert sum(read.background for read in self.active) <= MAX_BACKGROUND

    def teardown(self) -> None:
        """After close all that is left is handed out, then every thread is sent home."""
        self.queue.close(num_threads=3)
        left = sum(read.num_tasks - self.taken[read] for kind in self.waiting.values() for read in kind)
        for _ in range(left):
            assert self.queue.take() is not None
        assert [self.queue.take() for _ in range(3)] == [None] * 3


Reads.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestReads = Reads.TestCase


def test_waiting_thread_is_woken() -> None:
    """`take` has a ticket for each task that may begin, none for one that may not."""
    tasks = TaskQueue[QueuedRead](max_background=1)
    demand, background = QueuedRead(2, False), QueuedRead(1, True)
    tasks.put(demand)
    tasks.put(background)
    assert tasks.take() == (demand, 0)
    assert tasks.take() == (demand, 1)
    tasks.done(demand)
    tickets: queue.SimpleQueue[None] = tasks._tickets
    assert tickets.empty()  # one task of demand is still under way
    tasks.done(demand)
    assert tasks.take() == (background, 0)
