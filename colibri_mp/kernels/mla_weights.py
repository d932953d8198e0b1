"""The weights of latent attention, and how kv_b becomes the two matrices of each head that absorbed attention multiplies with.

kv_b [heads * (nope + v), L] holds for each head W_uk [nope, L] and W_uv [v, L]: keys are W_uk c, values W_uv c of a latent c [L].
Scores are (W_uk^T q) c, so W_uk is needed the other way round:

    uk   [heads * L, nope]        row blocks of a head give its latent query
    uv   [heads * v_padded, L]    as stored, where heads are whole blocks of 16 rows

A quantised W_uk has its scales along L, the rows of uk. Its codes are turned and packed with scale 1 and bias 0 (of colibrì's signed codes
-8 or -128; floating-point codes as bf16, which holds them). The scales meet the queries instead, exactly the products of the dequantised
weights: for the columns c of a group g

    sum_n q[n] (code[n, c] scale[n, g] + bias[n, g])  =  sum_n (q[n] scale[n, g]) code[n, c]  +  sum_n q[n] bias[n, g]

A checkpoint of MLX has `embed_q` [heads, L, nope] and `unembed_out` [heads, v, L] in place of kv_b: uk and uv as they are.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_mp.formats import AFFINE_GROUP_SIZES, TILE, Encoding, Format
from colibri_mp.kernels.attention_inputs import check_plain
from colibri_mp.kernels.indexer import IndexerWeights
from colibri_mp.kernels.latent_cache import padded
from colibri_mp.kernels.layout import BLOCK_ROWS, PackedMatrix, gather_rows, pack, packed_bytes
from colibri_mp.kernels.reference import E4M3, E8M0, FP4, elements
from colibri_mp.kernels.team import aligned_bytes
from colibri_mp.specs import MlaSpec

F32Array = NDArray[np.float32]
Bytes = NDArray[np.uint8]

_SIGNED = ("grouped", "row")
"""Encodings whose codes are signed."""


@dataclass(frozen=True, eq=False)
class MlaWeights:
    """Weights of one block of latent attention. Vectors are C-contiguous float32.

    norm [D]; q_a [q_lora, D] with q_a_norm [q_lora], or None; q [heads * (nope + rope), q_lora or D]; kv_a [L + rope, D];
    kv_a_norm [L]; uk, uv: see the module docstring; uk_scales, uk_biases [heads, groups, nope] where kv_b has such; o [D, heads * v].
    `indexer`: of layers that have one of their own.
    """

    norm: F32Array
    q_a: PackedMatrix | None
    q_a_norm: F32Array | None
    q: PackedMatrix
    kv_a: PackedMatrix
    kv_a_norm: F32Array
    uk: PackedMatrix
    uv: PackedMatrix
    o: PackedMatrix
    uk_scales: F32Array | None = None
    uk_biases: F32Array | None = None
    indexer: IndexerWeights | None = None

    @property
    def num_scales(self) -> int:
        """Groups of columns of W_uk that have scales of their own; 1 without scales."""
        return 1 if self.uk_scales is None else int(self.uk_scales.shape[1])

    def check(self, spec: MlaSpec) -> None:
        """Our own invariant: the loader has compared the checkpoint with its configuration."""
        heads, latent = spec.num_heads, spec.kv_lora_rank
        shapes = {
            "q": (spec.q_width, spec.q_lora_rank or spec.hidden),
            "kv_a": (latent + spec.rope_dim, spec.hidden),
            "uk": (heads * latent, spec.nope_dim),
            "uv": (heads * padded(spec.v_dim), latent),
            "o": (spec.hidden, heads * spec.v_dim),
        }
        widths = {"norm": spec.hidden, "kv_a_norm": latent}
        if spec.q_lora_rank:
            shapes["q_a"], widths["q_a_norm"] = (spec.q_lora_rank, spec.hidden), spec.q_lora_rank
        for name, shape in shapes.items():
            matrix = getattr(self, name)
            assert (matrix.rows, matrix.cols) == shape, f"{name} is [{matrix.rows}, {matrix.cols}], not {shape}"
        if self.uk_scales is not None:
            assert self.uk_scales.shape == (heads, self.num_scales, spec.nope_dim)
            widths["uk_scales"] = self.uk_scales.size
        if self.uk_biases is not None:
            widths["uk_biases"] = heads * self.num_scales * spec.nope_dim
        if self.indexer is not None:
            assert spec.indexer is not None
            self.indexer.check(spec.indexer)
        for name, width in widths.items():
            assert getattr(self, name).size == width, f"{name} must have {width} elements"
            check_plain(getattr(self, name), np.float32)


@dataclass(frozen=True)
class Absorbed:
    """How a kv_b is kept. `group_size`: columns of W_uk that share a scale, 0: it has none."""

    uk: Encoding
    uv: Format
    group_size: int
    has_bias: bool

    @staticmethod
    def of(kv_b: Encoding, spec: MlaSpec) -> "Absorbed":
        """uv is as stored where heads are whole blocks of rows, float32 elsewhere."""
        whole = spec.nope_dim % BLOCK_ROWS == 0 and spec.v_dim % BLOCK_ROWS == 0
        uv = kv_b.format if whole else Format("f32")
        if not kv_b.group_size:
            return Absorbed(kv_b, uv, 0, has_bias=False)
        uk, is_integer = Encoding("bf16"), kv_b.kind in ("affine", *_SIGNED)
        sizes = [size for size in AFFINE_GROUP_SIZES if spec.nope_dim % size == 0]
        if is_integer and sizes:
            uk = Encoding("affine", 4 if kv_b.bits <= 4 else 8, max(sizes), kv_b.scale)
        group_size = spec.kv_lora_rank if kv_b.kind == "row" else math.gcd(kv_b.group_size, spec.kv_lora_rank)
        return Absorbed(uk, uv, group_size, has_bias=kv_b.kind == "affine")

    def nbytes(self, spec: MlaSpec) -> int:
        """Bytes of uk and uv, and of the scales."""
        heads, latent = spec.num_heads, spec.kv_lora_rank
        factors = (1 + self.has_bias) * heads * spec.nope_dim * (latent // self.group_size) if self.group_size else 0
        uk = packed_bytes(self.uk.format, heads * latent, spec.nope_dim)
        return uk + packed_bytes(self.uv, heads * padded(spec.v_dim), latent) + 4 * factors


def absorb(encoding: Encoding, parts: Sequence[Bytes], spec: MlaSpec) -> dict[str, Any]:
    """uk, uv, uk_scales and uk_biases of `MlaWeights` from the stored parts of kv_b."""
    kept, rows = Absorbed.of(encoding, spec), spec.num_heads * (spec.nope_dim + spec.v_dim)
    found = {"uv": _values(_pack_parts(encoding, rows, spec.kv_lora_rank, parts), kept, spec)}
    codes = _codes(encoding, rows, spec.kv_lora_rank, parts[0])
    turned = _keys(codes, spec).transpose(0, 2, 1).reshape(-1, spec.nope_dim)
    if not kept.group_size:
        return found | {"uk": _pack_elements(kept.uk, turned)}
    if kept.uk.group_size:
        uk = _pack_codes(turned, kept.uk, 1 << encoding.bits - 1 if encoding.kind in _SIGNED else 0)
    else:
        uk = _pack_elements(kept.uk, _values_of(encoding, turned))
    factors = [_factors(encoding, part, rows, spec.kv_lora_rank, kept.group_size) for part in parts[1:]]
    by_head = [np.ascontiguousarray(_keys(part, spec).transpose(0, 2, 1)) for part in factors]
    return found | {"uk": uk} | dict(zip(("uk_scales", "uk_biases"), by_head, strict=False))


def pad_values(unembed: PackedMatrix, spec: MlaSpec) -> PackedMatrix:
    """uv from rows [heads * v, L]."""
    if spec.v_dim % BLOCK_ROWS == 0:
        return unembed
    return _pad(_rows(unembed).reshape(spec.num_heads, spec.v_dim, -1))


def padded_bytes(unembed: Format, spec: MlaSpec) -> int:
    """Bytes of what `pad_values` gives."""
    kept = unembed if spec.v_dim % BLOCK_ROWS == 0 else Format("f32")
    return packed_bytes(kept, spec.num_heads * padded(spec.v_dim), spec.kv_lora_rank)


def _keys(rows: NDArray[Any], spec: MlaSpec) -> NDArray[Any]:
    """[heads * (nope + v), n] -> [heads, nope, n]."""
    return rows.reshape(spec.num_heads, spec.nope_dim + spec.v_dim, -1)[:, : spec.nope_dim]


def _values(kv_b: PackedMatrix, kept: Absorbed, spec: MlaSpec) -> PackedMatrix:
    rows = spec.nope_dim + spec.v_dim
    if spec.nope_dim % BLOCK_ROWS or spec.v_dim % BLOCK_ROWS:
        return _pad(_rows(kv_b).reshape(spec.num_heads, rows, -1)[:, spec.nope_dim :])
    blocks = kv_b.data.reshape(spec.num_heads, rows // BLOCK_ROWS, -1)[:, spec.nope_dim // BLOCK_ROWS :]
    data = aligned_bytes(blocks.size)
    data[:] = blocks.reshape(-1)
    return PackedMatrix(kept.uv, spec.num_heads * spec.v_dim, kv_b.cols, data)


def _pad(values: F32Array) -> PackedMatrix:
    """[heads, v, L] with zero rows to whole blocks, as float32."""
    heads, v_dim, latent = values.shape
    rows = np.zeros((heads, padded(v_dim), latent), np.float32)
    rows[:, :v_dim] = values
    return _pack_elements(Encoding("f32"), rows.reshape(-1, latent))


def _rows(matrix: PackedMatrix) -> F32Array:
    return gather_rows(matrix, np.arange(matrix.rows, dtype=np.int32))


def _codes(encoding: Encoding, rows: int, cols: int, weight: Bytes) -> NDArray[Any]:
    """Codes uint8 [rows, cols], signed ones with half their range added; of plain encodings their elements, bits uncombined."""
    if not encoding.group_size:
        return weight.view(np.uint32 if encoding.kind == "f32" else np.uint16).reshape(rows, cols)
    if encoding.bits == 8:
        return (weight ^ 128 if encoding.kind in _SIGNED else weight).reshape(rows, cols)
    if encoding.bits == 4:
        return np.stack([weight & 15, weight >> 4], axis=-1).reshape(rows, cols)
    codes, row_bytes = np.empty((rows, cols), np.uint8), cols * encoding.bits // 8
    for row in range(rows):  # a bit of every code is a byte on its way
        bits = np.unpackbits(weight[row * row_bytes : (row + 1) * row_bytes], bitorder="little")
        codes[row] = bits.reshape(cols, encoding.bits) @ (1 << np.arange(encoding.bits, dtype=np.uint8))
    return codes


def _values_of(encoding: Encoding, codes: NDArray[np.uint8]) -> NDArray[np.uint16]:
    """What codes stand for before they are scaled, as bf16: integers below 256, E2M1 and E4M3 all have eight significant bits or less."""
    values: F32Array = np.arange(256, dtype=np.float32)
    if encoding.kind in _SIGNED:
        values = values - (1 << encoding.bits - 1)
    elif encoding.kind != "affine":
        values = FP4 if encoding.bits == 4 else E4M3
    return (values.view(np.uint32) >> 16).astype(np.uint16)[codes]


def _factors(encoding: Encoding, part: Bytes, rows: int, cols: int, group_size: int) -> F32Array:
    """Scales or biases float32 [rows, cols / group_size]."""
    match encoding.kind:
        case "affine" | "grouped":
            found = elements(part, encoding.scale).reshape(rows, -1)
        case "fp8":
            tiles = elements(part, encoding.scale).reshape(-(-rows // TILE), -1)
            found = tiles[np.arange(rows) // TILE]
        case "row":
            return elements(part, encoding.scale).reshape(rows, 1)
        case "nvfp4":
            found = E4M3[part].reshape(rows, -1)
        case _:
            found = E8M0[part].reshape(rows, -1)
    return np.ascontiguousarray(found.repeat(encoding.group_size // group_size, axis=1)[:, : cols // group_size])


def _pack_elements(encoding: Encoding, values: NDArray[Any]) -> PackedMatrix:
    """Elements [rows, cols] of the encoding's size."""
    rows, cols = values.shape
    return _pack_parts(encoding, rows, cols, [np.ascontiguousarray(values).reshape(-1).view(np.uint8)])


def _pack_codes(codes: NDArray[np.uint8], encoding: Encoding, middle: int) -> PackedMatrix:
    """Codes [rows, cols] with scale 1 and bias -middle."""
    rows, cols = codes.shape
    stored = codes if encoding.bits == 8 else codes[:, 0::2] | (codes[:, 1::2] << 4)
    factors = (_repeated(value, encoding.scale, rows * (cols // encoding.group_size)) for value in (1.0, -middle))
    return _pack_parts(encoding, rows, cols, [np.ascontiguousarray(stored).reshape(-1), *factors])


def _repeated(value: float, kind: str, count: int) -> Bytes:
    """A small integer, so many times, as bf16, f16 or f32."""
    as_f32 = np.array([value], np.float32)
    elements_of: dict[str, NDArray[Any]] = {
        "bf16": (as_f32.view(np.uint32) >> 16).astype(np.uint16),
        "f16": as_f32.astype(np.float16),
        "f32": as_f32,
    }
    return np.resize(elements_of[kind], count).view(np.uint8)


def _pack_parts(encoding: Encoding, rows: int, cols: int, parts: Sequence[Bytes]) -> PackedMatrix:
    data = aligned_bytes(packed_bytes(encoding.format, rows, cols))
    pack(encoding, rows, cols, parts, data)
    return PackedMatrix(encoding.format, rows, cols, data)
