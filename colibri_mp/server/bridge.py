"""The one thread that talks to the cluster, and what the rest of the server knows of it.

    event loop ── submit, cancel, stop ──▶ bridge thread ── Generate, Cancel, GetStatus ──▶ coordinator
               ◀── events of each turn ───               ◀── Piece, Finished, Status ─────

The thread starts an own cluster, or joins a running one, and asks for its status at intervals. Nothing in the event loop waits
for the cluster: `view` is what was last heard, so /health answers in the middle of anything.
"""

import asyncio
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from colibri_mp.client import Cluster
from colibri_mp.errors import ColibriError, from_wire
from colibri_mp.mailbox import Mailbox
from colibri_mp.messages import Failed, Finished, Status
from colibri_mp.server.turns import Event, Turn, key_of
from colibri_mp.server.view import Model, State, View, model_name
from colibri_mp.tokenizer import Tokenizer
from colibri_mp.transport import wait

_STATUS_S = 1.0  # between an answer to a question for the status, and the next question


OpenCluster: TypeAlias = Callable[[Callable[[str], None], Callable[[subprocess.Popen[bytes]], None]], Cluster]
"""Makes the cluster, in the bridge's thread: takes what is told of the start's progress, and of its process."""


class Bridge:
    """See the module docstring. The public methods are for the event loop's thread.

    `names`: further names of the model. In the event loop, `ready` is told the model's name when the cluster serves, and `ended`
    the error if it cannot be opened.
    """

    def __init__(
        self, open_cluster: OpenCluster, names: tuple[str, ...],
        ended: Callable[[ColibriError], None], ready: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._open_cluster = open_cluster
        self._names = names
        self._ended = ended
        self._ready = ready
        self._loop = asyncio.get_running_loop()
        self._inbox: Mailbox[Callable[[Cluster], None]] = Mailbox()
        self._is_stopping = False
        self._starting: subprocess.Popen[bytes] | None = None
        self._running: dict[int, tuple[Turn, int]] = {}
        self._turns: dict[str, Turn] = {}
        self._asked: int | None = None
        self._wanted: list[asyncio.Future[dict[str, Any]]] = []
        self._ask_at = 0.0
        self.view = View("loading", "starting", time.monotonic(), time.monotonic())
        self._thread = threading.Thread(target=self._run, name="bridge")

    def start(self) -> None:
        """Begin to open the cluster."""
        self._thread.start()

    def submit(self, turn: Turn) -> None:
        """Ask all questions of a turn; what comes is delivered to it."""
        self._turns[turn.key] = turn
        turn.cancel = partial(self._inbox.put, partial(self._end, turn))
        self._inbox.put(partial(self._begin, turn))

    def forget(self, turn: Turn) -> None:
        """The turn's request has ended: end what may still be under way."""
        self._turns.pop(turn.key, None)
        turn.cancel()

    def turn(self, turn_id: str) -> Turn | None:
        """The turn of a request under way, by the id of the request or of its answer."""
        return self._turns.get(key_of(turn_id))

    async def fresh_status(self) -> dict[str, Any]:
        """The cluster's status, asked for now."""
        coming: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._inbox.put(lambda _cluster: self._want_status(coming))
        return await coming

    @property
    def num_turns(self) -> int:
        """Requests under way."""
        return len(self._turns)

    def stop(self) -> None:
        """End all turns with an error, then the own cluster; returns at once."""
        self._is_stopping = True
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
            cluster = self._open_cluster(self._note_progress, self._note_start)
        except (ColibriError, OSError, ValueError) as error:  # the last two: stopped while starting
            self._note_failed_start(error)
            return
        self._starting = None
        with cluster:
            try:
                self._serve(cluster)
            except ColibriError as error:
                self._show("broken", str(error))
                self._fail_all(error)
            while not self._is_stopping:  # a broken cluster: whoever asks before he sees that is told
                wait([self._inbox.fd], None)
                self._obey(cluster)
                self._fail_all(ColibriError(self.view.detail))

    def _serve(self, cluster: Cluster) -> None:
        self._note_model(cluster.stats())
        while not self._is_stopping:
            self._ask_status(cluster)
            event = cluster.next_event(max(0.0, self._ask_at - time.monotonic()), self._inbox.fd)
            self._obey(cluster)
            if event is not None:
                self._take(*event)
        self._show("stopping", "the server is stopping")
        self._obey(cluster)
        self._fail_all(ColibriError("the server is stopping"))

    def _obey(self, cluster: Cluster) -> None:
        for command in self._inbox.drain():
            command(cluster)

    def _begin(self, turn: Turn, cluster: Cluster) -> None:
        for choice, question in enumerate(turn.questions):
            try:
                request_id = cluster.submit(question.prompt, **question.options)
            except ColibriError as error:
                self._deliver(turn, choice, error)
                return
            self._running[request_id] = (turn, choice)

    def _end(self, turn: Turn, cluster: Cluster) -> None:
        for request_id, (owner, _) in self._running.items():
            if owner is turn:
                cluster.cancel(request_id)

    def _ask_status(self, cluster: Cluster) -> None:
        now = time.monotonic()
        if now >= self._ask_at:
            self._ask_at = now + _STATUS_S
            if self._asked is None:
                self._asked = cluster.submit_status()

    def _want_status(self, coming: "asyncio.Future[dict[str, Any]]") -> None:
        self._wanted.append(coming)
        self._ask_at = 0.0

    def _take(self, request_id: int, event: Event | Failed | Status) -> None:
        if isinstance(event, Status):
            self._asked = None
            self.view = self.view.heard(event.stats, time.monotonic())
            wanted, self._wanted = self._wanted, []
            for coming in wanted:
                self._loop.call_soon_threadsafe(_resolve, coming, event.stats)
            return
        self.view = replace(self.view, moved_at=time.monotonic())
        turn, choice = self._running[request_id]
        if isinstance(event, Finished | Failed):
            del self._running[request_id]
        self._deliver(turn, choice, from_wire(event.kind, event.message) if isinstance(event, Failed) else event)

    def _deliver(self, turn: Turn, choice: int, event: Event | ColibriError) -> None:
        self._loop.call_soon_threadsafe(turn.deliver, choice, event)

    def _fail_all(self, error: ColibriError) -> None:
        for turn, choice in self._running.values():
            self._deliver(turn, choice, error)
        self._running.clear()

    # -- what is known -------------------------------------------------------------------------------------------------

    def _note_progress(self, text: str) -> None:
        self._show("loading", text)

    def _note_start(self, process: subprocess.Popen[bytes]) -> None:
        self._starting = process
        if self._is_stopping:
            self.stop()

    def _note_failed_start(self, error: Exception) -> None:
        self._starting = None
        self._show("broken", str(error))
        if not self._is_stopping and isinstance(error, ColibriError):
            self._loop.call_soon_threadsafe(self._ended, error)

    def _note_model(self, status: dict[str, Any]) -> None:
        about = status["model"]
        path = Path(about["path"])
        names = (model_name(path), *self._names)
        tokenizer = Tokenizer.load(path)
        longest = tokenizer.longest_token() if tokenizer else 0
        model = Model(names, about["fingerprint"], about["ctx_tokens"], tokenizer, longest, int(time.time()))
        now = time.monotonic()
        self.view = View("serving", "serving", now, now, status, model)
        self._loop.call_soon_threadsafe(self._ready, model.name)

    def _show(self, state: State, detail: str) -> None:
        self.view = replace(self.view, state=state, detail=detail)


def _resolve(coming: "asyncio.Future[dict[str, Any]]", status: dict[str, Any]) -> None:
    if not coming.done():
        coming.set_result(status)
