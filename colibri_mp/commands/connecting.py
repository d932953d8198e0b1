"""The cluster that a verb talks to: a running one, or an own one that ends with the verb."""

import argparse
import subprocess
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from colibri_mp.commands.arguments import launch_settings
from colibri_mp.commands.terminal import ProgressLine, say
from colibri_mp.config import LaunchConfig
from colibri_mp.errors import ConfigError

if TYPE_CHECKING:
    from colibri_mp.client import Cluster

Opener: TypeAlias = "Callable[[Callable[[str], None], Callable[[subprocess.Popen[bytes]], None]], Cluster]"
"""Launches or attaches, given `progress` and `started` as of `Cluster.launch`; may be called in another thread."""


def open_cluster(args: argparse.Namespace) -> "Cluster":
    """The running cluster that is named (or 'default'), or an own one if there is none or launch flags were given."""
    return connect(launch_settings(args))


def connect(settings: dict[str, Any], is_own: bool = False) -> "Cluster":
    """The same for settings of `LaunchConfig`; `is_own`: never a running one."""
    opener = _opener(settings, is_own)
    with ProgressLine() as progress:
        return opener(progress.show, lambda _process: None)


def cluster_opener(args: argparse.Namespace, **more: Any) -> Opener:
    """What `open_cluster` does, to be done later; `more` are settings of an own cluster that are not the user's.

    Raises:
        ConfigError: a setting that is wrong, or no cluster of that name.
    """
    return _opener(launch_settings(args), is_own=False, **more)


def _opener(settings: dict[str, Any], is_own: bool, **more: Any) -> Opener:
    from colibri_mp import rundir
    from colibri_mp.client import Cluster

    name = settings.get("name", "default")
    if not is_own and settings.keys() <= {"name"} and rundir.find(name) is not None:
        say(f"using the running cluster {name!r}")
        return lambda _progress, _started: Cluster.attach(name)
    if not is_own and settings.keys() == {"name"}:
        raise ConfigError(f"no cluster named {name!r} is running; start it with `colibri-cluster launch --name {name}`")
    settings = {**settings, **more}
    LaunchConfig(**settings)
    return lambda progress, started: Cluster.launch(**settings, progress=progress, started=started)
