"""What has been said in a chat, and the file that keeps it.

    {"format": "colibri-mp conversation", "version": 1, "system": null, "messages": [{"role": "user", "content": "Hi"}, ...]}

User and assistant take turns, the user begins, the assistant has the last word.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from colibri_mp.errors import ConfigError, WriteError
from colibri_mp.user_cache import replace_file

_FORMAT, _VERSION = "colibri-mp conversation", 1
_ROLES = ("user", "assistant")


@dataclass
class Conversation:
    """Messages {"role", "content"} in turns, and the system message, which is not one of them."""

    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def prompt(self, question: str | None = None) -> list[dict[str, Any]]:
        """All messages for the chat template, and a question that has not been answered."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        asked = [] if question is None else [{"role": "user", "content": question}]
        return [*system, *self.messages, *asked]

    def add(self, question: str, answer: str) -> None:
        """A question has been answered."""
        self.messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def undo(self) -> str | None:
        """Forget the last question and its answer; returns the question, None if there was none."""
        if not self.messages:
            return None
        question = self.messages[-2]["content"]
        del self.messages[-2:]
        return question

    def save(self, path: Path) -> None:
        """Write the file, only for the user (0600); a reader sees the old or the new one.

        Raises:
            WriteError: it cannot be written.
        """
        content = {"format": _FORMAT, "version": _VERSION, "system": self.system, "messages": self.messages}
        try:
            if not path.parent.is_dir():
                raise FileNotFoundError(2, "there is no such folder", str(path.parent))
            if path.is_dir():
                raise IsADirectoryError(21, "it is a folder", str(path))
            replace_file(
                path, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode(errors="surrogatepass")
            )
        except OSError as error:
            raise WriteError(f"{path}: cannot be written: {error.strerror}") from error

    @classmethod
    def load(cls, path: Path) -> "Conversation":
        """The conversation of a file.

        Raises:
            ConfigError: it cannot be read, or is no such file.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: is not a conversation that `/save` has written: {error}") from error
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise ConfigError(f"{path}: is not a conversation that `/save` has written")
        if content.get("version") != _VERSION:
            raise ConfigError(
                f"{path}: has version {content.get('version')!r} of the format, this program reads {_VERSION}"
            )
        return cls(_system(path, content.get("system")), _messages(path, content.get("messages")))


def _system(path: Path, system: object) -> str | None:
    if system is not None and not isinstance(system, str):
        raise ConfigError(f"{path}: system must be a text or null, not {system!r}")
    return system


def _messages(path: Path, messages: object) -> list[dict[str, str]]:
    if not isinstance(messages, list) or len(messages) % 2:
        raise ConfigError(f"{path}: messages must be a list of questions, each with its answer")
    for number, message in enumerate(messages):
        role = _ROLES[number % 2]
        is_good = isinstance(message, dict) and message.keys() == {"role", "content"} and message["role"] == role
        if not is_good or not isinstance(message["content"], str):
            raise ConfigError(f"{path}: message {number + 1} must have the role {role!r} and a content that is a text")
    return messages
