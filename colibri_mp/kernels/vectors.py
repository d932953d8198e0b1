"""Vectors of 16 float32 as values inside compiled code, and access to memory by address.

    v = load16(x) * splat16(scale)          # v: 16 lanes; + - * / work lane by lane
    acc = fma16(v, load16(w), acc)          # one rounding (two on the generic instruction set)
    store16(out, acc); s = sum16(acc)       # fixed tree

Addresses are int64 in bytes. Compiled code gets them from `address(array)`, or in the frame of a stage (see `team`).
No bounds are checked. A vector may be a local variable or an argument of a `compiled` function, not of a Python call.
"""

import operator
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import lower_builtin, models, register_model

from colibri_mp.kernels import emit
from colibri_mp.kernels.emit import F32, I32, I64, V16F, constant
from colibri_mp.kernels.jit import intrinsic


class _Vector16(types.Type):  # type: ignore[misc]  # numba is untyped
    def __init__(self) -> None:
        super().__init__(name="vector16_f32")


vector16 = _Vector16()
register_model(_Vector16)(lambda manager, kind: models.PrimitiveModel(manager, kind, V16F))

_OPERATORS = ((operator.add, "fadd"), (operator.sub, "fsub"), (operator.mul, "fmul"), (operator.truediv, "fdiv"))


def _register_operator(function: Any, instruction: str) -> None:
    template = type(f"Vector16_{instruction}", (ConcreteTemplate,), {"cases": [signature(vector16, vector16, vector16)]})
    infer_global(function)(template)

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return getattr(builder, instruction)(*args)

    lower_builtin(function, vector16, vector16)(lower)


for _function, _instruction in _OPERATORS:
    _register_operator(_function, _instruction)


@intrinsic
def load16(typing: Any, address: Any) -> Any:
    """16 float32 from an address, 4-aligned."""
    return vector16(types.int64), lambda context, builder, sig, args: emit.load(builder, args[0], V16F)


@intrinsic
def load_prefix16(typing: Any, address: Any, count: Any) -> Any:
    """The first `count` (0..16) float32 from an address, zeros after; touches no memory beyond them."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], V16F.as_pointer())
        arguments = [pointer, constant(I32, 4), _prefix_mask(builder, args[1]), constant(V16F, 0.0)]
        return emit.call(builder, "llvm.masked.load.v16f32.p0", V16F, arguments)

    return vector16(types.int64, types.int64), generate


@intrinsic
def store16(typing: Any, address: Any, value: Any) -> Any:
    """Store 16 float32 at an address, 4-aligned."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        emit.store(builder, args[1], args[0])
        return context.get_dummy_value()

    return types.void(types.int64, vector16), generate


@intrinsic
def store_prefix16(typing: Any, address: Any, value: Any, count: Any) -> Any:
    """Store the first `count` (0..16) lanes only."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], V16F.as_pointer())
        arguments = [args[1], pointer, constant(I32, 4), _prefix_mask(builder, args[2])]
        emit.call(builder, "llvm.masked.store.v16f32.p0", ir.VoidType(), arguments)
        return context.get_dummy_value()

    return types.void(types.int64, vector16, types.int64), generate


def _prefix_mask(builder: Any, count: Any) -> Any:
    lanes = ir.Constant(emit.V16I, list(range(emit.LANES)))
    return builder.icmp_signed("<", lanes, emit.splat(builder, builder.trunc(count, I32)))


@intrinsic
def splat16(typing: Any, scalar: Any) -> Any:
    """A float32 in all lanes."""
    return vector16(types.float32), lambda context, builder, sig, args: emit.splat(builder, args[0])


@intrinsic
def fma16(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c lane by lane, see `emit.fma`."""
    return vector16(*[vector16] * 3), lambda context, builder, sig, args: emit.fma(builder, *args)


@intrinsic
def min16(typing: Any, a: Any, b: Any) -> Any:
    """The smaller of each lane (b where either is NaN)."""
    return vector16(*[vector16] * 2), lambda context, builder, sig, args: emit.minimum(builder, *args)


@intrinsic
def max16(typing: Any, a: Any, b: Any) -> Any:
    """The larger of each lane (b where either is NaN)."""
    return vector16(*[vector16] * 2), lambda context, builder, sig, args: emit.maximum(builder, *args)


@intrinsic
def abs16(typing: Any, a: Any) -> Any:
    """|a| lane by lane."""
    return vector16(vector16), lambda context, builder, sig, args: emit.absolute(builder, args[0])


@intrinsic
def exp16(typing: Any, a: Any) -> Any:
    """e^a lane by lane, see `emit.exp`."""
    return vector16(vector16), lambda context, builder, sig, args: emit.exp(builder, args[0])


@intrinsic
def sum16(typing: Any, a: Any) -> Any:
    """Sum of the lanes as a fixed tree, float32."""
    return types.float32(vector16), lambda context, builder, sig, args: emit.fold(builder, args[0], builder.fadd)


@intrinsic
def largest16(typing: Any, a: Any) -> Any:
    """Largest of the lanes, float32."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return emit.fold(builder, args[0], lambda x, y: emit.maximum(builder, x, y))

    return types.float32(vector16), generate


@intrinsic
def fma_f32(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """Scalar a * b + c in float32, see `emit.fma`."""
    return types.float32(*[types.float32] * 3), lambda context, builder, sig, args: emit.fma(builder, *args)


@intrinsic
def address(typing: Any, array: Any) -> Any:
    """Address of an array's first element; the array must stay alive."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.ptrtoint(context.make_array(sig.args[0])(context, builder, args[0]).data, I64)

    return types.int64(array), generate


@intrinsic
def get_f32(typing: Any, address: Any) -> Any:
    """The float32 at an address."""
    return types.float32(types.int64), lambda context, builder, sig, args: emit.load(builder, args[0], F32)


@intrinsic
def set_f32(typing: Any, address: Any, value: Any) -> Any:
    """Store a float32 at an address."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        emit.store(builder, args[1], args[0])
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), generate


@intrinsic
def get_i64(typing: Any, address: Any) -> Any:
    """The int64 at an address."""
    return types.int64(types.int64), lambda context, builder, sig, args: emit.load(builder, args[0], I64)


@intrinsic
def set_i64(typing: Any, address: Any, value: Any) -> Any:
    """Store an int64 at an address."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        emit.store(builder, args[1], args[0])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def get_i32(typing: Any, address: Any) -> Any:
    """The int32 at an address, as int64."""
    return types.int64(types.int64), lambda context, builder, sig, args: builder.sext(emit.load(builder, args[0], I32), I64)


@intrinsic
def get_u8(typing: Any, address: Any) -> Any:
    """The byte at an address."""
    return types.uint8(types.int64), lambda context, builder, sig, args: emit.load(builder, args[0], emit.I8, align=1)


@intrinsic
def get_u64(typing: Any, address: Any) -> Any:
    """The uint64 at an address of any alignment, little-endian."""
    return types.uint64(types.int64), lambda context, builder, sig, args: emit.load(builder, args[0], I64, align=1)


@intrinsic
def set_u64(typing: Any, address: Any, value: Any) -> Any:
    """Store a uint64 at an address of any alignment, little-endian."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        emit.store(builder, args[1], args[0], align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.uint64), generate


@intrinsic
def record_at(typing: Any, address: Any, dtype: Any) -> Any:
    """The record (numpy structured dtype, a module-level constant) at an address: fields are read and written in place."""
    record = dtype.dtype

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(record))

    return record(types.int64, dtype), generate


def _pointer(element: Any) -> Any:
    @numba.extending.intrinsic
    def to_pointer(typing: Any, address: Any) -> Any:
        kind = types.CPointer(element)
        return kind(types.int64), lambda context, builder, sig, args: builder.inttoptr(args[0], context.get_value_type(kind))

    return to_pointer


pointer_f32 = _pointer(types.float32)
"""int64 address -> pointer for `numba.carray(pointer_f32(a), shape)`, an array over that memory."""
pointer_i32 = _pointer(types.int32)
pointer_i64 = _pointer(types.int64)
pointer_u8 = _pointer(types.uint8)


def _emit_call(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    kind = ir.FunctionType(ir.VoidType(), [I64] * (len(args) - 1))
    builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
    return context.get_dummy_value()


@intrinsic
def call_native3(typing: Any, function: Any, a: Any, b: Any, c: Any) -> Any:
    """Call the `jit.Native` of three arguments at an address (stages, prepare kernels)."""
    return types.void(*[types.int64] * 4), _emit_call


@intrinsic
def call_native5(typing: Any, function: Any, a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:
    """Call the `jit.Native` of five arguments at an address (tile kernels)."""
    return types.void(*[types.int64] * 6), _emit_call


# ---- for `attention` and `router`


@intrinsic
def lanes16(typing: Any) -> Any:
    """0.0, 1.0, ... 15.0."""
    numbers = ir.Constant(V16F, [float(lane) for lane in range(emit.LANES)])
    return vector16(), lambda context, builder, sig, args: numbers


@intrinsic
def select_less16(typing: Any, a: Any, b: Any, x: Any, y: Any) -> Any:
    """x where a < b, y elsewhere (y where either is NaN)."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered("<", args[0], args[1]), args[2], args[3])

    return vector16(*[vector16] * 4), generate
