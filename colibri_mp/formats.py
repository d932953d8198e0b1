"""Weight formats: how a matrix is *stored* in a checkpoint and how the kernels *compute* with it.

`Encoding` names the stored form of one matrix [rows, cols] and the byte size of its parts; `Format` names the form that
the kernels read (packed in blocks of 16 rows, see `kernels.layout`). Every encoding has one format that holds the same
values exactly:

    stored                                computed as                     why it is exact
    bf16, f16, f32                        the same element type
    affine 4 bit                          q4, same group and scales       codes kept
    affine 8 bit                          q8, same group and scales       codes kept
    affine 2, 3, 5, 6 bit                 q8, same group and scales       codes widened to a byte
    mxfp4 (FP4 codes, E8M0 scale, 32)     q8, group 32, float32 scales    2*FP4 is an integer: code + 12, scale/2, bias -6*scale
    nvfp4 (FP4 codes, E4M3 scale, 16)     q8, group 16, float32 scales    likewise
    mxfp8 (E4M3 codes, E8M0 scale, 32)    f32                             a product with a power of two

See docs/formats.md for the bytes.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

ElementType = Literal["bf16", "f16", "f32"]
EncodingKind = Literal["bf16", "f16", "f32", "affine", "mxfp4", "nvfp4", "mxfp8"]
FormatKind = Literal["q4", "q8", "bf16", "f16", "f32"]

ExpertBits = Literal["stored", "4", "8", "mixed"]
"""What experts are quantised to: "stored" keeps their encodings, "mixed" is 4 in gate and up and 8 in down."""

ELEMENT_BYTES: dict[str, int] = {"bf16": 2, "f16": 2, "f32": 4, "u8": 1}
AFFINE_BITS = (2, 3, 4, 5, 6, 8)
AFFINE_GROUP_SIZES = (32, 64, 128)


class Format(NamedTuple):
    """A compute format. `group_size` is 0 and `scale` is "" for the plain element types."""

    kind: FormatKind
    group_size: int = 0
    scale: Literal["bf16", "f16", "f32", ""] = ""


@dataclass(frozen=True, slots=True)
class Encoding:
    """A stored format; a matrix [rows, cols] has the parts `weight`, and for grouped kinds `scales`, for affine `biases`.

    Each part is row-major. `weight` of an affine matrix is a little-endian bit stream of `bits` a value in each row,
    `scales`/`biases` are [rows, cols / group_size] of `scale` ("u8" for the mx/nv kinds).
    """

    kind: EncodingKind
    bits: int = 0
    group_size: int = 0
    scale: Literal["bf16", "f16", "f32", "u8", ""] = ""

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the stored parts, in the order that `part_bytes` and the packers use."""
        if self.kind == "affine":
            return ("weight", "scales", "biases")
        return ("weight", "scales") if self.group_size else ("weight",)

    def part_bytes(self, rows: int, cols: int) -> tuple[int, ...]:
        """Bytes of each part of a matrix [rows, cols]."""
        if not self.group_size:
            return (rows * cols * ELEMENT_BYTES[self.kind],)
        group_bytes = rows * (cols // self.group_size) * ELEMENT_BYTES[self.scale]
        return (rows * cols * self.bits // 8, *[group_bytes] * (len(self.parts) - 1))

    def describe(self) -> str:
        """For people: "affine 4 bit in groups of 64"."""
        if not self.group_size:
            return self.kind
        return f"{self.kind} {self.bits} bit in groups of {self.group_size}"

    def is_supported(self, cols: int) -> bool:
        """Whether this is one of the encodings in the module docstring, and rows of `cols` values can have it."""
        match self.kind:
            case "bf16" | "f16" | "f32":
                return self == Encoding(self.kind)
            case "affine":
                known = self.bits in AFFINE_BITS and self.group_size in AFFINE_GROUP_SIZES
                return known and self.scale in ("bf16", "f16", "f32") and cols % self.group_size == 0
            case "mxfp4" | "mxfp8" | "nvfp4":
                sizes = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}[self.kind]
                return (self.bits, self.group_size, self.scale) == (*sizes, "u8") and cols % self.group_size == 0

    @property
    def format(self) -> Format:
        """The compute format that holds the same values exactly (table in the module docstring)."""
        match self.kind:
            case "bf16" | "f16" | "f32":
                return Format(self.kind)
            case "affine":
                assert self.scale in ("bf16", "f16", "f32")
                return Format("q4" if self.bits == 4 else "q8", self.group_size, self.scale)
            case "mxfp4" | "nvfp4":
                return Format("q8", self.group_size, "f32")
            case "mxfp8":
                return Format("f32")
