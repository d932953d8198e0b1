"""How the matrices of a projection change on their way into a container, or into memory (`--expert-bits`), and why.

    stored as                 without --bits   with --bits: the width B asked for this projection
    bf16, f16, f32            kept             quantised to B bits
    codes of B bits or fewer  kept             kept: affine, mxfp4, nvfp4, mxfp8, fp8
    codes of more bits        kept             quantised anew to B bits

So nothing loses accuracy that need not, and nothing becomes wider than it was. `mixed` asks for 4 bits in gate and up and
for 8 in down, whose errors go straight into the residual stream: against 4 bits everywhere, 8 in down alone halve the
divergence from the original, in gate or in up alone they take off a fifth (docs/log.md).

Experts that are read (`quantised_when_read`) change by the same rules, but only from bf16, f16 and f32: codes that are
there already are what the checkpoint's author chose, and a container is packed already.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec
import numpy as np

from colibri_mp.checkpoint.container import Rounding
from colibri_mp.checkpoint.experts import PROJECTIONS, ExpertLayer
from colibri_mp.errors import ConfigError
from colibri_mp.formats import Encoding, ExpertBits
from colibri_mp.kernels.layout import Bytes, PackedMatrix, gather_rows, pack, packed_bytes
from colibri_mp.kernels.quantising import Floats, quantise
from colibri_mp.kernels.reference import elements
from colibri_mp.kernels.team import aligned_bytes

SCALE: Literal["bf16"] = "bf16"
"""Type of new scales and biases: the range of float32; the codes are chosen for the rounded ones."""
GROUP_SIZES = (32, 64)
"""Weights that may share a scale of our making; more at a time take less memory."""
_WIDTHS: dict[ExpertBits, dict[str, int]] = {
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
        return self.target != self.stored

    def apply(self, rows: int, cols: int, parts: Sequence[Bytes]) -> tuple[Sequence[Bytes], Rounding | None]:
        """The parts of some rows of a matrix in the target encoding, and what rounding cost if they were quantised."""
        if self.target == self.stored:
            return parts, None
        return _quantise(self.target, decode(self.stored, rows, cols, parts))


def choose(stored: Encoding, projection: str, bits: ExpertBits, group_size: int) -> Recoding:
    """How a projection that is `stored` so changes when `bits` is asked for."""
    width = _WIDTHS[bits].get(projection)
    if width is None:
        return Recoding(stored, stored, "as stored")
    if 0 < stored.bits <= width:
        return Recoding(stored, stored, f"as stored: {stored.bits} bits are no more than {width}")
    return Recoding(stored, Encoding("affine", width, group_size, SCALE), "quantised")


def recode_rows(recoding: Recoding, rows: int, cols: int, parts: Sequence[Bytes], out: Bytes) -> Rounding | None:
    """Recode and pack some rows; what rounding cost if they were quantised. parts, out: as in `kernels.layout.pack`."""
    recoded, cost = recoding.apply(rows, cols, parts)
    pack(recoding.target, rows, cols, recoded, out)
    return cost


def quantised_when_read(layer: ExpertLayer, bits: ExpertBits) -> ExpertLayer:
    """The layer whose experts are to be quantised each time they are read; the layer itself if nothing changes.

    Groups are the largest of `GROUP_SIZES` that divide all rows. Raises `ConfigError` if the experts have been quantised
    in another way, or packed into a container.
    """
    if bits == "stored":
        return layer
    stored = (layer.gate, layer.up, layer.down)
    for projection, encoding in zip(PROJECTIONS, stored, strict=True):
        if encoding.group_size and (encoding.kind, encoding.bits) != ("affine", _WIDTHS[bits][projection]):
            raise ConfigError(
                f"--expert-bits {bits}: the experts of layer {layer.layer} are quantised already ({projection}_proj: "
                f"{encoding.describe()}); leave it out, or use the checkpoint that they were made from"
            )
    group_size = _largest_group(layer)
    gate, up, down = (
        choose(encoding, projection, bits, group_size).target
        for projection, encoding in zip(PROJECTIONS, stored, strict=True)
    )
    if (gate, up, down) == stored:
        return layer
    if layer.is_packed:
        raise ConfigError(
            f"--expert-bits {bits}: the experts of layer {layer.layer} are packed in a container as {layer.gate.describe()}; "
            f"convert the original checkpoint with --bits {bits}"
        )
    return replace(layer, targets=(gate, up, down))


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


def _largest_group(layer: ExpertLayer) -> int:
    fitting = [size for size in GROUP_SIZES if layer.hidden % size == 0 and layer.width % size == 0]
    if not fitting:
        raise ConfigError(
            f"layer {layer.layer}: rows of {layer.hidden} and {layer.width} weights do not divide into groups of "
            f"{' or '.join(map(str, GROUP_SIZES))}; leave out --expert-bits"
        )
    return max(fitting)


def _quantise(target: Encoding, values: Floats) -> tuple[Sequence[Bytes], Rounding]:
    done = quantise(values, target.bits, target.group_size)
    sums = (done.squared_error, done.plain_squared_error, done.squared_values)
    return done[:3], Rounding(*(float(of_groups.sum(dtype=np.float64)) for of_groups in sums))
