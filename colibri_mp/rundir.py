"""Run directories: where a running cluster keeps its sockets, its description and its lock.

    <base>/<name>/            mode 0700
        lock                  flock'ed by the coordinator for its whole life: "in use" is "cannot be locked"
        cluster.json          pid, model, shared-memory names: written once when the cluster starts
        control, workers      sockets (see transport)
        last-words            empty; the error that ended the cluster, for clients that opened it in time
        coordinator.log       only of a detached cluster

The base is $COLIBRI_RUN_DIR, else $XDG_RUNTIME_DIR/colibri-mp, else a folder of this user in the temporary folder. A
lock that can be taken means that its cluster has ended; what it could not clean is cleaned by `clean_stale`.
"""

import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from colibri_mp.errors import ColibriError, ConfigError, from_wire

_LAST_WORDS = "last-words"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,31}")


class ClusterInfo(msgspec.Struct, frozen=True):
    """What `cluster.json` holds."""

    pid: int
    model: str
    segments: tuple[str, ...]


class _LastWords(msgspec.Struct, frozen=True):
    """What `last-words` holds: an error as it travels."""

    kind: str
    message: str


def base_folder() -> Path:
    """The folder of all run directories of this user; made with mode 0700.

    Raises:
        ConfigError: it belongs to somebody else, others may enter it, or it cannot be made.
    """
    if chosen := os.environ.get("COLIBRI_RUN_DIR"):
        base = Path(chosen)
    elif runtime := os.environ.get("XDG_RUNTIME_DIR"):
        base = Path(runtime) / "colibri-mp"
    else:
        base = Path(tempfile.gettempdir()) / f"colibri-mp-{os.getuid()}"
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = base.lstat()
    except OSError as error:
        raise ConfigError(f"cannot make the run folder {base}: {error.strerror}; set COLIBRI_RUN_DIR") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"run folder {base} must be a folder of yours with mode 0700; set COLIBRI_RUN_DIR to such a one"
        )
    return base


@dataclass(frozen=True)
class RunDir:
    """The run directory of one cluster, in this process's possession (`create`) or somebody else's (`find`)."""

    path: Path
    lock_fd: int = -1

    @property
    def control(self) -> Path:
        """Socket of the control endpoint."""
        return self.path / "control"

    @property
    def workers(self) -> Path:
        """Socket that the workers connect to."""
        return self.path / "workers"

    @property
    def log(self) -> Path:
        """Messages of a detached cluster."""
        return self.path / "coordinator.log"

    def leave_last_words(self, error: ColibriError) -> None:
        """Tell clients that wait, or will, why the cluster has ended: who has the file open reads it, removed or not."""
        (self.path / _LAST_WORDS).write_bytes(msgspec.json.encode(_LastWords(error.kind, str(error))))

    def open_last_words(self) -> BinaryIO:
        """The file for `read_last_words`; `FileNotFoundError` if the cluster has ended."""
        return (self.path / _LAST_WORDS).open("rb")

    def describe(self, info: ClusterInfo) -> None:
        """Write `cluster.json`, atomically."""
        temporary = self.path / "cluster.json.new"
        temporary.write_bytes(msgspec.json.encode(info))
        temporary.rename(self.path / "cluster.json")

    def info(self) -> ClusterInfo | None:
        """What `cluster.json` says; None while it has not been written."""
        try:
            return msgspec.json.decode((self.path / "cluster.json").read_bytes(), type=ClusterInfo)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None

    def remove(self) -> None:
        """Remove the folder and give the lock back."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self.lock_fd >= 0:
            os.close(self.lock_fd)


def create(name: str) -> RunDir:
    """Make and lock the run directory `name`; an ended cluster's is taken over.

    Raises:
        ConfigError: the name is not usable, or a running cluster has it.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"cluster name {name!r}: use up to 32 letters, digits, '_', '.' and '-', beginning with a letter or digit"
        )
    path = base_folder() / name
    fd = None
    for _ in range(3):  # somebody cleaning up may remove the folder before it is locked
        path.mkdir(mode=0o700, exist_ok=True)
        if (fd := _lock(path)) is not None:
            break
    if fd is None:
        raise ConfigError(
            f"a cluster named {name!r} is already running ({path}); "
            f"stop it with `colibri-cluster stop --name {name}` or choose another --name"
        )
    for leftover in path.iterdir():
        if leftover.name != "lock":
            leftover.unlink()
    (path / _LAST_WORDS).touch(0o600)
    return RunDir(path, fd)


def read_last_words(file: BinaryIO) -> ColibriError | None:
    """The error that ended the cluster; None while it runs, or when it ended without a word."""
    file.seek(0)
    try:
        words = msgspec.json.decode(file.read(), type=_LastWords)
    except msgspec.MsgspecError:  # empty
        return None
    return from_wire(words.kind, words.message)


def find(name: str) -> RunDir | None:
    """The run directory of the running cluster `name`, or None."""
    path = base_folder() / name
    return RunDir(path) if path.is_dir() and not _is_free(path) else None


def running() -> Iterator[str]:
    """Names of the running clusters of this user."""
    for path in sorted(base_folder().iterdir()):
        if path.is_dir() and not _is_free(path):
            yield path.name


def clean_stale(unlink_segment: Callable[[str], object]) -> list[str]:
    """Remove what ended clusters left behind; `unlink_segment` removes one shared-memory name. Returns their names."""
    cleaned = []
    for path in sorted(base_folder().iterdir()):
        if not path.is_dir() or (fd := _lock(path)) is None:
            continue
        stale = RunDir(path, fd)
        if (info := stale.info()) is not None:
            for segment in info.segments:
                unlink_segment(segment)
        stale.remove()
        cleaned.append(path.name)
    return cleaned


def _lock(path: Path) -> int | None:
    """A file descriptor that holds the lock of run directory `path`; None if a living process holds it or it is gone."""
    try:
        fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_ino == (path / "lock").stat().st_ino:
            return fd
    except (BlockingIOError, FileNotFoundError):  # held, or removed between opening and locking
        pass
    os.close(fd)
    return None


def _is_free(path: Path) -> bool:
    fd = _lock(path)
    if fd is not None:
        os.close(fd)
    return fd is not None or not path.is_dir()


def remove_if_ended(path: Path) -> None:
    """Remove the run directory `path` if no living coordinator holds it."""
    fd = _lock(path) if path.is_dir() else None
    if fd is not None:
        RunDir(path, fd).remove()
