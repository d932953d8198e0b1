"""How the matrices of a projection change on their way into a container, and why.

    stored as                 without --bits   with --bits: the width B asked for this projection
    bf16, f16, f32            kept             quantised to B bits
    affine, B bits or fewer   kept             kept; codes of 2 and 3 bits are widened to 4: the same values in half the slab
    affine, more bits         kept             quantised anew to B bits
    mxfp4, nvfp4              kept             8: kept, the kernels read them as 8-bit codes anyway; 4: quantised
    mxfp8                     kept             quantised to B bits

So nothing loses accuracy that need not, and nothing becomes wider than it was. `mixed` asks for 4 bits in gate and up and
for 8 in down, whose errors go straight into the residual stream: against 4 bits everywhere, 8 in down alone halve the
divergence from the original, in gate or in up alone they take off a fifth (docs/log.md).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from colibri_mp.checkpoint.container import Bits, Rounding
from colibri_mp.formats import Encoding
from colibri_mp.kernels.layout import Bytes, PackedMatrix, gather_rows, pack, packed_bytes
from colibri_mp.kernels.quantising import Floats, quantise
from colibri_mp.kernels.reference import elements
from colibri_mp.kernels.team import aligned_bytes

SCALE: Literal["bf16"] = "bf16"
"""Type of new scales and biases: the range of float32; the codes are chosen for the rounded ones."""
_WIDTHS: dict[Bits, dict[str, int]] = {
    "stored": {},
    "4": dict.fromkeys(("gate", "up", "down"), 4),
    "8": dict.fromkeys(("gate", "up", "down"), 8),
    "mixed": {"gate": 4, "up": 4, "down": 8},
}


@dataclass(frozen=True, slots=True)
class Recoding:
    """From `stored` to `target`; `reason` is for people. Equal encodings: the parts are kept."""

    stored: Encoding
    target: Encoding
    reason: str

    @property
    def is_quantised(self) -> bool:
        """Whether values change."""
        return self.target != self.stored and not _is_widened(self.stored, self.target)

    def apply(self, rows: int, cols: int, parts: Sequence[Bytes]) -> tuple[Sequence[Bytes], Rounding | None]:
        """The parts of some rows of a matrix in the target encoding, and what rounding cost if they were quantised."""
        if self.target == self.stored:
            return parts, None
        if not self.is_quantised:
            return (_widen(self.stored.bits, parts[0]), *parts[1:]), None
        return _quantise(self.target, decode(self.stored, rows, cols, parts))


def choose(stored: Encoding, projection: str, bits: Bits, group_size: int) -> Recoding:
    """How a projection that is `stored` so changes when `bits` is asked for."""
    width = _WIDTHS[bits].get(projection)
    if width is None:
        return Recoding(stored, stored, "as stored")
    if stored.kind == "affine" and stored.bits <= width:
        if stored.bits < 4:
            wider = Encoding("affine", 4, stored.group_size, stored.scale)
            return Recoding(stored, wider, "the same values, codes widened")
        return Recoding(stored, stored, f"as stored: {stored.bits} bits are no more than {width}")
    if stored.format.kind == "q8" and width == 8:
        return Recoding(stored, stored, "as stored: packed with 8-bit codes, exactly")
    return Recoding(stored, Encoding("affine", width, group_size, SCALE), "quantised")


def add(roundings: Iterable[Rounding]) -> Rounding:
    """The sums over several blocks, experts or layers."""
    columns = zip(*(msgspec.structs.astuple(rounding) for rounding in roundings), strict=True)
    return Rounding(*map(sum, columns))


def decode(encoding: Encoding, rows: int, cols: int, parts: Sequence[Bytes]) -> Floats:
    """The values float32 [rows, cols] of stored parts; quantised ones by way of the packed form, whose kernels know them all."""
    if not encoding.group_size:
        return elements(parts[0], encoding.kind).reshape(rows, cols)
    packed = aligned_bytes(packed_bytes(encoding.format, rows, cols))
    pack(encoding, rows, cols, parts, packed)
    return gather_rows(PackedMatrix(encoding.format, rows, cols, packed), np.arange(rows, dtype=np.int32))


def _is_widened(stored: Encoding, target: Encoding) -> bool:
    return (stored.kind, stored.group_size, stored.scale) == (target.kind, target.group_size, target.scale)


def _widen(bits: int, weight: Bytes) -> Bytes:
    """Codes of 2 or 3 bits, a little-endian stream, as codes of 4 bits. Rows are whole bytes in both."""
    stream = np.unpackbits(weight, bitorder="little").reshape(-1, bits)
    wide = np.zeros((len(stream), 4), np.uint8)
    wide[:, :bits] = stream
    return np.packbits(wide, bitorder="little")


def _quantise(target: Encoding, values: Floats) -> tuple[Sequence[Bytes], Rounding]:
    done = quantise(values, target.bits, target.group_size)
    sums = (done.squared_error, done.plain_squared_error, done.squared_values)
    return done[:3], Rounding(*(float(of_groups.sum(dtype=np.float64)) for of_groups in sums))
