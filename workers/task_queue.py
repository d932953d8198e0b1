"""The order in which reads are done: demand first, background only while the disk is idle. No I/O and no thread in here.

    put ─▶ demand      ═══════▶ take ─▶ (an I/O thread works) ─▶ done
    put ─▶ background  ───────▶   "  only while no demand task waits or is under way, and so many at a time at most
              │  promote: to the end of demand        cancel: gone, if nothing of it has begun

A read is cut into tasks 0, 1, 2 ..., which are taken in this order, by several threads. A thread that finds nothing to do
sleeps until there is a ticket. There are never fewer tickets than tasks that may begin; one too many only makes a thread
look in vain.
"""

import queue
import threading
from collections import OrderedDict, deque
from typing import Generic, TypeVar


class QueuedRead:
    """A read as the queue sees it: `num_tasks` in all, how many have been taken, how many of those are under way."""

    __slots__ = ("background", "num_active", "num_taken", "num_tasks")

    def __init__(self, num_tasks: int, background: bool) -> None:
        self.num_tasks = num_tasks
        self.background = background
        self.num_taken = self.num_active = 0


Read = TypeVar("Read", bound=QueuedRead)


class TaskQueue(Generic[Read]):
    """Thread-safe. `take` waits, everything else returns at once."""

    def __init__(self, max_background: int) -> None:
        """At most `max_background` tasks of background reads are under way at a time."""
        self._max_background = max_background
        self._lock = threading.Lock()
        self._tickets: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._demand: deque[Read] = deque()
        self._background: OrderedDict[Read, None] = OrderedDict()
        self._num_active = {False: 0, True: 0}  # tasks under way: demand, background
        self._is_closed = False

    def put(self, read: Read) -> None:
        """Queue all tasks of a read behind those of its kind."""
        with self._lock:
            if read.background:
                self._background[read] = None
                self._offer_background()
            else:
                self._demand.append(read)
                self._issue(read.num_tasks)

    def take(self) -> tuple[Read, int] | None:
        """The next task: its read and its number. Waits for one; None once the queue is closed and empty."""
        while True:
            self._tickets.get()
            with self._lock:
                read = self._next()
                if read is not None:
                    return read, self._begin(read)
                if self._is_closed:
                    return None

    def done(self, read: Read) -> None:
        """A task that was taken has ended."""
        with self._lock:
            read.num_active -= 1
            self._num_active[read.background] -= 1
            self._offer_background()

    def promote(self, read: Read) -> None:
        """Make a background read, begun or not, a demand read."""
        with self._lock:
            if not read.background:
                return
            read.background = False
            self._num_active[True] -= read.num_active
            self._num_active[False] += read.num_active
            if read in self._background:
                del self._background[read]
                self._demand.append(read)
                self._issue(read.num_tasks - read.num_taken)

    def cancel(self, read: Read) -> bool:
        """Take a background read out again; False if a part of it has begun, or it is none."""
        with self._lock:
            if read.num_taken or read not in self._background:
                return False
            del self._background[read]
            return True

    def close(self, num_threads: int) -> None:
        """Hand out what is left, background reads too, then None to each of `num_threads` threads."""
        with self._lock:
            self._is_closed = True
            for read in self._background:
                read.background = False
                self._num_active[True] -= read.num_active
                self._num_active[False] += read.num_active
                self._demand.append(read)
            self._background.clear()
            self._issue(sum(read.num_tasks - read.num_taken for read in self._demand) + num_threads)

    def _next(self) -> Read | None:
        """The read whose next task may begin now."""
        if self._demand:
            return self._demand[0]
        return next(iter(self._background)) if self._num_startable() > 0 else None

    def _begin(self, read: Read) -> int:
        task_idx = read.num_taken
        read.num_taken += 1
        read.num_active += 1
        self._num_active[read.background] += 1
        if read.num_taken == read.num_tasks:
            if read.background:
                del self._background[read]
            else:
                self._demand.popleft()
        return task_idx

    def _num_startable(self) -> int:
        """Background tasks that may begin now."""
        if not self._background or self._demand or self._num_active[False]:
            return 0
        return self._max_background - self._num_active[True]

    def _offer_background(self) -> None:
        self._issue(self._num_startable())

    def _issue(self, num_tickets: int) -> None:
        for _ in range(num_tickets):
            self._tickets.put(None)
