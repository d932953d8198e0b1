"""Rotary frequencies and tables against values of transformers 5.24.0 (its float32 results, printed once)."""

import math

import numpy as np
import pytest

from colibri_mp.errors import CheckpointError
from colibri_mp.kernels.rope import RopeTables, inverse_frequencies, rope_tables
from colibri_mp.specs import RopeSpec

TRANSFORMERS = {
    "default": (RopeSpec(1e4, 8), [1.0, 0.1, 0.01, 0.001], 1.0),
    "linear": (RopeSpec(1e4, 8, "linear", factor=8.0), [0.125, 0.0125, 0.00125, 0.000125], 1.0),
    "yarn": (
        RopeSpec(1e6, 8, "yarn", factor=4.0, original_max_position=32768),
        [1.0, 0.03162277862429619, 0.0006250000442378223, 7.905693564680405e-06],
        1.138629436111989,
    ),
    "yarn untruncated": (
        RopeSpec(150000.0, 8, "yarn", factor=32.0, original_max_position=4096, truncate=False),
        [1.0, 0.05081327259540558, 0.0004564839182421565, 4.099978468730114e-06],
        1.3465735902799727,
    ),
    "llama3": (
        RopeSpec(5e5, 8, "llama3", factor=8.0, original_max_position=8192),
        [1.0, 0.03760603070259094, 0.0005248460220173001, 6.647869668086059e-06],
        1.0,
    ),
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_frequencies_are_those_of_transformers(name: str) -> None:
    """Each rope type gives the inverse frequencies and the attention factor that transformers gives."""
    spec, frequencies, scaling = TRANSFORMERS[name]
    assert inverse_frequencies(spec) == pytest.approx(np.float32(frequencies), rel=2.5e-7)
    assert spec.attention_scaling == pytest.approx(scaling, rel=1e-12)


def test_tables_hold_cosines_and_sines_of_float32_angles() -> None:
    """Row p, column i is the cosine or sine of the float32 product p * frequency i, times the attention factor."""
    spec = TRANSFORMERS["yarn"][0]
    tables = rope_tables(spec, 5000)
    angle = float(np.float32(4321) * inverse_frequencies(spec)[1])
    assert tables.cos.shape == tables.sin.shape == (5000, 4)
    assert tables.cos.dtype == np.float32
    assert tables.rotary_dim == 8
    assert tables.cos[4321, 1] == pytest.approx(spec.attention_scaling * math.cos(angle), abs=2e-7)
    assert tables.sin[4321, 1] == pytest.approx(spec.attention_scaling * math.sin(angle), abs=2e-7)


def test_tables_take_the_planned_bytes() -> None:
    """`nbytes_for` is what both tables take."""
    tables = rope_tables(RopeSpec(1e4, 24), 100)
    assert RopeTables.nbytes_for(24, 100) == tables.cos.nbytes + tables.sin.nbytes


@pytest.mark.parametrize(("mscale", "all_dim", "expected"), [(1.0, 1.0, 1.0), (2.0, None, 0.1 * math.log(40) + 1)])
def test_yarn_attention_factor_follows_both_mscales(mscale: float, all_dim: float | None, expected: float) -> None:
    """With both mscales the factor is their ratio (1 for DeepSeek), with one of them the plain rule."""
    spec = RopeSpec(1e4, 64, "yarn", 40.0, 4096, mscale=mscale, mscale_all_dim=all_dim)
    assert spec.attention_scaling == pytest.approx(expected)


@pytest.mark.parametrize(
    "values", [{"rotary_dim": 7}, {"rope_type": "longrope"}, {"theta": 0.5}, {"rope_type": "yarn", "factor": 2.0}]
)
def test_impossible_specs_are_checkpoint_errors(values: dict[str, object]) -> None:
    """An odd width, an unknown type, a theta below one and yarn without its original context are refused."""
    with pytest.raises(CheckpointError):
        RopeSpec(**({"theta": 1e4, "rotary_dim": 8} | values))  # type: ignore[arg-type]
