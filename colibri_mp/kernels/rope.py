"""Rotary position embedding: frequency rules and the cosine and sine tables that the attention kernel reads.

Pairing is "half": elements i and i + rotary_dim / 2 of a head turn together, elements from `rotary_dim` on are left
alone. Formulas: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071) and transformers' `modeling_rope_utils.py`, whose
float32 rounding is followed: the frequencies and the angle `position * frequency` are float32 numbers.

Reading a `config.json` is not done here (see `models`): a `RopeSpec` is its result.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from colibri_mp.specs import RopeSpec

F32Array = NDArray[np.float32]


@dataclass(frozen=True)
class RopeTables:
    """`cos` and `sin`, float32 [max_context, rotary_dim / 2]; read-only, shared by all layers."""

    cos: F32Array
    sin: F32Array

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that turn."""
        return 2 * int(self.cos.shape[1])

    @staticmethod
    def nbytes_for(rotary_dim: int, max_context: int) -> int:
        """Bytes of both tables, for the memory plan."""
        return max_context * rotary_dim * 4


def rope_tables(spec: RopeSpec, max_context: int) -> RopeTables:
    """Tables for the positions 0 .. max_context - 1, computed as transformers does in float32."""
    positions = np.arange(max_context, dtype=np.float32)
    angles = positions[:, None] * inverse_frequencies(spec)[None, :]
    scaling = np.float32(spec.attention_scaling)
    cos, sin = (fn(angles.astype(np.float64)).astype(np.float32) * scaling for fn in (np.cos, np.sin))
    return RopeTables(np.ascontiguousarray(cos), np.ascontiguousarray(sin))


def inverse_frequencies(spec: RopeSpec) -> F32Array:
    """Radians a position for each pair, float32 [rotary_dim / 2]."""
    match spec.rope_type:
        case "linear":
            return _plain_frequencies(spec) / np.float32(spec.factor)
        case "yarn":
            return _yarn_frequencies(spec)
        case "llama3":
            return _llama3_frequencies(spec)
        case _:
            return _plain_frequencies(spec)


def _pair_periods(spec: RopeSpec) -> F32Array:
    """theta^(2i/d), the power rounded once to float32."""
    exponents = np.arange(0, spec.rotary_dim, 2, dtype=np.float32) / np.float32(spec.rotary_dim)
    return np.asarray(np.power(spec.theta, exponents.astype(np.float64)), dtype=np.float32)


def _plain_frequencies(spec: RopeSpec) -> F32Array:
    return np.float32(1.0) / _pair_periods(spec)


def _yarn_frequencies(spec: RopeSpec) -> F32Array:
    """Slow pairs are interpolated (divided by `factor`), fast ones kept, those between mixed by a linear ramp."""
    periods = _pair_periods(spec)
    kept, interpolated = np.float32(1.0) / periods, np.float32(1.0) / (np.float32(spec.factor) * periods)
    low, high = _yarn_range(spec)
    ramp = (np.arange(spec.rotary_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    share = np.float32(1.0) - np.clip(ramp, np.float32(0.0), np.float32(1.0))
    return np.asarray(interpolated * (np.float32(1.0) - share) + kept * share, dtype=np.float32)


def _yarn_range(spec: RopeSpec) -> tuple[float, float]:
    """The pair indices between which the ramp lies: pairs that turn `beta_fast` and `beta_slow` times in the original context."""

    def pair_of(turns: float) -> float:
        periods = spec.original_max_position / (turns * 2.0 * math.pi)
        return spec.rotary_dim * math.log(periods) / (2.0 * math.log(spec.theta))

    low, high = pair_of(spec.beta_fast), pair_of(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    return low, high + 0.001 if low == high else high


def _llama3_frequencies(spec: RopeSpec) -> F32Array:
    """Wavelengths over the original context are stretched by `factor`, short ones kept, those between smoothed."""
    plain = _plain_frequencies(spec)
    turns = np.float32(spec.original_max_position) * plain / np.float32(2.0 * math.pi)
    smooth = (turns - np.float32(spec.low_freq_factor)) / np.float32(spec.high_freq_factor - spec.low_freq_factor)
    smooth = np.clip(smooth, np.float32(0.0), np.float32(1.0))
    return np.asarray((np.float32(1.0) - smooth) * plain / np.float32(spec.factor) + smooth * plain, dtype=np.float32)
