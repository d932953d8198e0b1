"""`colibri-cluster simulate`: what other memory sizes would have made of a traced run."""

import argparse
import json
from pathlib import Path

from colibri_mp.commands.arguments import Verbs, add_verb, items_of
from colibri_mp.commands.terminal import ProgressLine
from colibri_mp.config import parse_size
from colibri_mp.errors import ConfigError


def simulate(args: argparse.Namespace) -> int:
    """What other memory sizes and policies would have made of a traced run: hit rates, and tokens/s to expect."""
    from colibri_mp.simulate.cache import POLICIES
    from colibri_mp.simulate.grid import simulate as simulate_trace
    from colibri_mp.simulate.sizes import default_sizes, sizes_by_memory, sizes_by_slots
    from colibri_mp.trace import read_trace

    policies = items_of(args.policy, "--policy", str) or list(POLICIES)
    for name in policies:
        if name not in POLICIES:
            raise ConfigError(f"--policy must be some of {', '.join(POLICIES)}, not {name!r}")
    trace = read_trace(Path(args.trace_file))
    sizes = sizes_by_memory(trace.header, items_of(args.ram, "--ram", str), args.model) if args.ram else []
    sizes += sizes_by_slots(trace.header, items_of(args.slots, "--slots", int))
    with ProgressLine() as progress:
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


def register(verbs: Verbs) -> None:
    """Add `simulate`."""
    parser = add_verb(verbs, "simulate", simulate, as_json=True)
    for flag, metavar, help_text in (
        ("--ram", "SIZE,...", "memory for everything, as for `launch`: 1GB,2GB,4GB"),
        ("--slots", "N,...", "experts in memory per layer; default, without --ram: from one token's to all"),
        (
            "--policy",
            "NAME,...",
            "lrfu,lru,lfu,lru-freq,lru+pins,belady, which are described in docs/trace.md (default: all)",
        ),
        ("--model", "DIR", "where the checkpoint of the trace is, for --ram (default: where it was)"),
        ("--disk", "SIZE", "bytes/s that a disk reads (default: as the trace saw it)"),
        ("--plot", "FILE", "write a PNG with a line for each policy; needs colibri-mp[plot]"),
    ):
        parser.add_argument(flag, default="", metavar=metavar, help=help_text)
    parser.add_argument("trace_file", metavar="TRACE", help="a file written by `--trace`")
