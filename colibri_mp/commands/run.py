"""`colibri-cluster run`: one prompt, one answer."""

import argparse
import json
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from colibri_mp.answer_line import describe_answer
from colibri_mp.commands.arguments import Verbs, add_verb, sampling_options
from colibri_mp.commands.connecting import open_cluster
from colibri_mp.commands.terminal import say
from colibri_mp.errors import ConfigError, ProtocolError

if TYPE_CHECKING:
    from colibri_mp.messages import Finished


def run(args: argparse.Namespace) -> int:
    """Generate from one prompt."""
    prompt = _prompt(args)
    with open_cluster(args) as cluster:
        events = cluster.events(prompt, max_tokens=args.max_tokens, stop=args.stop or (), **sampling_options(args))
        token_ids, text, finished = _receive(events, show=not args.json)
        memory = cluster.stats()["memory"]
    if args.json:
        answer = {"text": text, "token_ids": token_ids, "finish_reason": finished.finish_reason}
        print(json.dumps({**answer, **finished.stats, "memory": memory}, ensure_ascii=False))
    else:
        print(flush=True)
        say(describe_answer(finished.finish_reason, finished.stats, memory))
    return 0


def register(verbs: Verbs) -> None:
    """Add `run`."""
    parser = add_verb(verbs, "run", run, cluster=True, sampling=True, as_json=True)
    parser.add_argument("prompt", nargs="?", help="the text to continue; '-' or nothing reads it from a pipe")
    parser.add_argument("--prompt-ids", metavar="1,2,3", help="token ids in place of text; needs no tokenizer")
    parser.add_argument("--chat", action="store_true", help="put the prompt into the checkpoint's chat template")
    parser.add_argument("--system", metavar="TEXT", help="system message (with --chat)")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")


def _prompt(args: argparse.Namespace) -> Any:
    """The prompt as `Cluster.events` takes it."""
    if args.prompt_ids is not None:
        if args.prompt is not None or args.chat:
            raise ConfigError("give either a text or --prompt-ids, and no --chat with ids")
        try:
            return [int(token) for token in args.prompt_ids.split(",")]
        except ValueError as error:
            raise ConfigError(f"--prompt-ids takes integers separated by commas, not {args.prompt_ids!r}") from error
    text = args.prompt
    if text is None and sys.stdin.isatty():
        raise ConfigError('no prompt: give one, as in `colibri-cluster run "Once upon a time"`, or pipe it in')
    if text is None or text == "-":
        text = sys.stdin.read()
    if not args.chat:
        if args.system is not None:
            raise ConfigError("--system needs --chat")
        return text
    system = [{"role": "system", "content": args.system}] if args.system else []
    return [*system, {"role": "user", "content": text}]


def _receive(events: Iterable[Any], show: bool) -> tuple[list[int], str, "Finished"]:
    """Token ids, text and end of an answer; `show` prints the text as it comes."""
    from colibri_mp.messages import Finished, Piece

    token_ids: list[int] = []
    text = ""
    for event in events:
        if not isinstance(event, Piece | Finished):
            continue
        text += event.text
        if show:
            print(event.text, end="", flush=True)
        if isinstance(event, Finished):
            return token_ids, text, event
        token_ids += event.token_ids
    raise ProtocolError("the answer ended without a finish")
