"""Every golden checkpoint of the families that MLX computes: reference logits and greedy tokens, on MLX's CPU device."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed: pip install 'colibri-mp[mlx]'")

from direct_model import DirectModel

from colibri_mp.checkpoint import Checkpoint
from colibri_mp.mlx_backend.mixers import missing_kinds
from colibri_mp.models import load_model

GOLDEN = Path(__file__).parents[1] / "golden"
FIXTURES = sorted(
    path.parent
    for path in GOLDEN.glob("tiny*/*/golden.npz")
    if not missing_kinds(load_model(Checkpoint.open(path.parent)))
)
TOLERANCE = 2e-4  # measured: 3.2e-5 at most
BLOCKS = [5, 2, 7, 0, 1, 3, 4, 6]


@pytest.mark.parametrize("fixture", FIXTURES, ids=[f"{path.parent.name}-{path.name}" for path in FIXTURES])
def test_fixture(fixture: Path) -> None:
    """A prompt and then token by token: logits within tolerance, greedy tokens the reference's; the long prompt's choices."""
    golden = np.load(fixture / "golden.npz")
    prompt, generated = golden["input_ids"].ravel().tolist(), golden["generated_ids"].ravel().tolist()
    direct = DirectModel(fixture)
    rows = [direct.forward((prompt, 0, BLOCKS))]
    for token in generated:
        assert rows[-1][-1].argmax() == token
        rows.append(direct.forward(([token], sum(map(len, rows)), BLOCKS)))
    np.testing.assert_allclose(np.concatenate(rows), golden["logits"], rtol=0, atol=TOLERANCE)
    long_logits = direct.forward((golden["long_ids"].ravel().tolist(), 0, BLOCKS))
    np.testing.assert_array_equal(long_logits.argmax(axis=1), golden["long_argmax"].ravel())
    picked = [*range(0, 96, 8), 95]
    np.testing.assert_allclose(long_logits[picked], golden["long_logits"], rtol=0, atol=TOLERANCE)
