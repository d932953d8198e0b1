"""`--expert-bits`: experts that are quantised while they are read are those that `convert --bits` would have made."""

import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conversion import made
from expert_checkpoint import BF16, Q4, Q8, ExpertBytes, per_expert, random_experts, stacked, write
from numpy.typing import NDArray

from colibri_mp import checksums
from colibri_mp.checkpoint.convert import Options
from colibri_mp.checkpoint.experts import ExpertLayer
from colibri_mp.checkpoint.source import Checkpoint
from colibri_mp.checksums import check_or_compute, checksum_key, with_checksums
from colibri_mp.config import LaunchConfig
from colibri_mp.errors import ConfigError, ReadError
from colibri_mp.formats import Encoding, ExpertBits
from colibri_mp.kernels.layout import pack, packed_bytes
from colibri_mp.kernels.quantising import quantise
from colibri_mp.limits import Room
from colibri_mp.lossy import lossy_options, with_lossy_options
from colibri_mp.models import load_model
from colibri_mp.models.structure import ModelSpec
from colibri_mp.planner import make_plan
from colibri_mp.recoding import quantised_when_read
from colibri_mp.workers import quantised_rows, read_plan
from colibri_mp.workers.copies import Copy, ExpertCopies
from colibri_mp.workers.expert_files import aligned_buffer
from colibri_mp.workers.expert_reader import ExpertReader, scratch_bytes
from colibri_mp.workers.quantised_rows import quantising_bytes

GOLDEN = Path(__file__).parents[1] / "golden"
OLMOE = GOLDEN / "tiny" / "olmoe"
Q8_64 = Encoding("affine", 8, 64, "bf16")
WIDTHS: tuple[ExpertBits, ...] = ("4", "8", "mixed")


def model_of(path: Path, bits: ExpertBits = "stored") -> ModelSpec:
    """The model as a launch with `--expert-bits` has it."""
    return with_lossy_options(load_model(Checkpoint.open(path)), LaunchConfig(expert_bits=bits))


def read_slabs(files: Sequence[Path], layers: Sequence[ExpertLayer]) -> dict[tuple[int, int], bytes]:
    """Every expert's slab, by layer and expert, through the reader."""
    reader = ExpertReader(ExpertCopies([Copy(tuple(files))]), layers, pack)
    slabs = {}
    with closing(reader):
        scratch = aligned_buffer(reader.scratch_bytes)
        for layer in layers:
            slab = np.full(layer.shape.slab_bytes, 0xAA, np.uint8)
            for expert in range(layer.num_experts):
                reader.read(layer.layer, expert, slab, scratch)
                slabs[layer.layer, expert] = slab.tobytes()
    return slabs


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("name", ["olmoe", "qwen3_moe_fused"])
def test_slabs_are_those_of_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, bits: ExpertBits
) -> None:
    """Byte for byte, also where experts are cut into tasks, and tasks into steps of a row block."""
    source = Checkpoint.open(GOLDEN / "tiny" / name)
    made(source.path, tmp_path / "out", Options(bits, 32))
    container = Checkpoint.open(tmp_path / "out")
    expected = read_slabs(container.files, load_model(container).expert_layers)
    layers = model_of(source.path, bits).expert_layers
    assert read_slabs(source.files, layers) == expected
    monkeypatch.setattr(read_plan, "TASK_BYTES", 1 << 10)
    monkeypatch.setattr(quantised_rows, "_STEP_VALUES", 64)
    assert read_slabs(source.files, layers) == expected


def stored_as(element: str, weights: NDArray[np.float32]) -> ExpertBytes:
    """One layer of experts, gate and up [F, D] and down [D, F] of each with the values `weights` [E, F * D]."""
    encodings = (Encoding(element),) * 3  # type: ignore[arg-type]  # a literal
    raw = weights.astype({"f16": "<f2", "f32": "<f4"}[element])
    return ExpertBytes(0, len(raw), 128, 64, encodings, [[row.view(np.uint8)] * 3 for row in raw])


@pytest.mark.parametrize("element", ["f16", "f32"])
def test_other_element_types(tmp_path: Path, element: str) -> None:
    """Half and single precision are quantised from their own values."""
    weights = np.random.default_rng(1).standard_normal((2, 64 * 128), np.float32).astype(f"<f{int(element[1:]) // 8}")
    experts = stored_as(element, weights.astype(np.float32))
    files = write(tmp_path, experts, per_expert)
    layer = quantised_when_read(experts.expert_layer(), "8")
    slabs = read_slabs(files, [layer])
    for expert in range(2):
        gate = np.zeros(packed_bytes(Q8_64.format, 64, 128), np.uint8)
        parts = quantise(weights[expert].astype(np.float32).reshape(64, 128), 8, 64)[:3]
        pack(Q8_64, 64, 128, parts, gate)
        assert slabs[0, expert][: gate.size] == gate.tobytes()


def test_weights_that_are_not_finite(tmp_path: Path) -> None:
    """An error that names layer and expert; the others can be read."""
    weights = np.ones((3, 64 * 128), np.float32)
    weights[1, 77] = np.nan
    experts = stored_as("f32", weights)
    files = write(tmp_path, experts, stacked)
    layer = quantised_when_read(experts.expert_layer(), "4")
    reader = ExpertReader(ExpertCopies([Copy(tuple(files))]), [layer], pack)
    with closing(reader):
        slab, scratch = np.zeros(layer.shape.slab_bytes, np.uint8), aligned_buffer(reader.scratch_bytes)
        reader.read(0, 2, slab, scratch)
        with pytest.raises(ReadError, match=r"^layer 0, expert 1: weights that are not finite"):
            reader.read(0, 1, slab, scratch)


# ── what can be asked for ───────────────────────────────────────────────────────────────────────────────────────


def test_as_stored_is_untouched() -> None:
    """The default changes nothing, nor does the width that is stored."""
    layer = model_of(OLMOE).expert_layers[0]
    assert quantised_when_read(layer, "stored") is layer
    stored = random_experts(0, 1, 128, 64, (Q4, Q4, Q4))
    stacked(stored)
    assert quantised_when_read(stored.expert_layer(), "4").targets is None


def test_unquantised_projections_among_quantised_ones() -> None:
    """What has the width already is kept, the rest gets it; groups are as large as the rows allow."""
    experts = random_experts(0, 1, 128, 96, (BF16, Q4, BF16))
    stacked(experts)
    layer = quantised_when_read(experts.expert_layer(), "mixed")
    assert layer.targets == (Encoding("affine", 4, 32, "bf16"), Q4, Encoding("affine", 8, 32, "bf16"))
    assert layer.encodings == {BF16, *layer.targets}


@pytest.mark.parametrize(
    ("encodings", "hidden", "bits", "message"),
    [
        ((Q4, Q4, Q4), 128, "8", r"--expert-bits 8: .* layer 0 are quantised already \(gate_proj: affine 4 bit"),
        ((BF16, BF16, Q8), 128, "4", r"quantised already \(down_proj: affine 8 bit in groups of 32\); leave it out"),
        ((Q4, Q4, Q4), 128, "mixed", r"quantised already \(down_proj"),
        ((BF16, BF16, BF16), 100, "4", "rows of 100 and 64 weights do not divide into groups of 32 or 64"),
    ],
)
def test_refusals(encodings: tuple[Encoding, Encoding, Encoding], hidden: int, bits: ExpertBits, message: str) -> None:
    """Experts that were quantised otherwise, or whose rows have no whole groups."""
    experts = random_experts(0, 1, hidden, 64, encodings)
    stacked(experts)
    with pytest.raises(ConfigError, match=message):
        quantised_when_read(experts.expert_layer(), bits)


def test_containers_are_taken_as_they_are(tmp_path: Path) -> None:
    """One with that width is, one that keeps bf16 is refused with the cure."""
    made(OLMOE, tmp_path / "four", Options("4", 32))
    made(OLMOE, tmp_path / "kept")
    assert not model_of(tmp_path / "four", "4").quantises_experts
    with pytest.raises(
        ConfigError, match=r"packed in a container as bf16; convert the original checkpoint with --bits 4"
    ):
        model_of(tmp_path / "kept", "4")


def test_named_lossy_where_something_is_lost() -> None:
    """With the stored type; not where the experts have that width already."""
    bf16, four = load_model(Checkpoint.open(OLMOE)), load_model(Checkpoint.open(GOLDEN / "tiny_mlx" / "qwen3_moe_q4"))
    assert lossy_options(bf16, LaunchConfig(expert_bits="mixed")) == ("--expert-bits mixed (stored are bf16)",)
    assert lossy_options(four, LaunchConfig(expert_bits="4")) == ()


# ── memory and checksums ────────────────────────────────────────────────────────────────────────────────────────


def test_plan_prices_what_is_packed(tmp_path: Path) -> None:
    """Slots are those of the container; the threads' memory for quantising is a part of the read buffers."""
    made(OLMOE, tmp_path / "out", Options("4", 32))
    room = Room("a machine", 10**10, 10**10)
    config = LaunchConfig(num_threads=1, num_workers=1, ctx=128, expert_bits="4", ram="1GB")
    quantised, container = model_of(OLMOE, "4"), model_of(tmp_path / "out")
    plan, same = make_plan(quantised, config, room), make_plan(container, replace(config, expert_bits="stored"), room)
    assert plan.expert_bytes == same.expert_bytes < make_plan(model_of(OLMOE), config, room).expert_bytes
    assert plan.workers[0].slab_bytes == same.workers[0].slab_bytes
    layers = quantised.expert_layers
    [buffers] = [term.nbytes for term in plan.terms if term.name.startswith("read buffers")]
    assert (
        buffers
        == scratch_bytes(layers, 8)
        == scratch_bytes(model_of(OLMOE).expert_layers, 8) + 8 * quantising_bytes(layers[0])
    )


def test_checksums_are_those_of_the_quantised_slabs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each width has its own, and a flipped byte is named."""
    monkeypatch.setenv("COLIBRI_CACHE_DIR", str(tmp_path / "cache"))
    checkpoint = Checkpoint.open(shutil.copytree(OLMOE, tmp_path / "model"))
    layers = {bits: model_of(checkpoint.path, bits).expert_layers for bits in ("stored", "4", "8")}  # type: ignore[arg-type]
    fingerprint = checkpoint.fingerprint
    assert len({checksum_key(fingerprint, of_bits) for of_bits in layers.values()}) == 3
    check_or_compute(checkpoint.files, layers["4"], fingerprint, lambda _: None)
    known = {bits: with_checksums(of_bits, fingerprint)[0].checksums is not None for bits, of_bits in layers.items()}
    assert known == {"stored": False, "4": True, "8": False}
    assert "same --expert-bits" in checksums.describe(layers["8"], "first")
    with checkpoint.files[0].open("r+b") as file:
        file.seek(int(layers["4"][1].offset[2, 0]) + 1)
        file.write(b"\x47")  # the upper byte of a bf16: a large value
    with pytest.raises(ReadError, match=r"^1 experts differ from their checksums: layer 1, expert 2;"):
        check_or_compute(checkpoint.files, layers["4"], fingerprint, lambda _: None)
