"""Plays sessions of a script over one connection to a cluster: at most so many at once, each turn after its answer.

    waiting ──(others have ended, delay over, place free)──▶ due ──submit──▶ in flight ──Finished, Failed──▶ next turn, or ended

What the sessions say does not depend on the order in which all this happens; `play` knows nothing of it.
"""

import heapq
import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from colibri_mp.client import Cluster
from colibri_mp.errors import ColibriError, ConfigError, RequestError
from colibri_mp.interruption import Interruption
from colibri_mp.messages import Failed, Finished, Message, Piece
from colibri_mp.script.definition import Script, Session
from colibri_mp.script.figures import Times
from colibri_mp.script.placeholders import Answer
from colibri_mp.script.play import Play, Request, TurnResult

_WAIT_S = 0.25  # the display goes on even if nothing comes
_CANCEL_S = 5.0  # how long answers that were stopped may take to end
_FIRST_PATIENCE_S, _MOST_PATIENCE_S = 0.1, 5.0  # between two tries of a request that an overloaded cluster refuses
_GIVE_UP_S = 600.0


class Listener(Protocol):
    """Is told what happens, to show it."""

    def asked(self, play: Play) -> None:
        """A turn has been sent."""

    def heard(self, play: Play, result: TurnResult) -> None:
        """Tokens of its answer have come."""

    def turn_ended(self, play: Play, result: TurnResult) -> None:
        """An answer is complete, or failed."""

    def ended(self, play: Play) -> None:
        """A session has ended."""

    def tick(self) -> None:
        """Time has passed."""


@dataclass(eq=False)
class _Flight:
    """A turn under way."""

    play: Play
    request: Request
    result: TurnResult
    times: Times
    patience_s: float = _FIRST_PATIENCE_S


def make_plays(script: Script) -> list[Play]:
    """One play for each repeat of each session, in the order of the file."""
    return [
        Play(session, repeat, script.seed) for session in script.sessions for repeat in range(1, session.repeat + 1)
    ]


class Runner:
    """Plays `plays` to their ends on `cluster`, at most `concurrency` at once. `error`: what ended the cluster, if it did."""

    def __init__(
        self, cluster: Cluster, plays: Sequence[Play], concurrency: int, listener: Listener, interruption: Interruption
    ) -> None:
        self.error: ColibriError | None = None
        self._cluster = cluster
        self._plays = {(play.session.name, play.repeat): play for play in plays}
        self._repeats = {play.session.name: play.session.repeat for play in plays}
        self._concurrency = concurrency
        self._listener = listener
        self._interruption = interruption
        self._waiting = list(plays)
        self._ended_s: dict[Play, float] = {}
        self._due: list[tuple[float, int, _Flight]] = []  # a heap: when, a number that orders equals, what
        self._numbers = itertools.count()
        self._flights: dict[int, _Flight] = {}
        self._num_playing = 0
        self._next_start_s = 0.0  # when to look again at those that wait
        self._start_s = time.monotonic()

    def run(self) -> None:
        """Play everything; returns when all plays have ended, in whatever way."""
        try:
            while self._waiting or self._due or self._flights:
                if self._interruption.signal is not None:
                    self._stop_all()
                    return
                self._begin_plays()
                self._submit_due()
                self._hear(self._cluster.next_event(self._patience_s(), self._interruption.wake_fd))
                self._listener.tick()
        except ColibriError as error:
            self.error = error
            self._end_all(str(error))

    # -- begin ---------------------------------------------------------------------------------------------------------

    def _begin_plays(self) -> None:
        """Start those that wait for nothing any more, in the order of the file, as far as there is room."""
        now = time.monotonic()
        if now < self._next_start_s:
            return
        self._next_start_s = float("inf")  # until something ends, or a delay is over
        for play in list(self._waiting):
            if self._num_playing >= self._concurrency:
                return  # until one of these ends
            awaited = list(self._awaited(play.session, play.repeat))
            if failed := [other for other in awaited if other.state in ("failed", "stopped")]:
                self._waiting.remove(play)
                play.give_up(f"not played: {failed[0].label!r}, which it waits for, has failed")
                self._has_ended(play)
            elif all(other.has_ended for other in awaited):
                start_s = max((self._ended_s[other] for other in awaited), default=self._start_s) + play.session.delay_s
                if start_s > now:
                    self._next_start_s = min(self._next_start_s, start_s)
                else:
                    self._waiting.remove(play)
                    self._num_playing += 1
                    self._go_on(play)

    def _awaited(self, session: Session, repeat: int) -> Iterable[Play]:
        """What a repeat waits for: the same repeat of a session that is played as often, else all of it."""
        for name in session.after:
            count = self._repeats[name]
            yield from (
                [self._plays[name, repeat]]
                if count == session.repeat
                else [self._plays[name, other] for other in range(1, count + 1)]
            )

    def _go_on(self, play: Play) -> None:
        """Line up the next turn of a play, or note that it has ended."""

        def answer_of(answer: Answer) -> str:
            assert answer.session is not None
            repeat = 1 if self._repeats[answer.session] == 1 else play.repeat
            return self._plays[answer.session, repeat].answer_at(answer.index)

        request = play.next_request(answer_of)
        if request is None:
            self._leave(play)
            return
        when_s = time.monotonic() + request.delay_s
        flight = _Flight(play, request, TurnResult(request.turn, request), Times(when_s))
        flight.result.times = flight.times
        self._line_up(flight, when_s)

    def _line_up(self, flight: _Flight, when_s: float) -> None:
        heapq.heappush(self._due, (when_s, next(self._numbers), flight))

    def _submit_due(self) -> None:
        while self._due and self._due[0][0] <= time.monotonic():
            flight = heapq.heappop(self._due)[2]
            try:
                request_id = self._cluster.submit(flight.request.prompt, **flight.request.options)
            except (ConfigError, RequestError) as error:
                self._fail(flight, str(error))
                continue
            self._flights[request_id] = flight
            self._listener.asked(flight.play)

    def _patience_s(self) -> float:
        """How long to wait for an event: until something else is to be done."""
        now = time.monotonic()
        next_s = min(self._due[0][0] if self._due else float("inf"), self._next_start_s)
        return max(0.0, min(_WAIT_S, next_s - now))

    # -- answers -------------------------------------------------------------------------------------------------------

    def _hear(self, event: tuple[int, Message] | None) -> None:
        if event is None or event[0] not in self._flights:
            return
        request_id, message = event
        flight = self._flights[request_id]
        match message:
            case Piece():
                flight.times.heard(time.monotonic(), len(message.token_ids))
                flight.result.token_ids += message.token_ids
                flight.result.text += message.text
                self._listener.heard(flight.play, flight.result)
            case Finished():
                del self._flights[request_id]
                flight.result.text += message.text
                flight.result.finish_reason = message.finish_reason
                flight.result.stats = message.stats
                self._finish(flight)
            case Failed():
                del self._flights[request_id]
                self._refused(flight, message)

    def _finish(self, flight: _Flight) -> None:
        flight.play.answer(flight.result)
        self._listener.turn_ended(flight.play, flight.result)
        if flight.play.has_ended:
            self._leave(flight.play)
        else:
            self._go_on(flight.play)

    def _refused(self, flight: _Flight, message: Failed) -> None:
        """An overloaded cluster is asked again, later; anything else fails the session."""
        now = time.monotonic()
        if message.kind != "overloaded" or now - flight.times.asked_s > _GIVE_UP_S:
            self._fail(flight, message.message)
            return
        flight.times.num_refused += 1
        self._line_up(flight, now + flight.patience_s)
        flight.patience_s = min(2 * flight.patience_s, _MOST_PATIENCE_S)

    def _fail(self, flight: _Flight, error: str) -> None:
        flight.play.fail(flight.result, error)
        self._listener.turn_ended(flight.play, flight.result)
        self._leave(flight.play)

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _leave(self, play: Play) -> None:
        self._num_playing -= 1
        self._has_ended(play)

    def _has_ended(self, play: Play) -> None:
        self._ended_s[play] = time.monotonic()
        self._next_start_s = 0.0
        self._listener.ended(play)

    def _stop_all(self) -> None:
        """Cancel what is under way, and take what there is of it."""
        for request_id in self._flights:
            self._cluster.cancel(request_id)
        flights, deadline = dict(self._flights), time.monotonic() + _CANCEL_S
        while flights and (left_s := deadline - time.monotonic()) > 0:
            event = self._cluster.next_event(left_s)
            if event is None or (flight := flights.get(event[0])) is None:
                continue
            message = event[1]
            if isinstance(message, Piece):
                flight.result.token_ids += message.token_ids
            if isinstance(message, Piece | Finished):
                flight.result.text += message.text
            if isinstance(message, Finished):
                flight.result.finish_reason = message.finish_reason
            if isinstance(message, Finished | Failed):
                del flights[event[0]]
        self._end_all("interrupted")

    def _end_all(self, reason: str) -> None:
        """Nothing will come any more: end every play that has not ended."""
        under_way = {flight.play: flight for flight in self._flights.values()}
        under_way |= {flight.play: flight for _, _, flight in self._due}
        self._waiting, self._due, self._flights = [], [], {}
        for play in self._plays.values():
            if play.has_ended:
                continue
            flight = under_way.get(play)
            if self.error is None:
                play.stop(flight.result if flight else None, reason)
            elif flight:
                play.fail(flight.result, reason)
            else:
                play.give_up(reason)
            self._listener.ended(play)
