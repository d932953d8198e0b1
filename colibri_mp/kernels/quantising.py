"""Affine quantisation of groups with a searched range, compiled: value = code * scale + bias, codes of 4 or 8 bits.

Plain rounding spreads the codes from a group's least value to its greatest. Here the ends of that range are moved:

    range = least ... greatest                                     plain rounding, the first candidate
    three rounds, each with steps a third of the round before:
        the lower end by each of the steps; then the upper end
        least squares: the scale and bias that fit the codes found best

Scale and bias are rounded to bf16 before the codes are chosen, and a candidate is taken only if the group's squared error,
computed with what is stored, becomes less: no group is ever worse than plain rounding.

A vector lane is a group, 16 at a time; each operation rounds once, in one order, so every machine gives the same bytes.
`reference.quantise` is the same in plain numpy.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from colibri_mp.kernels.emit import V16F, V16I, constant
from colibri_mp.kernels.jit import compiled, operation
from colibri_mp.kernels.vectors import (
    address,
    load16,
    max16,
    min16,
    select_less16,
    splat16,
    store16,
    vector16,
)

STEPS = (np.array([[-0.04, 0.04, 0.08, 0.14]]) / [[1], [3], [9]]).astype(np.float32)
"""How far an end of the range moves inwards in each of three rounds, as shares of the group's range."""
SEARCH_VERSION = "search1"
"""Names what the search finds: to change a code or a scale that it chooses is to change this."""
LEAST_SCALE = np.float32(1e-36)
"""Groups whose values differ by less are taken as constant: the inverse of their scale would overflow."""

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


class Quantised(NamedTuple):
    """The parts of an affine matrix as `Encoding.parts` wants them, and of each group [rows * cols / group]: squared errors,
    what they would be with plain rounding, and the sum of the squared values; float32.
    """

    weight: Bytes
    scales: Bytes
    biases: Bytes
    squared_error: Floats
    plain_squared_error: Floats
    squared_values: Floats


@operation(vector16, vector16)
def _to_bf16(builder: Any, value: Any) -> Any:
    """Rounded to bf16, ties to even, as float32 (the lower half of the bits is zero)."""
    bits = builder.bitcast(value, V16I)
    odd = builder.and_(builder.lshr(bits, constant(V16I, 16)), constant(V16I, 1))
    rounded = builder.add(builder.add(bits, constant(V16I, 0x7FFF)), odd)
    return builder.bitcast(builder.and_(rounded, constant(V16I, 0xFFFF0000)), V16F)


@compiled
def _inverse(scale: Any) -> Any:
    """1 / scale; 0 where the scale is not above `LEAST_SCALE`, so that all codes are 0."""
    zero, one, least = splat16(np.float32(0.0)), splat16(np.float32(1.0)), splat16(LEAST_SCALE)
    return select_less16(least, scale, one / scale, zero)


@compiled
def _code(value: Any, bias: Any, inverse: Any, top: Any) -> Any:
    """The nearest code, as float32: adding 1.5 * 2^23 rounds to an integer, ties to even."""
    magic = splat16(np.float32(12582912.0))
    code = max16(min16((value - bias) * inverse, top), splat16(np.float32(0.0)))
    return (code + magic) - magic


@compiled
def _squared_error(tile: int, group: int, scale: Any, bias: Any, top: Any) -> Any:
    """Of each lane's group, for a scale and bias as stored."""
    inverse, total = _inverse(scale), splat16(np.float32(0.0))
    for j in range(group):
        value = load16(tile + 64 * j)
        difference = (_code(value, bias, inverse, top) * scale + bias) - value
        total = total + difference * difference
    return total


@compiled
def _fit(tile: int, group: int, scale: Any, bias: Any, top: Any) -> Any:
    """The range (low, high) that fits the codes of this scale and bias best: least squares."""
    inverse, zero = _inverse(scale), splat16(np.float32(0.0))
    codes, squares, values, products = zero, zero, zero, zero
    for j in range(group):
        value = load16(tile + 64 * j)
        code = _code(value, bias, inverse, top)
        codes, squares = codes + code, squares + code * code
        values, products = values + value, products + code * value
    count = splat16(np.float32(group))
    spread = count * squares - codes * codes
    slope = select_less16(zero, spread, (count * products - codes * values) / spread, scale)
    low = (values - slope * codes) / count
    return low, low + slope * top


@compiled
def _try_range(tile: int, group: int, top: Any, best: Any, low: Any, high: Any) -> Any:
    """The better of `best` and the range low ... high, lane by lane; both are (scale, bias, low, high, squared error)."""
    scale, bias = _to_bf16((high - low) / top), _to_bf16(low)
    error = _squared_error(tile, group, scale, bias, top)
    return (
        select_less16(error, best[4], scale, best[0]),
        select_less16(error, best[4], bias, best[1]),
        select_less16(error, best[4], low, best[2]),
        select_less16(error, best[4], high, best[3]),
        min16(error, best[4]),
    )


@compiled
def _plain(tile: int, group: int, top: Any) -> Any:
    """Plain rounding, as `_try_range` returns it, and the sum of the squared values."""
    low, high, squares = load16(tile), load16(tile), splat16(np.float32(0.0))
    for j in range(group):
        value = load16(tile + 64 * j)
        low, high = min16(value, low), max16(value, high)
        squares = squares + value * value
    scale, bias = _to_bf16((high - low) / top), _to_bf16(low)
    return (scale, bias, low, high, _squared_error(tile, group, scale, bias, top)), squares


@compiled
def _search(tile: int, group: int, top: Any, steps: Any, out: int) -> None:
    """The best scale and bias of 16 groups at `out`, then squared error, that of plain rounding, and squared values.

    steps [rounds, steps of an end], as shares of the range.
    """
    best, squares = _plain(tile, group, top)
    store16(out + 192, best[4])
    store16(out + 256, squares)
    width = best[3] - best[2]
    for number in range(steps.shape[0]):
        low, high = best[2], best[3]
        for i in range(steps.shape[1]):
            best = _try_range(tile, group, top, best, low + splat16(steps[number, i]) * width, high)
        low = best[2]
        for i in range(steps.shape[1]):
            best = _try_range(tile, group, top, best, low, high - splat16(steps[number, i]) * width)
        low, high = _fit(tile, group, best[0], best[1], top)
        best = _try_range(tile, group, top, best, low, high)
    store16(out, best[0])
    store16(out + 64, best[1])
    store16(out + 128, best[4])


@compiled
def _load_tile(values: Any, first: int, tile: Any) -> None:
    """16 groups of `values` [groups, group] from `first` on, transposed to [group, 16]; lanes past the end are zeros."""
    for lane in range(16):
        for j in range(tile.shape[0]):
            tile[j, lane] = values[first + lane, j] if first + lane < values.shape[0] else np.float32(0.0)


@compiled
def _encode_tile(tile: int, group: int, scale: Any, bias: Any, top: Any) -> None:
    """The values of a tile become their codes, as float32."""
    inverse = _inverse(scale)
    for j in range(group):
        place = tile + 64 * j
        store16(place, _code(load16(place), bias, inverse, top))


@compiled
def _store_codes(codes: Any, lane: int, bits: int, out: Any) -> None:
    """The codes [group, 16] of one lane as bytes: 8 bits each, or two in a byte, the lower half first."""
    if bits == 8:
        for j in range(out.size):
            out[j] = np.uint8(codes[j, lane])
    else:
        for j in range(out.size):
            out[j] = np.uint8(codes[2 * j, lane] + np.float32(16.0) * codes[2 * j + 1, lane])


@compiled
def _quantise(values: Any, bits: int, steps: Any, weight: Any, results: Any) -> None:
    """values [groups, group] -> weight uint8 [groups, group * bits / 8], results float32 [5, groups]: see `_search`."""
    num_groups, group = values.shape
    top = splat16(np.float32(2**bits - 1))
    tile, found = np.empty((group, 16), np.float32), np.empty((5, 16), np.float32)
    for first in range(0, num_groups, 16):
        _load_tile(values, first, tile)
        _search(address(tile), group, top, steps, address(found))
        _encode_tile(address(tile), group, load16(address(found)), load16(address(found) + 64), top)
        for lane in range(min(16, num_groups - first)):
            results[:, first + lane] = found[:, lane]
            _store_codes(tile, lane, bits, weight[first + lane])


def quantise(values: Floats, bits: int, group_size: int, steps: Floats = STEPS) -> Quantised:
    """Quantise float32 [rows, cols] to affine groups with bf16 scales; releases the GIL. bits: 4 or 8; cols: a multiple of the group.

    steps float32 [rounds, steps of an end], as shares of a group's range; without rounds it is plain rounding.
    Values that are not finite give no usable codes; `squared_values` then is not finite either.
    """
    assert bits in (4, 8), f"{bits} bits"
    groups = np.ascontiguousarray(values, np.float32).reshape(-1, group_size)
    weight = np.empty((len(groups), group_size * bits // 8), np.uint8)
    results = np.empty((5, len(groups)), np.float32)
    _quantise(groups, bits, steps, weight, results)
    scales, biases = ((results[i].view(np.uint32) >> 16).astype("<u2").view(np.uint8) for i in range(2))
    return Quantised(weight.reshape(-1), scales, biases, *results[2:])
