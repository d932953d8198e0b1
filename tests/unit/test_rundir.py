"""Run directories: private, locked while in use, cleaned when stale."""

import os
import stat
from pathlib import Path

import pytest

from colibri_mp import rundir
from colibri_mp.errors import ConfigError, WorkerDied
from colibri_mp.rundir import ClusterInfo


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A base folder of this test's own."""
    folder = tmp_path / "run"
    monkeypatch.setenv("COLIBRI_RUN_DIR", str(folder))
    return folder


def test_private_and_gone_after_use(base: Path) -> None:
    """Folder and base have mode 0700, and nothing is left after `remove`."""
    made = rundir.create("one")
    assert stat.S_IMODE(made.path.stat().st_mode) == stat.S_IMODE(base.stat().st_mode) == 0o700
    assert list(rundir.running()) == ["one"]
    assert rundir.find("one") is not None
    made.remove()
    assert list(base.iterdir()) == []
    assert rundir.find("one") is None


def test_last_words_outlive_the_folder() -> None:
    """Who opened the file in time reads the error after the folder is gone; the next cluster of the name starts silent."""
    made = rundir.create("one")
    with made.open_last_words() as file:
        assert rundir.read_last_words(file) is None
        made.leave_last_words(WorkerDied("worker 3 was killed"))
        made.remove()
        error = rundir.read_last_words(file)
    assert isinstance(error, WorkerDied)
    assert str(error) == "worker 3 was killed"
    again = rundir.create("one")
    with again.open_last_words() as file:
        assert rundir.read_last_words(file) is None
    again.remove()


def test_name_in_use_is_refused() -> None:
    """A second cluster of the same name is an error that names the cure."""
    made = rundir.create("one")
    with pytest.raises(ConfigError, match=r"already running.*stop --name one"):
        rundir.create("one")
    made.remove()


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "x" * 33])
def test_unusable_names(name: str) -> None:
    """Names that would leave the base folder, or make socket paths too long, are refused."""
    with pytest.raises(ConfigError, match="cluster name"):
        rundir.create(name)


def test_stale_directories_are_cleaned(base: Path) -> None:
    """What an ended cluster left is removed, its segments named; a running cluster's is not touched."""
    running = rundir.create("running")
    dead = rundir.create("dead")
    dead.describe(ClusterInfo(1, "m", ("seg-a", "seg-b")))
    os.close(dead.lock_fd)  # as the end of its process does
    unlinked: list[str] = []
    assert rundir.clean_stale(unlinked.append) == ["dead"]
    assert unlinked == ["seg-a", "seg-b"]
    assert [path.name for path in base.iterdir()] == ["running"]
    running.remove()


def test_takes_over_the_folder_of_an_ended_cluster() -> None:
    """A name is free again when its cluster has ended without cleaning up."""
    dead = rundir.create("one")
    (dead.path / "control").touch()
    os.close(dead.lock_fd)
    again = rundir.create("one")
    assert not (again.path / "control").exists()
    again.remove()


def test_foreign_base_is_refused(base: Path) -> None:
    """A base folder that others may enter is not used."""
    base.mkdir(mode=0o755)
    base.chmod(0o755)
    with pytest.raises(ConfigError, match="0700"):
        rundir.create("one")
