"""Where the lines of a chat come from: a terminal with line editing and history, or a pipe.

A line that ends in a backslash goes on in the next one.
"""

from typing import IO, Protocol

PROMPT, MORE = "> ", ". "


class Lines(Protocol):
    """A source of lines."""

    is_terminal: bool

    def read(self) -> str | None:
        """The next message or command, None at the end of input."""


class PipedLines:
    """Lines of a file or a pipe; no prompt is shown."""

    is_terminal = False

    def __init__(self, source: IO[str]) -> None:
        self._source = source

    def read(self) -> str | None:
        """See `Lines`."""
        parts = []
        while line := self._source.readline():
            parts.append(line.rstrip("\n"))
            if not parts[-1].endswith("\\"):
                break
        return _joined(parts) if parts else None


class TerminalLines:
    """Lines typed by a person, edited with readline; the history is that of this chat, and Tab completes commands."""

    is_terminal = True

    def __init__(self, commands: list[str]) -> None:
        self._commands = commands
        try:
            import readline
        except ImportError:  # a Python that was built without it
            return
        readline.set_completer(self._complete)
        readline.set_completer_delims("")
        is_libedit = "libedit" in (readline.__doc__ or "")
        readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")

    def read(self) -> str | None:
        """See `Lines`. Ctrl-C raises KeyboardInterrupt; what was typed is gone."""
        try:
            parts = [input(PROMPT)]
            while parts[-1].endswith("\\"):
                parts.append(input(MORE))
        except EOFError:
            return None
        return _joined(parts)

    def _complete(self, typed: str, number: int) -> str | None:
        found = [command for command in self._commands if typed and command.startswith(typed)]
        return found[number] + " " if number < len(found) else None


def _joined(parts: list[str]) -> str:
    return "\n".join(part.removesuffix("\\") for part in parts)
