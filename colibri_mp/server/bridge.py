"""The one thread that talks to the cluster, and what the rest of the server knows of it.

    event loop ── submit, cancel, close ──▶ bridge thread ── Generate, Cancel, GetStatus ──▶ coordinator
               ◀── events of each turn ────               ◀── Piece, Finished, Status ─────

The thread starts an own cluster, or joins a running one, and asks for its status at intervals. Nothing in the event loop waits
for the cluster: `view` is what was last heard, so /health answers in the middle of anything.
"""

import asyncio
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

from colibri_mp import rundir
from colibri_mp.client import Cluster
from colibri_mp.errors import ColibriError, from_wire
from colibri_mp.mailbox import Mailbox
from colibri_mp.messages import Failed, Finished, Status
from colibri_mp.server.turns import Question, Turn
from colibri_mp.tokenizer import Tokenizer

_STATUS_S = 2.0  # between two readings of the status
State: TypeAlias = Literal["loading", "serving", "broken", "stopping"]


@dataclass(frozen=True)
class Model:
    """The model that is served. Names by which it may be asked for: the first is its own."""

    name: str
    names: tuple[str, ...]
    fingerprint: str
    ctx_tokens: int
    tokenizer: Tokenizer | None
    created: int


@dataclass(frozen=True)
class View:
    """What is known of the cluster. Replaced as a whole; times are of `time.monotonic`."""

    state: State
    detail: str
    status: dict[str, Any]
    moved_at: float
    model: Model | None = None


@dataclass(frozen=True)
class _Submit:
    turn: Turn


@dataclass(frozen=True)
class _Cancel:
    turn: Turn


class Bridge:
    """See the module docstring. All methods are for the event loop's thread.

    Args:
        open_cluster: makes the cluster, in the bridge's thread: gets functions for progress and for the process it starts.
        names: further names of the model.
        ended: called in the event loop when the cluster cannot be opened, with the error.
    """

    def __init__(self, open_cluster: "OpenCluster", names: tuple[str, ...], ended: Callable[[ColibriError], None]) -> None:
        self._open_cluster = open_cluster
        self._names = names
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._inbox: Mailbox[_Submit | _Cancel] = Mailbox()
        self._stopping = threading.Event()
        self._starting: subprocess.Popen[bytes] | None = None
        self._running: dict[int, tuple[Turn, int]] = {}
        self._turns: dict[str, Turn] = {}
        self._status_id = 0
        self._next_status = 0.0
        self.view = View("loading", "starting", {}, time.monotonic())
        self._thread = threading.Thread(target=self._run, name="bridge")

    def start(self) -> None:
        """Begin to open the cluster."""
        self._thread.start()

    def submit(self, turn: Turn) -> None:
        """Ask all questions of a turn; what comes is delivered to it."""
        self._turns[turn.id] = turn
        turn.cancel = partial(self.cancel, turn)
        self._inbox.put(_Submit(turn))

    def cancel(self, turn: Turn) -> None:
        """End a turn's answers; nothing happens if they have ended."""
        self._inbox.put(_Cancel(turn))

    def forget(self, turn: Turn) -> None:
        """The turn's request has ended."""
        self._turns.pop(turn.id, None)

    def turn(self, turn_id: str) -> Turn | None:
        """The turn of a request under way."""
        return self._turns.get(turn_id)

    @property
    def num_turns(self) -> int:
        """Requests under way."""
        return len(self._turns)

    def stop(self) -> None:
        """End all turns with an error, then the own cluster; returns at once."""
        self._stopping.set()
        self._inbox.wake()
        starting = self._starting
        if starting is not None and starting.stdin is not None:
            starting.stdin.close()  # its lifeline

    async def join(self) -> None:
        """Wait until the thread has ended, and with it the own cluster."""
        await asyncio.to_thread(self._thread.join)
        self._inbox.close()

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            cluster = self._open_cluster(self._show, self._note_start)
        except ColibriError as error:
            self._show_state("broken", str(error))
            if not self._stopping.is_set():
                self._loop.call_soon_threadsafe(self._ended, error)
            return
        finally:
            self._starting = None
        try:
            self._serve(cluster)
        except ColibriError as error:
            self._show_state("broken", str(error))
            self._fail_all(error)
            self._refuse_all(error)
        finally:
            cluster.close()

    def _serve(self, cluster: Cluster) -> None:
        self._took_status(cluster.stats())
        while not self._stopping.is_set():
            self._ask_status(cluster)
            event = cluster.next_event(max(0.0, self._next_status - time.monotonic()), self._inbox.fd)
            for command in self._inbox.drain():
                self._obey(cluster, command)
            if event is not None:
                self._take(*event)
        self._show_state("stopping", "the server is stopping")
        self._fail_all(ColibriError("the server is stopping"))

    def _refuse_all(self, error: ColibriError) -> None:
        """Of a broken cluster, until the server stops."""
        while not self._stopping.wait(0.2):
            for command in self._inbox.drain():
                if isinstance(command, _Submit):
                    self._deliver(command.turn, 0, error)

    def _obey(self, cluster: Cluster, command: _Submit | _Cancel) -> None:
        turn = command.turn
        if isinstance(command, _Cancel):
            turn.is_cancelled = True
            for request_id, (owner, _) in self._running.items():
                if owner is turn:
                    cluster.cancel(request_id)
            return
        for choice, question in enumerate(turn.questions):
            try:
                self._running[_submit(cluster, question)] = (turn, choice)
            except ColibriError as error:
                self._deliver(turn, choice, error)
                return

    def _take(self, request_id: int, event: Any) -> None:
        if isinstance(event, Status):
            self._took_status(event.stats)
            return
        turn, choice = self._running[request_id]
        if isinstance(event, Finished | Failed):
            del self._running[request_id]
        self._deliver(turn, choice, from_wire(event.kind, event.message) if isinstance(event, Failed) else event)
        self._moved()

    def _deliver(self, turn: Turn, choice: int, event: Any) -> None:
        self._loop.call_soon_threadsafe(turn.deliver, choice, event)

    def _fail_all(self, error: ColibriError) -> None:
        for turn, choice in self._running.values():
            self._deliver(turn, choice, error)
        self._running.clear()
