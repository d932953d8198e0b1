"""Checksums of published layouts: computed once, kept for the user, used by launches, and a way to check the disk."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from expert_checkpoint import Q4, Q8, checksums_of, random_experts, stacked, write

from colibri_mp import checksums
from colibri_mp.checkpoint.experts import ExpertLayer
from colibri_mp.checkpoint.source import Checkpoint
from colibri_mp.checksums import check_or_compute, checksum_path, compute, describe, with_checksums
from colibri_mp.errors import CheckpointError, ReadError
from colibri_mp.models import load_model

MODEL = Path(__file__).parents[1] / "golden" / "tiny" / "qwen3_moe"


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder of the test's own."""
    monkeypatch.setenv("COLIBRI_CACHE_DIR", str(tmp_path / "cache"))


class Model:
    """The tiny model in a folder that may be damaged."""

    def __init__(self, folder: Path) -> None:
        shutil.copytree(MODEL, folder)
        self.checkpoint = Checkpoint.open(folder)
        self.fingerprint = self.checkpoint.fingerprint
        self.layers = load_model(self.checkpoint).expert_layers

    def run(self) -> checksums.Report:
        """The verb."""
        return check_or_compute(self.checkpoint.files, self.layers, self.fingerprint, lambda _: None)

    def known(self) -> tuple[ExpertLayer, ...]:
        """What a launch would work with."""
        return with_checksums(self.layers, self.fingerprint)

    def flip(self, layer: ExpertLayer, expert: int) -> None:
        """Damage one byte of an expert."""
        with self.checkpoint.files[int(layer.file_idx[expert, 0])].open("r+b") as file:
            file.seek(int(layer.offset[expert, 0]) + 9)
            [byte] = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))


@pytest.fixture
def model(tmp_path: Path) -> Model:
    """A whole model."""
    return Model(tmp_path / "model")


def test_checksums_are_those_of_the_slabs(tmp_path: Path) -> None:
    """One number an expert: xxh3-64 of its slab as the kernels read it."""
    all_experts = [random_experts(layer, 20, 128, 64, (Q4, Q8, Q4)) for layer in (2, 7)]
    files: list[Path] = []
    layers = []
    for experts in all_experts:
        new = write(tmp_path, experts, stacked)
        layers.append(experts.expert_layer(len(files)))
        files += new
    said: list[str] = []
    found = compute(files, layers, said.append)
    for experts in all_experts:
        assert np.array_equal(found[experts.layer], checksums_of(experts))


def test_launches_use_what_was_computed(model: Model) -> None:
    """Without a file there are none, and it is said; afterwards every layer has them."""
    assert all(layer.checksums is None for layer in model.known())
    assert "none" in describe(model.known(), "first")
    report = model.run()
    assert (report.num_experts, report.num_known) == (sum(layer.num_experts for layer in model.layers), 0)
    assert report.path == str(checksum_path(model.fingerprint))
    assert all(layer.checksums is not None for layer in model.known())
    assert "when they are first read" in describe(model.known(), "first")
    assert model.run().num_known == report.num_experts


def test_damage_since_the_first_time_is_named(model: Model) -> None:
    """A second run holds the disk against the first; what differs is named, and what is kept stays."""
    model.run()
    before = checksum_path(model.fingerprint).read_bytes()
    layer = model.layers[1]
    model.flip(layer, 2)
    with pytest.raises(
        ReadError, match=rf"^1 experts differ from their checksums: layer {layer.layer}, expert 2; the files"
    ):
        model.run()
    assert checksum_path(model.fingerprint).read_bytes() == before


def test_layers_with_checksums_of_their_own_keep_them(model: Model) -> None:
    """What a container states is not replaced by what has been computed."""
    model.run()
    own = np.zeros(model.layers[0].num_experts, np.uint64)
    model.layers = (replace(model.layers[0], checksums=own), *model.layers[1:])
    assert model.known()[0].checksums is own
    with pytest.raises(ReadError, match=rf"^{len(own)} experts differ"):
        model.run()


def test_file_that_cannot_be_used(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damaged or of other experts: an error that says which file to remove; of another slab layout: computed again."""
    model.run()
    path = checksum_path(model.fingerprint)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=rf"{path} cannot be used: .*; remove the file"):
        model.known()
    checksums.save(model.fingerprint, {model.layers[0].layer: np.zeros(3, np.uint64)})
    with pytest.raises(CheckpointError, match=r"has \d+ experts; remove the file"):
        model.known()
    path.write_bytes(whole)
    monkeypatch.setattr(checksums, "LAYOUT_VERSION", "R16S-99")
    assert all(layer.checksums is None for layer in model.known())


def test_unreadable_expert_ends_it(model: Model) -> None:
    """A truncated file: the named error, and nothing is kept."""
    file = model.checkpoint.files[-1]
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(ReadError, match=r"layer \d+, expert \d+: .*the file ends at"):
        model.run()
    assert not checksum_path(model.fingerprint).exists()
