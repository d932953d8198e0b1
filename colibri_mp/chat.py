"""The conversation loop of `colibri-cluster chat`: reads lines, streams answers, keeps the history.

Commands: /reset forgets the history, /system TEXT sets the system message, /stats shows the last answer's figures,
/help, /exit (or the end of input). Ctrl-C stops the answer under way and not the program; at the prompt it ends it.
"""

import json
from typing import IO, Any

from colibri_mp.client import Cluster
from colibri_mp.errors import RequestError
from colibri_mp.messages import Finished, Progress, PromptLogprobs

_HELP = "commands: /reset  /system TEXT  /stats  /help  /exit; Ctrl-C stops an answer"


class Chat:
    """One conversation with a cluster; `options` are those of `Cluster.stream`."""

    def __init__(self, cluster: Cluster, options: dict[str, Any], system: str | None) -> None:
        self._cluster = cluster
        self._options = options
        self._system = system
        self._history: list[dict[str, str]] = []
        self._stats: dict[str, Any] = {}

    def run(self, source: IO[str], out: IO[str]) -> None:
        """Talk until the end of input. A prompt is shown only if `source` is a terminal."""
        interactive = source.isatty()
        if interactive:
            print(_HELP, file=out)
        while True:
            if interactive:
                print("> ", end="", file=out, flush=True)
            line = source.readline()
            if not line or line.strip() == "/exit":
                return
            if line.strip():
                self._obey(line.strip(), out)

    def _obey(self, line: str, out: IO[str]) -> None:
        command, _, rest = line.partition(" ")
        match command:
            case "/reset":
                self._history.clear()
            case "/system":
                self._system = rest or None
                self._history.clear()
            case "/stats":
                print(json.dumps(self._stats), file=out)
            case "/help":
                print(_HELP, file=out)
            case _ if command.startswith("/"):
                print(f"unknown command {command}; {_HELP}", file=out)
            case _:
                self._answer(line, out)

    def _answer(self, line: str, out: IO[str]) -> None:
        system = [{"role": "system", "content": self._system}] if self._system else []
        question = {"role": "user", "content": line}
        text = ""
        events = self._cluster.events([*system, *self._history, question], **self._options)
        try:
            for event in events:
                if isinstance(event, Progress | PromptLogprobs):
                    continue
                text += event.text
                print(event.text, end="", file=out, flush=True)
                if isinstance(event, Finished):
                    self._stats = event.stats
        except KeyboardInterrupt:
            print(" [stopped]", end="", file=out)
        except RequestError as error:
            print(f"[{error}; /reset starts afresh]", file=out)
            return
        finally:
            events.close()  # type: ignore[attr-defined]  # a generator: closing cancels what is still running
        print(file=out, flush=True)
        self._history += [question, {"role": "assistant", "content": text}]
