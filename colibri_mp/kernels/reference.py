"""Plain numpy of the kernels: what they compute, slowly. Tests hold the two together; nothing on the hot path comes here.

Stored forms follow MLX (`mx.dequantize` with float32 scales, bit for bit) and the OCP microscaling formats.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri_mp.formats import Encoding, Format
from colibri_mp.kernels import layout
from colibri_mp.specs import ClampedSwiGLU

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Biases = tuple[Floats, Floats, Floats]

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""Values of the 16 codes of E2M1."""
E8M0: Floats = np.append(np.exp2(np.arange(255.0) - 127), np.nan).astype(np.float32)
"""Values of the 256 power-of-two scales."""


def _e4m3() -> Floats:
    """S.EEEE.MMM with bias 7; 0x7F and 0xFF, NaN in the standard, are 480 as in MLX."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, (code & 7) / 8
    magnitude = np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * np.exp2(exponent - 7.0))
    return np.where(code < 128, magnitude, -magnitude).astype(np.float32)


E4M3 = _e4m3()
"""Values of the 256 codes of FP8 E4M3."""


def elements(raw: Bytes, kind: str) -> Floats:
    """Little-endian bf16, f16 or f32 elements -> float32, exact."""
    raw = np.ascontiguousarray(raw)
    match kind:
        case "bf16":
            return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
        case "f16":
            return raw.view("<f2").astype(np.float32)
        case _:
            return raw.view("<f4").astype(np.float32)


def stored_codes(weight: Bytes, rows: int, cols: int, bits: int) -> npt.NDArray[np.int64]:
    """Codes [rows, cols] of the little-endian bit stream of each row."""
    stream = np.unpackbits(weight.reshape(rows, -1), axis=1, bitorder="little").reshape(rows, cols, bits)
    codes: npt.NDArray[np.int64] = (stream.astype(np.int64) << np.arange(bits)).sum(axis=2)
    return codes


def dequantise(encoding: Encoding, rows: int, cols: int, parts: Sequence[Bytes]) -> Floats:
    """The values [rows, cols] of a stored matrix, float32. Affine: the product rounded, then the sum."""
    if not encoding.group_size:
        return elements(parts[0], encoding.kind).reshape(rows, cols)
    codes = stored_codes(parts[0], rows, cols, encoding.bits)
    if encoding.kind in ("grouped", "row"):
        values = codes - 8 if encoding.bits == 4 else parts[0].view(np.int8).reshape(rows, cols)
        return values.astype(np.float32) * _by_column(encoding, rows, cols, elements(parts[1], "f32"))
    if encoding.kind == "affine":
        scales, biases = (_by_column(encoding, rows, cols, elements(part, encoding.scale)) for part in parts[1:])
        return codes.astype(np.float32) * scales + biases
    table = FP4 if encoding.bits == 4 else E4M3
    return table[codes] * _by_column(encoding, rows, cols, _stored_scales(encoding, parts[1]))


def _stored_scales(encoding: Encoding, part: Bytes) -> Floats:
    if encoding.scale == "u8":
        return (E4M3 if encoding.kind == "nvfp4" else E8M0)[part]
    return elements(part, encoding.scale)


def _by_column(encoding: Encoding, rows: int, cols: int, scales: Floats) -> Floats:
    """What each value of a matrix [rows, cols] is scaled with."""
    grid = scales.reshape(encoding.groups(rows, cols))
    across = grid.repeat(-(-cols // grid.shape[1]) if encoding.kind == "row" else encoding.group_size, axis=1)[:, :cols]
    return across.repeat(encoding.row_tile, axis=0)[:rows]


def unpack(matrix_format: Format, rows: int, cols: int, packed: Bytes) -> Floats:
    """The values [rows, cols] of a packed matrix, float32; the inverse of `layout.pack` followed by `dequantise`."""
    sizes, group = layout.geometry(matrix_format, cols), matrix_format.group_size
    blocks = packed.reshape(layout.num_blocks(rows), sizes.block_bytes)
    if not group:
        by_column = elements(blocks.reshape(-1), matrix_format.kind).reshape(len(blocks), -1, layout.BLOCK_ROWS)
        return np.ascontiguousarray(by_column.transpose(0, 2, 1)).reshape(-1, by_column.shape[1])[:rows, :cols]
    if matrix_format.kind in ("fp4", "fp8"):
        values = _unpack_floats(matrix_format, cols, blocks)
        return np.ascontiguousarray(values).reshape(-1, cols)[:rows]
    steps = blocks[:, : sizes.num_steps * sizes.step_bytes].reshape(len(blocks), sizes.num_steps, -1)
    bits = layout.code_bits(matrix_format)
    codes_end = layout.BLOCK_ROWS * group * bits // 8
    codes = _unpack_codes(steps[:, :, :codes_end], group, bits)  # [block, group, row, column]
    if matrix_format.scale in ("symmetric", "row"):
        stored = blocks[:, None, -64:] if matrix_format.scale == "row" else steps[:, :, codes_end:]
        scales = elements(stored.reshape(-1), "f32").reshape(*stored.shape[:2], layout.BLOCK_ROWS, 1)
        values = (codes.astype(np.float32) - np.float32(2 ** (bits - 1))) * scales
        return np.ascontiguousarray(values.transpose(0, 2, 1, 3)).reshape(-1, cols)[:rows]
    factors = elements(steps[:, :, codes_end:].reshape(-1), matrix_format.scale).reshape(
        *steps.shape[:2], 2, layout.BLOCK_ROWS, 1
    )
    values = codes.astype(np.float32) * factors[:, :, 0] + factors[:, :, 1]
    return np.ascontiguousarray(values.transpose(0, 2, 1, 3)).reshape(-1, cols)[:rows]


def _unpack_floats(matrix_format: Format, cols: int, blocks: Bytes) -> Floats:
    """Values [block, row, column] of FP4 and FP8."""
    kind, group, scale = matrix_format
    num_groups, per_line = -(-cols // group), layout.groups_a_line(matrix_format)
    group_bytes = 2 * group * layout.code_bits(matrix_format)
    lines = np.arange(num_groups) // per_line
    firsts = lines * (layout.LINE_BYTES + per_line * group_bytes)
    ends = firsts + layout.LINE_BYTES + (np.arange(num_groups) % per_line + 1) * group_bytes
    codes = [blocks[:, end - group_bytes : end] for end in ends.tolist()]  # of the last group perhaps fewer
    if kind == "fp4":
        words = np.stack(codes, axis=1)
        values = FP4[_unpack_codes(words, group, 4)].transpose(0, 2, 1, 3).reshape(len(blocks), layout.BLOCK_ROWS, cols)
    else:
        pairs = np.concatenate(codes, axis=1).reshape(len(blocks), cols // 2, layout.BLOCK_ROWS, 2)
        values = E4M3[pairs.transpose(0, 2, 1, 3).reshape(len(blocks), layout.BLOCK_ROWS, cols)]
    width = layout.LINE_BYTES // per_line
    places = (firsts + np.arange(num_groups) % per_line * width)[:, None] + np.arange(width)
    stored = blocks[:, places]  # [block, group, bytes]
    if scale == "tile":
        scales = elements(stored.reshape(-1), "f32").reshape(len(blocks), 1, num_groups)
    else:
        scales = (E8M0 if scale == "e8m0" else E4M3)[stored.transpose(0, 2, 1)]
    found: Floats = values * scales.repeat(group, axis=2)[:, :, :cols]
    return found


def _unpack_codes(words: Bytes, group: int, bits: int) -> npt.NDArray[np.uint8]:
    """Word bytes [block, group, word * 16 * 4] -> codes [block, group, row, column]."""
    by_word = words.reshape(*words.shape[:2], -1, layout.BLOCK_ROWS, 4)  # ..., word, row, byte
    units = np.zeros((*words.shape[:2], group // 4, layout.BLOCK_ROWS, 4), np.uint8)
    first = low = 0
    for width in layout.code_parts(bits):
        part = by_word[:, :, first : first + group * width // 32]
        for j in range(8 // width):
            units[:, :, j :: 8 // width] |= (part >> width * j & 2**width - 1) << low
        first, low = first + group * width // 32, low + width
    pairs = units.reshape(*units.shape[:2], -1, 2, layout.BLOCK_ROWS, 4)  # ..., eight columns, even or odd, row, byte
    return pairs.transpose(0, 1, 4, 2, 5, 3).reshape(*units.shape[:2], layout.BLOCK_ROWS, group)


def linear(x: Floats, weight: Floats, bias: Floats | None = None) -> Floats:
    """x [T, K] W^T [N, K] + bias, summed in float64."""
    y = x.astype(np.float64) @ weight.astype(np.float64).T
    return (y if bias is None else y + bias).astype(np.float32)


def silu(x: Floats) -> Floats:
    """x / (1 + e^-x)."""
    wide = x.astype(np.float64)
    result: Floats = (wide / (1 + np.exp(-wide))).astype(np.float32)
    return result


def clamped_swiglu(gate: Floats, up: Floats, clamp: ClampedSwiGLU) -> Floats:
    """(up + 1) * gate * sigmoid(alpha * gate), gate at most `limit`, up within +-`limit`."""
    low, within = np.minimum(gate, clamp.limit).astype(np.float64), np.clip(up, -clamp.limit, clamp.limit)
    result: Floats = ((within + 1) * low / (1 + np.exp(-clamp.alpha * low))).astype(np.float32)
    return result


def expert(
    x: Floats, gate: Floats, up: Floats, down: Floats, biases: Biases | None = None, clamp: ClampedSwiGLU | None = None
) -> Floats:
    """SwiGLU: down(silu(gate x) * up x); x [T, D], gate and up [F, D], down [D, F]; biases [F], [F], [D]."""
    gate_bias, up_bias, down_bias = biases or (None, None, None)
    gated, lifted = linear(x, gate, gate_bias), linear(x, up, up_bias)
    hidden = silu(gated) * lifted if clamp is None else clamped_swiglu(gated, lifted, clamp)
    return linear(hidden, down, down_bias)


def experts(
    x: Floats,
    ids: npt.NDArray[np.int32],
    weights: Floats,
    matrices: Sequence[tuple[Any, ...]],
    clamp: ClampedSwiGLU | None = None,
) -> Floats:
    """Sum over the chosen experts of weight * expert(x), in ascending id; ids [T, K] < 0 are skipped.

    matrices[id] = gate, up, down[, biases], as `expert` takes them.
    """
    out = np.zeros_like(x)
    for token in range(len(x)):
        for k in np.argsort(ids[token], kind="stable"):
            if ids[token, k] >= 0:
                gate, up, down, *biases = matrices[ids[token, k]]
                row = expert(x[token : token + 1], gate, up, down, biases[0] if biases else None, clamp)
                out[token] += weights[token, k] * row[0]
    return out


def quantise(values: Floats, bits: int, group_size: int, steps: Floats) -> tuple[Bytes, Floats, Floats]:
    """Affine quantisation with a searched range, see `quantising`: codes uint8 [rows, cols], scales and biases float32 [groups].

    steps [rounds, steps of an end]. Sums run over a group's values in order, in float32, as in the kernel.
    """
    groups = values.reshape(-1, group_size)
    top = np.float32(2**bits - 1)

    def candidate(low: Floats, high: Floats) -> list[Floats]:
        scale, bias = _round_to_bf16((high - low) / top), _round_to_bf16(low)
        difference = _codes(groups, scale, bias, top) * scale[:, None] + bias[:, None] - groups
        return [scale, bias, low, high, _ordered_sum(difference * difference)]

    best = candidate(groups.min(axis=1), groups.max(axis=1))

    def try_range(low: Floats, high: Floats) -> None:
        tried = candidate(low, high)
        better = tried[4] < best[4]
        best[:] = [np.where(better, new, old) for new, old in zip(tried, best, strict=True)]

    width = best[3] - best[2]
    for shares in steps:
        low, high = best[2], best[3]
        for share in shares:
            try_range(low + share * width, high)
        low = best[2]
        for share in shares:
            try_range(low, high - share * width)
        try_range(*_least_squares(groups, best[0], best[1], top))
    scale, bias = best[:2]
    return _codes(groups, scale, bias, top).astype(np.uint8).reshape(values.shape), scale, bias


def _codes(groups: Floats, scale: Floats, bias: Floats, top: np.float32) -> Floats:
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > np.float32(1e-36))
    codes: Floats = np.rint(np.clip((groups - bias[:, None]) * inverse[:, None], 0, top))
    return codes


def _least_squares(groups: Floats, scale: Floats, bias: Floats, top: np.float32) -> tuple[Floats, Floats]:
    codes = _codes(groups, scale, bias, top)
    count = np.full_like(scale, groups.shape[1])
    sum_c, sum_cc, sum_v, sum_cv = map(_ordered_sum, (codes, codes * codes, groups, codes * groups))
    spread = count * sum_cc - sum_c * sum_c
    slope: Floats = np.divide(count * sum_cv - sum_c * sum_v, spread, out=scale.copy(), where=spread > 0)
    low: Floats = np.divide(sum_v - slope * sum_c, count, dtype=np.float32)
    high: Floats = low + slope * top
    return low, high


def _ordered_sum(groups: Floats) -> Floats:
    """Of each row, one value after the other."""
    total: Floats = np.add.accumulate(groups, axis=1)[:, -1]
    return total


def _round_to_bf16(values: Floats) -> Floats:
    bits = values.view(np.uint32)
    return (bits + (0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)
