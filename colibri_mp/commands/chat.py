"""`colibri-cluster chat`: a conversation in the terminal, or from a pipe."""

import argparse
import sys

from colibri_mp.commands.arguments import Verbs, add_verb, sampling_options
from colibri_mp.commands.connecting import open_cluster


def chat(args: argparse.Namespace) -> int:
    """A conversation in the terminal; also with input from a pipe, one message a line."""
    from colibri_mp.chat import Chat
    from colibri_mp.chat.lines import PipedLines, TerminalLines

    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    options = {"max_tokens": args.max_tokens, **sampling_options(args)}
    with open_cluster(args) as cluster:
        talk = Chat(cluster, options, args.system, sys.stdout, sys.stderr)
        return talk.run(TerminalLines(talk.commands) if is_terminal else PipedLines(sys.stdin))


def register(verbs: Verbs) -> None:
    """Add `chat`."""
    parser = add_verb(verbs, "chat", chat, cluster=True, sampling=True)
    parser.add_argument("--system", metavar="TEXT", help="system message")
