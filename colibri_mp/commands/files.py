"""Verbs about checkpoints as files: `convert` and `checksum`."""

import argparse
import json
import signal
from pathlib import Path
from typing import Any, get_args

from colibri_mp.commands.arguments import Verbs, add_verb
from colibri_mp.commands.terminal import ProgressLine, raise_interrupt, say
from colibri_mp.config import LaunchConfig, format_size
from colibri_mp.formats import Encoding, ExpertBits


def checksum(args: argparse.Namespace) -> int:
    """Compute checksums of all experts, or hold the experts against those that were computed before."""
    from colibri_mp.checkpoint.hub import resolve
    from colibri_mp.checkpoint.source import Checkpoint
    from colibri_mp.checksums import check_or_compute
    from colibri_mp.compiling import compile_kernels
    from colibri_mp.lossy import with_lossy_options
    from colibri_mp.models import load_model

    with ProgressLine() as progress:
        checkpoint = Checkpoint.open(resolve(args.model, progress.show))
        model = with_lossy_options(load_model(checkpoint), LaunchConfig(expert_bits=args.expert_bits))
        encodings = frozenset[Encoding]().union(*(layer.encodings for layer in model.expert_layers))
        compile_kernels(encodings, LaunchConfig.planes, progress.show, lambda: False, model.quantises_experts)
        report = check_or_compute(checkpoint.files, model.expert_layers, checkpoint.fingerprint, progress.show)
    if args.json:
        print(json.dumps(report._asdict()))
    else:
        say(_checksum_summary(report))
    return 0


def convert(args: argparse.Namespace) -> int:
    """Rewrite a checkpoint as a container, in which each expert is one aligned read."""
    from colibri_mp.checkpoint.convert import Options, convert, is_unfinished
    from colibri_mp.checkpoint.convert.report import ConversionProgress, print_conversion
    from colibri_mp.checkpoint.hub import resolve

    options = Options.of(args.bits, args.group_size)
    folder = Path(args.destination)
    signal.signal(signal.SIGTERM, raise_interrupt)
    try:
        with ProgressLine() as progress:
            source = resolve(args.source, progress.show)
        with ConversionProgress() as listener:
            report = convert(source, folder, options, listener)
    except KeyboardInterrupt:
        kept = (
            "what is finished is kept: go on with the same command" if is_unfinished(folder) else "nothing was written"
        )
        say(f"\ncolibri-cluster: interrupted; {kept}")
        return 128 + signal.SIGINT
    if args.json:
        print(json.dumps(report.as_dict()))
    else:
        print_conversion(report)
    return 0


def register(verbs: Verbs) -> None:
    """Add the verbs of this file."""
    parser = add_verb(verbs, "checksum", checksum, as_json=True)
    parser.add_argument("model", metavar="MODEL", help="model folder, or Hugging Face id (org/name)")
    parser.add_argument(
        "--expert-bits",
        choices=get_args(ExpertBits),
        default="stored",
        help="what launches quantise experts to while they read them (default: stored)",
    )
    _add_convert(verbs)


def _add_convert(verbs: Verbs) -> None:
    parser = add_verb(verbs, "convert", convert, as_json=True)
    add = parser.add_argument
    add("source", metavar="SRC", help="what to convert: a folder, a Hugging Face id (org/name), or 'demo'")
    add("destination", metavar="DST", help="folder to make; an interrupted conversion goes on where it was")
    add(
        "--bits",
        choices=("4", "8", "mixed"),
        help="quantise experts that are stored wider (lossy); mixed: gate and up 4, down 8 (default: keep what is stored)",
    )
    add("--group-size", type=int, choices=(32, 64), help="weights that share a scale, with --bits (default: 64)")


def _checksum_summary(report: Any) -> str:
    read = f"{report.num_experts} experts, {format_size(report.bytes_read)}, read in {report.seconds:.1f} s"
    new = report.num_experts - report.num_known
    kept = f"; checksums of {new} are kept in {report.path}" if new else ""
    return f"{read}; {report.num_known} had a checksum, and have it still{kept}"
