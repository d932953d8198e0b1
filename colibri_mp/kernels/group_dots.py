"""Dot products of one group of a packed matrix with prepared activations, by instruction set; see `tiles` for what they compute."""

from collections.abc import Callable, Sequence
from typing import Any

from colibri_mp.kernels import emit
from colibri_mp.kernels.codes import Codes, dot_codes, fp4_floats, unit_codes
from colibri_mp.kernels.emit import F32, I8, I16, I32, V16F, V16I, constant, load, offset, splat, vector


def _group_dots_vnni(builder: Any, words: Any, xs: Sequence[Any], codes: Codes, planes: int) -> list[list[Any]]:
    """dot[token][plane] of one group. Few accumulators would wait for each other: integers may be summed in any order."""
    chains = 2 if len(xs) * planes < 8 else 1
    accs = [[[constant(V16I, 0)] * chains for _ in range(planes)] for _ in xs]

    def word_at(index: int) -> Any:
        return load(builder, offset(builder, words, 64 * index), V16I)

    for unit in range(codes.group // 4):
        taken = dot_codes(builder, word_at, codes, unit)
        for plane in range(planes):
            for t, x in enumerate(xs):
                value = splat(builder, load(builder, offset(builder, x, 4 * (unit * planes + plane)), I32))
                acc = accs[t][plane]
                arguments = [acc[unit % chains], taken, value]
                acc[unit % chains] = emit.call(builder, "llvm.x86.avx512.vpdpbusd.512", V16I, arguments)
    return [[acc[0] if chains == 1 else builder.add(acc[0], acc[1]) for acc in token] for token in accs]


_Unit = tuple[int, Callable[[Any, Callable[[int], Any]], Any]]
"""Number of a unit of activations, and what makes its codes out of words."""


def _nibble_passes(codes: Codes) -> list[list[_Unit]]:
    """One pass over all units, of 8-bit codes two (high, low nibbles)."""

    def whole(unit: int) -> _Unit:
        return unit, lambda builder, word_at: dot_codes(builder, word_at, codes, unit)

    def nibble(unit: int, shift: int) -> _Unit:
        def take(builder: Any, word_at: Callable[[int], Any]) -> Any:
            word = word_at(unit)
            shifted = builder.lshr(word, constant(word.type, shift)) if shift else word
            return builder.and_(shifted, constant(word.type, 0x0F0F0F0F))

        return unit, take

    units = range(codes.group // 4)
    if codes.bits < 8:
        return [[whole(unit) for unit in units]]
    return [[nibble(unit, shift) for unit in units] for shift in (4, 0)]


def _part_dots(builder: Any, passes: Any, new_sums: Callable[[], Any], add: Callable[..., None]) -> list[list[Any]]:
    """Run the passes over one part of the lanes; between them the sums are shifted by a nibble."""
    sums = new_sums()
    for index, units in enumerate(passes):
        if index:
            sums = [[builder.shl(s, constant(s.type, 4)) for s in token] for token in sums]
        add(sums, units)
    return sums  # type: ignore[no-any-return]  # LLVM values are untyped


def _group_dots_avx2(builder: Any, words: Any, xs: Sequence[Any], codes: Codes, planes: int) -> list[list[Any]]:
    """dot[token][plane], 8 rows at a time: twice as many tokens fit into the 16 registers."""
    v8i, v16s, v32b = vector(I32, 8), vector(I16, 16), vector(I8, 32)
    run = 32767 // (2 * 128 * (codes.largest if codes.bits < 8 else 15))  # so many sums of two products fit into int16
    halves = []
    for half in range(2):

        def word_at(index: int, half: int = half) -> Any:
            return load(builder, offset(builder, words, 64 * index + 32 * half), v8i)

        def add(sums: Any, units: list[_Unit], word_at: Callable[[int], Any] = word_at) -> None:
            for start in range(0, len(units), run):
                partial: dict[tuple[int, int], Any] = {}
                for unit, take in units[start : start + run]:
                    taken = builder.bitcast(take(builder, word_at), v32b)
                    for plane in range(planes):
                        for t, x in enumerate(xs):
                            value = load(builder, offset(builder, x, 4 * (unit * planes + plane)), I32)
                            value = builder.bitcast(splat(builder, value, 8), v32b)
                            product = emit.call(builder, "llvm.x86.avx2.pmadd.ub.sw", v16s, [taken, value])
                            before = partial.get((t, plane))
                            partial[t, plane] = product if before is None else builder.add(before, product)
                for (t, plane), value in partial.items():
                    wide = emit.call(builder, "llvm.x86.avx2.pmadd.wd", v8i, [value, constant(v16s, 1)])
                    sums[t][plane] = builder.add(sums[t][plane], wide)

        halves.append(
            _part_dots(builder, _nibble_passes(codes), lambda: [[constant(v8i, 0)] * planes for _ in xs], add)
        )
    return [[emit.join(builder, [half[t][p] for half in halves]) for p in range(planes)] for t in range(len(xs))]


def _group_dots_neon(builder: Any, words: Any, xs: Sequence[Any], codes: Codes, planes: int) -> list[list[Any]]:
    """dot[token][plane], 4 rows at a time; four activations a load, `sdot` picks one of them."""
    v4i, v16b = vector(I32, 4), vector(I8, 16)
    quarters = []
    for quarter in range(4):

        def word_at(index: int, quarter: int = quarter) -> Any:
            return load(builder, offset(builder, words, 64 * index + 16 * quarter), v4i)

        def add(sums: Any, units: list[_Unit], word_at: Callable[[int], Any] = word_at) -> None:
            loaded: dict[tuple[int, int], Any] = {}
            for unit, take in units:
                taken = builder.bitcast(take(builder, word_at), v16b)
                for plane in range(planes):
                    vector_idx, lane = divmod(unit * planes + plane, 4)
                    for t, x in enumerate(xs):
                        if (t, vector_idx) not in loaded:
                            loaded[t, vector_idx] = load(builder, offset(builder, x, 16 * vector_idx), v4i)
                        four = loaded[t, vector_idx]
                        value = builder.bitcast(emit.shuffle(builder, four, four, [lane] * 4), v16b)
                        arguments = [sums[t][plane], taken, value]
                        sums[t][plane] = emit.call(builder, "llvm.aarch64.neon.sdot.v4i32.v16i8", v4i, arguments)

        quarters.append(
            _part_dots(builder, _nibble_passes(codes), lambda: [[constant(v4i, 0)] * planes for _ in xs], add)
        )
    return [
        [emit.join(builder, [quarter[t][p] for quarter in quarters]) for p in range(planes)] for t in range(len(xs))
    ]


GROUP_DOTS = {"avx512_vnni": _group_dots_vnni, "avx2": _group_dots_avx2, "neon_dot": _group_dots_neon}
"""By instruction set: dot[token][plane], int32, of one group."""


def planes_to_float(builder: Any, dots: Sequence[Any]) -> Any:
    """The group's dot product in units of the activation scale, float32."""
    if len(dots) == 1:
        return builder.sitofp(dots[0], V16F)
    low = builder.add(builder.shl(dots[-2], constant(V16I, 8)), dots[-1])
    value = builder.sitofp(low, V16F)
    if len(dots) == 2:
        return value
    return emit.fma(builder, builder.sitofp(dots[0], V16F), constant(V16F, 65536.0), value)


def group_dots_float(builder: Any, words: Any, xs: Sequence[Any], codes: Codes) -> list[Any]:
    """Sum of code * x of one group, columns in ascending order."""
    sums = [constant(V16F, 0.0)] * len(xs)
    for column in range(codes.group):
        unit, byte = column // 8 * 2 + column % 2, column % 8 // 2
        found = unit_codes(builder, lambda index: load(builder, offset(builder, words, 64 * index), V16I), codes, unit)
        shifted = builder.lshr(found, constant(V16I, 8 * byte)) if byte else found
        code = builder.and_(shifted, constant(V16I, 255))
        value = fp4_floats(builder, code) if codes.is_fp4 else builder.sitofp(code, V16F)
        for t, x in enumerate(xs):
            sums[t] = emit.fma(
                builder, value, splat(builder, load(builder, offset(builder, x, 4 * column), F32)), sums[t]
            )
    return sums
