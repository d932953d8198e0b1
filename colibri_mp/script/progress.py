"""What a script's user sees meanwhile, on stderr: a table that lives while sessions are played, or a line for each turn."""

import time
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from colibri_mp.script.play import Play, TurnResult
from colibri_mp.script.runner import Listener

_REFRESH_S = 0.125
_MOST_ROWS = 12
_MOST_CHARACTERS = 60


class Progress(Listener, Protocol):
    """A listener that is shown within `with`."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None: ...


def make_progress(console: Console, num_plays: int) -> Progress:
    """A table where there is a terminal, else lines."""
    return _LiveProgress(console, num_plays) if console.is_terminal else _LineProgress(console)


class _LineProgress:
    """A line for each turn that ends and for each session that fails."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to put away."""

    def asked(self, play: Play) -> None:
        """Not shown."""

    def heard(self, play: Play, result: TurnResult) -> None:
        """Not shown."""

    def turn_ended(self, play: Play, result: TurnResult) -> None:
        """One line."""
        self._console.print(Text(_turn_line(play, result)), soft_wrap=True)

    def ended(self, play: Play) -> None:
        """One line if it was not well."""
        if play.state != "done":
            self._console.print(Text(f"{play.label} {play.state}: {play.error}"), soft_wrap=True)

    def tick(self) -> None:
        """Not shown."""


def _turn_line(play: Play, result: TurnResult) -> str:
    times = result.times
    first = f", first after {times.first_s:.2f} s" if times is not None and times.first_s is not None else ""
    end = result.error or result.finish_reason
    return (
        f"{play.label}, turn {result.turn} of {len(play.session.turns)}: {len(result.token_ids)} tokens{first}; {end}"
    )


class _LiveProgress:
    """A table of the sessions under way, refreshed a few times a second, and gone at the end."""

    def __init__(self, console: Console, num_plays: int) -> None:
        self._num_plays = num_plays
        self._active: dict[Play, TurnResult | None] = {}
        self._num_ended = self._num_failed = self._num_tokens = 0
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._started_s = self._shown_s = time.monotonic()

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def asked(self, play: Play) -> None:
        """A row appears."""
        self._active[play] = None
        self.tick()

    def heard(self, play: Play, result: TurnResult) -> None:
        """A row changes."""
        self._active[play] = result
        self._num_tokens += 1

    def turn_ended(self, play: Play, result: TurnResult) -> None:
        """The row stays until the next turn, or the end."""

    def ended(self, play: Play) -> None:
        """A row goes; failures stay to be read."""
        self._active.pop(play, None)
        self._num_ended += 1
        if play.state == "failed":
            self._num_failed += 1
            self._live.console.print(Text(f"{play.label} failed: {play.error}"), soft_wrap=True)
        self.tick()

    def tick(self) -> None:
        """Show it again, if that was some time ago."""
        now = time.monotonic()
        if now - self._shown_s >= _REFRESH_S:
            self._shown_s = now
            self._live.update(self._table(now), refresh=True)

    def _table(self, now: float) -> Table:
        failed = f", {self._num_failed} failed" if self._num_failed else ""
        caption = (
            f"{self._num_ended} of {self._num_plays} sessions ended{failed}; {self._num_tokens} tokens in "
            f"{now - self._started_s:.0f} s; Ctrl-C stops and writes what there is"
        )
        table = Table("session", "turn", "tokens", "says", caption=caption, caption_justify="left", expand=True)
        table.columns[3].ratio = 1
        for play, result in list(self._active.items())[:_MOST_ROWS]:
            count = f"{len(play.results) + 1}/{len(play.session.turns)}"
            says = Text(_tail(result), no_wrap=True)
            table.add_row(play.label, count, str(len(result.token_ids) if result else 0), says)
        return table


def _tail(result: TurnResult | None) -> str:
    """The end of an answer, in a line, without what a terminal would obey."""
    said = result.text[-_MOST_CHARACTERS:] if result else ""
    return "".join(char if char.isprintable() else " " for char in said)
