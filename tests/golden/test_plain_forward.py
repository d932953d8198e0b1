"""Every golden checkpoint through the reader and plain numpy: the tables of offsets and the families are right by themselves."""

from pathlib import Path

import numpy as np
import pytest
from plain_forward import PlainModel

from colibri_mp.checkpoint import Checkpoint

FIXTURES = sorted(path.parent for path in Path(__file__).parent.glob("tiny*/*/golden.npz"))
TOLERANCE = 4e-5  # the reference is float32, and differs from itself by 3e-5: 2.1e-5 is the largest difference seen


@pytest.mark.parametrize("folder", FIXTURES, ids=[path.name for path in FIXTURES])
def test_reference_logits(folder: Path) -> None:
    """Teacher-forced logits are the reference's."""
    golden = np.load(folder / "golden.npz")
    ids = np.concatenate([golden["input_ids"], golden["generated_ids"]])
    logits = PlainModel(Checkpoint.open(folder)).logits(ids)
    np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=TOLERANCE)
