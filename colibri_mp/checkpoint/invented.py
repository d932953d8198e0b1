"""A table of tensors that exist nowhere: whatever a family's file asks for is there, quantised as an option says.

So a model can be built from its config.json alone, by the code that builds it from a checkpoint, for a plan before a download.
"""

import math
from typing import NamedTuple

from colibri_mp.checkpoint.matrices import Shape, TensorTable
from colibri_mp.checkpoint.quantisation import Quantisation
from colibri_mp.checkpoint.safetensors_header import DTYPE_BITS, TensorInfo
from colibri_mp.errors import ConfigError
from colibri_mp.formats import AFFINE_BITS, AFFINE_GROUP_SIZES, Encoding

_FLOAT_MODES = {
    "16": Encoding("bf16"),
    "mxfp4": Encoding("mxfp4", 4, 32, "u8"),
    "mxfp8": Encoding("mxfp8", 8, 32, "u8"),
    "nvfp4": Encoding("nvfp4", 4, 16, "u8"),
    "fp8": Encoding("fp8", 8, 128, "f32"),
}
STORED_BITS = (*map(str, AFFINE_BITS), *_FLOAT_MODES)
"""What matrices may be invented in: affine bits, 16 for bf16, or the name of a format."""

_ENDS = ("embed_tokens", "lm_head")
_ROUTERS = ("gate", "router", "shared_expert_gate")


class StoredAs(NamedTuple):
    """Encodings of the routed experts, of the ends (embedding and head), and of every other matrix but the routers, which are bf16."""

    experts: Encoding
    resident: Encoding
    ends: Encoding

    @staticmethod
    def of(bits: str, resident_bits: str, end_bits: str, group_size: int) -> "StoredAs":
        """From options, each of `STORED_BITS`; `group_size` is that of the affine ones, whose scales and biases are bf16.

        Raises:
            ConfigError: bits or a group size that are not supported.
        """
        return StoredAs(*(_encoding(name, group_size) for name in (bits, resident_bits, end_bits)))

    def encoding(self, path: str, cols: int) -> Encoding:
        """Of the matrix `path`; bf16 where its columns do not divide into groups, as MLX leaves such a matrix."""
        *parents, name = path.split(".")
        wanted = self.resident
        if name in _ROUTERS:
            wanted = _FLOAT_MODES["16"]
        elif name in _ENDS:
            wanted = self.ends
        elif "experts" in parents or "switch_mlp" in parents:
            wanted = self.experts
        return wanted if wanted.is_supported(cols) else _FLOAT_MODES["16"]


def _encoding(bits: str, group_size: int) -> Encoding:
    if bits not in STORED_BITS:
        raise ConfigError(f"matrices can be stored in {', '.join(STORED_BITS)} bits, not {bits!r}")
    if group_size not in AFFINE_GROUP_SIZES:
        raise ConfigError(f"groups can have {', '.join(map(str, AFFINE_GROUP_SIZES))} weights, not {group_size}")
    return _FLOAT_MODES.get(bits) or Encoding("affine", int(bits), group_size, "bf16")


class InventedTable(TensorTable):
    """See the module docstring. Its tensors lie nowhere: every offset is 0. Experts are stacked, as MLX stores them."""

    def __init__(self, stored: StoredAs) -> None:
        super().__init__({}, Quantisation(), finds_predictors=True)
        self._stored = stored

    def __contains__(self, name: str) -> bool:
        """Whether a checkpoint as MLX writes them would have it: no scales of other quantisations, no fused experts."""
        return name.endswith((".weight", ".bias"))

    def tensor(self, name: str, shape: Shape) -> TensorInfo:
        """A tensor of this shape, bf16."""
        return self._invent(name, "BF16", shape.dims)

    def parts(self, path: str, shape: Shape) -> tuple[Encoding, tuple[TensorInfo, ...]]:
        """The matrix or stack `path`, quantised as the options say."""
        *lead, rows, cols = shape.dims
        encoding = self._stored.encoding(path, cols)
        if not encoding.group_size:
            return encoding, (self._invent(f"{path}.weight", "BF16", shape.dims),)
        if encoding.kind == "fp8":
            codes = self._invent(f"{path}.weight", "F8_E4M3", shape.dims)
            tiles = (*lead, *encoding.groups(rows, cols))
            return encoding, (codes, self._invent(f"{path}.{encoding.parts[1]}", "F32", tiles))
        lead = [*lead, rows]
        codes = self._invent(f"{path}.weight", "U32", (*lead, cols * encoding.bits // 32))
        groups = (*lead, cols // encoding.group_size)
        dtype = "U8" if encoding.scale == "u8" else "BF16"
        return encoding, (codes, *(self._invent(f"{path}.{part}", dtype, groups) for part in encoding.parts[1:]))

    def plain(self, name: str, shape: Shape) -> tuple[Encoding, TensorInfo]:
        """A matrix that is stored under its bare name: never quantised."""
        return _FLOAT_MODES["16"], self.tensor(name, shape)

    def _invent(self, name: str, dtype: str, shape: tuple[int, ...]) -> TensorInfo:
        self.used.add(name)
        return TensorInfo(name, dtype, shape, 0, 0, math.prod(shape) * DTYPE_BITS[dtype] // 8)
