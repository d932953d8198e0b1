"""Which backend a launch gets: what was asked for, MLX only where it can do it, an error that says what would do."""

import sys
from pathlib import Path

import pytest

from colibri_mp import backend_choice
from colibri_mp.backend_choice import with_backend
from colibri_mp.checkpoint.source import Checkpoint
from colibri_mp.config import LaunchConfig
from colibri_mp.errors import ConfigError
from colibri_mp.models import load_model
from colibri_mp.models.structure import ModelSpec

OLMOE = Path(__file__).parents[1] / "golden" / "tiny" / "olmoe"


@pytest.fixture(scope="module")
def model() -> ModelSpec:
    """Grouped-query attention everywhere."""
    return load_model(Checkpoint.open(OLMOE))


def choice(model: ModelSpec, **settings: object) -> str:
    """The backend that such a launch gets."""
    return with_backend(LaunchConfig(**settings), model).backend


def test_auto_is_mlx_where_it_has_a_gpu(model: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU the kernels compute; with one MLX does, but for what only the kernels can."""
    assert choice(model) == "cpu"
    pytest.importorskip("mlx.core", reason="mlx is not installed: pip install 'colibri-mp[mlx]'")
    monkeypatch.setattr(backend_choice, "has_gpu", lambda: True)
    assert choice(model) == "mlx"
    assert choice(model, kv_bits=8) == "cpu"
    assert choice(model, backend="cpu") == "cpu"


def test_mlx_that_is_not_installed(model: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for, it is an error with the command that installs it; not asked for, nothing is said."""
    monkeypatch.setitem(sys.modules, "mlx", None)
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    assert choice(model) == "cpu"
    with pytest.raises(ConfigError, match=r"not installed; install it \(pip install 'colibri-mp\[mlx\]'\)"):
        choice(model, backend="mlx")


def test_what_mlx_does_not_compute(model: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixer or a setting that only the kernels have is refused by name, with the way out."""
    pytest.importorskip("mlx.core", reason="mlx is not installed: pip install 'colibri-mp[mlx]'")
    from colibri_mp.mlx_backend import mixers

    with pytest.raises(ConfigError, match=r"--kv-bits 8 is of the compiled kernels; .* --backend cpu"):
        choice(model, backend="mlx", kv_bits=8)
    monkeypatch.setattr(mixers, "KINDS", {})
    with pytest.raises(ConfigError, match=r"a layer of olmoe has AttentionSpec, which .* launch with --backend cpu"):
        choice(model, backend="mlx")
