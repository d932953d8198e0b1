"""`colibri-cluster serve`: a cluster behind HTTP, for clients of OpenAI's and Anthropic's interfaces."""

import argparse
import dataclasses
import signal
import sys
from typing import Any

from colibri_mp.commands.arguments import Verbs, add_verb
from colibri_mp.commands.terminal import say
from colibri_mp.server.settings import ServerConfig, flag_of


def serve(args: argparse.Namespace) -> int:
    """Serve OpenAI's and Anthropic's HTTP interfaces, from an own cluster or a running one, until Ctrl-C."""
    from colibri_mp.commands.connecting import cluster_opener
    from colibri_mp.server.serving import bind, serve, url_of

    config = ServerConfig(**_server_settings(args))
    key = config.read_key()
    open_cluster = cluster_opener(args, client="server")
    signal.signal(signal.SIGTERM, lambda _signal, _frame: sys.exit(0))  # until the server has handlers of its own
    listener = bind(config.host, config.port)
    url = url_of(listener)
    say(f"listening on {url}; stop with Ctrl-C")
    if not key and not listener.getsockname()[0].startswith(("127.", "::1")):
        say("WARNING: without --api-key, everybody who can reach this address can use it")
    serve(config, listener, open_cluster, lambda model: say(f"model {model!r} is served at {url}/v1"))
    return 0


def register(verbs: Verbs) -> None:
    """Add `serve`."""
    parser = add_verb(verbs, "serve", serve, cluster=True)
    group = parser.add_argument_group("server")
    for spec in dataclasses.fields(ServerConfig):
        repeats = spec.default == ()
        default = f" (default: {spec.default})" if spec.default not in (0, "", ()) else ""
        group.add_argument(
            flag_of(spec), dest=spec.name, default=argparse.SUPPRESS, metavar=spec.metadata["metavar"],
            type=str if repeats else type(spec.default), action="append" if repeats else "store",
            help=spec.metadata["help"] + default,
        )  # fmt: skip


def _server_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given as flags."""
    given = {
        spec.name: getattr(args, spec.name) for spec in dataclasses.fields(ServerConfig) if hasattr(args, spec.name)
    }
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
