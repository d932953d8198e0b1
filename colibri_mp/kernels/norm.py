"""RMS norm: x * (mean(x^2) + eps)^-0.5 * weight, all in float32 (arXiv 1910.07467; transformers multiplies in this order).

The sum of squares is taken in 16 lanes, in ascending order, and then over the lanes as a tree: it depends on the row alone.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from colibri_mp.kernels.jit import compiled
from colibri_mp.kernels.vectors import fma16, load16, load_prefix16, splat16, store16, store_prefix16, sum16


@compiled
def load_up_to16(address: int, count: int) -> Any:
    """The first min(count, 16) float32 from an address, zeros after."""
    if count >= 16:
        return load16(address)
    return load_prefix16(address, count)


@compiled
def store_up_to16(address: int, value: Any, count: int) -> None:
    """Store the first min(count, 16) lanes."""
    if count >= 16:
        store16(address, value)
    else:
        store_prefix16(address, value, count)


@compiled
def rms_norm_row(x: int, weight: int, out: int, width: int, eps: np.float32) -> None:
    """Norm `width` float32 at address x into `out`, which may be x."""
    squares = splat16(np.float32(0.0))
    for i in range(0, width, 16):
        part = load_up_to16(x + 4 * i, width - i)
        squares = fma16(part, part, squares)
    mean = sum16(squares) / np.float32(width)
    factor = splat16(np.float32(1.0) / np.sqrt(mean + eps))
    for i in range(0, width, 16):
        normed = load_up_to16(x + 4 * i, width - i) * factor * load_up_to16(weight + 4 * i, width - i)
        store_up_to16(out + 4 * i, normed, width - i)


@compiled
def _rms_norm_rows(x: int, weight: int, out: int, num_rows: int, width: int, eps: float) -> None:
    for row in range(num_rows):
        rms_norm_row(x + row * width * 4, weight, out + row * width * 4, width, np.float32(eps))


def rms_norm(x: npt.NDArray[np.float32], weight: npt.NDArray[np.float32], eps: float) -> npt.NDArray[np.float32]:
    """Norm each row of x [T, D] with weight [D]; C-contiguous float32, a new array."""
    assert weight.shape == x.shape[-1:]
    assert x.flags.c_contiguous
    assert x.dtype == weight.dtype == np.float32
    out = np.empty_like(x)
    _rms_norm_rows(x.ctypes.data, weight.ctypes.data, out.ctypes.data, x.size // weight.size, weight.size, eps)
    return out
