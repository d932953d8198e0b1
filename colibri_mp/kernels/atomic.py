"""Atomic operations on int64 in memory, and the two system calls that park and wake threads, for compiled code.

All are sequentially consistent or acquire/release as named; addresses are 8-aligned.
"""

import platform
from typing import Any

from llvmlite import ir
from numba import types

from colibri_mp.kernels import emit
from colibri_mp.kernels.emit import I32, I64, constant
from colibri_mp.kernels.jit import intrinsic

read = types.ExternalFunction("read", types.int64(types.int32, types.int64, types.int64))
"""read(2); by symbol and not as a ctypes pointer, which could not be cached."""
sched_yield = types.ExternalFunction("sched_yield", types.int32())

_IS_ARM = platform.machine() in ("arm64", "aarch64")


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, I64.as_pointer())


@intrinsic
def load_acquire(typing: Any, address: Any) -> Any:
    """The int64, with everything written before its `store_release`."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load_atomic(_pointer(builder, args[0]), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def store_release(typing: Any, address: Any, value: Any) -> Any:
    """Publish an int64 and everything written before."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store_atomic(args[1], _pointer(builder, args[0]), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def fetch_add(typing: Any, address: Any, value: Any) -> Any:
    """Add; the value before."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _pointer(builder, args[0]), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def compare_and_swap(typing: Any, address: Any, expected: Any, desired: Any) -> Any:
    """Store `desired` if the value is `expected`; whether it was."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        result = builder.cmpxchg(_pointer(builder, args[0]), args[1], args[2], "seq_cst")
        return builder.extract_value(result, 1)

    return types.boolean(*[types.int64] * 3), generate


@intrinsic
def fence(typing: Any) -> Any:
    """No read or write moves across."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def pause(typing: Any) -> Any:
    """Tell the processor that this is a spinning loop."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if _IS_ARM:
            emit.call(builder, "llvm.aarch64.hint", ir.VoidType(), [constant(I32, 1)])
        else:
            emit.call(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
        return context.get_dummy_value()

    return types.void(), generate
