"""MLX's affine quantisation in numpy, both ways: value = code * scale + bias, codes packed low bits first.

mlx spreads the codes from a group's least to its greatest value. Here a few narrower ranges are tried too, and the one
with the least squared error is kept; readers see no difference. Scales and biases are rounded to bf16 before the codes
are chosen, so the codes fit what is stored.
"""

from dataclasses import dataclass

import numpy as np

GROUP_SIZE = 64
SHRINKS = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.75, 0.7)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """float32 to bf16 bits (uint16), ties to even; no NaN expected."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return np.asarray((bits.astype(np.uint32) << 16).view(np.float32))


@dataclass(frozen=True)
class Quantised:
    """One matrix, or a stack of them, as it is stored."""

    weight: np.ndarray  # [..., in * bits / 32] uint32
    scales: np.ndarray  # [..., in / 64] uint16, bf16 bits
    biases: np.ndarray  # [..., in / 64] uint16, bf16 bits
    bits: int

    def dequantised(self) -> np.ndarray:
        """[..., in] float32, computed in float32."""
        per_word = 32 // self.bits
        shifts = np.arange(per_word, dtype=np.uint32) * self.bits
        codes = (self.weight[..., None] >> shifts) & (2**self.bits - 1)
        groups = codes.reshape(*self.scales.shape, GROUP_SIZE).astype(np.float32)
        values = groups * from_bf16(self.scales)[..., None] + from_bf16(self.biases)[..., None]
        return values.reshape(*self.weight.shape[:-1], -1)


def quantise(x: np.ndarray, bits: int) -> Quantised:
    """x [..., in] float32 with ``in`` a multiple of 64."""
    groups = x.reshape(-1, GROUP_SIZE)
    middle = (groups.max(1) + groups.min(1)) / 2
    half = np.maximum((groups.max(1) - groups.min(1)) / 2, 1e-7)
    best_error = np.full(len(groups), np.inf, np.float32)
    scales, biases = np.empty((2, len(groups)), np.uint16)
    codes = np.empty(groups.shape, np.uint8)
    for shrink in SHRINKS:
        scale = to_bf16(2 * half * shrink / (2**bits - 1))
        bias = to_bf16(middle - half * shrink)
        error, code = fitted(groups, from_bf16(scale), from_bf16(bias), bits)
        better = error < best_error
        best_error[better] = error[better]
        scales[better], biases[better], codes[better] = scale[better], bias[better], code[better]
    by_group = (*x.shape[:-1], x.shape[-1] // GROUP_SIZE)
    return Quantised(packed(codes.reshape(x.shape), bits), scales.reshape(by_group), biases.reshape(by_group), bits)


def fitted(groups: np.ndarray, scale: np.ndarray, bias: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Squared error of each group and its codes, for given scales and biases."""
    code = np.clip(np.rint((groups - bias[:, None]) / scale[:, None]), 0, 2**bits - 1)
    difference = code * scale[:, None] + bias[:, None] - groups
    return np.square(difference).sum(1), code.astype(np.uint8)


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """uint8 codes [..., in] to uint32 words [..., in * bits / 32], for 4 and 8 bits."""
    if bits == 4:
        codes = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return np.ascontiguousarray(codes).view("<u4")
