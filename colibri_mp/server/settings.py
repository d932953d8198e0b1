"""The settings of the HTTP side: one frozen dataclass from which the flags of `serve` come."""

import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from colibri_mp.config import parse_size
from colibri_mp.errors import ConfigError

_KEY_VARIABLE = "COLIBRI_API_KEY"


def _setting(default: Any, help_text: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help_text, **metadata})


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How to serve."""

    host: str = _setting(
        "127.0.0.1", "address to listen on; 0.0.0.0 is everybody who can reach this machine", metavar="ADDRESS"
    )
    port: int = _setting(8000, "port to listen on (0: a free one, which is printed)", metavar="N")
    api_key: str = _setting(
        "",
        f"key that clients must send; @FILE reads it from a file (default: ${_KEY_VARIABLE}, else none)",
        metavar="KEY",
    )
    allow_host: tuple[str, ...] = _setting(
        (), "name in a Host header that is answered, beside localhost and --host; may be repeated, '*' allows all",
        metavar="NAME",
    )  # fmt: skip
    cors_origin: tuple[str, ...] = _setting(
        (), "origin of web pages that may use this server; may be repeated, '*' allows all", metavar="ORIGIN"
    )
    model_name: tuple[str, ...] = _setting(
        (), "further name by which clients may ask for the model; may be repeated, '*' takes any name", metavar="NAME"
    )
    max_tokens: int = _setting(
        0, "longest answer of a request that does not say (0: what the context holds)", metavar="TOKENS"
    )
    max_body: str = _setting("8MB", "largest request", metavar="SIZE")
    max_connections: int = _setting(512, "connections at a time; more are told to come again", metavar="N")
    timeout: float = _setting(
        30.0, "seconds that a client may take to send a request, and to take a part of an answer", metavar="S"
    )
    ping: float = _setting(
        10.0, "seconds of silence after which a stream gets a comment that keeps it open", metavar="S"
    )
    stall: float = _setting(
        300.0, "seconds without progress, requests being there, after which /health says stalled", metavar="S"
    )

    def __post_init__(self) -> None:
        parse_size(self.max_body)
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be from 0 to 65535, not {self.port}")
        for flag, value, least in (
            ("--max-tokens", self.max_tokens, 0),
            ("--max-connections", self.max_connections, 1),
            ("--timeout", self.timeout, 0.1),
            ("--ping", self.ping, 0.1),
            ("--stall", self.stall, 1.0),
        ):
            if not value >= least:
                raise ConfigError(f"{flag} must be at least {least}, not {value}")

    @property
    def max_body_bytes(self) -> int:
        """Largest request, in bytes."""
        return parse_size(self.max_body)

    def read_key(self) -> str:
        """The key that clients must send, "" if none is needed.

        Raises:
            ConfigError: the file cannot be read, or holds no key.
        """
        key = self.api_key or os.environ.get(_KEY_VARIABLE, "")
        if not key.startswith("@"):
            return key
        try:
            key = Path(key[1:]).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key {key}: the file cannot be read ({error})") from error
        if not key:
            raise ConfigError("--api-key: the file is empty")
        return key


def flag_of(spec: dataclasses.Field[Any]) -> str:
    """The command-line flag of a field."""
    return "--" + spec.name.replace("_", "-")
