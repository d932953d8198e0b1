"""From what the user gives as --model to a folder: folders, the built-in model, the local Hugging Face cache, a download."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_cases import copy_of, fixture
from hub_server import COMMIT, serve_model

from colibri_mp.checkpoint.hub import resolve
from colibri_mp.errors import CheckpointError

RESOLVE = """
import json, sys
from colibri_mp.checkpoint.hub import resolve
from colibri_mp.errors import CheckpointError
lines = []
try:
    print(json.dumps({"folder": str(resolve(sys.argv[1], lines.append)), "lines": lines}))
except CheckpointError as error:
    print(json.dumps({"error": str(error)}))
"""


def resolve_apart(model: str, home: Path, **environment: str) -> dict[str, object]:
    """`resolve` in a process of its own, since huggingface_hub reads its environment once."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    result = subprocess.run(
        [sys.executable, "-c", RESOLVE, model],
        env={**kept, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", **environment},
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    answer: dict[str, object] = json.loads(result.stdout.splitlines()[-1])
    return answer


def put_into_cache(home: Path, repo_id: str, source: Path, revision: str = "main") -> Path:
    """A snapshot as huggingface_hub leaves it in its cache."""
    storage = home / "hub" / f"models--{repo_id.replace('/', '--')}"
    (storage / "refs").mkdir(parents=True)
    (storage / "refs" / revision).write_text(COMMIT)
    return Path(shutil.copytree(source, storage / "snapshots" / COMMIT))


def test_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder is taken as it is, also one whose name looks like an id, and ~ is the home."""
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve(str(tmp_path)) == tmp_path
    assert resolve("org/name") == Path("org/name")
    assert resolve("~/org") == tmp_path / "org"


def test_built_in_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """None and "demo" are the built-in model, wherever the package lies; without it the error says what to do."""
    (tmp_path / "demo_model").mkdir()
    monkeypatch.setattr("importlib.resources.files", lambda _: tmp_path)
    with pytest.raises(CheckpointError, match="built-in model is not there"):
        resolve(None)
    (tmp_path / "demo_model" / "config.json").write_text("{}")
    assert resolve(None) == resolve("demo") == tmp_path / "demo_model"


@pytest.mark.parametrize("model", ["nonesuch", "./org/name", "~/org/name", "a/b/c", "/absent/folder", "org/na me", ""])
def test_neither_folder_nor_id(model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What can be no id is said to be no folder, without asking the hub."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match=r"no such folder. Give a folder"):
        resolve(model)


def test_cached_model_needs_no_network(tmp_path: Path) -> None:
    """An id is found in the cache under HF_HOME, or under HF_HUB_CACHE, by branch or by commit, offline."""
    snapshot = put_into_cache(tmp_path, "org/tiny", fixture("qwen3_moe_fused"))
    for model in ("org/tiny", "org/tiny@main", f"org/tiny@{COMMIT}"):
        assert resolve_apart(model, tmp_path, HF_HUB_OFFLINE="1")["folder"] == str(snapshot)
    elsewhere = resolve_apart("org/tiny", tmp_path / "other", HF_HUB_CACHE=str(tmp_path / "hub"), HF_HUB_OFFLINE="1")
    assert elsewhere["folder"] == str(snapshot)


@pytest.mark.parametrize("missing", ["model-00002-of-00002.safetensors", "config.json"])
def test_half_downloaded_model_offline(tmp_path: Path, missing: str) -> None:
    """A snapshot that an interrupted download has left is not taken for a checkpoint."""
    snapshot = put_into_cache(tmp_path, "org/tiny", fixture("qwen3_moe_fused"))
    (snapshot / missing).unlink()
    error = resolve_apart("org/tiny", tmp_path, HF_HUB_OFFLINE="1")["error"]
    assert "nor, complete, in the Hugging Face cache" in str(error)
    assert "HF_HUB_OFFLINE is set" in str(error)


def test_no_connection(tmp_path: Path) -> None:
    """Not in the cache and no hub that answers: the error names cache and reason."""
    error = str(resolve_apart("org/tiny", tmp_path, HF_ENDPOINT="http://127.0.0.1:9")["error"])
    assert error.startswith("org/tiny: neither a folder here nor, complete, in the Hugging Face cache")
    assert str(tmp_path) in error
    assert "could not be downloaded" in error


def test_download(tmp_path: Path) -> None:
    """Only what is read is fetched, progress is told, and the second time the cache is enough."""
    source = copy_of("qwen3_moe_q4", tmp_path)
    (source / "model.gguf").write_bytes(bytes(100))
    (source / "original").mkdir()
    (source / "original" / "consolidated.safetensors").write_bytes(bytes(100))
    with serve_model("org/tiny", source) as (address, requests):
        answer = resolve_apart("org/tiny", tmp_path / "home", HF_ENDPOINT=address, HF_HUB_DISABLE_XET="1")
        fetched = {request.rsplit("/", 1)[1] for request in requests if request.startswith("GET /org/tiny/resolve")}
    folder = Path(str(answer["folder"]))
    assert fetched == {path.name for path in folder.iterdir()}
    assert fetched == {path.name for path in source.iterdir()} - {"model.gguf", "original", "golden.npz"}
    assert (folder / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert any("downloading: " in line for line in answer["lines"])  # type: ignore[attr-defined]
    again = resolve_apart("org/tiny", tmp_path / "home", HF_HUB_OFFLINE="1")
    assert again["folder"] == answer["folder"]


def test_half_downloaded_model_is_completed(tmp_path: Path) -> None:
    """With a connection, what an interrupted download lacks is fetched."""
    snapshot = put_into_cache(tmp_path / "home", "org/tiny", fixture("qwen3_moe_fused"))
    (snapshot / "model-00002-of-00002.safetensors").unlink()
    with serve_model("org/tiny", fixture("qwen3_moe_fused")) as (address, _):
        answer = resolve_apart("org/tiny", tmp_path / "home", HF_ENDPOINT=address, HF_HUB_DISABLE_XET="1")
    assert answer["folder"] == str(snapshot)
    assert (snapshot / "model-00002-of-00002.safetensors").stat().st_size > 200_000


def test_download_larger_than_the_disk(tmp_path: Path) -> None:
    """A model that the disk cannot hold is refused before the download, with both numbers."""
    with serve_model("org/tiny", fixture("olmoe"), {"model.safetensors": 1 << 60}) as (address, requests):
        error = str(resolve_apart("org/tiny", tmp_path, HF_ENDPOINT=address)["error"])
    assert "org/tiny: 1152921504.61 GB are to be downloaded" in error
    assert not any("resolve" in request for request in requests)


def test_unknown_model(tmp_path: Path) -> None:
    """The hub does not know the id."""
    with serve_model("org/tiny", fixture("olmoe")) as (address, _):
        error = str(resolve_apart("org/other", tmp_path, HF_ENDPOINT=address)["error"])
        assert f"org/other: neither a folder here nor a model on {address}" in error
