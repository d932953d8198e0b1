"""Entry point."""
import argparse
from pathlib import Path

from demo_model.data import prepare
from demo_model.model import Shape
from demo_model.train import Recipe, Run, train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    p = verbs.add_parser("prepare")
    p.add_argument("--corpora", type=Path, required=True)
    p.add_argument("--data", type=Path, required=True)
    t = verbs.add_parser("train")
    t.add_argument("--data", type=Path, required=True)
    t.add_argument("--out", type=Path, required=True)
    t.add_argument("--steps", type=int, required=True)
    t.add_argument("--decay-steps", type=int, required=True)
    t.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    if options.verb == "prepare":
        prepare(options.corpora, options.data, 0)
    else:
        run = Run(Recipe(options.steps, options.decay_steps), Shape(), options.data, options.out)
        if options.resume:
            run.resume()
        train(run)


main()
