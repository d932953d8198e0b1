"""Ctrl-C and SIGTERM while answers come: the first one asks for an orderly end, a second one ends at once.

A signal handler that raises would leave a message half read; this one only notes, and wakes who waits.
"""

import os
import signal
from types import FrameType
from typing import Self


class Interruption:
    """Within `with`, signals are noted and make `wake_fd` readable; afterwards they do again what they did before."""

    def __init__(self, *signals: signal.Signals) -> None:
        """`signals`: those to note (default: SIGINT and SIGTERM)."""
        self.signal: int | None = None
        self._signals = signals or (signal.SIGINT, signal.SIGTERM)

    def __enter__(self) -> Self:
        self.wake_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        self._old_wakeup = signal.set_wakeup_fd(self._write_fd)
        self._old = {number: signal.signal(number, self._note) for number in self._signals}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_wakeup)
        os.close(self.wake_fd)
        os.close(self._write_fd)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number
