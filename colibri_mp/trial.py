"""Whether something that changes no result pays here: measured, since what the machine has, and how much of it others leave, is nothing
to be guessed. A read that the page cache serves, for example, takes less time than a hint for it; one from a disk many times more.
"""

_CHANGE = 2.0  # times as many reads a step, or as few, are another situation than that of the last trial
_FEW_READS = 0.5  # a step: differences below are chance


class Trial:
    """Some decode steps with it and without in turn, then the quicker way for a long while. `is_on`: how the next step is to be.

    The blocks of a trial are off, on, on, off, off,
    on, on, off: a pool that gets warmer speaks for neither. A new trial begins early where steps read twice as much as in the last
    one, or half.
    """

    def __init__(self, block: int = 16, rounds: int = 4, keep: int = 2048) -> None:
        """Steps of a block, blocks of each kind in a trial, steps until the next trial."""
        self._block, self._rounds, self._keep = block, rounds, keep
        self.is_on = False
        self.gain: float | None = None  # of the last trial: time without it over time with it
        self._reads = 0.0  # of a step, in the last trial
        self._begin()

    def note(self, seconds: float, num_rows: int, num_reads: int) -> None:
        """A decode step took so long, for which so many experts had to be read, ahead of it or in it.

        Steps of different numbers of rows cannot be compared: then a trial under way begins anew.
        """
        self._num_reads += num_reads
        self._num_steps += 1
        if self._kept:
            self._look_for_change()
            return
        if num_rows != self._num_rows:
            self._begin(num_rows)
            return
        self._seconds[self.is_on].append(seconds)
        if self._num_steps % self._block == 0:
            self.is_on = self._num_steps // self._block % 4 in (1, 2)
            if self._num_steps == 2 * self._block * self._rounds:
                self._decide()

    def _begin(self, num_rows: int = 1) -> None:
        self._kept, self._num_rows = 0, num_rows
        self._num_reads = self._num_steps = 0
        self._seconds: dict[bool, list[float]] = {False: [], True: []}
        self.is_on = False

    def _decide(self) -> None:
        """Means, not medians: rare long waits count as much as they take."""
        self.gain = sum(self._seconds[False]) / sum(self._seconds[True])
        self.is_on, self._kept = self.gain > 1.0, self._keep
        self._reads = self._num_reads / self._num_steps
        self._num_reads = self._num_steps = 0

    def _look_for_change(self) -> None:
        """In the steps after a trial: whether it is time for another one."""
        self._kept -= 1
        if self._num_steps == 2 * self._block:
            reads, self._num_reads, self._num_steps = self._num_reads / self._num_steps, 0, 0
            if max(reads, self._reads) > _CHANGE * min(reads, self._reads) + _FEW_READS:
                self._kept = 0
        if not self._kept:
            self._begin()
