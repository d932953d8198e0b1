"""Plays and their runner against a cluster that answers at once: order, dependence, failures, interruption."""

import os
import signal
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from colibri_mp.errors import CoordinatorDied, RequestError
from colibri_mp.interruption import Interruption
from colibri_mp.messages import Conversation, Failed, Finished, Message, Piece
from colibri_mp.script.checking import read_script
from colibri_mp.script.play import Play, TurnResult
from colibri_mp.script.runner import Runner, make_plays
from colibri_mp.script.transcript import transcript

STATS = {"cache": {"hits": 1.0, "misses": 1.0, "promoted": 0.0, "bytes_read": 8, "disk_s": 0.1}, "prompt_tokens": 3}


class Echo:
    """A cluster that answers a prompt with its last text in capitals; `fail` may name an error instead."""

    def __init__(self, fail: Callable[[str], str | None] = lambda text: None) -> None:
        self._fail = fail
        self._events: deque[tuple[int, Message]] = deque()
        self.asked: list[str] = []
        self.prompts: list[Any] = []
        self.options: list[dict[str, Any]] = []
        self.most_at_once = 0
        self._open: set[int] = set()

    def submit(self, prompt: Any, **options: Any) -> int:
        text = prompt.messages[-1]["content"] if isinstance(prompt, Conversation) else str(prompt)
        request_id = len(self.asked) + 1
        self.asked.append(text)
        self.prompts.append(prompt)
        self.options.append(options)
        if text == "unsendable":
            raise RequestError("it cannot be sent")
        if kind := self._fail(text):
            self._events.append((request_id, Failed(request_id, kind, f"it is {kind}")))
        else:
            self._events.append((request_id, Piece(request_id, [7, 8], text.upper())))
            self._events.append((request_id, Finished(request_id, "stop", "!", STATS)))
        self._open.add(request_id)
        self.most_at_once = max(self.most_at_once, len(self._open))
        return request_id

    def next_event(self, timeout_s: float | None = None, wake_fd: int | None = None) -> tuple[int, Message] | None:
        if not self._events:
            return None
        request_id, event = self._events.popleft()
        if isinstance(event, Finished | Failed):
            self._open.discard(request_id)
        return request_id, event

    def cancel(self, request_id: int) -> None:
        """It ends by itself."""


class Quiet:
    """A listener that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def asked(self, play: Play) -> None:
        self.told.append(f"asked {play.label}")

    def heard(self, play: Play, result: TurnResult) -> None:
        """Nothing."""

    def turn_ended(self, play: Play, result: TurnResult) -> None:
        """Nothing."""

    def ended(self, play: Play) -> None:
        self.told.append(f"{play.state} {play.label}")

    def tick(self) -> None:
        """Nothing."""


def played(
    tmp_path: Path, lines: str, cluster: Echo, concurrency: int = 16, interruption: Interruption | None = None
) -> tuple[list[Play], Quiet]:
    """All plays of a JSONL script after they have been run."""
    path = tmp_path / "talk.jsonl"
    path.write_text(lines)
    plays, listener = make_plays(read_script(path)), Quiet()
    with interruption or Interruption() as running:
        Runner(cluster, plays, concurrency, listener, running).run()  # type: ignore[arg-type]
    assert all(play.has_ended for play in plays)
    return plays, listener


def test_history_grows_in_each_form(tmp_path: Path) -> None:
    """A chat keeps messages, a text grows by text, ids grow by ids; without history a turn stands alone."""
    cluster = Echo()
    lines = (
        '{"name": "chat", "system": "S{repeat}", "turns": ["a", "b {answer}"], "template_options": {"x": 1}}\n'
        '{"name": "text", "chat": false, "turns": ["a", "b"]}\n{"name": "ids", "turns": [[1], [2, 3]]}\n'
        '{"name": "alone", "history": false, "turns": ["a", "b {answers[0]}"]}\n'
    )
    played(tmp_path, lines, cluster, concurrency=1)
    chat, text, ids, alone = cluster.prompts[1::2]
    assert chat == Conversation(
        [
            {"role": "system", "content": "S1"},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "A!"},
            {"role": "user", "content": "b A!"},
        ],
        template_options={"x": 1},
    )
    assert (text, ids) == ("aA!b", [1, 7, 8, 2, 3])
    assert alone.messages == [{"role": "user", "content": "b A!"}]


def test_conditions_look_at_the_answer_before(tmp_path: Path) -> None:
    """A turn is skipped unless `when` is found and `unless` is not; a skipped turn leaves the last answer as it was."""
    turns = (
        '["yes", {"text": "x", "when": "NO"}, {"text": "y", "unless": "YES"}, {"text": "z {answer}", "when": "YES"}]'
    )
    cluster = Echo()
    plays, _ = played(tmp_path, f'{{"name": "a", "turns": {turns}}}', cluster)
    assert cluster.asked == ["yes", "z YES!"]
    assert [result.is_skipped for result in plays[0].results] == [False, True, True, False]
    assert transcript(plays).count(b'"skipped": true') == 2


def test_expectations(tmp_path: Path) -> None:
    """A session whose answer is not what was expected fails with both, and asks no more."""
    cluster = Echo()
    plays, _ = played(tmp_path, '{"name": "a", "turns": [{"text": "x", "expect": "Y"}, "more"]}', cluster)
    assert (plays[0].state, cluster.asked) == ("failed", ["x"])
    assert plays[0].error == "turn 1: expected 'Y' in the answer 'X!'"


def test_sessions_wait_for_others(tmp_path: Path) -> None:
    """Repeats pair with repeats of a session played as often, and wait for all of any other."""
    lines = (
        '{"name": "end", "after": ["pair", "one"], "turns": ["end {one.answer}"]}\n'
        '{"name": "pair", "after": "two", "repeat": 2, "turns": ["pair {two.answers[0]}"]}\n'
        '{"name": "two", "repeat": 2, "turns": ["two {repeat}"]}\n{"name": "one", "turns": ["one"]}\n'
    )
    cluster = Echo()
    played(tmp_path, lines, cluster)
    assert sorted(cluster.asked) == ["end ONE!", "one", "pair TWO 1!", "pair TWO 2!", "two 1", "two 2"]
    assert cluster.asked[-1] == "end ONE!"


def test_a_failure_ends_one_session_and_those_that_wait_for_it(tmp_path: Path) -> None:
    """Others go on; what needs the failed one is not played and says why."""
    lines = (
        '{"name": "bad", "turns": ["boom", "never"]}\n{"name": "next", "after": "bad", "turns": ["x"]}\n'
        '{"name": "last", "after": "next", "turns": ["x"]}\n{"name": "worse", "turns": ["unsendable"]}\n'
        '{"name": "good", "turns": ["fine", "fine"]}\n'
    )
    cluster = Echo(lambda text: "request" if text == "boom" else None)
    plays, _ = played(tmp_path, lines, cluster, concurrency=2)
    assert [play.state for play in plays] == ["failed", "failed", "failed", "failed", "done"]
    assert plays[0].error == "turn 1: it is request"
    assert plays[2].error == "not played: 'next', which it waits for, has failed"
    assert plays[3].error == "turn 1: it cannot be sent"
    assert b'"error": "it is request"' in transcript(plays)


def test_concurrency_is_kept(tmp_path: Path) -> None:
    """No more sessions are under way than allowed, and they begin in the order of the file."""
    cluster = Echo()
    _, listener = played(tmp_path, '{"name": "a", "repeat": 9, "turns": ["x", "y"]}', cluster, concurrency=3)
    assert cluster.most_at_once == 3
    first = list(dict.fromkeys(told for told in listener.told if told.startswith("asked")))
    assert first == [f"asked a #{number}" for number in range(1, 10)]
    assert len({options["seed"] for options in cluster.options}) == 18


def test_an_overloaded_cluster_is_asked_again(tmp_path: Path) -> None:
    """The turn is repeated with the same seed until it is taken; the wait counts into its time to first token."""
    refusals = iter(["overloaded", "overloaded"])
    cluster = Echo(lambda text: next(refusals, None))
    plays, _ = played(tmp_path, '{"name": "a", "turns": ["x"]}', cluster)
    times = plays[0].results[0].times
    assert times is not None
    assert times.first_s is not None
    assert (plays[0].state, len(cluster.asked), times.num_refused) == ("done", 3, 2)
    assert times.first_s >= 0.3
    assert len({options["seed"] for options in cluster.options}) == 1


def test_the_end_of_the_cluster_fails_everything(tmp_path: Path) -> None:
    """Sessions under way and waiting ones fail with the cluster's error, and the runner ends."""

    class Dying(Echo):
        def next_event(self, timeout_s: float | None = None, wake_fd: int | None = None) -> tuple[int, Message] | None:
            if len(self.asked) == 2:
                raise CoordinatorDied("it has been killed")
            return super().next_event(timeout_s, wake_fd)

    lines = '{"name": "a", "turns": ["x", "y"]}\n{"name": "b", "after": "a", "turns": ["x"]}\n'
    plays, _ = played(tmp_path, lines, Dying())
    assert [play.state for play in plays] == ["failed", "failed"]
    assert "it has been killed" in plays[1].error


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interruption_keeps_what_there_is(tmp_path: Path, number: signal.Signals) -> None:
    """After a signal nothing new is asked; a partial answer is in the transcript; signals do again what they did."""

    class Slow(Echo):
        def submit(self, prompt: Any, **options: Any) -> int:
            request_id = super().submit(prompt, **options)
            if len(self.asked) == 2:
                self._events.pop()
                os.kill(os.getpid(), number)
            return request_id

        def cancel(self, request_id: int) -> None:
            self._events.append((request_id, Finished(request_id, "cancelled", "?", STATS)))

    before = signal.getsignal(number)
    interruption = Interruption()
    plays, _ = played(tmp_path, '{"name": "a", "turns": ["x", "y", "z"]}', Slow(), interruption=interruption)
    assert interruption.signal == number
    assert signal.getsignal(number) is before
    assert (plays[0].state, [result.text for result in plays[0].results]) == ("stopped", ["X!", "Y?"])
    assert plays[0].results[1].finish_reason == "cancelled"
    assert b'"error": "interrupted"' in transcript(plays)


def test_a_second_signal_ends_at_once() -> None:
    """Whoever presses Ctrl-C twice does not want to wait."""
    with Interruption():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
