"""The weights of latent attention, and how kv_b becomes the two matrices of each head that absorbed attention multiplies with.

kv_b [heads * (nope + v), L] holds for each head W_uk [nope, L] and W_uv [v, L]: keys are W_uk c, values W_uv c of a latent c [L].
Scores are (W_uk^T q) c, so W_uk is needed the other way round:

    uk   [heads * L, nope]        row blocks of a head give its latent query
    uv   [heads * v_padded, L]    as stored, where heads are whole blocks of 16 rows

A quantised W_uk has its scales along L, the rows of uk. Its codes are turned and packed with scale 1 and bias 0; the scales meet the
queries instead, exactly the products of the dequantised weights: for the columns c of a group g

    sum_n q[n] (code[n, c] scale[n, g] + bias[n, g])  =  sum_n (q[n] scale[n, g]) code[n, c]  +  sum_n q[n] bias[n, g]

A checkpoint of MLX has `embed_q` [heads, L, nope] and `unembed_out` [heads, v, L] in place of kv_b: uk and uv as they are.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from colibri_mp.formats import AFFINE_GROUP_SIZES, Encoding, Format
from colibri_mp.kernels.attention_inputs import check_plain
from colibri_mp.kernels.indexer import IndexerWeights
from colibri_mp.kernels.latent_cache import padded
from colibri_mp.kernels.layout import BLOCK_ROWS, PackedMatrix, code_bits, gather_rows, geometry, pack, packed_bytes
from colibri_mp.kernels.team import aligned_bytes
from colibri_mp.specs import MlaSpec

F32Array = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class MlaWeights:
    """Weights of one block of latent attention. Vectors are C-contiguous float32.

    norm [D]; q_a [q_lora, D] with q_a_norm [q_lora], or None; q [heads * (nope + rope), q_lora or D]; kv_a [L + rope, D];
    kv_a_norm [L]; uk, uv: see the module docstring; uk_scales, uk_biases [heads, groups, nope]; o [D, heads * v].
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
            assert self.uk_biases is not None
            assert self.uk_scales.shape == self.uk_biases.shape == (heads, self.num_scales, spec.nope_dim)
            widths["uk_scales"] = widths["uk_biases"] = self.uk_scales.size
        if self.indexer is not None:
            assert spec.indexer is not None
            self.indexer.check(spec.indexer)
        for name, width in widths.items():
            assert getattr(self, name).size == width, f"{name} must have {width} elements"
            check_plain(getattr(self, name), np.float32)


@dataclass(frozen=True)
class Absorbed:
    """How a kv_b of some format is kept. `how`: "codes" turned with their scales apart, "elements" turned, or widened to float32."""

    uk: Encoding
    uv: Format
    how: Literal["codes", "elements", "floats"]

    @staticmethod
    def of(kv_b: Format, spec: MlaSpec) -> "Absorbed":
        """float32 where heads are no whole blocks, or codes cannot be turned; as stored elsewhere."""
        floats = Encoding("f32")
        whole = spec.nope_dim % BLOCK_ROWS == 0 and spec.v_dim % BLOCK_ROWS == 0
        uv = kv_b if whole else floats.format
        if kv_b.kind in ("bf16", "f16", "f32"):
            return Absorbed(Encoding(kv_b.kind), uv, "elements")
        sizes = [size for size in AFFINE_GROUP_SIZES if spec.nope_dim % size == 0]
        if kv_b.kind not in ("q4", "q8") or not sizes or kv_b.group_size % BLOCK_ROWS:
            return Absorbed(floats, uv, "floats")
        return Absorbed(Encoding("affine", code_bits(kv_b), max(sizes), kv_b.scale), uv, "codes")

    def nbytes(self, spec: MlaSpec, kv_b: Format) -> int:
        """Bytes of uk and uv, and of the scales."""
        heads, latent = spec.num_heads, spec.kv_lora_rank
        scales = 2 * 4 * heads * (latent // kv_b.group_size) * spec.nope_dim if self.how == "codes" else 0
        uk = packed_bytes(self.uk.format, heads * latent, spec.nope_dim)
        return uk + packed_bytes(self.uv, heads * padded(spec.v_dim), latent) + scales


def absorb(kv_b: PackedMatrix, spec: MlaSpec) -> dict[str, Any]:
    """uk, uv, uk_scales and uk_biases of `MlaWeights` from a packed kv_b."""
    kept = Absorbed.of(kv_b.format, spec)
    parts: dict[str, Any] = {"uv": _values(kv_b, kept, spec)}
    if kept.how != "codes":
        parts["uk"] = _turned(kv_b, kept, spec)
        return parts
    codes, factors = _codes(kv_b)
    heads, latent, nope = spec.num_heads, spec.kv_lora_rank, spec.nope_dim
    turned = codes.reshape(heads, nope + spec.v_dim, latent)[:, :nope].transpose(0, 2, 1).reshape(heads * latent, nope)
    parts["uk"] = _pack_codes(np.ascontiguousarray(turned), kept.uk)
    by_head = factors.reshape(2, heads, nope + spec.v_dim, -1)[:, :, :nope].transpose(0, 1, 3, 2)
    parts["uk_scales"], parts["uk_biases"] = (np.ascontiguousarray(part) for part in by_head)
    return parts


def pad_values(unembed: PackedMatrix, spec: MlaSpec) -> PackedMatrix:
    """uv from rows [heads * v, L]."""
    if spec.v_dim % BLOCK_ROWS == 0:
        return unembed
    return _pad(_rows(unembed).reshape(spec.num_heads, spec.v_dim, -1))


def padded_bytes(unembed: Format, spec: MlaSpec) -> int:
    """Bytes of what `pad_values` gives."""
    kept = unembed if spec.v_dim % BLOCK_ROWS == 0 else Format("f32")
    return packed_bytes(kept, spec.num_heads * padded(spec.v_dim), spec.kv_lora_rank)


def _values(kv_b: PackedMatrix, kept: Absorbed, spec: MlaSpec) -> PackedMatrix:
    rows = spec.nope_dim + spec.v_dim
    if kept.uv != kv_b.format or rows % BLOCK_ROWS or spec.nope_dim % BLOCK_ROWS:
        return _pad(_rows(kv_b).reshape(spec.num_heads, rows, -1)[:, spec.nope_dim :])
    blocks = kv_b.data.reshape(spec.num_heads, rows // BLOCK_ROWS, -1)[:, spec.nope_dim // BLOCK_ROWS :]
    data = aligned_bytes(blocks.size)
    data[:] = blocks.reshape(-1)
    return PackedMatrix(kv_b.format, spec.num_heads * spec.v_dim, kv_b.cols, data)


def _pad(values: F32Array) -> PackedMatrix:
    """[heads, v, L] with zero rows to whole blocks, as float32."""
    heads, v_dim, latent = values.shape
    rows = np.zeros((heads, padded(v_dim), latent), np.float32)
    rows[:, :v_dim] = values
    return _pack(Encoding("f32"), rows.reshape(-1, latent))


def _turned(kv_b: PackedMatrix, kept: Absorbed, spec: MlaSpec) -> PackedMatrix:
    """uk as elements: exact, since they had this type, or float32."""
    rows = _rows(kv_b).reshape(spec.num_heads, -1, spec.kv_lora_rank)[:, : spec.nope_dim]
    return _pack(kept.uk, np.ascontiguousarray(rows.transpose(0, 2, 1)).reshape(-1, spec.nope_dim))


def _rows(matrix: PackedMatrix) -> F32Array:
    return gather_rows(matrix, np.arange(matrix.rows, dtype=np.int32))


def _pack(encoding: Encoding, values: F32Array) -> PackedMatrix:
    """Values that the elements hold exactly."""
    if encoding.kind == "bf16":
        stored: NDArray[Any] = (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16)
    else:
        stored = np.ascontiguousarray(values, np.float16 if encoding.kind == "f16" else np.float32)
    rows, cols = values.shape
    return _pack_parts(encoding, rows, cols, [stored.reshape(-1).view(np.uint8)])


def _pack_codes(codes: NDArray[np.uint8], encoding: Encoding) -> PackedMatrix:
    """Codes [rows, cols] with scale 1 and bias 0."""
    rows, cols = codes.shape
    stored = codes if encoding.bits == 8 else codes[:, 0::2] | (codes[:, 1::2] << 4)
    one: dict[str, NDArray[Any]] = {
        "bf16": np.array([0x3F80], np.uint16),
        "f16": np.ones(1, np.float16),
        "f32": np.ones(1, np.float32),
    }
    scales = np.resize(one[encoding.scale], rows * (cols // encoding.group_size)).view(np.uint8)
    return _pack_parts(encoding, rows, cols, [np.ascontiguousarray(stored).reshape(-1), scales, np.zeros_like(scales)])


def _pack_parts(encoding: Encoding, rows: int, cols: int, parts: list[NDArray[np.uint8]]) -> PackedMatrix:
    data = aligned_bytes(packed_bytes(encoding.format, rows, cols))
    pack(encoding, rows, cols, parts, data)
    return PackedMatrix(encoding.format, rows, cols, data)


def _codes(matrix: PackedMatrix) -> tuple[NDArray[np.uint8], F32Array]:
    """Codes uint8 [rows, cols] of whole blocks, and scales and biases float32 [2, rows, groups]. Layout: `layout`."""
    matrix_format = matrix.format
    sizes, bits = geometry(matrix_format, matrix.cols), code_bits(matrix_format)
    records = matrix.data.reshape(-1, sizes.num_steps, sizes.step_bytes)
    end = BLOCK_ROWS * matrix_format.group_size * bits // 8
    words = records[:, :, :end].reshape(*records.shape[:2], -1, BLOCK_ROWS, 4).transpose(0, 3, 1, 2, 4)
    if bits == 4:
        codes = np.stack([words & 15, words >> 4], axis=-1)
    else:
        codes = words.reshape(*words.shape[:3], -1, 2, 4).swapaxes(-1, -2)
    factors = _floats(records[:, :, end:], matrix_format.scale).reshape(*records.shape[:2], 2, BLOCK_ROWS)
    by_row = factors.transpose(2, 0, 3, 1).reshape(2, -1, sizes.num_steps)
    return codes.reshape(-1, matrix.cols)[: matrix.rows], by_row[:, : matrix.rows]


def _floats(raw: NDArray[np.uint8], kind: str) -> F32Array:
    raw = np.ascontiguousarray(raw)
    if kind == "bf16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return raw.view(np.float16 if kind == "f16" else np.float32).astype(np.float32)
