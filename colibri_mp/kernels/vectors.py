"""Vectors of 16 float32 as values inside compiled code, and access to memory by address.

    v = load16(x) * splat16(scale)          # v: 16 lanes; + - * / work lane by lane
    acc = fma16(v, load16(w), acc)          # one rounding (two on the generic instruction set)
    store16(out, acc); s = sum16(acc)       # fixed tree

Addresses are int64 in bytes, of any alignment that their elements have. Compiled code gets them from `address(array)`, or in the frame of a
stage (see `team`). `address` does not keep a local array alive. No bounds are checked. A vector may be a local variable or an argument of a
`compiled` function, not of a Python call.
"""

import operator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import lower_builtin, models, register_model

from colibri_mp.kernels import emit
from colibri_mp.kernels.emit import F32, I8, I32, I64, V16F, V16I, constant
from colibri_mp.kernels.jit import intrinsic, operation


class _Vector16(types.Type):  # type: ignore[misc]  # numba is untyped
    def __init__(self) -> None:
        super().__init__(name="vector16_f32")


vector16 = _Vector16()
register_model(_Vector16)(lambda manager, kind: models.PrimitiveModel(manager, kind, V16F))


def _register_operator(function: Any, instruction: str) -> None:
    cases = [signature(vector16, vector16, vector16)]
    infer_global(function)(type(f"Vector16_{instruction}", (ConcreteTemplate,), {"cases": cases}))

    def lower(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return getattr(builder, instruction)(*args)

    lower_builtin(function, vector16, vector16)(lower)


for _operator, _instruction in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _register_operator(_operator, _instruction)


# ---- vectors and memory


@operation(vector16, types.int64)
def load16(builder: Any, address: Any) -> Any:
    """16 float32 from an address."""
    return emit.load(builder, address, V16F)


@operation(types.void, types.int64, vector16)
def store16(builder: Any, address: Any, value: Any) -> None:
    """Store 16 float32 at an address."""
    emit.store(builder, value, address)


@operation(vector16, types.int64, types.int64)
def load_prefix16(builder: Any, address: Any, count: Any) -> Any:
    """The first `count` (0..16) float32 from an address, zeros after; touches no memory beyond them."""
    pointer = builder.inttoptr(address, V16F.as_pointer())
    arguments = [pointer, constant(I32, 4), _prefix_mask(builder, count), constant(V16F, 0.0)]
    return emit.call(builder, "llvm.masked.load.v16f32.p0", V16F, arguments)


@operation(types.void, types.int64, vector16, types.int64)
def store_prefix16(builder: Any, address: Any, value: Any, count: Any) -> None:
    """Store the first `count` (0..16) lanes only."""
    pointer = builder.inttoptr(address, V16F.as_pointer())
    arguments = [value, pointer, constant(I32, 4), _prefix_mask(builder, count)]
    emit.call(builder, "llvm.masked.store.v16f32.p0", ir.VoidType(), arguments)


def _prefix_mask(builder: Any, count: Any) -> Any:
    lanes = ir.Constant(V16I, list(range(emit.LANES)))
    return builder.icmp_signed("<", lanes, emit.splat(builder, builder.trunc(count, I32)))


# ---- arithmetic on lanes


@operation(vector16, types.float32)
def splat16(builder: Any, scalar: Any) -> Any:
    """A float32 in all lanes."""
    return emit.splat(builder, scalar)


@operation(vector16, vector16, vector16, vector16)
def fma16(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c lane by lane, see `emit.fma`."""
    return emit.fma(builder, a, b, c)


@operation(vector16, vector16, vector16)
def min16(builder: Any, a: Any, b: Any) -> Any:
    """The smaller of each lane (b where either is NaN)."""
    return emit.minimum(builder, a, b)


@operation(vector16, vector16, vector16)
def max16(builder: Any, a: Any, b: Any) -> Any:
    """The larger of each lane (b where either is NaN)."""
    return emit.maximum(builder, a, b)


@operation(vector16, vector16)
def abs16(builder: Any, a: Any) -> Any:
    """|a| lane by lane."""
    return emit.absolute(builder, a)


@operation(vector16, vector16)
def exp16(builder: Any, a: Any) -> Any:
    """e^a lane by lane, see `emit.exp`."""
    return emit.exp(builder, a)


@operation(types.float32, vector16)
def sum16(builder: Any, a: Any) -> Any:
    """Sum of the lanes as a fixed tree, float32."""
    return emit.fold(builder, a, builder.fadd)


@operation(types.float32, vector16)
def largest16(builder: Any, a: Any) -> Any:
    """Largest of the lanes, float32."""
    return emit.fold(builder, a, lambda x, y: emit.maximum(builder, x, y))


@operation(vector16)
def lanes16(_builder: Any) -> Any:
    """0.0, 1.0, ... 15.0."""
    return ir.Constant(V16F, [float(lane) for lane in range(emit.LANES)])


@operation(vector16, vector16, vector16, vector16, vector16)
def select_less16(builder: Any, a: Any, b: Any, x: Any, y: Any) -> Any:
    """x where a < b, y elsewhere (y where either is NaN)."""
    return builder.select(builder.fcmp_ordered("<", a, b), x, y)


@operation(types.float32, types.float32, types.float32, types.float32)
def fma_f32(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Scalar a * b + c in float32, see `emit.fma`."""
    return emit.fma(builder, a, b, c)


# ---- scalars and memory


@operation(types.float32, types.int64)
def get_f32(builder: Any, address: Any) -> Any:
    """The float32 at an address."""
    return emit.load(builder, address, F32)


@operation(types.void, types.int64, types.float32)
def set_f32(builder: Any, address: Any, value: Any) -> None:
    """Store a float32 at an address."""
    emit.store(builder, value, address)


@operation(types.int64, types.int64)
def get_i64(builder: Any, address: Any) -> Any:
    """The int64 at an address."""
    return emit.load(builder, address, I64)


@operation(types.void, types.int64, types.int64)
def set_i64(builder: Any, address: Any, value: Any) -> None:
    """Store an int64 at an address."""
    emit.store(builder, value, address)


@operation(types.int64, types.int64)
def get_i32(builder: Any, address: Any) -> Any:
    """The int32 at an address, as int64."""
    return builder.sext(emit.load(builder, address, I32), I64)


@operation(types.void, types.int64, types.int64)
def set_i32(builder: Any, address: Any, value: Any) -> None:
    """Store the lower 32 bits of an int64 at an address."""
    emit.store(builder, builder.trunc(value, I32), address)


@operation(types.uint8, types.int64)
def get_u8(builder: Any, address: Any) -> Any:
    """The byte at an address."""
    return emit.load(builder, address, I8, align=1)


@operation(types.void, types.int64, types.uint8)
def set_u8(builder: Any, address: Any, value: Any) -> None:
    """Store a byte at an address."""
    emit.store(builder, value, address, align=1)


@operation(types.uint64, types.int64)
def get_u64(builder: Any, address: Any) -> Any:
    """The uint64 at any address, little-endian."""
    return emit.load(builder, address, I64, align=1)


@operation(types.void, types.int64, types.uint64)
def set_u64(builder: Any, address: Any, value: Any) -> None:
    """Store a uint64 at any address, little-endian."""
    emit.store(builder, value, address, align=1)


@operation(types.void, types.int64, types.int64, types.int64)
def copy_bytes(builder: Any, source: Any, target: Any, num_bytes: Any) -> None:
    """memcpy."""
    emit.copy(builder, source, target, num_bytes)


# ---- arrays, records, functions by address


@intrinsic
def address(_typing: Any, array: Any) -> Any:
    """Address of an array's first element; the array must stay alive."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.ptrtoint(context.make_array(sig.args[0])(context, builder, args[0]).data, I64)

    return types.int64(array), generate


@intrinsic
def record_at(_typing: Any, address: Any, dtype: Any) -> Any:  # noqa: ARG001  # numba asks for the parameter
    """The record (numpy structured dtype, a module-level constant) at an address: fields are read and written in place."""
    record = dtype.dtype

    def generate(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(record))

    return record(types.int64, dtype), generate


def _pointer(element: Any, bits: Any) -> Any:
    def to_pointer(builder: Any, address: Any) -> Any:
        return builder.inttoptr(address, bits.as_pointer())

    return operation(types.CPointer(element), types.int64)(to_pointer)


pointer_f32 = _pointer(types.float32, F32)
"""int64 address -> pointer for `jit.carray(pointer_f32(a), shape)`, an array over that memory."""
pointer_i32 = _pointer(types.int32, I32)
pointer_i64 = _pointer(types.int64, I64)
pointer_u8 = _pointer(types.uint8, I8)


def _emit_call(builder: Any, function: Any, *arguments: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [I64] * len(arguments))
    builder.call(builder.inttoptr(function, kind.as_pointer()), arguments)


@operation(types.void, *[types.int64] * 4)
def call_native3(builder: Any, function: Any, a: Any, b: Any, c: Any) -> None:
    """Call the `jit.Native` of three arguments at an address (stages, prepare kernels)."""
    _emit_call(builder, function, a, b, c)


@operation(types.void, *[types.int64] * 6)
def call_native5(builder: Any, function: Any, a: Any, b: Any, c: Any, d: Any, e: Any) -> None:
    """Call the `jit.Native` of five arguments at an address (tile kernels)."""
    _emit_call(builder, function, a, b, c, d, e)
