"""Matrices of colibrì's own containers (the C engine): bytes without a shape, whose form their number tells.

    X.weight     U8 or I8, flat          X.weight.qs   F32, flat           matrix X of R rows, C columns
    R C          int8, signed            R             scales by row
    R C / 2      int4, value + 8,        R             scales by row
                 low nibble first        R C / g       scales of groups, g the first of 16 32 48 64 96 128 192 256 that fits
    R C          E4M3                    R/128 C/128   scales of tiles of 128 x 128, rounded up (where as many are not scales by row)

Experts of OLMoE lie otherwise: `merged`. Everything else of such a folder is as in other checkpoints: config.json, the names of Hugging
Face, norms and routers plain.
"""

from collections.abc import Iterator

from colibri_mp.checkpoint.safetensors_header import TensorInfo
from colibri_mp.errors import CheckpointError
from colibri_mp.formats import INT4_GROUP_SIZES, TILE, Encoding, row_group

SCALES = ".weight.qs"
_CODE_DTYPES = ("U8", "I8")


def flat_encoding(weight: TensorInfo, scales: TensorInfo, rows: int, cols: int) -> Encoding:
    """The encoding of a flat matrix, from the bytes of its codes and the number of its scales.

    Raises `CheckpointError` if they are those of no supported form.
    """
    num_scales = scales.nbytes // 4
    is_flat = len(weight.shape) == len(scales.shape) == 1 and weight.dtype in _CODE_DTYPES and scales.dtype == "F32"
    for encoding in _possible(cols) if is_flat else ():
        down, across = encoding.groups(rows, cols)
        if (weight.nbytes, num_scales) == (encoding.part_bytes(rows, cols)[0], down * across) and encoding.is_supported(
            cols
        ):
            return encoding
    raise CheckpointError(
        f"{weight.name}: {weight.dtype} {list(weight.shape)} with scales {scales.dtype} {list(scales.shape)} is no matrix of {rows} rows "
        f"and {cols} columns in a form of colibrì's containers that is read: int8 or int4 with a scale for each row, int4 in groups of "
        f"{', '.join(map(str, INT4_GROUP_SIZES))}, fp8 in tiles of {TILE} x {TILE}; convert the original checkpoint instead"
    )


def _possible(cols: int) -> Iterator[Encoding]:
    """In the order in which one that fits is taken."""
    group = row_group(cols)
    yield Encoding("row", 8, group, "f32")
    yield Encoding("row", 4, group, "f32")
    yield from (Encoding("grouped", 4, size, "f32") for size in INT4_GROUP_SIZES)
    yield Encoding("fp8", 8, TILE, "f32")
