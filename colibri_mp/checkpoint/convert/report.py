"""What a user sees of a conversion: bars while it runs, then what became of the experts. The only part that needs rich."""

import time
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from colibri_mp.checkpoint.convert.conversion import ProjectionReport, Report
from colibri_mp.config import format_size

_LINE_S = 10.0  # between lines of progress where there is no terminal


class ConversionProgress:
    """How far a conversion is, on stderr: a bar a phase with rate and time left; lines now and then if not a terminal."""

    def __init__(self) -> None:
        console = Console(stderr=True, highlight=False)
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self._bars = Progress(TextColumn("{task.description}"), *columns, console=console)
        self._lines = None if console.is_terminal else _ProgressLines(console)
        self._phase = ""
        self._task = TaskID(0)

    def show(self, doing: str, done_bytes: int, total_bytes: int) -> None:
        """Progress of one phase."""
        if self._lines is not None:
            self._lines.show(doing, done_bytes, total_bytes)
            return
        if doing != self._phase:
            self._phase, self._task = doing, self._bars.add_task(doing, total=total_bytes)
        self._bars.update(self._task, completed=done_bytes)

    def note(self, text: str) -> None:
        """A line of its own."""
        self._bars.console.print(text, soft_wrap=True)

    def __enter__(self) -> Self:
        if self._lines is None:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()


class _ProgressLines:
    """The same as whole lines: one in ten seconds, and one at the end of a phase."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._phase = ""
        self._began = self._shown = 0.0

    def show(self, doing: str, done_bytes: int, total_bytes: int) -> None:
        now = time.monotonic()
        if doing != self._phase:
            self._phase, self._began, self._shown = doing, now, now
        if done_bytes < total_bytes and now - self._shown < _LINE_S:
            return
        self._shown = now
        rate = done_bytes / max(now - self._began, 1e-3)
        self._console.print(
            f"{doing}: {format_size(done_bytes)} of {format_size(total_bytes)}, {format_size(rate)}/s, "
            f"{(total_bytes - done_bytes) / rate:.0f} s left",
            soft_wrap=True,
        )


def print_conversion(report: Report) -> None:
    """What became of the experts, and what quantising them cost."""
    kept = f"; {report.kept_files} files were there already" if report.kept_files else ""
    lines = [
        f"{report.path}: {report.num_layers} layers, {report.num_experts} experts of {format_size(report.expert_bytes)} "
        f"({format_size(report.stored_expert_bytes)} as stored), {format_size(report.resident_bytes)} resident",
        *(_describe_projection(found, report.num_layers) for found in report.projections),
        f"{format_size(report.written_bytes)} written and read back in {report.seconds:.1f} s{kept}",
    ]
    Console(highlight=False).print("\n".join(lines), soft_wrap=True, markup=False)


def _describe_projection(found: ProjectionReport, num_layers: int) -> str:
    where = "" if found.num_layers == num_layers else f" in {found.num_layers} layers"
    change = found.stored if found.packed == found.stored else f"{found.stored} -> {found.packed}"
    cost = "" if found.error is None else f": error {found.error:.2%} (plain rounding {found.plain_error:.2%})"
    return f"  {found.projection:<5}{where} {change}, {found.reason}{cost}"
