"""The cluster that a verb talks to: a running one, or an own one that ends with the verb."""

import argparse
from typing import TYPE_CHECKING, Any

from colibri_mp.commands.arguments import launch_settings
from colibri_mp.commands.terminal import ProgressLine, say
from colibri_mp.errors import ConfigError

if TYPE_CHECKING:
    from colibri_mp.client import Cluster


def open_cluster(args: argparse.Namespace) -> "Cluster":
    """The running cluster that is named (or 'default'), or an own one if there is none or launch flags were given."""
    return connect(launch_settings(args))


def connect(settings: dict[str, Any], is_own: bool = False) -> "Cluster":
    """The same for settings of `LaunchConfig`; `is_own`: never a running one."""
    from colibri_mp import rundir
    from colibri_mp.client import Cluster

    name = settings.get("name", "default")
    if not is_own and settings.keys() <= {"name"} and rundir.find(name) is not None:
        say(f"using the running cluster {name!r}")
        return Cluster.attach(name)
    if not is_own and settings.keys() == {"name"}:
        raise ConfigError(f"no cluster named {name!r} is running; start it with `colibri-cluster launch --name {name}`")
    with ProgressLine() as progress:
        return Cluster.launch(**settings, progress=progress.show)
