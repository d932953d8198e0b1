"""How a client starts a coordinator process and hears that it is ready: one JSON line in, JSON lines out.

    client ── stdin: StartRequest ──▶ coordinator        the pipe stays open; its end means "the client has gone"
           ◀── stdout: Progress* then Ready or StartFailed

The coordinator is `python -c` with a thin main module, so that the workers it spawns do not import the coordinator's code
again (multiprocessing's spawn re-imports a main module that has a name). `-P` keeps the current folder out of the search
path: in a clone of this project it would hide the installed package.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeAlias

import msgspec

from colibri_mp.config import LaunchConfig, from_keywords
from colibri_mp.errors import ColibriError, CoordinatorDied, from_wire

_MAIN = "from colibri_mp.service import main; main()"


class StartRequest(msgspec.Struct, frozen=True):
    """Settings of `LaunchConfig` and whether the cluster ends with the client that started it."""

    config: dict[str, Any]
    owned: bool


class Progress(msgspec.Struct, frozen=True, tag=True):
    """What the start is busy with."""

    text: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The cluster serves; `name` is its run directory's. `notes` are automatic choices with their reasons."""

    name: str
    notes: tuple[str, ...]


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """The cluster could not start; everything has been taken back."""

    kind: str
    message: str


Event: TypeAlias = Progress | Ready | StartFailed


class Reporter:
    """The coordinator's side. Takes stdout for itself: later prints of any library go to stderr."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)

    def send(self, event: Event) -> None:
        """Tell the client; a client that has gone is noticed on stdin."""
        try:
            self._out.write(msgspec.json.encode(event) + b"\n")
        except (BrokenPipeError, ValueError):
            return

    def progress(self, text: str) -> None:
        """Tell what is being done."""
        self.send(Progress(text))

    def close(self) -> None:
        """No more events. Idempotent."""
        self._out.close()


def read_request(line: bytes) -> tuple[LaunchConfig, bool]:
    """The configuration of a `StartRequest` line, and whether the cluster is owned.

    Raises:
        CoordinatorDied: the client went away before it asked.
    """
    if not line:
        raise CoordinatorDied("there is nobody to start for")
    request = msgspec.json.decode(line, type=StartRequest)
    return from_keywords(LaunchConfig, request.config), request.owned


def start_coordinator(
    config: LaunchConfig,
    owned: bool,
    progress: Callable[[str], None],
    started: Callable[[subprocess.Popen[bytes]], None] = lambda _process: None,
) -> tuple[subprocess.Popen[bytes], Ready]:
    """Start a coordinator process and wait until it serves; `started` gets the process before that.

    Raises:
        ColibriError: what kept it from starting.
        CoordinatorDied: it ended without a word.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _MAIN, "colibri-coordinator", config.name or config.model],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=not owned,
    )  # fmt: skip
    started(process)
    try:
        return process, _await_ready(process, StartRequest(asdict(config), owned), progress)
    except BaseException:  # Ctrl-C too: nothing may be left behind
        stop_process(process)
        raise


def _await_ready(process: subprocess.Popen[bytes], request: StartRequest, progress: Callable[[str], None]) -> Ready:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(msgspec.json.encode(request) + b"\n")
    process.stdin.flush()
    for line in process.stdout:
        match _event(line):
            case Progress(text=text):
                progress(text)
            case Ready() as ready:
                return ready
            case StartFailed(kind=kind, message=message):
                raise from_wire(kind, message)
    raise CoordinatorDied(
        f"the coordinator ended while starting (exit code {process.wait()}); its messages stand above"
    )


def _event(line: bytes) -> Event:
    try:
        return msgspec.json.decode(line, type=Event)
    except msgspec.MsgspecError as error:
        raise ColibriError(f"cannot understand the coordinator: {json.dumps(line.decode(errors='replace'))}") from error


def stop_process(process: subprocess.Popen[bytes], timeout_s: float = 10.0) -> None:
    """Close an owned coordinator's lifeline and wait for its end; kill it if it takes too long."""
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
    if process.stdout is not None:
        process.stdout.close()
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
