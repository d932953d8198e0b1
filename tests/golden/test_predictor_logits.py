"""The predictor of every golden checkpoint that has reference logits of one, on the true hidden states and through its own bookkeeping."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from colibri_mp import rundir
from colibri_mp.config import LaunchConfig
from colibri_mp.coordinator import Coordinator
from colibri_mp.messages import Floats
from colibri_mp.scheduler import Rows, Sequence

FIXTURES = sorted(
    path.parent for path in Path(__file__).parent.glob("tiny/*/golden.npz") if "mtp_logits" in np.load(path).files
)
TOLERANCE = 2e-4


@contextmanager
def launched(folder: Path) -> Iterator[Coordinator]:
    """A coordinator in this process, with one worker."""
    config = LaunchConfig(model=str(folder), ctx=128, num_workers=1, num_threads=1, draft=2, usage="off")
    with ExitStack() as stack:
        run_dir = rundir.create(f"predictor-{os.getpid()}")
        stack.callback(run_dir.remove)
        yield Coordinator.launch(config, run_dir, lambda _text: None, lambda: False, stack)


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda path: path.name)
def test_logits_are_those_of_the_reference(fixture: Path) -> None:
    """Row p gets the hidden state of position p and token p + 1; rows in one go or in parts, and the guess from the last."""
    golden = np.load(fixture / "golden.npz")
    ids, expected = np.concatenate([golden["input_ids"], golden["generated_ids"]]), golden["mtp_logits"]
    sequence = Sequence(ids[: len(expected) + 1].tolist(), 128, 64)
    sequence.blocks = list(range(8))
    with launched(fixture) as coordinator:
        predicting, backend = coordinator.predicting, coordinator._backend
        assert predicting is not None
        seen: list[Floats] = []
        predicting.begin(sequence)
        note = predicting.note
        predicting.note = lambda rows, x: (seen.append(x.copy()), note(rows, x))[1]  # type: ignore[method-assign]
        coordinator.forward([Rows(sequence, 0, len(expected))], lambda: None)
        x = backend.merge(ids[1 : len(expected) + 1].astype(np.int32), backend.final_norm(seen[0]))
        for first, count in ((0, 10), (10, len(expected) - 10)):
            part = np.ascontiguousarray(x[first : first + count])
            coordinator.compute_predictor([Rows(sequence, first, count)], part)
            logits = backend.predictor_head(part)
            np.testing.assert_allclose(logits, expected[first : first + count], rtol=0, atol=TOLERANCE)
        sequence.num_computed = len(expected)
        assert predicting.propose([(sequence, 1)]) == [[int(expected[-1].argmax())]]


def test_fixtures_are_there() -> None:
    """The parametrisation above is not empty."""
    assert FIXTURES
