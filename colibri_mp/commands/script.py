"""`colibri-cluster script`: many sessions from a file, played at once; see docs/scripts.md."""

import argparse
import dataclasses
import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colibri_mp.commands.arguments import Verbs, add_verb, launch_settings
from colibri_mp.commands.connecting import connect
from colibri_mp.commands.terminal import raise_interrupt, say
from colibri_mp.errors import ColibriError, ConfigError

if TYPE_CHECKING:
    from colibri_mp.interruption import Interruption
    from colibri_mp.script.definition import Script
    from colibri_mp.script.output import Output


def script(args: argparse.Namespace) -> int:
    """Play the sessions of a file at once, and write transcripts and a report."""
    from colibri_mp.interruption import Interruption
    from colibri_mp.script.checking import read_script
    from colibri_mp.script.output import Output, default_folder
    from colibri_mp.script.report import report

    path = Path(args.script_file)
    what = _overridden(read_script(path), args)
    if args.check:
        say(f"{path}: well-formed: {_size(what)}")
        return 0
    output = Output(Path(args.output) if args.output else default_folder(path))
    interruption = Interruption()
    signal.signal(signal.SIGTERM, raise_interrupt)
    launches: list[dict[str, Any]] = []
    error: ColibriError | None = None
    try:
        _play(what, output, interruption, launches)
    except KeyboardInterrupt:
        interruption.signal = interruption.signal or signal.SIGINT
    except ColibriError as failure:
        error = failure
    if error is not None and not launches:
        output.remove_if_empty()
        raise error
    made = report(what, launches, interrupted=interruption.signal is not None)
    return _end(made, output, interruption, error, args.json)


def register(verbs: Verbs) -> None:
    """Add `script`."""
    parser = add_verb(verbs, "script", script, cluster=True, as_json=True)
    parser.add_argument("script_file", metavar="FILE", help="a .toml or .jsonl file, as docs/scripts.md describes it")
    parser.add_argument("--check", action="store_true", help="only say whether the file is well-formed")
    parser.add_argument("--output", metavar="FOLDER", help="where to write (default: a new one in script-runs/)")
    for flag, what in (
        ("--concurrency", "most sessions at once"),
        ("--launches", "launches in a row"),
        ("--seed", "seed from which those of the turns are derived"),
    ):
        parser.add_argument(flag, type=int, metavar="N", help=f"{what} (default: the file's)")


def _overridden(what: "Script", args: argparse.Namespace) -> "Script":
    """The script with what the flags say instead."""
    given = {name: getattr(args, name) for name in ("concurrency", "launches", "seed")}
    for name, value in given.items():
        least = 0 if name == "seed" else 1
        if value is not None and value < least:
            raise ConfigError(f"--{name} must be at least {least}, not {value}")
    changes = {name: value for name, value in given.items() if value is not None}
    flags = launch_settings(args)
    if what.fresh and "usage" in flags:
        raise ConfigError("--usage: this script is fresh, it keeps what is learned in a file of its own")
    return dataclasses.replace(what, launch={**what.launch, **flags}, **changes)


def _size(what: "Script") -> str:
    num_plays = sum(session.repeat for session in what.sessions)
    num_turns = sum(session.repeat * len(session.turns) for session in what.sessions)
    return f"{num_plays} sessions with {num_turns} turns, {what.launches} launches"


def _play(what: "Script", output: "Output", interruption: "Interruption", launches: list[dict[str, Any]]) -> None:
    """Run all launches, each on a cluster of its own if there are several; adds their reports to `launches`."""
    from rich.console import Console

    from colibri_mp.script.launches import run_launches
    from colibri_mp.script.progress import make_progress
    from colibri_mp.script.report import launch_report
    from colibri_mp.script.transcript import transcript

    is_own = what.launches > 1 or what.fresh
    console = Console(stderr=True, highlight=False)
    num_plays = sum(session.repeat for session in what.sessions)
    for launch in run_launches(
        what, lambda settings: connect(settings, is_own), lambda: make_progress(console, num_plays), interruption
    ):
        path, is_same = output.write_transcript(launch.number, transcript(launch.plays))
        launches.append(launch_report(launch, path, is_same))


def _end(
    made: dict[str, Any], output: "Output", interruption: "Interruption", error: ColibriError | None, as_json: bool
) -> int:
    """Write and show the report; returns the exit code."""
    from rich.console import Console

    from colibri_mp.script.tables import print_report

    path = output.write_report(made)
    if as_json:
        print(json.dumps(made))
    else:
        print_report(made, Console(highlight=False))
    if error is not None:
        say(f"colibri-cluster: launch {len(made['launches']) + 1}: {error}")
    if interruption.signal is not None:
        say(f"colibri-cluster: interrupted; what there is has been written to {path.parent}")
        return 128 + interruption.signal
    say(f"transcripts and report: {path.parent}")
    if made["failed"]:
        say(f"colibri-cluster: {made['failed']} sessions failed")
    return 1 if made["failed"] or error is not None else 0
