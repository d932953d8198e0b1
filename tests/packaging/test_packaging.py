"""The mapping of folders to packages, the direction of imports, and what a wheel holds."""

import ast
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"colibri_mp": ROOT / "colibri_mp", "colibri_mp.shm": ROOT / "shm", "colibri_mp.workers": ROOT / "workers"}
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def packages_on_disk() -> set[str]:
    """Every folder with Python files, as the package that it becomes."""
    found = set()
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            found.add(".".join([package, *path.parent.relative_to(folder).parts]))
    return found


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of the distribution with its file."""
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            yield ".".join([package, *(part for part in parts if part != "__init__")]), path


def imports_of(path: Path) -> set[str]:
    """Modules of ours that a file imports, at whatever depth of the code."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in names if name.startswith("colibri_mp")}


def test_every_package_is_listed() -> None:
    """A package missing from the list works when editable and is absent from the wheel."""
    assert set(SETTINGS["packages"]) == packages_on_disk()


def test_every_package_has_an_init() -> None:
    """A folder without __init__.py fails only when editable."""
    for package in packages_on_disk():
        top = max((name for name in FOLDERS if package.startswith(name)), key=len)
        folder = FOLDERS[top].joinpath(*package.removeprefix(top).strip(".").split("."))
        assert (folder / "__init__.py").exists(), folder


@pytest.mark.parametrize(("module", "path"), list(modules()), ids=[name for name, _ in modules()])
def test_imports_go_one_way(module: str, path: Path) -> None:
    """shm knows nothing of workers; both use only the shared vocabulary; only the coordinator's side starts workers."""
    used = imports_of(path)
    coordinator_side = (
        "commands",
        "cli",
        "client",
        "engine",
        "coordinator",
        "service",
        "supervisor",
        "scheduler",
        "control",
        "planner",
    )
    if module.startswith(("colibri_mp.shm", "colibri_mp.workers")):
        forbidden = [f"colibri_mp.{name}" for name in coordinator_side]
        assert not [name for name in used for bad in forbidden if name == bad or name.startswith(bad + ".")]
    if module.startswith("colibri_mp.shm"):
        assert not [name for name in used if name.startswith("colibri_mp.workers")]
    if module.startswith(("colibri_mp.kernels", "colibri_mp.models", "colibri_mp.checkpoint")):
        assert not [
            name for name in used if name.startswith(("colibri_mp.workers", "colibri_mp.shm", "colibri_mp.coordinator"))
        ]


def test_only_transport_uses_zmq_and_only_segment_shared_memory() -> None:
    """One place each."""
    for module, path in modules():
        text = path.read_text()
        assert module == "colibri_mp.transport" or "import zmq" not in text, module
        assert module == "colibri_mp.shm.segment" or "SharedMemory(" not in text, module
        assert "import pickle" not in text, module


def test_only_its_backend_uses_mlx() -> None:
    """Nothing else needs MLX, or takes the time to import it; where there is a GPU the choice of a backend asks it."""
    for module, path in modules():
        if not module.startswith(("colibri_mp.mlx_backend", "colibri_mp.backend_choice")):
            assert "import mlx" not in path.read_text(), module


def test_wheel_is_complete(tmp_path: Path) -> None:
    """The wheel holds every module, the type marker, the licence and the built-in model."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        str(ROOT),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    names = set(zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist())
    for module, path in modules():
        inner = Path(*module.split("."))
        assert str(inner / "__init__.py" if path.name == "__init__.py" else inner.with_suffix(".py")) in names
    for file in ("py.typed", "demo_model/config.json", "demo_model/model.safetensors", "demo_model/tokenizer.json"):
        assert f"colibri_mp/{file}" in names
    assert any(name.endswith("LICENSE") for name in names)


def test_version_is_one() -> None:
    """pyproject.toml and the package state the same version."""
    from colibri_mp import __version__

    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == __version__
