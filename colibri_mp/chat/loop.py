"""The loop of a chat: reads lines, obeys commands, streams answers, keeps the history."""

import difflib
import signal
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from colibri_mp.answer_line import describe_answer
from colibri_mp.chat import keeping
from colibri_mp.chat.conversation import Conversation
from colibri_mp.chat.lines import Lines
from colibri_mp.client import Cluster
from colibri_mp.errors import ConfigError, RequestError, WriteError
from colibri_mp.interruption import Interruption
from colibri_mp.messages import Failed, Finished, Piece

_WAIT_S = 1.0
_HELP = """\
/reset        forget what has been said
/undo         take back the last question and its answer
/retry        ask the last question again
/system TEXT  another system message, and /reset; without TEXT: none
/save FILE    write the conversation to a file, and what was computed for it to FILE.kv
/load FILE    go on with such a conversation
/stats        figures of the last answer
/help         this
/exit         end, as the end of input does
A line that ends in a backslash goes on in the next. Ctrl-C stops an answer."""


class Chat:
    """One conversation with a cluster; `options` are those of `Cluster.stream`.

    Answers and what commands print go to `out`, remarks to `remarks`.
    """

    def __init__(
        self, cluster: Cluster, options: dict[str, Any], system: str | None, out: IO[str], remarks: IO[str]
    ) -> None:
        self._cluster = cluster
        self._options = options
        self._conversation = Conversation(system)
        self._out = out
        self._remarks = remarks
        self._unanswered: str | None = None  # a question that failed, for /retry
        self._num_retries = 0
        self._last: Finished | None = None
        self._num_failed = 0
        self._commands: dict[str, Callable[[str], None]] = {
            "/reset": self._reset,
            "/undo": self._undo,
            "/retry": self._retry,
            "/system": self._system,
            "/save": self._save,
            "/load": self._load,
            "/stats": self._stats,
            "/help": lambda _rest: self._print(_HELP),
        }

    @property
    def commands(self) -> list[str]:
        """Their names."""
        return [*self._commands, "/exit"]

    def run(self, lines: Lines) -> int:
        """Talk until the end of input or /exit. Returns the exit code: 1 if input is not a terminal and something failed.

        Raises:
            KeyboardInterrupt: Ctrl-C twice at the prompt, or at any time if input is not a terminal.
            ColibriError: the cluster has ended.
        """
        if lines.is_terminal:
            self._remark("/help shows the commands, /exit or Ctrl-D ends; Ctrl-C stops an answer")
        was_interrupted = False
        while True:
            try:
                line = lines.read()
            except KeyboardInterrupt:
                if was_interrupted or not lines.is_terminal:
                    raise
                was_interrupted = True
                self._remark("\n(Ctrl-C again, /exit or Ctrl-D ends)")
                continue
            was_interrupted = False
            if line is None or line.strip() == "/exit":
                if line is None and lines.is_terminal:
                    self._print("")
                return 1 if self._num_failed and not lines.is_terminal else 0
            if line.strip():
                self._obey(line.strip())
                if self._is_stopped and not lines.is_terminal:
                    raise KeyboardInterrupt

    @property
    def _is_stopped(self) -> bool:
        return self._last is not None and self._last.finish_reason == "cancelled"

    def _obey(self, line: str) -> None:
        """A command or a question; what goes wrong with it is said, and the chat goes on."""
        command, _, rest = line.partition(" ")
        try:
            if not command.startswith("/"):
                self._num_retries = 0
                self._ask(line)
            elif command in self._commands:
                self._commands[command](rest.strip())
            else:
                raise ConfigError(f"unknown command {command}{self._nearest(command)}")
        except (ConfigError, RequestError, WriteError) as error:
            self._num_failed += 1
            self._remark(f"[{error}]")

    def _nearest(self, command: str) -> str:
        nearest = difflib.get_close_matches(command, self.commands, n=1)
        return f"; did you mean {nearest[0]}?" if nearest else "; /help shows the commands"

    # -- commands ------------------------------------------------------------------------------------------------------

    def _reset(self, _rest: str) -> None:
        self._conversation.messages.clear()
        self._unanswered = None

    def _undo(self, _rest: str) -> None:
        if self._unanswered is not None:
            self._unanswered = None
        elif self._conversation.undo() is None:
            raise ConfigError("there is nothing to take back")

    def _retry(self, _rest: str) -> None:
        question = self._unanswered if self._unanswered is not None else self._conversation.undo()
        if question is None:
            raise ConfigError("there is no question to ask again")
        self._num_retries += 1
        self._ask(question)

    def _system(self, rest: str) -> None:
        self._conversation = Conversation(rest or None)
        self._unanswered = None

    def _save(self, rest: str) -> None:
        self._remark(f"[{keeping.save(self._cluster, self._conversation, _path(rest, '/save'))}]")

    def _load(self, rest: str) -> None:
        self._conversation, said = keeping.load(self._cluster, _path(rest, "/load"))
        self._unanswered = None
        self._remark(f"[{said}]")

    def _stats(self, _rest: str) -> None:
        if self._last is None:
            self._print("no answer yet")
            return
        self._print(describe_answer(self._last.finish_reason, self._last.stats))
        self._print(f"{len(self._conversation.messages)} messages in the conversation")

    # -- answers -------------------------------------------------------------------------------------------------------

    def _ask(self, question: str) -> None:
        """Stream the answer and keep both; a question that fails is kept for /retry alone."""
        self._unanswered = question
        prompt = self._conversation.prompt(question)
        text, end = self._stream(prompt)
        if isinstance(end, Failed):
            raise RequestError(f"{end.message}; {_cure(end.kind)}")
        self._print(" [stopped]" if end.finish_reason == "cancelled" else "")
        self._last = end
        self._unanswered = None
        self._conversation.add(question, text)
        if self._is_context_full(end):
            self._remark("[the context is full: /undo or /reset makes room, or start again with a larger --ctx]")
        elif end.finish_reason == "length":
            self._remark(f"[cut after {end.stats['completion_tokens']} tokens, by --max-tokens]")

    def _stream(self, prompt: list[dict[str, Any]]) -> tuple[str, Finished | Failed]:
        """Print the answer as it comes; Ctrl-C cancels it, and what there is of it stays."""
        options = self._options
        if options.get("seed") is not None:
            options = {**options, "seed": options["seed"] + self._num_retries}
        text, is_cancelled = "", False
        with Interruption(signal.SIGINT) as interruption:
            request_id = self._cluster.submit(prompt, **options)
            while True:
                event = self._cluster.next_event(_WAIT_S, None if is_cancelled else interruption.wake_fd)
                if interruption.signal is not None and not is_cancelled:
                    self._cluster.cancel(request_id)
                    is_cancelled = True
                if event is None or event[0] != request_id:
                    continue
                message = event[1]
                if isinstance(message, Piece | Finished):
                    text += message.text
                    print(message.text, end="", file=self._out, flush=True)
                if isinstance(message, Finished | Failed):
                    return text, message

    def _is_context_full(self, end: Finished) -> bool:
        """Whether an answer was cut although it was not as long as it was allowed to be."""
        most = self._options.get("max_tokens")
        return end.finish_reason == "length" and (most is None or end.stats["completion_tokens"] < most)

    def _print(self, text: str) -> None:
        print(text, file=self._out, flush=True)

    def _remark(self, text: str) -> None:
        print(text, file=self._remarks, flush=True)


def _cure(kind: str) -> str:
    """What helps after an error of this kind: only a bad request would fail again."""
    if kind == RequestError.kind:
        return "/undo takes back what was said last, /reset all of it"
    return "/retry asks again"


def _path(text: str, command: str) -> Path:
    if not text:
        raise ConfigError(f"{command} needs the name of a file")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{text}: {error}") from error
