"""Every golden checkpoint of the supported families, through real processes: reference logits and greedy tokens."""

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from colibri_mp import Cluster
from colibri_mp.trace import LAYER, read_trace

GOLDEN = Path(__file__).parent
FIXTURES = sorted(path.parent for path in GOLDEN.glob("tiny*/*/golden.npz"))
TOLERANCE = 2e-4  # golden README: float32 implementations differ by 3e-5 at most
ONE_CLUSTER = {"num_threads": 1, "ctx": 128, "num_workers": 1}


@pytest.mark.parametrize("fixture", FIXTURES, ids=[f"{path.parent.name}-{path.name}" for path in FIXTURES])
def test_fixture(fixture: Path, tmp_path: Path) -> None:
    """Teacher-forced logits within tolerance, each token's experts; decoding gives the reference's tokens, the long prompt its choices."""
    golden = np.load(fixture / "golden.npz")
    prompt, generated = golden["input_ids"].tolist(), golden["generated_ids"].tolist()
    with Cluster.launch(fixture, **ONE_CLUSTER, trace=str(tmp_path / "trace")) as cluster:
        logits = cluster.logits(prompt + generated, chunk=1)
        np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=TOLERANCE)
        done = cluster.generate(prompt, max_tokens=len(generated), temperature=0.0, ignore_eos=True)
        assert done.token_ids == generated
        long_logits = cluster.logits(golden["long_ids"].tolist())
        np.testing.assert_array_equal(long_logits.argmax(axis=1), golden["long_argmax"])
        picked = [*range(0, 96, 8), 95]
        np.testing.assert_allclose(long_logits[picked], golden["long_logits"], rtol=0, atol=TOLERANCE)
    if "router_idx" in golden:
        np.testing.assert_array_equal(_chosen(tmp_path / "trace", len(logits)), np.sort(golden["router_idx"]))


def _chosen(path: Path, num_tokens: int) -> NDArray[np.int64]:
    """The experts of the first tokens, which were steps of a row, [layers, T, K] ascending."""
    trace = read_trace(path)
    layers = trace.of_kind(LAYER)[: num_tokens * len(trace.header.layers)]
    assert set(layers["num_rows"]) == {1}
    asked = np.unpackbits(layers["asked"], axis=1, bitorder="little")
    chosen = np.nonzero(asked)[1].reshape(num_tokens, len(trace.header.layers), trace.header.top_k)
    return chosen.transpose(1, 0, 2)


def test_fixtures_are_there() -> None:
    """The parametrisation above is not empty, and each fixture says what it was made with."""
    assert len(FIXTURES) >= 30
    for fixture in FIXTURES:
        assert json.loads((fixture / "golden.json").read_text())["generated_ids"]
