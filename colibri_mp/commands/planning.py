"""`colibri-cluster plan`: how the memory would be split, for a checkpoint, or for a model of which there is only a config.json."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from colibri_mp.commands.arguments import Verbs, add_verb, launch_settings
from colibri_mp.commands.terminal import ProgressLine
from colibri_mp.config import LaunchConfig, parse_size
from colibri_mp.errors import ConfigError, MemoryPlanError

if TYPE_CHECKING:  # for help, nothing is loaded that makes plans
    from colibri_mp.config_plan import ConfigPlan

_CONFIG_ONLY = (
    ("--bits", "BITS", "routed experts are stored in 2, 3, 4, 5, 6 or 8 bits, 16 (bf16), mxfp4, mxfp8, nvfp4 or fp8 (default: 4)"),
    ("--resident-bits", "BITS", "and attention, shared experts and dense blocks (default: as --bits)"),
    ("--end-bits", "BITS", "and embedding and head (default: 8)"),
    ("--group-size", "N", "weights that share a scale: 32, 64 or 128 (default: 64)"),
    ("--disk", "SIZE/s", "what the disk reads, for tokens/s (default: 2GB/s)"),
    ("--memory", "SIZE/s", "what the processor reads from memory (default: 20GB/s)"),
    ("--hit-rate", "SHARE", "of experts found in memory, 0 to 1 (default: the share that is there, as if all were used alike)"),
)  # fmt: skip


def plan(args: argparse.Namespace) -> int:
    """How the memory would be split; allocates nothing."""
    if args.config_only is not None:
        return _plan_config(args)
    for flag, _, _ in _CONFIG_ONLY:
        if getattr(args, _name(flag)) is not None:
            raise ConfigError(f"{flag} goes with --config-only: a checkpoint says itself how it is stored")
    from colibri_mp.planner import plan_for

    with ProgressLine() as progress:
        made = plan_for(LaunchConfig(**launch_settings(args)), progress.show)
    if args.json:
        print(json.dumps(made.as_dict()))
    else:
        from colibri_mp.report import print_plan

        print_plan(made)
    return 0


def register(verbs: Verbs) -> None:
    """Add `plan`."""
    parser = add_verb(verbs, "plan", plan, cluster=True, as_json=True)
    group = parser.add_argument_group("without a checkpoint")
    group.add_argument(
        "--config-only",
        metavar="FILE",
        help="plan from this config.json alone: what the model would take and how fast it could be, without --ram for "
        "several sizes",
    )
    for flag, metavar, help_text in _CONFIG_ONLY:
        group.add_argument(flag, metavar=metavar, help=help_text)


def _plan_config(args: argparse.Namespace) -> int:
    from colibri_mp.checkpoint.invented import StoredAs
    from colibri_mp.config_plan import plan_from_config
    from colibri_mp.forecast import Machine

    settings = launch_settings(args)
    if "model" in settings:
        raise ConfigError("give either --model or --config-only")
    bits = args.bits or "4"
    stored = StoredAs.of(bits, args.resident_bits or bits, args.end_bits or "8", _group_size(args.group_size or "64"))
    machine = Machine(
        _speed("--disk", args.disk or "2GB/s"), _speed("--memory", args.memory or "20GB/s"), _share(args.hit_rate)
    )
    path = Path(args.config_only)
    try:
        made = plan_from_config(path, LaunchConfig(**settings), stored, machine)
    except MemoryPlanError:
        if not args.json:  # what the model takes, and what other sizes would do, is what the user wants to know now
            _print_config_plan(plan_from_config(path, LaunchConfig(**{**settings, "ram": "auto"}), stored, machine))
        raise
    if args.json:
        print(json.dumps(made.as_dict()))
    else:
        _print_config_plan(made)
    return 0


def _print_config_plan(made: "ConfigPlan") -> None:
    from colibri_mp.report_config import print_config_plan

    print_config_plan(made)


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _group_size(text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"--group-size takes 32, 64 or 128, not {text!r}")
    return int(text)


def _speed(flag: str, text: str) -> int:
    """Bytes a second."""
    try:
        return parse_size(text.removesuffix("/s"))
    except ConfigError as error:
        raise ConfigError(f"{flag} takes bytes a second, such as 2GB/s, not {text!r}") from error


def _share(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ConfigError(f"--hit-rate takes a share from 0 to 1, not {text!r}")
    return share
