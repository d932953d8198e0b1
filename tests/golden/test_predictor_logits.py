"""Predictors give the logits of the reference, on the true hidden states and through their own bookkeeping."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from predictor_fixture import random_mtp, with_predictor

from colibri_mp import rundir
from colibri_mp.config import LaunchConfig
from colibri_mp.coordinator import Coordinator
from colibri_mp.messages import Floats, Ints
from colibri_mp.scheduler import Rows, Sequence

GOLDEN = Path(__file__).parent
FIXTURES = sorted(path.parent for path in GOLDEN.glob("tiny/*/golden.npz") if "mtp_logits" in np.load(path).files)
TOLERANCE = 2e-4


@contextmanager
def launched(folder: Path) -> Iterator[Coordinator]:
    """A coordinator in this process, with one worker."""
    config = LaunchConfig(model=str(folder), ctx=128, num_workers=1, num_threads=1, draft=2, usage="off")
    with ExitStack() as stack:
        run_dir = rundir.create(f"predictor-{os.getpid()}")
        stack.callback(run_dir.remove)
        yield Coordinator.launch(config, run_dir, lambda _text: None, lambda: False, stack)


def check(folder: Path, ids: Ints, expected: Floats) -> None:
    """Row p gets the hidden state of position p and token p + 1; rows in two parts, and the guess from the last."""
    sequence = Sequence(ids[: len(expected) + 1].tolist(), 128, 64)
    sequence.blocks = list(range(8))
    with launched(folder) as coordinator:
        predicting, backend = coordinator.predicting, coordinator._backend
        assert predicting is not None
        seen: list[Floats] = []
        note = predicting.note
        predicting.note = lambda rows, x: (seen.append(x.copy()), note(rows, x))[1]  # type: ignore[method-assign]
        predicting.begin(sequence)
        runs = ((len(expected), -1, 0),) if coordinator.states.num_slots else ()
        coordinator.forward([Rows(sequence, 0, len(expected), state_runs=runs)], lambda: None)
        x = backend.merge(ids[1 : len(expected) + 1].astype(np.int32), backend.final_norm(seen[0]))
        for first, count in ((0, 10), (10, len(expected) - 10)):
            part = np.ascontiguousarray(x[first : first + count])
            coordinator.compute_predictor([Rows(sequence, first, count)], part)
            logits = backend.predictor_head(part)
            np.testing.assert_allclose(logits, expected[first : first + count], rtol=0, atol=TOLERANCE)
        sequence.num_computed = len(expected)
        assert predicting.propose([(sequence, 1)]) == [[int(expected[-1].argmax())]]


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda path: path.name)
def test_logits_are_those_of_the_reference(fixture: Path) -> None:
    """Checkpoints that come with a predictor."""
    golden = np.load(fixture / "golden.npz")
    check(fixture, np.concatenate([golden["input_ids"], golden["generated_ids"]]), golden["mtp_logits"])


def test_logits_of_a_predictor_of_qwen3_next(tmp_path: Path) -> None:
    """Zero-centred norms, gated attention, names below `mtp`; the reference is transformers' layer, see the README."""
    golden = np.load(GOLDEN / "qwen3_next_predictor.npz")
    check(with_predictor("qwen3_next", tmp_path, random_mtp), golden["ids"], golden["logits"])


def test_fixtures_are_there() -> None:
    """The parametrisation above is not empty."""
    assert FIXTURES
