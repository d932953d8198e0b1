"""scripts/make_synthetic_model.py: its checkpoints load, are reproducible, and hold sane numbers."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import xxhash
from checkpoint_cases import fixture

from colibri_mp.checkpoint import Checkpoint, ExpertLayer
from colibri_mp.checkpoint.source import to_float32
from colibri_mp.kernels.reference import unpack
from colibri_mp.models import ModelSpec, MoeSpec, load_model

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_synthetic_model.py"
SHAPE = (
    "--hidden=128", "--layers=2", "--experts=4", "--top-k=2", "--width=64", "--heads=4", "--vocab=512", "--ctx=64",
)  # fmt: skip

PINNED = "85743b3a7415c1a6620cd214db9ec11ae7a589c0e9dd5d024ae250b78485ac35"  # sha256 of the weights of SHAPE


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the script as a user does."""
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parent)}
    command = [sys.executable, SCRIPT, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)


def make(out: Path, *arguments: str | Path) -> tuple[Checkpoint, ModelSpec]:
    """A tiny checkpoint, opened."""
    result = run(out, *SHAPE, *arguments)
    assert result.returncode == 0, result.stderr
    checkpoint = Checkpoint.open(out)
    return checkpoint, load_model(checkpoint)


def digests(folder: Path) -> dict[str, str]:
    """sha256 of every file."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import make_synthetic_model

    return make_synthetic_model


@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe", "mixtral"])
@pytest.mark.parametrize("dtype", ["mlx", "bf16"])
def test_every_family_loads(tmp_path: Path, family: str, dtype: str) -> None:
    """Quantised (stacked experts, 8-bit router) and plain (one tensor an expert), the config and the tensors agree."""
    kv_heads = "--kv-heads=4" if family == "olmoe" else "--kv-heads=2"
    _, model = make(tmp_path / "m", f"--family={family}", f"--dtype={dtype}", kv_heads, "--shards=3")
    layer = model.layers[1].mlp
    assert isinstance(layer, MoeSpec)
    assert (model.model_type, layer.router.num_experts, layer.router.top_k) == (family, 4, 2)
    expected = ("affine", "affine", 8) if dtype == "mlx" else ("bf16", "bf16", 0)
    assert (layer.experts.down.kind, layer.gate.encoding.kind, layer.gate.encoding.bits) == expected


@pytest.mark.parametrize(("bits", "group_size"), [(2, 128), (3, 64), (5, 32), (6, 64), (8, 32)])
def test_other_codes(tmp_path: Path, bits: int, group_size: int) -> None:
    """Other widths and groups are what they say."""
    _, model = make(tmp_path / "m", f"--bits={bits}", f"--group-size={group_size}", "--width=128")
    encoding = model.expert_layers[0].down
    assert (encoding.bits, encoding.group_size) == (bits, group_size)


def test_reproducible(tmp_path: Path) -> None:
    """The same arguments give the same bytes, another seed gives others."""
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        make(tmp_path / name, f"--seed={seed}")
    first, second, other = (digests(tmp_path / name) for name in "abc")
    assert first == second
    assert first["config.json"] == other["config.json"]
    assert first["model.safetensors"] != other["model.safetensors"]


def test_bytes_are_pinned(tmp_path: Path) -> None:
    """The bytes do not change with the version of numpy or of the script: benchmarks stay comparable."""
    make(tmp_path / "m")
    assert digests(tmp_path / "m")["model.safetensors"] == PINNED


def test_sharding_moves_tensors_without_changing_them(tmp_path: Path) -> None:
    """A tensor's bytes depend on its name and the seed only."""
    (one, _), (many, _) = make(tmp_path / "one"), make(tmp_path / "many", "--shards=4")
    assert len(many.files) == 4
    for name in one.tensors:
        first, second = one.tensors[name], many.tensors[name]
        left, right = (c.read(t.file_idx, t.offset, t.nbytes) for c, t in ((one, first), (many, second)))
        assert (left == right).all()


def values(checkpoint: Checkpoint, layer: ExpertLayer, projection: str) -> np.ndarray:
    """All weights of one projection of one layer, 4 bit in groups of 64: code * scale + bias."""
    pieces = [piece for piece, (name, _) in enumerate(layer.piece_names) if name == projection]
    weights = []
    for expert in range(layer.num_experts):
        codes, scales, biases = (
            checkpoint.read(int(layer.file_idx[expert, p]), int(layer.offset[expert, p]), int(layer.piece_bytes[p]))
            for p in pieces
        )
        nibbles = np.stack([codes & 15, codes >> 4], axis=1).reshape(-1, 64)
        weights.append(nibbles * to_float32(scales, "BF16")[:, None] + to_float32(biases, "BF16")[:, None])
    return np.concatenate(weights)


def test_weights_are_centred_and_scaled(tmp_path: Path) -> None:
    """Mean 0 and deviation 1/sqrt(columns), so that activations neither vanish nor explode."""
    checkpoint, model = make(tmp_path / "m")
    for projection, cols in (("gate", 128), ("down", 64)):
        weights = values(checkpoint, model.expert_layers[1], projection)
        assert abs(weights.mean()) < 0.02 / cols**0.5
        assert weights.std() == pytest.approx(cols**-0.5, rel=0.05)


def test_containers_hold_made_up_experts(tmp_path: Path) -> None:
    """One read an expert, checksums that hold, other weights in each expert, and the deviations of the plain form."""
    checkpoint, model = make(tmp_path / "m", "--container")
    assert sorted(path.suffix for path in (tmp_path / "m").iterdir()) == [".json", *[".safetensors"] * 3]
    layer = model.expert_layers[1]
    assert layer.piece_bytes.tolist() == [layer.shape.slab_bytes]
    slabs = [
        checkpoint.read(int(layer.file_idx[expert, 0]), int(layer.offset[expert, 0]), layer.shape.slab_bytes)
        for expert in range(layer.num_experts)
    ]
    assert layer.checksums is not None
    assert [xxhash.xxh3_64_intdigest(slab.data) for slab in slabs] == layer.checksums.tolist()
    gates = [unpack(layer.gate.format, 64, 128, slab[: layer.shape.up_offset]) for slab in slabs]
    assert np.stack(gates).std() == pytest.approx(128**-0.5, rel=0.05)
    assert abs(np.stack(gates).mean()) < 0.02 / 128**0.5


def test_tokenizer_is_copied(tmp_path: Path) -> None:
    """With its chat template; refused if its ids do not fit the vocabulary."""
    make(tmp_path / "m", "--tokenizer", fixture("qwen3_moe_q4"))
    assert (tmp_path / "m" / "chat_template.jinja").exists()
    result = run(tmp_path / "n", *SHAPE, "--vocab=100", "--tokenizer", fixture("qwen3_moe_q4"))
    assert "the tokenizer has ids up to 255, --vocab is 100" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--hidden=100",), "--hidden = 100 must be a multiple of 64"),
        (("--width=65",), "--width 65 must be a multiple of --group-size 64"),
        (("--kv-heads=3",), "--heads 4 must be a multiple of --kv-heads 3"),
        (("--top-k=5",), "--top-k 5 must be 1 to --experts 4"),
        (("--layers=0",), "must be above 0, not 0"),
        (("--head-dim=64",), "olmoe has no head-dim of its own"),
    ],
)
def test_impossible_shapes(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    """Refused before anything is written."""
    result = run(tmp_path / "m", *SHAPE, *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_existing_folder_is_kept(tmp_path: Path) -> None:
    """Nothing is overwritten."""
    assert "exists already" in run(tmp_path, *SHAPE).stderr


def test_full_disk(tmp_path: Path, script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before anything is written, with both numbers."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**6))
    with pytest.raises(SystemExit, match=r"needs 0.02 GB, the disk has 0.00 GB free"):
        script.main([str(tmp_path / "m"), *SHAPE])
    assert list(tmp_path.iterdir()) == []


def test_failure_leaves_nothing(tmp_path: Path, script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted run leaves no half of a checkpoint."""

    def interrupted(*_arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "write_shard", interrupted)
    with pytest.raises(KeyboardInterrupt):
        script.main([str(tmp_path / "m"), *SHAPE])
    assert list(tmp_path.iterdir()) == []
