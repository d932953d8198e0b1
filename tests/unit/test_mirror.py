"""A second copy is accepted only if it is one."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from colibri_mp.checkpoint.mirror import mirror_files
from colibri_mp.checkpoint.source import Checkpoint
from colibri_mp.errors import CheckpointError

MODEL = Path(__file__).parents[1] / "golden" / "tiny" / "qwen3_moe_fused"
FILE = "model-00002-of-00002.safetensors"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The weight files only, somewhere else."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in MODEL.glob("*.safetensors"):
        shutil.copy(file, folder)
    return folder


def test_true_copy(copy: Path) -> None:
    """Weight files are enough; they come in the order of the checkpoint's."""
    checkpoint = Checkpoint.open(MODEL)
    files = mirror_files(checkpoint, copy)
    assert [file.parent for file in files] == [copy, copy]
    assert [file.name for file in files] == [file.name for file in checkpoint.files]


def remove(file: Path) -> None:
    file.unlink()


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def rename_a_tensor(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b"down_proj", b"dawn_proj", 1))


def other_weights(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (remove, rf"has no {FILE}; copy all"),
        (cut, r"has \d+ bytes, .* has \d+: copy it again"),
        (rename_a_tensor, r"has another header than"),
        (other_weights, r"with other contents"),
    ],
)
def test_what_is_no_copy(copy: Path, damage: Callable[[Path], None], what: str) -> None:
    """A missing file, another size, header or contents: an error that says which, before anything is read from it."""
    damage(copy / FILE)
    with pytest.raises(CheckpointError, match=what):
        mirror_files(Checkpoint.open(MODEL), copy)


def test_checkpoint_is_not_its_own_mirror(tmp_path: Path) -> None:
    """Neither itself nor by another name."""
    link = tmp_path / "link"
    link.symlink_to(MODEL)
    with pytest.raises(CheckpointError, match="is the checkpoint itself"):
        mirror_files(Checkpoint.open(MODEL), link)
