"""Make the built-in model of colibri-mp: fetch its corpora, train it on a CPU, quantise it, write its card.

    pip install numpy torch==2.13.0 tokenizers         # nothing here is a dependency of colibri-mp
    python scripts/train_demo_model.py fetch           # Debian packages with the corpora: needs apt-get and bookworm lists
    python scripts/train_demo_model.py prepare         # samples, tokenizer, token streams
    python scripts/train_demo_model.py train --steps N --decay-steps M
    python scripts/train_demo_model.py evaluate        # held-out bits per byte before and after quantisation, samples
    python scripts/train_demo_model.py export          # colibri_mp/demo_model/
    python scripts/train_demo_model.py card            # its README.md

Everything between lies in ``--work`` (a folder beside the repository). The model card names each N and M that the shipped model
was made with. A run stopped by SIGTERM goes on with ``--resume``; the steps before the decay do not depend on N, so a run may be
started with a large N and resumed with the final one. A finished run goes on, from the full rate again, with a larger N. With
glibc, ``MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000 MALLOC_TOP_PAD_=500000000`` in the environment makes a step faster:
big buffers are then kept instead of mapped anew.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def fetch(options: argparse.Namespace) -> None:
    from demo_model import packages

    packages.fetch(options.work / "corpora")


def prepare(options: argparse.Namespace) -> None:
    from demo_model import data

    data.prepare(options.work / "corpora", options.work / "data", seed=0)


def train(options: argparse.Namespace) -> None:
    from demo_model.model import Shape
    from demo_model.train import Recipe, Run, train

    run = Run(Recipe(options.steps, options.decay_steps), Shape(), options.work / "data", options.work / "run")
    if options.resume:
        run.resume()
    train(run)


def evaluate(options: argparse.Namespace) -> None:
    from demo_model.evaluate import evaluate

    evaluate(options.work / "run", options.work / "data")


def export(options: argparse.Namespace) -> None:
    from demo_model.export import export_hugging_face, export_shipped

    export_one = export_hugging_face if options.unquantised else export_shipped
    export_one(options.work / "run", options.work / "data/tokenizer.json", options.out)


def card(options: argparse.Namespace) -> None:
    from demo_model.card import write_card

    write_card(options.work / "run", options.work / "data", options.out)


VERBS: tuple[Callable[[argparse.Namespace], None], ...] = (fetch, prepare, train, evaluate, export, card)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    subparsers = top.add_subparsers(dest="verb", required=True)
    verbs = {verb.__name__: subparsers.add_parser(verb.__name__) for verb in VERBS}
    for verb, function in zip(verbs.values(), VERBS, strict=True):
        verb.set_defaults(function=function)
        verb.add_argument(
            "--work", type=Path, default=ROOT.parent / "colibri-demo-model", help="corpora, data and run lie here"
        )
    verbs["train"].add_argument("--steps", type=int, required=True)
    verbs["train"].add_argument("--decay-steps", type=int, required=True)
    verbs["train"].add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    verbs["export"].add_argument("--unquantised", action="store_true", help="bf16, a tensor an expert")
    for name in ("export", "card"):
        verbs[name].add_argument("--out", type=Path, default=ROOT / "colibri_mp/demo_model")
    return top


def main() -> None:
    options = parser().parse_args()
    options.function(options)


if __name__ == "__main__":
    main()
