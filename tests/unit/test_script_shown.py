"""What a script shows: the table of sessions under way, lines where there is no terminal, and the tables of the report."""

import io
from typing import Any

from rich.console import Console

from colibri_mp.script.definition import Session, Turn
from colibri_mp.script.figures import Times, cache_between, cache_counts, speed, spread
from colibri_mp.script.placeholders import parse
from colibri_mp.script.play import Play, TurnResult
from colibri_mp.script.progress import make_progress
from colibri_mp.script.tables import print_report


def a_play(name: str = "anna") -> tuple[Play, TurnResult]:
    """A session of one turn with a part of its answer."""
    play = Play(Session(name, "chat", (Turn(parse("Hi")),)), 1, 0)
    request = play.next_request(lambda answer: "")
    assert request is not None
    times = Times(1.0)
    times.heard(1.5, 1)
    times.heard(1.75, 1)
    return play, TurnResult(1, request, [3, 4], "Hello\n\x1b[2Jthere", times=times)


def console(is_terminal: bool, width: int = 80) -> tuple[Console, io.StringIO]:
    """A console and what it writes to."""
    out = io.StringIO()
    return Console(file=out, force_terminal=is_terminal, width=width, color_system=None, highlight=False), out


def test_a_table_on_a_terminal(monkeypatch: Any) -> None:
    """Sessions under way are shown with the end of what they say, without its control characters; failures stay."""
    monkeypatch.setattr("colibri_mp.script.progress._REFRESH_S", 0.0)
    shown, out = console(is_terminal=True)
    play, result = a_play()
    with make_progress(shown, 2) as progress:
        progress.asked(play)
        progress.heard(play, result)
        progress.tick()
        play.fail(result, "it broke")
        progress.turn_ended(play, result)
        progress.ended(play)
    text = out.getvalue()
    assert "Hello  [2Jthere" in text
    assert "1/1" in text
    assert "anna failed: turn 1: it broke" in text
    assert "1 of 2 sessions ended, 1 failed" in text


def test_lines_elsewhere() -> None:
    """A line for each turn, and one for a session that has not gone well; none is wrapped."""
    shown, out = console(is_terminal=False, width=30)
    play, result = a_play()
    with make_progress(shown, 1) as progress:
        progress.asked(play)
        progress.heard(play, result)
        progress.tick()
        progress.turn_ended(play, result)
        play.fail(result, "it broke")
        progress.ended(play)
    assert out.getvalue().splitlines() == [
        "anna, turn 1 of 1: 2 tokens, first after 0.50 s; ",
        "anna failed: turn 1: it broke",
    ]


def test_figures() -> None:
    """Times to first token, between tokens and tokens/s; nothing where nothing was measured."""
    _, result = a_play()
    times = result.times
    assert times is not None
    assert (times.first_s, times.gaps_s, speed([times])) == (0.5, [0.25], 4.0)
    assert (Times(1.0).first_s, speed([Times(1.0)])) == (None, None)
    assert spread([3.0, 1.0, 2.0], 50) == {"p50": 2.0, "max": 3.0}
    assert spread([], 50, 99) == {"p50": None, "p99": None, "max": None}
    before, after = {"hits": 1, "misses": 1, "promoted": 0}, {"hits": 4, "misses": 2, "promoted": 0, "bytes_read": 7}
    assert cache_between(before, after) == {
        "hits": 3, "misses": 1, "promoted": 0, "bytes_read": 7, "disk_s": 0, "hit_rate": 0.75,
    }  # fmt: skip
    assert cache_counts()["hit_rate"] is None


def test_report_fits_a_terminal() -> None:
    """Both tables fit 80 columns; a launch in which nothing could be measured is shown all the same."""
    none = {"p50": None, "p99": None, "max": None}
    figures = {
        "prompt_tokens": 123456, "cached_tokens": 100000, "completion_tokens": 12345, "decode_tok_s": 1234.5,
        "ttft_s": {"p50": 12.345}, "inter_token_s": {"p50": 0.1234, "p99": 1.2345}, "cache": {"hit_rate": 1.0},
    }  # fmt: skip
    empty = {**figures, "decode_tok_s": None, "ttft_s": none, "inter_token_s": none, "cache": {"hit_rate": None}}
    session = {"session": "anna", "repeat": 2, "state": "done", "error": None, "turns": [{}], **figures}
    total = {"done": 1, "sessions": 1, "tok_s": 100.0, **figures, "cache": {"hit_rate": 0.5, "bytes_read": 123456789}}
    bad = {"done": 0, "sessions": 1, "tok_s": None, **empty, "cache": {"hit_rate": None, "bytes_read": 0}}
    launch = {
        "launch": 1, "wall_s": 1234.5, "total": total, "sessions": [session] * 50, "same_as_first": None,
        "memory": {"peak_bytes": 10**9, "budget_bytes": 2 * 10**9},
    }  # fmt: skip
    failed = {**session, "state": "failed", "error": "turn 1: it broke", **empty}
    last = {
        **launch, "launch": 2, "total": bad, "sessions": [failed], "same_as_first": False,
        "memory": {"peak_bytes": None, "budget_bytes": None},
    }  # fmt: skip
    shown, out = console(is_terminal=False)
    print_report({"launches": [launch]}, shown)
    print_report({"launches": [launch, last]}, shown)
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    for wanted in (
        "anna #2", "... 10 more", "123456", "100.0%", "123 MB", "memory 1 GB at most, of 2 GB", "anna #2 (failed)",
        "launch 2: anna #2 failed: turn 1: it broke", "2 (0/1 done)", "differ from the first launch's: 2", "1234.5",
    ):  # fmt: skip
        assert wanted in text, wanted
    print_report({"launches": []}, shown)
