"""Plan, status and conversions as tables and bars for people."""

import time
from typing import TYPE_CHECKING, Any

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
from rich.table import Table

from colibri_mp.config import format_size
from colibri_mp.planner import Plan

if TYPE_CHECKING:
    from colibri_mp.checkpoint.convert import Report
    from colibri_mp.checkpoint.convert.conversion import ProjectionReport

_NUM_SLOWEST = 3
_LINE_S = 10.0  # between lines of progress where there is no terminal


def print_plan(plan: Plan) -> None:
    """The terms of a plan, and what they buy."""
    table = Table(title=f"memory plan for {format_size(plan.budget_bytes)}", title_justify="left")
    table.add_column("process")
    table.add_column("for")
    table.add_column("bytes", justify="right")
    for term in sorted(plan.terms, key=lambda term: term.process):
        table.add_row(term.process, term.name, format_size(term.nbytes))
    table.add_section()
    table.add_row("sum", "", format_size(plan.planned_bytes))
    console = Console()
    console.print(table)
    console.print(
        f"experts in memory: {plan.resident_share:.1%}, slabs of {format_size(plan.expert_bytes)}", highlight=False
    )
    for note in plan.notes:
        console.print(note, highlight=False)


def _digest(phases: dict[str, Any]) -> str:
    """Where the time of the steps went, in which layers, and how many experts were needed for it."""
    if not phases["steps"]:
        return "time     no step yet"
    total_s = phases["total_s"]
    shares = sorted(phases["seconds"].items(), key=lambda phase: -phase[1])
    slowest = sorted(phases["layers"], key=lambda layer: -layer["total_s"])[:_NUM_SLOWEST]
    unions = ", ".join(f"{_rows(entry)}: {entry['mean']:.1f}" for entry in phases["unions"])
    return (
        f"time     {total_s:.1f} s in {phases['steps']} steps: "
        + ", ".join(f"{name.replace('_', ' ')} {seconds / total_s:.0%}" for name, seconds in shares)
        + "\n         slowest layers: "
        + ", ".join(f"{layer['layer']} ({layer['total_s'] / total_s:.1%})" for layer in slowest)
        + f"\nexperts  {phases['experts_per_token']:.2f} a token; distinct ones of a layer, by rows of a step: {unions}"
    )


def _rows(entry: dict[str, Any]) -> str:
    least, most = entry["least_rows"], entry["most_rows"]
    return str(least) if least == most else f"{least}-{most}"


def print_status(stats: dict[str, Any]) -> None:
    """What `status` shows without `--json`."""
    model, cache, memory, requests = stats["model"], stats["cache"], stats["memory"], stats["requests"]
    console = Console(highlight=False)
    console.print(
        f"cluster {stats['name']!r} (pid {stats['pid']}) is {stats['state']}, up {stats['uptime_s']:.0f} s\n"
        f"model    {model['path']} ({model['model_type']}, {model['num_layers']} layers)\n"
        f"requests {requests['active']} active, {requests['waiting_sequences']} waiting; "
        f"{requests['kv_blocks_free']} of {requests['kv_blocks']} KV blocks free\n"
        f"cache    {cache['hit_rate']:.1%} of {cache['hits'] + cache['misses'] + cache['promoted']:.0f} experts from memory, "
        f"{format_size(cache['bytes_read'])} read\n"
        f"memory   {format_size(memory['used_bytes'])} used, {format_size(memory['peak_bytes'])} at most, "
        f"of {format_size(memory['budget_bytes'])}\n"
        f"{_digest(stats['phases'])}"
    )
    if stats["lossy"]:
        console.print(f"lossy    {', '.join(stats['lossy'])}")
    table = Table("worker", "pid", "layers", "slots", "hits", "misses", "read")
    for worker in stats["workers"]:
        table.add_row(
            str(worker["worker_id"]), str(worker["pid"]), worker["layers"], str(worker["num_slots"]),
            str(worker["hits"]), str(worker["misses"]), format_size(worker["bytes_read"]),
        )  # fmt: skip
    console.print(table)


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

    def __enter__(self) -> "ConversionProgress":
        if self._lines is None:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()


class _ProgressLines:
    """The same as whole lines: the first and the last of a phase, and one in ten seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._phase = ""
        self._began = self._shown = 0.0

    def show(self, doing: str, done_bytes: int, total_bytes: int) -> None:
        now = time.monotonic()
        if doing != self._phase:
            self._phase, self._began, self._shown = doing, now, 0.0
        if done_bytes < total_bytes and now - self._shown < _LINE_S:
            return
        self._shown = now
        rate = done_bytes / max(now - self._began, 1e-3)
        self._console.print(
            f"{doing}: {format_size(done_bytes)} of {format_size(total_bytes)}, {format_size(rate)}/s, "
            f"{(total_bytes - done_bytes) / rate:.0f} s left",
            soft_wrap=True,
        )


def print_conversion(report: "Report") -> None:
    """What became of the experts, and what quantising them cost."""
    kept = f"; {report.kept_files} files were there already" if report.kept_files else ""
    lines = [
        f"{report.path}: {report.num_layers} layers, {report.num_experts} experts of {format_size(report.expert_bytes)} "
        f"({format_size(report.stored_expert_bytes)} as stored), {format_size(report.resident_bytes)} resident",
        *(_describe_projection(found, report.num_layers) for found in report.projections),
        f"{format_size(report.written_bytes)} written and read back in {report.seconds:.1f} s{kept}",
    ]
    Console(highlight=False).print("\n".join(lines), soft_wrap=True, markup=False)


def _describe_projection(found: "ProjectionReport", num_layers: int) -> str:
    where = "" if found.num_layers == num_layers else f" in {found.num_layers} layers"
    change = found.stored if found.packed == found.stored else f"{found.stored} -> {found.packed}"
    cost = "" if found.error is None else f": error {found.error:.2%} (plain rounding {found.plain_error:.2%})"
    return f"  {found.projection:<5}{where} {change}, {found.reason}{cost}"
