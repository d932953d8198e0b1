"""A script's file as plain values: TOML, or JSONL with a session a line. What they mean is the business of `checking`."""

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colibri_mp.errors import ConfigError


@dataclass(frozen=True)
class RawScript:
    """Unchecked values. `places` says where each session stands, for messages."""

    path: Path
    settings: dict[str, Any]
    sessions: list[Any]
    places: list[str]


def read_raw(path: Path) -> RawScript:
    """The values of a file.

    Raises:
        ConfigError: it cannot be read, or is neither valid TOML nor valid JSONL.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    match path.suffix:
        case ".toml":
            return _read_toml(path, text)
        case ".jsonl":
            return _read_jsonl(path, text)
    raise ConfigError(f"{path}: a script is a .toml or a .jsonl file, as in scripts/sessions/ (see docs/scripts.md)")


def _read_toml(path: Path, text: str) -> RawScript:
    try:
        settings = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    sessions = settings.pop("session", [])
    if not isinstance(sessions, list):
        raise ConfigError(f"{path}: write [[session]] with two brackets, once for each session")
    return RawScript(path, settings, sessions, [f"session {number}" for number in range(1, len(sessions) + 1)])


def _read_jsonl(path: Path, text: str) -> RawScript:
    """A session a line; the first line may be {"settings": {...}} instead."""
    settings: dict[str, Any] = {}
    sessions: list[Any] = []
    places: list[str] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        value = _json_line(path, number, line)
        if isinstance(value, dict) and value.keys() == {"settings"} and not sessions and not settings:
            settings = value["settings"]
            if not isinstance(settings, dict):
                raise ConfigError(f"{path}: line {number}: settings must be an object, not {settings!r}")
        else:
            sessions.append(value)
            places.append(f"line {number}")
    return RawScript(path, settings, sessions, places)


def _json_line(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: line {number}: not valid JSON: {error}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} stands there twice")
        found[key] = value
    return found
