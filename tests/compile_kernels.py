"""Compiles what the tests need before they start, in two processes: else two of them would compile the same, within their time limits."""

import multiprocessing
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from colibri_mp.checkpoint.source import Checkpoint
from colibri_mp.coordinator import encodings_of
from colibri_mp.formats import Encoding
from colibri_mp.kernels import isa
from colibri_mp.kernels.warming import BLOCKS, warm
from colibri_mp.models import load_model

GOLDEN = Path(__file__).parent / "golden"


def compile_for(encodings: Iterable[Encoding], blocks: Iterable[str]) -> None:
    """A process's share; what the other has done by then is found in the cache."""
    isa.prepare_cache()
    started = time.monotonic()
    names = warm(encodings, lambda _text: None, blocks=blocks, quantises=not blocks)
    print(f"{len(names)} kernels in {time.monotonic() - started:.0f} s", file=sys.stderr)


def main() -> int:
    """Weights and products here, what layers do before their experts there."""
    models = [load_model(Checkpoint.open(path.parent)) for path in GOLDEN.glob("tiny*/*/config.json")]
    encodings = frozenset[Encoding]().union(*map(encodings_of, models))
    other = multiprocessing.get_context("spawn").Process(target=compile_for, args=((), tuple(BLOCKS)))
    other.start()
    compile_for(encodings, ())
    other.join()
    return other.exitcode or 0


if __name__ == "__main__":
    sys.exit(main())
