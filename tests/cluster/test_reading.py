"""Reading experts, from a cluster's point of view: damage, a second copy, checksums, and files that change under way."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conversion import made

from colibri_mp import Cluster
from colibri_mp.checkpoint.source import Checkpoint
from colibri_mp.errors import CheckpointError, ReadError
from colibri_mp.models import load_model
from colibri_mp.user_cache import user_cache_dir

MODEL = Path(__file__).parents[1] / "golden" / "tiny" / "qwen3_moe_fused"
SETTINGS = {"num_workers": 2, "num_threads": 1, "ctx": 512, "slots": 4}
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model that the test may damage."""
    return Path(shutil.copytree(MODEL, tmp_path / "model"))


@pytest.fixture
def checked(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, its checksums computed by the verb; they are kept apart from the user's, compiled kernels are not."""
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "kernels").symlink_to(user_cache_dir() / "kernels")
    monkeypatch.setenv("COLIBRI_CACHE_DIR", str(cache))
    computed = command("checksum", str(model), "--json")
    assert computed.returncode == 0, computed.stderr
    report = json.loads(computed.stdout)
    assert report["num_known"] == 0
    assert Path(report["path"]).parent == cache / "checksums"
    return model


def place_of(model: Path, layer_idx: int, expert: int) -> tuple[Path, int, int]:
    """File and first byte of an expert, and the number of its layer."""
    checkpoint = Checkpoint.open(model)
    layer = load_model(checkpoint).expert_layers[layer_idx]
    return checkpoint.files[int(layer.file_idx[expert, 0])], int(layer.offset[expert, 0]), layer.layer


def flip_all(model: Path, layer_idx: int) -> int:
    """Damage every expert of a layer by one bit, keeping the time stamps; returns the layer's number."""
    checkpoint = Checkpoint.open(model)
    layer = load_model(checkpoint).expert_layers[layer_idx]
    for expert in range(layer.num_experts):
        path, offset = checkpoint.files[int(layer.file_idx[expert, 0])], int(layer.offset[expert, 0])
        state = path.stat()
        data = bytearray(path.read_bytes())
        data[offset + 7] ^= 2
        path.write_bytes(data)
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    return layer.layer


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `colibri-cluster`."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "colibri_mp", *arguments], capture_output=True, text=True, timeout=100
    )


def test_flipped_bytes_are_refused_by_name(checked: Path) -> None:
    """Damage on the disk: requests that need it fail with layer and expert, the cluster stays up."""
    model = checked
    layer = flip_all(model, 1)
    with Cluster.launch(model, **SETTINGS) as cluster:
        assert any("checked when they are first read" in note for note in cluster.stats()["notes"])
        for _ in range(2):
            with pytest.raises(ReadError, match=rf"layer {layer}, expert \d+, at offset \d+ of {model}.* checksum"):
                cluster.generate(PROMPT, max_tokens=2)
        assert cluster.stats()["state"] == "serving"
    again = command("checksum", str(model))
    assert again.returncode == ReadError.exit_code
    assert f"layer {layer}, expert 0" in again.stderr
    with Cluster.launch(model, **SETTINGS, verify="off") as cluster:
        assert cluster.generate(PROMPT, max_tokens=2).finish_reason == "length"


def test_flipped_bytes_of_a_container_are_refused_by_name(tmp_path: Path) -> None:
    """Its own checksums find them, without any preparation."""
    made(MODEL, tmp_path / "container")
    layer = flip_all(tmp_path / "container", 2)
    with Cluster.launch(tmp_path / "container", **SETTINGS) as cluster:
        with pytest.raises(
            ReadError, match=rf"layer {layer}, expert \d+, at offset \d+ of .*experts-0000{layer}.* checksum"
        ):
            cluster.generate(PROMPT, max_tokens=2)
        assert cluster.stats()["state"] == "serving"


def test_second_copy_stands_in(model: Path, tmp_path: Path) -> None:
    """With `--mirror` a file that is cut while running costs nothing: same tokens; a wrong copy is refused at start."""
    mirror = Path(shutil.copytree(model, tmp_path / "mirror"))
    with Cluster.launch(MODEL, **SETTINGS) as cluster:
        expected = cluster.generate(PROMPT, max_tokens=12, temperature=0.0, ignore_eos=True).token_ids
    with Cluster.launch(model, **SETTINGS, mirror=str(mirror)) as cluster:
        assert any(f"if the other copy fails from {mirror}" in note for note in cluster.stats()["notes"])
        for file in model.glob("*.safetensors"):
            os.truncate(file, file.stat().st_size // 3)
        done = cluster.generate(PROMPT, max_tokens=12, temperature=0.0, ignore_eos=True)
        assert done.token_ids == expected
    with pytest.raises(CheckpointError, match=r"has \d+ bytes, .* has \d+: copy it again"):
        Cluster.launch(MODEL, **SETTINGS, mirror=str(model))


def test_file_cut_and_restored_while_running(checked: Path) -> None:
    """What is gone is a named error for the requests that need it; put back, it is read again, since checksums match."""
    with Cluster.launch(checked, **SETTINGS) as cluster:
        expected = cluster.generate(PROMPT, max_tokens=4, temperature=0.0, ignore_eos=True).token_ids
        path, offset, layer = place_of(checked, -1, 0)
        whole = path.read_bytes()
        os.truncate(path, offset)
        for _ in range(2):
            with pytest.raises(ReadError, match=rf"layer {layer}, expert \d+: .* offset \d+ of {path} .*truncated"):
                cluster.generate(PROMPT, max_tokens=4)
        assert cluster.stats()["state"] == "serving"
        path.write_bytes(whole)
        again = cluster.generate(PROMPT, max_tokens=4, temperature=0.0, ignore_eos=True)
        assert again.token_ids == expected


def test_reading_modes_give_the_same_tokens(model: Path) -> None:
    """Buffered, direct, dropping, and compared with the disk at each use."""
    answers = []
    for changes in ({"io": "buffered"}, {"io": "direct"}, {"io": "drop", "verify": "always"}):
        with Cluster.launch(model, **SETTINGS, **changes) as cluster:
            answers.append(cluster.generate(PROMPT, max_tokens=6, temperature=0.0, ignore_eos=True).token_ids)
    assert answers == answers[:1] * 3
