"""Atomic operations on int64 in memory, and the system calls that park threads and tell the time, for compiled code.

Addresses are 8-aligned. `load_acquire` and `store_release` pair up; the others are sequentially consistent.
"""

import platform
from typing import Any

from llvmlite import ir
from numba import types

from colibri_mp.kernels import emit
from colibri_mp.kernels.emit import I32, I64, constant
from colibri_mp.kernels.jit import fixed, operation

read = types.ExternalFunction("read", types.int64(types.int32, types.int64, types.int64))
"""read(2); by symbol and not as a ctypes pointer, which could not be cached."""
sched_yield = types.ExternalFunction("sched_yield", types.int32())
clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))
"""clock_gettime(2), the time as int64 seconds, int64 nanoseconds."""
PERF_COUNTER_CLOCK = fixed(8 if platform.system() == "Darwin" else 1)
"""The clock of `time.perf_counter`: CLOCK_UPTIME_RAW, or CLOCK_MONOTONIC."""

_IS_ARM = platform.machine() in ("arm64", "aarch64")


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, I64.as_pointer())


@operation(types.int64, types.int64)
def load_acquire(builder: Any, address: Any) -> Any:
    """The int64, with everything written before its `store_release`."""
    return builder.load_atomic(_pointer(builder, address), "acquire", 8)


@operation(types.void, types.int64, types.int64)
def store_release(builder: Any, address: Any, value: Any) -> None:
    """Publish an int64 and everything written before."""
    builder.store_atomic(value, _pointer(builder, address), "release", 8)


@operation(types.int64, types.int64, types.int64)
def fetch_add(builder: Any, address: Any, value: Any) -> Any:
    """Add; the value before."""
    return builder.atomic_rmw("add", _pointer(builder, address), value, "seq_cst")


@operation(types.boolean, types.int64, types.int64, types.int64)
def compare_and_swap(builder: Any, address: Any, expected: Any, desired: Any) -> Any:
    """Store `desired` if the value is `expected`; whether it was."""
    return builder.extract_value(builder.cmpxchg(_pointer(builder, address), expected, desired, "seq_cst"), 1)


@operation(types.void)
def fence(builder: Any) -> None:
    """No read or write moves across."""
    builder.fence("seq_cst")


@operation(types.void)
def pause(builder: Any) -> None:
    """Tell the processor that this is a spinning loop."""
    if _IS_ARM:
        emit.call(builder, "llvm.aarch64.hint", ir.VoidType(), [constant(I32, 1)])
    else:
        emit.call(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
