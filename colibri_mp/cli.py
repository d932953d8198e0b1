"""The command line: `colibri-cluster <verb>`. Each verb is a function of the parsed arguments that returns an exit code.

Flags of a cluster come from the fields of `config.LaunchConfig`, flags of sampling from `_SAMPLING`. Text goes to stdout,
everything about the run to stderr, `--json` prints one JSON object as the last line of stdout.
"""

import argparse
import dataclasses
import difflib
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from colibri_mp import __version__
from colibri_mp.config import LaunchConfig, flag_of, parse_size
from colibri_mp.errors import ColibriError, ConfigError

Item = TypeVar("Item", int, str)
_SAMPLING: tuple[tuple[str, str, type, str], ...] = (
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


# -- verbs -------------------------------------------------------------------------------------------------------------


def launch(args: argparse.Namespace) -> int:
    """Start a cluster; in the foreground until Ctrl-C, SIGTERM or `stop`, or detached."""
    from colibri_mp.handshake import start_coordinator, stop_process

    config = LaunchConfig(**{"name": "default", **_launch_settings(args)})
    with _Progress() as progress:
        process, ready = start_coordinator(config, owned=not args.detach, progress=progress.show)
    _print_notes(ready.notes)
    _say(f"cluster {ready.name!r} serves, coordinator pid {process.pid}")
    if args.detach:
        return 0
    _say("stop it with Ctrl-C or `colibri-cluster stop`")
    signal.signal(signal.SIGTERM, _raise_interrupt)
    try:
        return process.wait()
    except KeyboardInterrupt:
        _say("\nstopping")
        return 0
    finally:
        stop_process(process)


def run(args: argparse.Namespace) -> int:
    """Generate from one prompt."""
    from colibri_mp.messages import Finished

    prompt = _prompt(args)
    token_ids: list[int] = []
    text = ""
    with _cluster(args) as cluster:
        for event in cluster.events(prompt, max_tokens=args.max_tokens, stop=args.stop or (), **_sampling(args)):
            text += event.text
            if not args.json:
                print(event.text, end="", flush=True)
            if isinstance(event, Finished):
                memory = cluster.stats()["memory"]
                break
            token_ids += event.token_ids
    stats = event.stats
    if args.json:
        answer = {"text": text, "token_ids": token_ids, "finish_reason": event.finish_reason, **stats, "memory": memory}
        print(json.dumps(answer, ensure_ascii=False))
    else:
        print(flush=True)
        _say(_summary(event.finish_reason, stats, memory))
    return 0


def chat(args: argparse.Namespace) -> int:
    """A conversation in the terminal; also with input from a pipe, one message a line."""
    from colibri_mp.chat import Chat

    with _cluster(args) as cluster:
        Chat(cluster, {"max_tokens": args.max_tokens, **_sampling(args)}, args.system).run(sys.stdin, sys.stdout)
    return 0


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
    _say(f"cluster {cluster.name!r} has stopped")
    return 0


def plan(args: argparse.Namespace) -> int:
    """How the memory would be split; allocates nothing."""
    from colibri_mp.planner import plan_for

    with _Progress() as progress:
        made = plan_for(LaunchConfig(**_launch_settings(args)), progress.show)
    if args.json:
        print(json.dumps(made.as_dict()))
    else:
        from colibri_mp.report import print_plan

        print_plan(made)
    return 0


def simulate(args: argparse.Namespace) -> int:
    """What other memory sizes and policies would have made of a traced run: hit rates, and tokens/s to expect."""
    from pathlib import Path

    from colibri_mp.simulate.cache import POLICIES
    from colibri_mp.simulate.grid import simulate as simulate_trace
    from colibri_mp.simulate.sizes import default_sizes, sizes_by_memory, sizes_by_slots
    from colibri_mp.trace import read_trace

    policies = _items(args.policy, "--policy", str) or list(POLICIES)
    for name in policies:
        if name not in POLICIES:
            raise ConfigError(f"--policy must be some of {', '.join(POLICIES)}, not {name!r}")
    trace = read_trace(Path(args.trace_file))
    sizes = sizes_by_memory(trace.header, _items(args.ram, "--ram", str), args.model) if args.ram else []
    sizes += sizes_by_slots(trace.header, _items(args.slots, "--slots", int))
    with _Progress() as progress:
        made = simulate_trace(
            trace,
            sizes or default_sizes(trace.header),
            policies,
            parse_size(args.disk) if args.disk else None,
            progress.show,
        )
    if args.plot:
        from colibri_mp.simulate.plot import plot_simulation

        plot_simulation(trace.header, made, Path(args.plot))
    if args.json:
        print(json.dumps(made.as_dict()))
    else:
        from colibri_mp.simulate.report import print_simulation

        print_simulation(trace, made)
    return 0


def checksum(args: argparse.Namespace) -> int:
    """Compute checksums of all experts, or hold the experts against those that were computed before."""
    from colibri_mp.checkpoint.hub import resolve
    from colibri_mp.checkpoint.source import Checkpoint
    from colibri_mp.checksums import check_or_compute
    from colibri_mp.compiling import compile_kernels
    from colibri_mp.models import load_model

    with _Progress() as progress:
        checkpoint = Checkpoint.open(resolve(args.model, progress.show))
        model = load_model(checkpoint)
        encodings = frozenset(e for layer in model.expert_layers for e in (layer.gate, layer.up, layer.down))
        compile_kernels(encodings, LaunchConfig.planes, progress.show, lambda: False)
        report = check_or_compute(checkpoint.files, model.expert_layers, checkpoint.fingerprint, progress.show)
    if args.json:
        print(json.dumps(report._asdict()))
    else:
        _say(_checksum_summary(report))
    return 0


def convert(args: argparse.Namespace) -> int:
    """Rewrite a checkpoint as a container, in which each expert is one aligned read."""
    from pathlib import Path

    from colibri_mp.checkpoint.convert import Options, convert, is_unfinished
    from colibri_mp.checkpoint.convert.report import ConversionProgress, print_conversion
    from colibri_mp.checkpoint.hub import resolve

    options = Options.of(args.bits, args.group_size)
    folder = Path(args.destination)
    signal.signal(signal.SIGTERM, _raise_interrupt)
    try:
        with _Progress() as progress:
            source = resolve(args.source, progress.show)
        with ConversionProgress() as listener:
            report = convert(source, folder, options, listener)
    except KeyboardInterrupt:
        kept = (
            "what is finished is kept: go on with the same command" if is_unfinished(folder) else "nothing was written"
        )
        _say(f"\ncolibri-cluster: interrupted; {kept}")
        return 128 + signal.SIGINT
    if args.json:
        print(json.dumps(report.as_dict()))
    else:
        print_conversion(report)
    return 0


# -- arguments ---------------------------------------------------------------------------------------------------------


def _parser() -> Parser:
    parser = Parser(
        prog="colibri-cluster",
        description="Run mixture-of-experts language models that are larger than this machine's memory.",
    )
    parser.add_argument("--version", action="version", version=f"colibri-mp {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True, parser_class=Parser)

    launch_parser = _verb(verbs, "launch", launch, cluster=True)
    launch_parser.add_argument("--detach", action="store_true", help="return when it serves, and leave it running")

    run_parser = _verb(verbs, "run", run, cluster=True, sampling=True, as_json=True)
    run_parser.add_argument("prompt", nargs="?", help="the text to continue; '-' or nothing reads it from a pipe")
    run_parser.add_argument("--prompt-ids", metavar="1,2,3", help="token ids in place of text; needs no tokenizer")
    run_parser.add_argument("--chat", action="store_true", help="put the prompt into the checkpoint's chat template")
    run_parser.add_argument("--system", metavar="TEXT", help="system message (with --chat)")
    run_parser.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")

    chat_parser = _verb(verbs, "chat", chat, cluster=True, sampling=True)
    chat_parser.add_argument("--system", metavar="TEXT", help="system message")

    for name, function in (("status", status), ("stop", stop)):
        verb_parser = _verb(verbs, name, function, as_json=name == "status")
        verb_parser.add_argument("--name", default="", metavar="NAME", help="name of the cluster (default: 'default')")
    _verb(verbs, "plan", plan, cluster=True, as_json=True)
    _add_simulate(verbs)

    checksum_parser = _verb(verbs, "checksum", checksum, as_json=True)
    checksum_parser.add_argument("model", metavar="MODEL", help="model folder, or Hugging Face id (org/name)")
    _add_convert(verbs)
    return parser


def _add_convert(verbs: Any) -> None:
    parser = _verb(verbs, "convert", convert, as_json=True)
    add = parser.add_argument
    add("source", metavar="SRC", help="what to convert: a folder, a Hugging Face id (org/name), or 'demo'")
    add("destination", metavar="DST", help="folder to make; an interrupted conversion goes on where it was")
    add(
        "--bits",
        choices=("4", "8", "mixed"),
        help="quantise experts that are stored wider (lossy); mixed: gate and up 4, down 8 (default: keep what is stored)",
    )
    add("--group-size", type=int, choices=(32, 64), help="weights that share a scale, with --bits (default: 64)")


def _add_simulate(verbs: Any) -> None:
    parser = _verb(verbs, "simulate", simulate, as_json=True)
    for flag, metavar, help_text in (
        ("--ram", "SIZE,...", "memory for everything, as for `launch`: 1GB,2GB,4GB"),
        ("--slots", "N,...", "experts in memory per layer; default, without --ram: from one token's to all"),
        (
            "--policy",
            "NAME,...",
            "lru,lfu,lru-freq,lrfu,lru+pins,belady, which are described in docs/trace.md (default: all)",
        ),
        ("--model", "DIR", "where the checkpoint of the trace is, for --ram (default: where it was)"),
        ("--disk", "SIZE", "bytes/s that a disk reads (default: as the trace saw it)"),
        ("--plot", "FILE", "write a PNG with a line for each policy; needs colibri-mp[plot]"),
    ):
        parser.add_argument(flag, default="", metavar=metavar, help=help_text)
    parser.add_argument("trace_file", metavar="TRACE", help="a file written by `--trace`")


def _verb(
    verbs: Any, name: str, function: Callable[[argparse.Namespace], int],
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
    for flag, name, kind, help_text in _SAMPLING:
        group.add_argument(flag, dest=name, type=kind, metavar="X" if kind is float else "N", help=help_text)


def _launch_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given as flags."""
    return {
        spec.name: getattr(args, spec.name) for spec in dataclasses.fields(LaunchConfig) if hasattr(args, spec.name)
    }


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for _, name, _, _ in _SAMPLING if getattr(args, name) is not None}


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


def _items(text: str, flag: str, kind: type[Item]) -> list[Item]:
    """The values of a list such as "1GB,2GB"."""
    try:
        return [kind(item.strip()) for item in text.split(",") if item.strip()]
    except ValueError as error:
        raise ConfigError(f"{flag} takes integers separated by commas, not {text!r}") from error


def _cluster(args: argparse.Namespace) -> Any:
    """The running cluster that is named (or 'default'), or an own one if there is none or launch flags were given."""
    from colibri_mp import rundir
    from colibri_mp.client import Cluster

    settings = _launch_settings(args)
    name = settings.get("name", "default")
    if settings.keys() <= {"name"} and rundir.find(name) is not None:
        _say(f"using the running cluster {name!r}")
        return Cluster.attach(name)
    if settings.keys() == {"name"}:
        raise ConfigError(f"no cluster named {name!r} is running; start it with `colibri-cluster launch --name {name}`")
    with _Progress() as progress:
        return Cluster.launch(**settings, progress=progress.show)


# -- output ------------------------------------------------------------------------------------------------------------


class _Progress:
    """One line on stderr that says what the start is busy with; gone when it is done. Whole lines if not a terminal."""

    def __init__(self) -> None:
        self._shown = 0

    def show(self, text: str) -> None:
        """Replace the line."""
        if sys.stderr.isatty():
            sys.stderr.write("\r" + text.ljust(self._shown))
            self._shown = len(text)
        else:
            sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            sys.stderr.write("\r" + " " * self._shown + "\r")
            sys.stderr.flush()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _print_notes(notes: Sequence[str]) -> None:
    for note in notes:
        _say(f"  {note}")


def _summary(reason: str, stats: dict[str, Any], memory: dict[str, Any]) -> str:
    from colibri_mp.config import format_size

    cache = stats["cache"]
    return (
        f"[{stats['completion_tokens']} tokens, {stats['decode_tok_s']:.1f} tok/s; first after {stats['ttft_s']:.2f} s "
        f"({stats['prompt_tokens']} prompt tokens); experts {cache['hit_rate']:.0%} from memory, "
        f"{format_size(cache['bytes_read'])} read; memory {format_size(memory['peak_bytes'])} "
        f"of {format_size(memory['budget_bytes'])}; ended: {reason}]"
    )


def _checksum_summary(report: Any) -> str:
    from colibri_mp.config import format_size

    read = f"{report.num_experts} experts, {format_size(report.bytes_read)}, read in {report.seconds:.1f} s"
    new = report.num_experts - report.num_known
    kept = f"; checksums of {new} are kept in {report.path}" if new else ""
    return f"{read}; {report.num_known} had a checksum, and have it still{kept}"


def _raise_interrupt(_signal: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt
