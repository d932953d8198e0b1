"""Matrices by module path: encodings from config.json and shapes, and what is refused."""

import dataclasses

import numpy as np
import pytest
from checkpoint_cases import fixture, header_of

from colibri_mp.checkpoint import Checkpoint, TensorInfo
from colibri_mp.checkpoint.matrices import Shape, TensorTable, take_rows
from colibri_mp.checkpoint.quantisation import read_quantisation
from colibri_mp.errors import CheckpointError
from colibri_mp.formats import AFFINE_BITS, AFFINE_GROUP_SIZES, Encoding

Config = dict[str, object]
Tensors = dict[str, tuple[str, tuple[int, ...]]]
COLS, ROWS = 256, 5
SHAPE = Shape((ROWS, COLS), "rows, columns")


def table(tensors: Tensors, config: Config | None = None) -> TensorTable:
    """A table of tensors that exist only in name."""
    entries = header_of(tensors)
    infos = {
        name: TensorInfo(
            name, e["dtype"], tuple(e["shape"]), 0, e["data_offsets"][0], e["data_offsets"][1] - e["data_offsets"][0]
        )
        for name, e in entries.items()
    }
    return TensorTable(infos, read_quantisation(config or {}))


def affine(bits: int, group_size: int, scale: str = "BF16") -> Tensors:
    """The tensors of an MLX affine matrix "m" of SHAPE."""
    groups = (ROWS, COLS // group_size)
    return {"m.weight": ("U32", (ROWS, COLS * bits // 32)), "m.scales": (scale, groups), "m.biases": (scale, groups)}


def floating(bits: int, group_size: int) -> Tensors:
    """The tensors of an MLX mxfp4, mxfp8 or nvfp4 matrix."""
    return {"m.weight": ("U32", (ROWS, COLS * bits // 32)), "m.scales": ("U8", (ROWS, COLS // group_size))}


def settings(bits: int, group_size: int, **more: object) -> Config:
    """config.json of a quantised model."""
    return {"quantization": {"bits": bits, "group_size": group_size, **more}}


@pytest.mark.parametrize("bits", AFFINE_BITS)
@pytest.mark.parametrize("group_size", AFFINE_GROUP_SIZES)
@pytest.mark.parametrize("scale", ["BF16", "F16", "F32"])
def test_affine(bits: int, group_size: int, scale: str) -> None:
    """Every supported width, group size and scale type is found, and its pieces have the encoding's sizes."""
    matrix = table(affine(bits, group_size, scale), settings(bits, group_size)).matrix("m", SHAPE)
    assert matrix.encoding == Encoding("affine", bits, group_size, scale.lower())  # type: ignore[arg-type]
    assert tuple(piece.nbytes for piece in matrix.pieces) == matrix.encoding.part_bytes(ROWS, COLS)
    assert matrix.stored_bytes == sum(matrix.encoding.part_bytes(ROWS, COLS))


@pytest.mark.parametrize(("mode", "bits", "group_size"), [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)])
def test_floating_codes(mode: str, bits: int, group_size: int) -> None:
    """The modes of MLX without biases, with the config's word and without."""
    for config in (settings(bits, group_size, mode=mode), None):
        found = table(floating(bits, group_size), config).matrix("m", SHAPE).encoding
        assert found == Encoding(mode, bits, group_size, "u8")  # type: ignore[arg-type]


TILED = Shape((136, 264), "rows, columns")


def tiled(tiles: tuple[int, ...] = (2, 3), scale: str = "F32", cols: int = 264, rows: int = 136) -> Tensors:
    """The tensors of an fp8 matrix."""
    return {"m.weight": ("F8_E4M3", (rows, cols)), "m.weight_scale_inv": (scale, tiles)}


def fp8(**changes: object) -> Config:
    """config.json of an fp8 model."""
    return {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], **changes}}


@pytest.mark.parametrize(("scale", "kind"), [("F32", "f32"), ("BF16", "bf16")])
def test_fp8(scale: str, kind: str) -> None:
    """E4M3 codes and a scale for each tile of 128 x 128, last ones that are smaller included; bf16 matrices stay beside them."""
    tensors = table({**tiled(scale=scale), "n.weight": ("BF16", (136, 264))}, fp8())
    matrix = tensors.matrix("m", TILED)
    assert matrix.encoding == Encoding("fp8", 8, 128, kind)  # type: ignore[arg-type]
    assert tuple(piece.nbytes for piece in matrix.pieces) == (136 * 264, 6 * (4 if scale == "F32" else 2))
    assert tensors.matrix("n", TILED).encoding == Encoding("bf16")


@pytest.mark.parametrize(
    ("tensors", "shape", "message"),
    [
        (tiled((1, 2)), TILED, r"'m.weight_scale_inv' is F32 \[1, 2\].*asks for \[2, 3\] .*in tiles of 128 x 128"),
        (tiled(scale="F16"), TILED, "scales 'm.weight_scale_inv' of F16 is not supported"),
        (tiled((1, 1), cols=12, rows=5), Shape((5, 12), "rows, columns"), "F8_E4M3 with 12 columns"),
        ({**tiled(), "m.weight": ("I8", (136, 264))}, TILED, "I8 with 264 columns"),
        (tiled(rows=137), TILED, r"F8_E4M3 \[137, 264\]"),
    ],
)
def test_fp8_that_is_refused(tensors: Tensors, shape: Shape, message: str) -> None:
    """Other tiles, types and shapes are errors that name the tensor."""
    with pytest.raises(CheckpointError, match=message):
        table(tensors, fp8()).matrix("m", shape)


@pytest.mark.parametrize("change", [{"weight_block_size": [64, 128]}, {"weight_block_size": None}, {"fmt": "e5m2"}])
def test_fp8_of_another_kind_is_refused(change: Config) -> None:
    """config.json must say tiles of 128 x 128 and E4M3."""
    with pytest.raises(CheckpointError, match=r"fp8 with fmt .* is not supported; supported is e4m3 with \[128, 128\]"):
        read_quantisation(fp8(**change))


@pytest.mark.parametrize(("dtype", "kind"), [("BF16", "bf16"), ("F16", "f16"), ("F32", "f32")])
def test_plain(dtype: str, kind: str) -> None:
    """A matrix without scales is plain, in a quantised model too (its columns are no multiple of the group, say)."""
    tensors: Tensors = {"m.weight": (dtype, (ROWS, COLS))}
    assert table(tensors, settings(4, 64)).matrix("m", SHAPE).encoding == Encoding(kind)  # type: ignore[arg-type]


def test_override_without_mode_is_affine() -> None:
    """In a model of mode mxfp4 an override that gives no mode is affine."""
    config = settings(4, 32, mode="mxfp4", m={"bits": 8, "group_size": 64})
    assert table(affine(8, 64), config).matrix("m", SHAPE).encoding.kind == "affine"


def test_module_that_is_not_named_is_read_by_its_shapes() -> None:
    """Where the model's settings do not fit and nothing names the module, its shapes tell."""
    assert table(affine(8, 32), settings(4, 64)).matrix("m", SHAPE).encoding == Encoding("affine", 8, 32, "bf16")


def test_bias_is_not_biases() -> None:
    """A linear layer's `.bias` is looked up apart from the quantisation's `.biases`."""
    tensors = table({**affine(4, 64), "m.bias": ("BF16", (ROWS,))})
    tensors.matrix("m", SHAPE)
    assert tensors.unused() == ["m.bias"]
    assert tensors.vector("m.bias", Shape((ROWS,), "rows")).nbytes == 2 * ROWS
    assert tensors.unused() == []


REFUSED: dict[str, tuple[Tensors, Config, str]] = {
    "missing": ({"m.bias": ("F32", (ROWS,))}, {}, r"tensor 'm.weight', which config.json calls for.*there are m.bias"),
    "gptq tensors": ({"m.qweight": ("U32", (ROWS, 32))}, {}, "there are m.qweight.*a quantisation other than MLX's"),
    "fp8 weight": ({"m.weight": ("F8_E4M3", (ROWS, COLS))}, {}, "'m.weight' is stored as F8_E4M3.*supported are plain"),
    "plain shape": ({"m.weight": ("BF16", (COLS, ROWS))}, {}, r"BF16 \[256, 5\].*asks for \[5, 256\] \(rows, columns\)"),
    "rows": ({**affine(4, 64), "m.weight": ("U32", (7, 32))}, {}, r"\[7, 32\] in the file, config.json asks for \[5, 32\]"),
    "rows of scales": ({**affine(4, 64), "m.scales": ("BF16", (7, 4))}, {}, r"'m.scales' is .*\[7, 4\].*\[5, 4\]"),
    "no biases": (
        {name: tensor for name, tensor in affine(4, 64).items() if name != "m.biases"}, {}, "with scales BF16 and no biases"
    ),
    "biases of another type": ({**affine(4, 64), "m.biases": ("F32", (ROWS, 4))}, {}, "scales BF16 and biases F32"),
    "columns": ({**affine(4, 64), "m.scales": ("BF16", (ROWS, 3))}, {}, "is no MLX-quantised matrix of 256 columns"),
    "one bit": (affine(1, 64), {}, "1 bits in groups of 64"),
    "group of 16": (affine(4, 16), {}, "4 bits in groups of 16"),
    "global scale": ({**floating(4, 16), "m.global_scale": ("F32", ())}, {}, "nvfp4 with a global scale"),
    "contradicted override": (
        affine(4, 64), settings(4, 64, m={"bits": 8, "group_size": 64}), "says affine, 8 bits.*are affine, 4 bits"
    ),
    "contradicted false": (affine(4, 64), settings(4, 64, m=False), "says not quantised for m"),
    "override without scales": (
        {"m.weight": ("BF16", (ROWS, COLS))}, settings(4, 64, m={"bits": 4, "group_size": 64}), "no tensor 'm.scales'"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_refused(case: tuple[Tensors, Config, str]) -> None:
    """What cannot be read is an error that names the tensor and both sides."""
    tensors, config, message = case
    with pytest.raises(CheckpointError, match=message):
        table(tensors, config).matrix("m", SHAPE)


def test_vector_of_another_type() -> None:
    """A norm must be of a float type."""
    with pytest.raises(CheckpointError, match="'n' has dtype U8"):
        table({"n": ("U8", (4,))}).vector("n", Shape((4,), "hidden_size"))


def test_parts_are_the_bytes_of_the_file() -> None:
    """read_parts gives weight, scales and biases of an MLX matrix as stored."""
    checkpoint = Checkpoint.open(fixture("qwen3_moe_q4"))
    matrix = checkpoint.table().matrix("lm_head", Shape((256, 128), "vocab_size, hidden_size"))
    content = checkpoint.files[0].read_bytes()
    for name, part in zip(("weight", "scales", "biases"), checkpoint.read_parts(matrix), strict=True):
        info = checkpoint.tensors[f"lm_head.{name}"]
        assert part.dtype == np.uint8
        assert part.tobytes() == content[info.offset : info.offset + info.nbytes]


def test_rows_of_a_matrix_are_taken_in_any_order() -> None:
    """Runs of rows, quantised or not, are read as if they were a matrix; a run within a tile of scales is refused."""
    source = Checkpoint.open(fixture("qwen3_moe_q4"))
    whole = source.table().matrix("lm_head", Shape((256, 128), ""))
    runs = [(200, 8), (0, 24), (17, 1)]
    taken = take_rows(whole, runs)
    assert (taken.rows, taken.cols, len(taken.pieces)) == (33, 128, 9)
    for part, stored in zip(source.read_parts(taken), source.read_parts(whole), strict=True):
        rows = stored.reshape(256, -1)
        np.testing.assert_array_equal(part, np.concatenate([rows[i : i + n] for i, n in runs]).reshape(-1))
    tiled = dataclasses.replace(whole, encoding=Encoding("fp8", 8, 128, "f32"), pieces=whole.pieces[:2])
    assert [piece.nbytes for piece in take_rows(tiled, [(128, 128)]).pieces] == [128 * 128, 4]
    with pytest.raises(CheckpointError, match="rows 64 to 192"):
        take_rows(tiled, [(64, 128)])
