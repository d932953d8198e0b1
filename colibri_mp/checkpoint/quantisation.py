"""What config.json says about quantisation, and the encoding that follows for one module.

MLX writes `quantization` (and a copy in `quantization_config`): the group size, bits and mode of every module, then
overrides by module path. The rules (mlx_lm/utils.py `load_model`, mlx `nn.quantize`):

- a module is quantised if it has a tensor `<path>.scales`; `false` for a path says that it is not
- an override without `mode` means "affine", even when the mode of the whole model is another
- a module that is not named takes the model's settings; where its shapes contradict those, the shapes are believed:
  with the number of columns known they give bits and group size without doubt. An override that contradicts them is
  an error

`quant_method` "mxfp4" is gpt_oss's: it says nothing that the names of its tensors do not (`shared_pieces`). "fp8" is
DeepSeek's: E4M3 codes, and a scale for each tile of 128 x 128 in `<path>.weight_scale_inv`; a module is so iff it has that tensor.

Other methods (`quantization_config.quant_method`: gptq, awq, bitsandbytes ...) are refused by name.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from colibri_mp.checkpoint.safetensors_header import TensorInfo
from colibri_mp.errors import CheckpointError
from colibri_mp.formats import AFFINE_BITS, AFFINE_GROUP_SIZES, FP8_COLUMNS, TILE, Encoding, EncodingKind

SUPPORTED = (
    "plain bf16, f16 and f32; MLX affine with "
    f"{', '.join(map(str, AFFINE_BITS))} bits in groups of {', '.join(map(str, AFFINE_GROUP_SIZES))}; "
    f"MLX mxfp4, mxfp8 and nvfp4; fp8 (E4M3) in tiles of {TILE} x {TILE}"
)
_ELEMENT_KINDS: dict[str, EncodingKind] = {"BF16": "bf16", "F16": "f16", "F32": "f32"}
_FLOAT_MODES: dict[tuple[int, int], EncodingKind] = {(4, 32): "mxfp4", (4, 16): "nvfp4", (8, 32): "mxfp8"}


class Settings(NamedTuple):
    """Quantisation of one module, as config.json gives it."""

    mode: str
    bits: int
    group_size: int


_SUPPORTED_SETTINGS = [
    *(Settings("affine", bits, group_size) for bits in AFFINE_BITS for group_size in AFFINE_GROUP_SIZES),
    *(Settings(mode, bits, group_size) for (bits, group_size), mode in _FLOAT_MODES.items()),
]


@dataclass(frozen=True, slots=True)
class Quantisation:
    """The settings of the whole model (None: not stated) and of single modules (None: not quantised)."""

    default: Settings | None = None
    overrides: dict[str, Settings | None] = field(default_factory=dict)


def read_quantisation(config: dict[str, Any]) -> Quantisation:
    """The quantisation settings in config.json.

    Raises `CheckpointError` for a method or a mode that is not supported.
    """
    stated = config.get("quantization") or config.get("quantization_config")
    if not stated:
        return Quantisation()
    if not isinstance(stated, dict):
        raise CheckpointError(f"config.json: quantization must be an object, not {stated!r}")
    if stated.get("quant_method") == "mxfp4":
        return Quantisation()
    if stated.get("quant_method") == "fp8":
        _check_fp8(stated)
        return Quantisation()
    if "quant_method" in stated:
        raise CheckpointError(
            f"config.json: quantisation method {stated['quant_method']!r} is not supported; supported are {SUPPORTED}. "
            "Use an unquantised or an MLX-quantised checkpoint of this model"
        )
    overrides: dict[str, Settings | None] = {}
    for path, value in stated.items():
        if isinstance(value, dict):
            overrides[path] = _settings(path, value)
        elif value is False:
            overrides[path] = None
    return Quantisation(_settings("the whole model", stated), overrides)


def _check_fp8(stated: dict[str, Any]) -> None:
    found = stated.get("fmt", "e4m3"), stated.get("weight_block_size")
    if found != ("e4m3", [TILE, TILE]):
        raise CheckpointError(
            f"config.json: fp8 with fmt {found[0]!r} and weight_block_size {found[1]} is not supported; supported is e4m3 with "
            f"[{TILE}, {TILE}]. Use another checkpoint of this model"
        )


def _settings(path: str, stated: dict[str, Any]) -> Settings:
    found = Settings(stated.get("mode", "affine"), stated.get("bits", 0), stated.get("group_size", 0))
    if found not in _SUPPORTED_SETTINGS:
        raise CheckpointError(
            f"config.json: quantisation of {path} with mode {found.mode!r}, {found.bits} bits, group size "
            f"{found.group_size} is not supported; supported are {SUPPORTED}"
        )
    return found


def plain_encoding(weight: TensorInfo) -> Encoding:
    """The encoding of a matrix that is not quantised. Raises `CheckpointError` if its dtype is none that is read."""
    kind = _ELEMENT_KINDS.get(weight.dtype)
    if kind is None:
        raise CheckpointError(
            f"tensor {weight.name!r} is stored as {weight.dtype}, which is not a supported weight format; "
            f"supported are {SUPPORTED}"
        )
    return Encoding(kind)


def grouped_encoding(
    path: str, cols: int, weight: TensorInfo, scales: TensorInfo, biases: TensorInfo | None, quantisation: Quantisation
) -> Encoding:
    """The encoding of the quantised matrix `path` with `cols` columns, from its shapes, held against config.json.

    Raises `CheckpointError` if the shapes fit no supported encoding or contradict an override.
    """
    bits, group_size = _from_shapes(path, cols, weight, scales)
    encoding = _encoding(path, bits, group_size, scales, biases)
    found = Settings(encoding.kind, bits, group_size)
    if path in quantisation.overrides and quantisation.overrides[path] != found:
        raise CheckpointError(
            f"config.json says {_describe(quantisation.overrides[path])} for {path}, but its tensors are "
            f"{_describe(found)}: {weight.dtype} {list(weight.shape)}, scales {list(scales.shape)}, {cols} columns"
        )
    return encoding


def _from_shapes(path: str, cols: int, weight: TensorInfo, scales: TensorInfo) -> tuple[int, int]:
    """Bits and group size: U32 words a row hold bits * cols bits, scales a row are cols / group size."""
    words, groups = (t.shape[-1] if t.shape else 0 for t in (weight, scales))
    if weight.dtype != "U32" or not groups or cols % groups or 32 * words % cols:
        raise CheckpointError(
            f"{path}: weight {weight.dtype} {list(weight.shape)} with scales {scales.dtype} {list(scales.shape)} is "
            f"no MLX-quantised matrix of {cols} columns (config and tensors disagree, or an unsupported quantisation); "
            f"supported are {SUPPORTED}"
        )
    return 32 * words // cols, cols // groups


def _encoding(path: str, bits: int, group_size: int, scales: TensorInfo, biases: TensorInfo | None) -> Encoding:
    if biases is None and scales.dtype == "U8" and (bits, group_size) in _FLOAT_MODES:
        return Encoding(_FLOAT_MODES[bits, group_size], bits, group_size, "u8")
    scale = _ELEMENT_KINDS.get(scales.dtype)
    known = bits in AFFINE_BITS and group_size in AFFINE_GROUP_SIZES
    if biases is None or biases.dtype != scales.dtype or scale not in ("bf16", "f16", "f32") or not known:
        with_biases = f"biases {biases.dtype}" if biases else "no biases"
        raise CheckpointError(
            f"{path}: {bits} bits in groups of {group_size} with scales {scales.dtype} and {with_biases} is not "
            f"supported; supported are {SUPPORTED}"
        )
    return Encoding("affine", bits, group_size, scale)


def fp8_encoding(weight: TensorInfo, scales: TensorInfo, cols: int) -> Encoding:
    """The encoding of an E4M3 matrix, or a stack of them, with scales for its tiles. Raises `CheckpointError`."""
    scale = _ELEMENT_KINDS.get(scales.dtype)
    if weight.dtype != "F8_E4M3" or scale not in ("bf16", "f32") or cols % FP8_COLUMNS:
        raise CheckpointError(
            f"{weight.name}: {weight.dtype} with {cols} columns and scales {scales.name!r} of {scales.dtype} is not supported; fp8 is "
            f"F8_E4M3 with scales of F32 or BF16 and a multiple of {FP8_COLUMNS} columns"
        )
    return Encoding("fp8", 8, TILE, scale)


def _describe(settings: Settings | None) -> str:
    if settings is None:
        return "not quantised"
    return f"{settings.mode}, {settings.bits} bits, group size {settings.group_size}"
