"""Verbs that start, show and end clusters: `launch`, `status`, `stop`."""

import argparse
import json
import signal
from collections.abc import Sequence

from colibri_mp.commands.arguments import Verbs, add_verb, launch_settings
from colibri_mp.commands.terminal import ProgressLine, raise_interrupt, say
from colibri_mp.config import LaunchConfig


def launch(args: argparse.Namespace) -> int:
    """Start a cluster; in the foreground until Ctrl-C, SIGTERM or `stop`, or detached."""
    from colibri_mp.handshake import start_coordinator, stop_process

    config = LaunchConfig(**{"name": "default", **launch_settings(args)})
    with ProgressLine() as progress:
        process, ready = start_coordinator(config, owned=not args.detach, progress=progress.show)
    _print_notes(ready.notes)
    say(f"cluster {ready.name!r} serves, coordinator pid {process.pid}")
    if args.detach:
        return 0
    say("stop it with Ctrl-C or `colibri-cluster stop`")
    signal.signal(signal.SIGTERM, raise_interrupt)
    try:
        return process.wait()
    except KeyboardInterrupt:
        say("\nstopping")
        return 0
    finally:
        stop_process(process)


def status(args: argparse.Namespace) -> int:
    """What a running cluster is and does."""
    from colibri_mp.client import Cluster

    with Cluster.attach(args.name or "default") as cluster:
        stats = cluster.stats()
    if args.json:
        print(json.dumps(stats))
    else:
        from colibri_mp.report import print_status

        print_status(stats)
    return 0


def stop(args: argparse.Namespace) -> int:
    """End a running cluster."""
    from colibri_mp.client import Cluster

    cluster = Cluster.attach(args.name or "default")
    cluster.stop()
    cluster.wait_until_gone()
    say(f"cluster {cluster.name!r} has stopped")
    return 0


def register(verbs: Verbs) -> None:
    """Add the verbs of this file."""
    parser = add_verb(verbs, "launch", launch, cluster=True)
    parser.add_argument("--detach", action="store_true", help="return when it serves, and leave it running")
    for name, function in (("status", status), ("stop", stop)):
        parser = add_verb(verbs, name, function, as_json=name == "status")
        parser.add_argument("--name", default="", metavar="NAME", help="name of the cluster (default: 'default')")


def _print_notes(notes: Sequence[str]) -> None:
    for note in notes:
        say(f"  {note}")
