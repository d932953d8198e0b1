"""`--expert-bits` through real processes: the logits of the container that `convert --bits` makes, named lossy, checked."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conversion import made

from colibri_mp import Cluster
from colibri_mp.checkpoint.convert import Options
from colibri_mp.errors import ConfigError
from colibri_mp.user_cache import user_cache_dir

GOLDEN = Path(__file__).parents[1] / "golden"
MODEL = GOLDEN / "tiny" / "qwen3_moe_fused"
SETTINGS = {"num_threads": 1, "ctx": 128, "slots": 4}
PROMPT = list(range(3, 40))


def test_same_bits_as_the_container(tmp_path: Path) -> None:
    """Whatever the workers and the way of reading; memory compared with the disk at each use finds no difference."""
    made(MODEL, tmp_path / "out", Options("mixed", 32))
    with Cluster.launch(str(tmp_path / "out"), **SETTINGS, num_workers=1) as cluster:
        expected = cluster.logits(PROMPT).tobytes()
        assert cluster.stats()["lossy"] == []
    for changes in ({"num_workers": 1}, {"num_workers": 2, "io": "direct", "verify": "always"}):
        with Cluster.launch(MODEL, **SETTINGS, **changes, expert_bits="mixed") as cluster:
            assert cluster.logits(PROMPT).tobytes() == expected
            assert cluster.stats()["lossy"] == ["--expert-bits mixed (stored are bf16)"]
            assert any("not those of the model as published" in note for note in cluster.notes)


def test_checksums_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`checksum --expert-bits` makes those that a launch with the same option uses."""
    (tmp_path / "kernels").symlink_to(user_cache_dir() / "kernels")  # compiled ones are taken from the user's
    monkeypatch.setenv("COLIBRI_CACHE_DIR", str(tmp_path))
    command = [sys.executable, "-P", "-m", "colibri_mp", "checksum", str(MODEL), "--expert-bits", "4", "--json"]
    for num_known in (0, 32):
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["num_known"] == num_known


def test_other_widths_are_refused() -> None:
    """Experts that are quantised already: the launch says which, and what to do."""
    with pytest.raises(ConfigError, match=r"--expert-bits 8: the experts of layer 0 are quantised already"):
        Cluster.launch(GOLDEN / "tiny_mlx" / "qwen3_moe_q4", **SETTINGS, expert_bits="8")
