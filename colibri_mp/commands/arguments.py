"""What the verbs share of the command line's grammar: the parser, the flags of a cluster and of sampling, and their values.

Flags of a cluster come from the fields of `config.LaunchConfig`, those of sampling from `SAMPLING`.
"""

import argparse
import dataclasses
import difflib
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias, TypeVar

from colibri_mp.config import LaunchConfig, flag_of
from colibri_mp.errors import ConfigError

Item = TypeVar("Item", int, str)
Verbs: TypeAlias = "argparse._SubParsersAction[Parser]"
SAMPLING: tuple[tuple[str, str, type, str], ...] = (
    ("--temp", "temperature", float, "0 is greedy; default: the checkpoint's"),
    ("--top-p", "top_p", float, "keep the likeliest tokens up to this share of the probability"),
    ("--top-k", "top_k", int, "keep this many of the likeliest tokens"),
    ("--min-p", "min_p", float, "keep tokens at least this likely, relative to the likeliest"),
    ("--repetition-penalty", "repetition_penalty", float, "divide the logits of tokens that have occurred"),
    ("--seed", "seed", int, "same seed, same text"),
)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors name the nearest known flag or verb."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Print one line with a hint and exit with 2."""
        sys.stderr.write(f"{self.prog}: {message}{self._hint(message)}\n")
        sys.stderr.write(f"Try `{self.prog} --help`.\n")
        raise SystemExit(ConfigError.exit_code)

    def _hint(self, message: str) -> str:
        """The nearest known flag, or verb, to a word of the message that is none."""
        known = [option for action in self._actions for option in action.option_strings]
        for action in self._actions:
            known += [str(choice) for choice in action.choices or ()]
        for quoted in message.partition(" (choose")[0].split():
            word = quoted.partition("=")[0].strip("',:()")
            nearest = difflib.get_close_matches(word, known, n=1)
            if nearest and word not in known and (word.startswith("-") or "choice" in message):
                return f"; did you mean {nearest[0]}?"
        return ""


def add_verb(
    verbs: Verbs, name: str, function: Callable[[argparse.Namespace], int],
    cluster: bool = False, sampling: bool = False, as_json: bool = False,
) -> argparse.ArgumentParser:  # fmt: skip
    summary = (function.__doc__ or "").strip()
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=summary, description=summary)
    parser.set_defaults(verb=function, parser=parser)
    if cluster:
        _add_cluster_flags(parser)
    if sampling:
        _add_sampling_flags(parser)
    if as_json:
        parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    return parser


def _add_cluster_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("cluster")
    for spec in dataclasses.fields(LaunchConfig):
        default = f" (default: {spec.default})" if spec.default not in (0, "") else ""
        group.add_argument(
            flag_of(spec), dest=spec.name, default=argparse.SUPPRESS, metavar=spec.metadata.get("metavar"),
            type=str if spec.name == "ram" else type(spec.default), choices=spec.metadata.get("choices"),
            help=spec.metadata["help"] + default,
        )  # fmt: skip


def _add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, metavar="N", help="most tokens to generate (default: what fits)")
    for flag, name, kind, help_text in SAMPLING:
        group.add_argument(flag, dest=name, type=kind, metavar="X" if kind is float else "N", help=help_text)


def launch_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given as flags."""
    return {
        spec.name: getattr(args, spec.name) for spec in dataclasses.fields(LaunchConfig) if hasattr(args, spec.name)
    }


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for _, name, _, _ in SAMPLING if getattr(args, name) is not None}


def items_of(text: str, flag: str, kind: type[Item]) -> list[Item]:
    """The values of a list such as "1GB,2GB"."""
    try:
        return [kind(item.strip()) for item in text.split(",") if item.strip()]
    except ValueError as error:
        raise ConfigError(f"{flag} takes integers separated by commas, not {text!r}") from error
