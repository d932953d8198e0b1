"""The coordinator's part on MLX: sequences of a step apart, paged blocks that move, routers, matrices of every encoding."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed: pip install 'colibri-mp[mlx]'")

import mlx.core as mx
from direct_model import DirectModel
from test_mlx_experts import ENCODINGS, random_parts

from colibri_mp.formats import Encoding
from colibri_mp.kernels import reference, reference_attention
from colibri_mp.mlx_backend import matrices
from colibri_mp.mlx_backend.router import choose
from colibri_mp.specs import RouterSpec

GOLDEN = Path(__file__).parents[1] / "golden"
TOKENS = np.random.default_rng(0).integers(0, 256, 60).tolist()


@pytest.fixture(scope="module")
def direct() -> DirectModel:
    """A model with windows, sinks, biases and yarn."""
    return DirectModel(GOLDEN / "tiny" / "gpt_oss")


def test_sequences_of_a_step_are_apart(direct: DirectModel) -> None:
    """Two sequences in one step, one in the middle and one at its beginning, give what each gives alone."""
    first, second = TOKENS[:40], TOKENS[40:]
    alone = direct.forward((first, 0, [0, 1, 2])), direct.forward((second, 0, [3, 4]))
    direct.forward((first[:21], 0, [9, 14, 11]))
    both = direct.forward((first[21:], 21, [9, 14, 11]), (second, 0, [13, 8]))
    np.testing.assert_allclose(both[:19], alone[0][21:], rtol=0, atol=2e-5)
    np.testing.assert_allclose(both[19:], alone[1], rtol=0, atol=2e-5)


def test_blocks_can_be_moved(direct: DirectModel) -> None:
    """What is copied out of a block and set into another one is the same cache, to the bit."""
    direct.forward((TOKENS[:32], 0, [0, 1, 2]))
    expected = direct.forward((TOKENS[32:40], 32, [0, 1, 2]))
    caches = direct.model.caches
    for source, target in ((0, 20), (1, 17)):
        data = caches.copy_block(source)
        assert data.nbytes == caches.block_bytes
        caches.set_block(target, np.frombuffer(data.tobytes(), np.uint8))
    moved = direct.forward((TOKENS[32:40], 32, [20, 17, 5]))
    np.testing.assert_array_equal(moved, expected)


def test_states_are_by_slot() -> None:
    """A recurrent state that is copied to another slot goes on as the first does, to the bit; another sequence does not disturb it."""
    direct = DirectModel(GOLDEN / "tiny" / "qwen3_next")
    direct.forward((TOKENS[:20], 0, [1, 2]), (TOKENS[30:47], 0, [4, 3]))
    states = direct.model.states
    data = states.copy_slot(1)
    assert data.nbytes == states.slot_bytes
    states.set_slot(2, np.frombuffer(data.tobytes(), np.uint8))
    for block, copy in ((1, 6), (2, 7)):
        direct.model.caches.set_block(copy, direct.model.caches.copy_block(block))
    expected = direct.forward((TOKENS[20:24], 20, [1, 2]))
    np.testing.assert_array_equal(direct.forward((TOKENS[20:24], 20, [6, 7])), expected)
    whole = direct.forward((TOKENS[:24], 0, [1, 2]))
    np.testing.assert_allclose(whole[20:], expected, rtol=0, atol=2e-5)


SPECS = [
    RouterSpec(16, 4, True),
    RouterSpec(16, 4, False, top_p=0.6),
    RouterSpec(16, 4, True, scoring="sigmoid", scaling=2.5),
    RouterSpec(16, 3, True, scoring="sigmoid", num_groups=4, kept_groups=2),
    RouterSpec(16, 3, False, num_groups=4, kept_groups=2),
]


@pytest.mark.parametrize("spec", SPECS, ids=range(len(SPECS)))
def test_choice_is_the_reference(spec: RouterSpec) -> None:
    """The chosen experts and their weights are those of the plain reference, whose matrix is the identity here."""
    rng = np.random.default_rng(4)
    logits = rng.standard_normal((9, 16)).astype(np.float32)
    correction = rng.standard_normal(16).astype(np.float32) if spec.scoring == "sigmoid" else None
    ids, weights = choose(logits, correction, spec)
    expected_ids, expected_weights = reference_attention.choose(logits, correction, spec)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected_weights, rtol=1e-5)
    assert (ids.dtype, weights.dtype) == (np.int32, np.float32)


@pytest.mark.parametrize("encoding", [*ENCODINGS, Encoding("affine", 5, 32, "f16")], ids=Encoding.describe)
def test_matrix(encoding: Encoding, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and products of a resident matrix are those of its stored values; a product may be cut into blocks of rows."""
    rows, cols = 24, 256
    monkeypatch.setattr(matrices, "WIDENED_BYTES", 7 * 4 * cols)
    parts = random_parts(encoding, rows, cols)
    matrix = matrices.make(encoding, rows, cols, parts)
    values = reference.dequantise(encoding, rows, cols, parts)
    np.testing.assert_allclose(
        np.array(matrix.gather(np.array([3, 0, 23], np.int32))),
        values[[3, 0, 23]],
        rtol=1e-6,
        atol=2e-7 * np.abs(values).max(),
    )
    x = np.random.default_rng(2).standard_normal((5, cols)).astype(np.float32)
    expected = reference.linear(x, values)
    np.testing.assert_allclose(np.array(matrix(mx.array(x))), expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    held = sum(array.nbytes for array in (matrix.weight, matrix.scales, matrix.biases) if array is not None)
    assert held == matrices.device_bytes(encoding, rows, cols)
