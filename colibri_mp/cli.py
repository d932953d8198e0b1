"""The command line: `colibri-cluster <verb>`; the verbs themselves are in `commands/`.

Text goes to stdout, everything about the run to stderr, `--json` prints one JSON object as the last line of stdout.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from colibri_mp import __version__
from colibri_mp.commands import chat, clusters, files, planning, run, script, serve, simulating
from colibri_mp.commands.arguments import Parser
from colibri_mp.errors import ColibriError

_GROUPS = (run, chat, script, serve, clusters, planning, simulating, files)


def entry_point() -> NoReturn:
    """The console script."""
    sys.exit(main(sys.argv[1:]))


def main(arguments: Sequence[str]) -> int:
    """Run a verb and return the exit code; errors are one line on stderr."""
    args, unknown = _parser().parse_known_args(arguments)
    if unknown:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    verb: Callable[[argparse.Namespace], int] = args.verb
    try:
        return verb(args)
    except ColibriError as error:
        print(f"colibri-cluster: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\ncolibri-cluster: interrupted; everything has been stopped", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of our output has gone, e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _parser() -> Parser:
    parser = Parser(
        prog="colibri-cluster",
        description="Run mixture-of-experts language models that are larger than this machine's memory.",
    )
    parser.add_argument("--version", action="version", version=f"colibri-mp {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True, parser_class=Parser)
    for group in _GROUPS:
        group.register(verbs)
    return parser
