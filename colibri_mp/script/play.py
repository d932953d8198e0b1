"""One run of one session, without input or output: which request comes next, and what its answer means.

    Play.next_request() ─▶ Request ─▶ (the runner asks the cluster) ─▶ Play.answer(...) or Play.fail(...)

A play ends when its turns are over, when a request fails, when an answer is not what was expected, or when it is stopped.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from colibri_mp.messages import Conversation
from colibri_mp.script.definition import Session, Turn
from colibri_mp.script.figures import Times
from colibri_mp.script.placeholders import Answer, Template
from colibri_mp.script.seeds import derive_seed

State = Literal["waiting", "playing", "done", "failed", "stopped"]
AnswerOf = Callable[[Answer], str]
Prompt: TypeAlias = str | list[int] | Conversation


@dataclass(frozen=True)
class Request:
    """What to ask the cluster. `asked` is the turn's own text or ids, `prompt` all that the model is to see."""

    turn: int
    asked: str | list[int]
    prompt: Prompt
    options: dict[str, Any]
    delay_s: float
    system: str = ""


@dataclass
class TurnResult:
    """What came of a turn, numbered from 1. A turn whose condition did not hold is `skipped` and has nothing else."""

    turn: int
    request: Request | None = None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    error: str = ""
    stats: dict[str, Any] = field(default_factory=dict)
    times: Times | None = None

    @property
    def is_skipped(self) -> bool:
        """Whether nothing was asked."""
        return self.request is None


class Play:
    """A repeat (from 1) of a session; `base_seed` is the script's seed."""

    def __init__(self, session: Session, repeat: int, base_seed: int) -> None:
        self.session = session
        self.repeat = repeat
        self.state: State = "waiting"
        self.error = ""
        self.results: list[TurnResult] = []
        self._seed = base_seed if session.seed is None else session.seed
        self._history: list[Any] = []  # of the chat: messages; of texts: texts; of ids: ids

    @property
    def label(self) -> str:
        """The name for people: with the number of the repeat if there are several."""
        return f"{self.session.name} #{self.repeat}" if self.session.repeat > 1 else self.session.name

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will be asked."""
        return self.state in ("done", "failed", "stopped")

    def answer_at(self, index: int) -> str:
        """The answer with this index; of a turn that was skipped or never came, an empty text."""
        answers = [result.text for result in self.results]
        return answers[index] if -len(answers) <= index < len(answers) else ""

    def next_request(self, answer_of: AnswerOf) -> Request | None:
        """The next thing to ask, or None when the play has ended. `answer_of` knows the answers of other sessions."""
        self.state = "playing"

        def lookup(answer: Answer) -> str:
            return self._own_answer(answer.index) if answer.session is None else answer_of(answer)

        while len(self.results) < len(self.session.turns):
            turn = self.session.turns[len(self.results)]
            if self._is_played(turn):
                return self._request(turn, lookup)
            self.results.append(TurnResult(len(self.results) + 1))
        self.state = "done"
        return None

    def answer(self, result: TurnResult) -> None:
        """Take the answer to the last request."""
        self.results.append(result)
        request = result.request
        assert request is not None
        if self.session.history:
            self._history += self._as_history(request.asked, result)
        expected = self.session.turns[request.turn - 1].expect
        if expected is not None and not expected.search(result.text):
            result.error = f"expected {expected.pattern!r} in the answer {_shortened(result.text)!r}"
            self._end("failed", f"turn {request.turn}: {result.error}")

    def fail(self, result: TurnResult, error: str) -> None:
        """The last request ended in an error."""
        result.error = error
        self.results.append(result)
        self._end("failed", f"turn {result.turn}: {error}")

    def stop(self, result: TurnResult | None, reason: str) -> None:
        """End early, with what there is of the last answer."""
        if result is not None:
            result.error = reason
            self.results.append(result)
        self._end("stopped", reason)

    def give_up(self, reason: str) -> None:
        """Something that it depends on has failed: nothing will be asked."""
        self._end("failed", reason)

    # -- inner ---------------------------------------------------------------------------------------------------------

    def _end(self, state: State, error: str) -> None:
        self.state = state
        self.error = error

    def _own_answer(self, index: int) -> str:
        """`{answer}` is the last one that was given; with an index from the start, that of this turn."""
        if index >= 0:
            return self.answer_at(index)
        given = [result.text for result in self.results if not result.is_skipped]
        return given[index] if -len(given) <= index else ""

    def _is_played(self, turn: Turn) -> bool:
        last = self._own_answer(-1)
        if turn.when is not None and not turn.when.search(last):
            return False
        return turn.unless is None or not turn.unless.search(last)

    def _request(self, turn: Turn, lookup: AnswerOf) -> Request:
        number = len(self.results) + 1
        seed = turn.seed if turn.seed is not None else derive_seed(self._seed, self.session.name, self.repeat, number)
        asked = self._filled(turn.text, lookup) if turn.text is not None else list(turn.ids)
        system = self._filled(self.session.system, lookup) if self.session.system else ""
        return Request(
            number, asked, self._prompt(asked, system), {**turn.options, "seed": seed}, turn.delay_s, system
        )  # fmt: skip

    def _prompt(self, asked: str | list[int], system: str) -> Prompt:
        if isinstance(asked, list):
            return [*self._history, *asked]
        if self.session.form == "text":
            return "".join([*self._history, asked])
        first = [{"role": "system", "content": system}] if system else []
        messages = [*first, *self._history, {"role": "user", "content": asked}]
        return Conversation(messages, template_options=self.session.template_options)

    def _filled(self, template: Template, lookup: AnswerOf) -> str:
        return template.fill(lookup, self.repeat)

    def _as_history(self, asked: str | list[int], result: TurnResult) -> list[Any]:
        if isinstance(asked, list):
            return [*asked, *result.token_ids]
        if self.session.form == "text":
            return [asked, result.text]
        return [{"role": "user", "content": asked}, {"role": "assistant", "content": result.text}]


def _shortened(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
