"""Matrix products: each format against numpy, and the same bits whatever the batch, the tile and the number of threads."""

import numpy as np
import pytest
from kernel_cases import BF16, F32, FORMATS, affine, packed, random_matrix, stored

from colibri_mp.formats import Encoding
from colibri_mp.kernels import reference
from colibri_mp.kernels.linear import linear
from colibri_mp.kernels.team import ThreadTeam
from colibri_mp.kernels.tiles import USES_PLANES

Q4 = affine(4, 64, "bf16")
TOLERANCE = {1: 2e-2, 2: 1e-4, 3: 1e-6}
"""Largest error over largest result, by number of planes."""


def product(
    x: np.ndarray, matrix: object, num_threads: int = 1, planes: int = 3, bias: np.ndarray | None = None
) -> np.ndarray:
    """The kernels' x W^T."""
    y = np.full((len(x), matrix.rows), np.nan, np.float32)  # type: ignore[attr-defined]
    with ThreadTeam(num_threads) as team:
        linear(team, x, matrix, bias, y, planes)  # type: ignore[arg-type]
    return y


def relative_error(y: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(y - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("encoding", FORMATS, ids=str)
def test_format_agrees_with_numpy(encoding: Encoding) -> None:
    """Three planes give the accuracy of float32, rows that fill no block included."""
    rng = np.random.default_rng(1)
    matrix, values = random_matrix(rng, encoding, 72, 384)
    x = rng.standard_normal((9, 384)).astype(np.float32) * np.float32(30)
    assert relative_error(product(x, matrix), reference.linear(x, values)) < TOLERANCE[3]


@pytest.mark.parametrize("encoding", FORMATS, ids=str)
def test_bits_do_not_depend_on_batch_or_threads(encoding: Encoding) -> None:
    """A row of a batch of 11 has the bits that it has alone, on one, two and three threads."""
    rng = np.random.default_rng(2)
    matrix, _ = random_matrix(rng, encoding, 200, 256)
    x = rng.standard_normal((11, 256)).astype(np.float32)
    alone = np.concatenate([product(x[t : t + 1], matrix) for t in range(11)])
    for num_threads in (1, 2, 3):
        np.testing.assert_array_equal(product(x, matrix, num_threads), alone)


@pytest.mark.skipif(not USES_PLANES, reason="this instruction set computes in float32")
@pytest.mark.parametrize("planes", [1, 2])
def test_fewer_planes_are_coarser(planes: int) -> None:
    """One plane has 8 bits of the activations, two have 15: within that tolerance, and worse than one more plane."""
    rng = np.random.default_rng(3)
    matrix, values = random_matrix(rng, Q4, 64, 256)
    x = rng.standard_normal((5, 256)).astype(np.float32)
    expected = reference.linear(x, values)
    error = relative_error(product(x, matrix, planes=planes), expected)
    assert TOLERANCE[planes] > error > relative_error(product(x, matrix, planes=planes + 1), expected)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("encoding", [affine(8, 128, "f32"), affine(4, 64, "bf16")], ids=str)
def test_largest_sums_do_not_overflow(encoding: Encoding, sign: int) -> None:
    """All codes and all activations at their largest: the integer sums of a group stay exact."""
    rows, cols = 16, 2 * encoding.group_size
    groups = np.ones((rows, 2), np.float32)
    parts = [
        np.full(encoding.part_bytes(rows, cols)[0], 255, np.uint8),
        stored(groups, encoding.scale),
        stored(0 * groups, encoding.scale),
    ]
    x = np.full((4, cols), sign, np.float32)
    x[2] *= 0.9999999
    y = product(x, packed(encoding, rows, cols, parts))
    exact = x.astype(np.float64).sum(axis=1, keepdims=True) * (2**encoding.bits - 1) * np.ones(rows)
    assert relative_error(y, exact) < 2e-7


def test_bias_is_added() -> None:
    """y = x W^T + bias, for rows that fill no block too."""
    rng = np.random.default_rng(4)
    matrix, values = random_matrix(rng, BF16, 24, 64)
    x, bias = rng.standard_normal((5, 64)).astype(np.float32), rng.standard_normal(24).astype(np.float32)
    assert relative_error(product(x, matrix, bias=bias), reference.linear(x, values, bias)) < 1e-6
    np.testing.assert_array_equal(product(x, matrix, bias=bias), product(x, matrix) + bias)


@pytest.mark.parametrize("encoding", [Q4, F32], ids=str)
def test_extreme_activations(encoding: Encoding) -> None:
    """Zeros give zeros, magnitudes from 1e-25 to 1e25 keep their accuracy, NaN stays visible and in its own row."""
    rng = np.random.default_rng(5)
    matrix, values = random_matrix(rng, encoding, 32, 256)
    x = rng.standard_normal((5, 256)).astype(np.float32) * np.array([[0], [1e-25], [1e25], [1], [1]], np.float32)
    x[3, 7] = np.nan
    y = product(x, matrix)
    assert not y[0].any()
    for t in (1, 2, 4):
        assert relative_error(y[t], reference.linear(x[t : t + 1], values)[0]) < 1e-6
    assert np.isnan(y[3]).all()


def test_scratch_of_dense_columns_is_padded() -> None:
    """Columns that fill no step of eight count as zeros."""
    rng = np.random.default_rng(6)
    matrix, values = random_matrix(rng, F32, 20, 13)
    x = rng.standard_normal((6, 13)).astype(np.float32)
    assert relative_error(product(x, matrix), reference.linear(x, values)) < 1e-6
