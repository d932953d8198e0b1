"""LLVM vector code for the bodies of intrinsics: 16 lanes always, whatever the machine; LLVM splits them where registers are narrower.

The functions take the LLVM `builder` first and emit instructions. What depends on the instruction set is here and in `tiles`.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from colibri_mp.kernels import isa

LANES = 16
I8, I16, I32, I64, F16, F32 = (
    ir.IntType(8),
    ir.IntType(16),
    ir.IntType(32),
    ir.IntType(64),
    ir.HalfType(),
    ir.FloatType(),
)
ISA = isa.current().value
HAS_FMA = ISA != "generic"


def vector(element: Any, lanes: int = LANES) -> Any:
    """The type of a vector."""
    return ir.VectorType(element, lanes)


V16I, V16F = vector(I32), vector(F32)


def constant(kind: Any, value: float) -> Any:
    """A constant; of a vector type: the same in each lane."""
    if isinstance(kind, ir.VectorType):
        return ir.Constant(kind, [value] * kind.count)
    return ir.Constant(kind, value)


def call(builder: Any, name: str, result: Any, args: Sequence[Any]) -> Any:
    """Call the function or LLVM intrinsic of that name."""
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def offset(builder: Any, address: Any, num_bytes: int) -> Any:
    """address + a constant."""
    return builder.add(address, constant(I64, num_bytes)) if num_bytes else address


def load(builder: Any, address: Any, kind: Any, align: int = 4) -> Any:
    """Load a value of type `kind` from an integer address."""
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = align
    return value


def store(builder: Any, value: Any, address: Any, align: int = 4) -> None:
    """Store a value at an integer address."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = align


def copy(builder: Any, source: Any, target: Any, num_bytes: Any) -> None:
    """memcpy between integer addresses."""
    pointers = [builder.inttoptr(address, I8.as_pointer()) for address in (target, source)]
    call(builder, "llvm.memcpy.p0.p0.i64", ir.VoidType(), [*pointers, num_bytes, constant(ir.IntType(1), 0)])


def shuffle(builder: Any, first: Any, second: Any, lanes: Iterable[int]) -> Any:
    """Lanes picked from the two vectors put end to end."""
    indices = list(lanes)
    return builder.shuffle_vector(first, second, ir.Constant(vector(I32, len(indices)), indices))


def splat(builder: Any, scalar: Any, lanes: int = LANES) -> Any:
    """The scalar in every lane."""
    undefined = ir.Constant(vector(scalar.type, lanes), ir.Undefined)
    first = builder.insert_element(undefined, scalar, constant(I32, 0))
    return shuffle(builder, first, undefined, [0] * lanes)


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once; on the generic instruction set rounded twice (a fused one would be a library call a lane)."""
    if not HAS_FMA:
        return builder.fadd(builder.fmul(a, b), c)
    suffix = f"v{a.type.count}f32" if isinstance(a.type, ir.VectorType) else "f32"
    return call(builder, f"llvm.fma.{suffix}", a.type, [a, b, c])


def minimum(builder: Any, a: Any, b: Any) -> Any:
    """The smaller; b where either is NaN."""
    return builder.select(builder.fcmp_ordered("<", a, b), a, b)


def maximum(builder: Any, a: Any, b: Any) -> Any:
    """The larger; b where either is NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def absolute(builder: Any, a: Any) -> Any:
    """|a| of 16 floats."""
    return call(builder, "llvm.fabs.v16f32", a.type, [a])


def fold(builder: Any, a: Any, combine: Any) -> Any:
    """Combine all lanes of a vector by halves, a fixed tree; the scalar."""
    while (lanes := a.type.count) > 1:
        half = lanes // 2
        a = combine(shuffle(builder, a, a, range(half)), shuffle(builder, a, a, range(half, lanes)))
    return builder.extract_element(a, constant(I32, 0))


def split(builder: Any, a: Any, parts: int) -> list[Any]:
    """Equal consecutive parts of a vector."""
    size = a.type.count // parts
    return [shuffle(builder, a, a, range(i * size, (i + 1) * size)) for i in range(parts)]


def join(builder: Any, parts: Sequence[Any]) -> Any:
    """The inverse of `split`; a power of two of parts."""
    while len(parts) > 1:
        size = parts[0].type.count * 2
        parts = [shuffle(builder, parts[i], parts[i + 1], range(size)) for i in range(0, len(parts), 2)]
    return parts[0]


def bf16_to_f32(builder: Any, bits: Any) -> Any:
    """16 bf16 given as int16 -> float32, exact."""
    return builder.bitcast(builder.shl(builder.zext(bits, V16I), constant(V16I, 16)), V16F)


def f16_to_f32(builder: Any, bits: Any) -> Any:
    """16 IEEE halves given as int16 -> float32, exact (subnormals, infinities and NaN included)."""
    if ISA != "generic":
        return builder.fpext(builder.bitcast(bits, vector(F16)), V16F)
    wide = builder.zext(bits, V16I)
    sign = builder.shl(builder.and_(wide, constant(V16I, 0x8000)), constant(V16I, 16))
    magnitude = builder.shl(builder.and_(wide, constant(V16I, 0x7FFF)), constant(V16I, 13))
    scaled = builder.fmul(builder.bitcast(magnitude, V16F), constant(V16F, 2.0**112))
    special = builder.icmp_unsigned(">=", magnitude, constant(V16I, 0x7C00 << 13))
    infinite = builder.or_(magnitude, constant(V16I, 0x7F800000))
    return builder.bitcast(builder.or_(builder.select(special, infinite, builder.bitcast(scaled, V16I)), sign), V16F)


def load_scales(builder: Any, address: Any, element_bytes: int, is_bf16: bool) -> Any:
    """16 scales or biases of a record as float32."""
    if element_bytes == 4:
        return load(builder, address, V16F)
    bits = load(builder, address, vector(I16), align=2)
    return bf16_to_f32(builder, bits) if is_bf16 else f16_to_f32(builder, bits)


def exp(builder: Any, x: Any) -> Any:
    """e^x of 16 floats, relative error below 2e-7, no special cases but clamping to [-87, 88]; NaN gives e^88.

    Cephes `expf`: n = round(x / ln 2), polynomial in the rest, exponent put together by hand.
    """
    x = maximum(builder, minimum(builder, x, constant(V16F, 88.0)), constant(V16F, -87.0))
    magic = constant(V16F, 12582912.0)  # 1.5 * 2^23: adding it rounds to an integer, on every machine
    n = builder.fsub(builder.fadd(builder.fmul(x, constant(V16F, 1.44269504088896341)), magic), magic)
    r = fma(builder, n, constant(V16F, -0.693359375), x)
    r = fma(builder, n, constant(V16F, 2.12194440e-4), r)
    poly = constant(V16F, 1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        poly = fma(builder, poly, r, constant(V16F, coefficient))
    mantissa = builder.fadd(fma(builder, poly, builder.fmul(r, r), r), constant(V16F, 1.0))
    exponent = builder.shl(builder.add(builder.fptosi(n, V16I), constant(V16I, 127)), constant(V16I, 23))
    return builder.fmul(mantissa, builder.bitcast(exponent, V16F))
