"""The user's cache folder: where it is, and that its files are replaced as a whole."""

import sys
from pathlib import Path

import pytest

from colibri_mp.user_cache import replace_file, user_cache_dir


def test_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """COLIBRI_CACHE_DIR wins, then the platform's convention."""
    monkeypatch.setenv("COLIBRI_CACHE_DIR", str(tmp_path / "mine"))
    assert user_cache_dir() == tmp_path / "mine"
    monkeypatch.delenv("COLIBRI_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(sys, "platform", "linux")
    assert user_cache_dir() == tmp_path / "xdg" / "colibri-mp"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert user_cache_dir() == tmp_path / ".cache" / "colibri-mp"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert user_cache_dir() == tmp_path / "Library" / "Caches" / "colibri-mp"


def test_files_are_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails leaves the old content and nothing else."""
    path = tmp_path / "new" / "disks.json"
    replace_file(path, b"old")
    assert path.parent.stat().st_mode & 0o777 == 0o700
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
        with pytest.raises(OSError, match="full"):
            replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"
