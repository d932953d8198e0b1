"""The report of a script as tables: the sessions of the last launch, and all launches side by side. They fit 80 columns."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from colibri_mp.config import format_size

_MOST_ROWS = 40
_FIGURES = ("prompt", "cached", "answer", "ttft s", "tok/s", "p50 ms", "p99 ms", "hits")


def print_report(report: dict[str, Any], console: Console) -> None:
    """Both tables, and what went wrong."""
    for launch in report["launches"]:
        for session in launch["sessions"]:
            if session["error"]:
                line = f"launch {launch['launch']}: {_label(session)} {session['state']}: {session['error']}"
                console.print(Text(line), soft_wrap=True)
    if not report["launches"]:
        return
    last = report["launches"][-1]
    console.print(_sessions(last))
    console.print(_launches(report["launches"]))
    memory = last["memory"]
    console.print(f"memory {_size(memory['peak_bytes'])} at most, of {_size(memory['budget_bytes'])}")
    if changed := [str(launch["launch"]) for launch in report["launches"] if launch["same_as_first"] is False]:
        console.print(f"transcripts that differ from the first launch's: {', '.join(changed)}")


def _sessions(launch: dict[str, Any]) -> Table:
    table = _table(f"sessions of launch {launch['launch']}", ("session",), ("turns", *_FIGURES))
    sessions = launch["sessions"]
    for session in sessions[:_MOST_ROWS]:
        state = "" if session["state"] == "done" else f" ({session['state']})"
        turns = str(len(session["turns"]))
        table.add_row(_label(session) + state, turns, *_figures(session, session["decode_tok_s"]))
    if len(sessions) > _MOST_ROWS:
        table.add_row(f"... {len(sessions) - _MOST_ROWS} more")
    return table


def _launches(launches: list[dict[str, Any]]) -> Table:
    table = _table("launches, all sessions together", (), ("launch", "s", *_FIGURES, "read"))
    for launch in launches:
        total = launch["total"]
        done = "" if total["done"] == total["sessions"] else f" ({total['done']}/{total['sessions']} done)"
        read = _size(total["cache"]["bytes_read"])
        wall = f"{launch['wall_s']:.1f}"
        table.add_row(f"{launch['launch']}{done}", wall, *_figures(total, total["tok_s"]), read)
    return table


def _table(title: str, words: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name in words:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _figures(figures: dict[str, Any], speed: float | None) -> list[str]:
    """The columns of `_FIGURES`."""
    between = figures["inter_token_s"]
    return [
        str(figures["prompt_tokens"]),
        str(figures["cached_tokens"]),
        str(figures["completion_tokens"]),
        _number(figures["ttft_s"]["p50"], 3),
        _number(speed, 1),
        _number(between["p50"], 1, 1000),
        _number(between["p99"], 1, 1000),
        "-" if figures["cache"]["hit_rate"] is None else f"{figures['cache']['hit_rate']:.1%}",
    ]


def _label(session: dict[str, Any]) -> str:
    return f"{session['session']} #{session['repeat']}" if session["repeat"] > 1 else str(session["session"])


def _number(value: float | None, digits: int, factor: int = 1) -> str:
    return "-" if value is None else f"{factor * value:.{digits}f}"


def _size(value: float | None) -> str:
    return "-" if value is None else format_size(value)
