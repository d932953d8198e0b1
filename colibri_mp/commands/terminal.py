"""What the verbs say to people, on stderr: progress of a start, remarks, and the way an interruption takes."""

import sys
from typing import NoReturn


class ProgressLine:
    """One line on stderr that says what the start is busy with; gone when it is done. Whole lines if not a terminal."""

    def __init__(self) -> None:
        self._shown = 0

    def show(self, text: str) -> None:
        """Replace the line."""
        if sys.stderr.isatty():
            sys.stderr.write("\r" + text.ljust(self._shown))
            self._shown = len(text)
        else:
            sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            sys.stderr.write("\r" + " " * self._shown + "\r")
            sys.stderr.flush()


def say(text: str) -> None:
    """A line for the user."""
    print(text, file=sys.stderr, flush=True)


def raise_interrupt(_signal: int, _frame: object) -> NoReturn:
    """A signal handler: end as by Ctrl-C."""
    raise KeyboardInterrupt
