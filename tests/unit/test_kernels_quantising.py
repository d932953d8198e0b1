"""Quantising groups with a searched range: the kernel is its reference to the byte, and never worse than plain rounding."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from colibri_mp.formats import Encoding
from colibri_mp.kernels import reference
from colibri_mp.kernels.quantising import STEPS, Quantised, quantise

Floats = NDArray[np.float32]
FORMS = [(4, 32), (4, 64), (8, 32), (8, 64)]


def samples(group: int) -> dict[str, Floats]:
    """Matrices of many kinds, 7 rows: the last tile of 16 groups is not full."""
    rng = np.random.default_rng(3)
    normal = rng.standard_normal((7, 3 * group)).astype(np.float32)
    steps = np.tile(np.arange(group, dtype=np.float32) % 16, (7, 3)) * np.float32(0.25) - 1
    return {
        "normal": normal / 45,
        "heavy tails": rng.standard_t(3, normal.shape).astype(np.float32),
        "far from zero": normal / 10 + 1000,
        "constant": np.full_like(normal, 0.3),
        "zeros": np.zeros_like(normal),
        "exact steps": steps,
        "one large": np.where(rng.random(normal.shape) < 0.01, 50, normal).astype(np.float32),
        "tiny": normal * np.float32(1e-30),
        "large": normal * np.float32(1e15),
    }


def dequantised(done: Quantised, values: Floats, bits: int, group: int) -> Floats:
    """What readers of the stored parts will see."""
    parts = [done.weight, done.scales, done.biases]
    return reference.dequantise(Encoding("affine", bits, group, "bf16"), *values.shape, parts)


def squared_errors(stored: Floats, values: Floats, group: int) -> NDArray[np.float64]:
    """By group, in float64."""
    return np.square(stored.astype(np.float64) - values).reshape(-1, group).sum(axis=1)


def plain(values: Floats, bits: int, group: int) -> Floats:
    """Round-to-nearest between the least and the greatest value of a group, scale and bias in bf16."""
    codes, scales, biases = reference.quantise(values, bits, group, STEPS[:0])
    stored = codes.reshape(-1, group).astype(np.float32) * scales[:, None] + biases[:, None]
    return stored.reshape(values.shape)


@pytest.mark.parametrize(("bits", "group"), FORMS)
@pytest.mark.parametrize("kind", samples(32))
def test_kernel_is_the_reference(bits: int, group: int, kind: str) -> None:
    """Codes, scales and biases are the same bytes; the stated errors are those of what is stored."""
    values = samples(group)[kind]
    done = quantise(values, bits, group)
    codes, scales, biases = reference.quantise(values, bits, group, STEPS)
    stored = reference.stored_codes(done.weight, *values.shape, bits)
    np.testing.assert_array_equal(stored, codes)
    for part, expected in ((done.scales, scales), (done.biases, biases)):
        np.testing.assert_array_equal(reference.elements(part, "bf16"), expected)
    errors = squared_errors(dequantised(done, values, bits, group), values, group)
    np.testing.assert_allclose(done.squared_error, errors, rtol=1e-4, atol=1e-37)
    squares = squared_errors(np.zeros_like(values), values, group)
    np.testing.assert_allclose(done.squared_values, squares, rtol=1e-5, atol=1e-37)


@pytest.mark.parametrize(("bits", "group"), FORMS)
@pytest.mark.parametrize("kind", samples(32))
def test_never_worse_than_plain_rounding(bits: int, group: int, kind: str) -> None:
    """In every group; and the error of plain rounding is stated truly."""
    values = samples(group)[kind]
    done = quantise(values, bits, group)
    assert (done.squared_error <= done.plain_squared_error).all()
    expected = squared_errors(plain(values, bits, group), values, group)
    np.testing.assert_allclose(done.plain_squared_error, expected, rtol=1e-4, atol=1e-37)


@pytest.mark.parametrize(("bits", "group", "most"), [(4, 64, 0.84), (4, 32, 0.81), (8, 64, 0.9), (8, 32, 0.83)])
def test_search_pays(bits: int, group: int, most: float) -> None:
    """On weights as models have them, the squared error is a tenth to a fifth below plain rounding's."""
    values = np.random.default_rng(1).standard_normal((64, 1024)).astype(np.float32)
    done = quantise(values, bits, group)
    assert done.squared_error.sum() <= most * done.plain_squared_error.sum()


def test_values_that_fit_are_kept() -> None:
    """Sixteen even steps lose nothing in 4 bits."""
    values = samples(64)["exact steps"]
    np.testing.assert_array_equal(dequantised(quantise(values, 4, 64), values, 4, 64), values)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30])
def test_unusable_values_show(value: float) -> None:
    """What cannot be quantised makes the sum of squares infinite or NaN, of its own group only."""
    values = samples(64)["normal"]
    values[3, 70] = value
    with np.errstate(all="ignore"):
        done = quantise(values, 4, 64)
    assert np.flatnonzero(~np.isfinite(done.squared_values)).tolist() == [3 * 3 + 1]


@given(
    values=arrays(np.float32, (3, 64), elements=st.floats(-1e6, 1e6, width=32)),
    bits=st.sampled_from([4, 8]),
    group=st.sampled_from([32, 64]),
)
@settings(max_examples=60, deadline=None)
def test_any_values(values: Floats, bits: int, group: int) -> None:
    """Whatever the values: the reference's bytes, and no group worse than plain rounding."""
    done = quantise(values, bits, group)
    codes, scales, _ = reference.quantise(values, bits, group, STEPS)
    np.testing.assert_array_equal(reference.stored_codes(done.weight, 3, 64, bits), codes)
    np.testing.assert_array_equal(reference.elements(done.scales, "bf16"), scales)
    assert (done.squared_error <= done.plain_squared_error).all()
