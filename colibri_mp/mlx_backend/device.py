"""MLX in this process: settings that must be made before its first use, and numbers on their way in and out.

Into MLX every array is copied: `mx.array` does so, and `mx.from_dlpack(copy=False)` refuses memory of the host on the CPU
device (0.32). Out of it nothing is: where host and device share memory numpy sees the result in place.
"""

import os
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

CACHE_BYTES = 32 << 20
"""Freed buffers that MLX may keep, where its allocator keeps any."""


def prepare() -> None:
    """Exact float32 products, and a bounded cache. Before the first computation of a process; idempotent."""
    os.environ.setdefault("MLX_ENABLE_TF32", "0")  # float32 products with 10 bits of mantissa are not ours
    mx.set_cache_limit(CACHE_BYTES)


def is_gpu() -> bool:
    """Whether the default device is one."""
    return bool(mx.default_device() != mx.Device(mx.cpu))


def cache_bytes() -> int:
    """What the allocator keeps beside what is in use, for the memory plan: nothing on the CPU."""
    return CACHE_BYTES if is_gpu() else 0


def describe() -> str:
    """What MLX computes on here, for notes."""
    return f"MLX {version('mlx')}, {'GPU' if is_gpu() else 'CPU'} device"


def to_device(array: NDArray[Any]) -> mx.array:
    """A copy on the device."""
    return mx.array(array)


def to_host(array: mx.array) -> NDArray[Any]:
    """The values, computed now; the memory is MLX's own where it can be seen from here."""
    return np.asarray(array)
