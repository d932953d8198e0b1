"""The folder of a conversion while it is being filled: who may write into it, and who may go on.

    no such folder, or an empty one         anybody
    conversion.json, no config.json         an unfinished conversion: the same source with the same options, one process at a time
    anything else                           nobody

`conversion.json` holds the marker that config.json will hold, is locked while a process converts, and is removed last.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from colibri_mp.checkpoint.container import UNFINISHED_NAME, Marker
from colibri_mp.checkpoint.convert.files import PARTIAL_SUFFIX, explained
from colibri_mp.checkpoint.convert.plan import Plan
from colibri_mp.config import format_size
from colibri_mp.errors import ConfigError, WriteError

_SLACK_BYTES = 16 << 20
"""Room for small files and the file system's own needs."""


@contextlib.contextmanager
def claimed(folder: Path, plan: Plan) -> Iterator[None]:
    """Make `folder`, or take over what an interrupted conversion left there; it is ours for the block.

    Raises:
        ConfigError: the folder holds something else, or another process is converting into it.
        WriteError: the disk has not enough room for what is missing, or the folder cannot be made.
    """
    _refuse_foreign(folder, plan.marker)
    _refuse_full_disk(folder, plan)
    with explained(folder / UNFINISHED_NAME):
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder / UNFINISHED_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        with explained(folder / UNFINISHED_NAME):
            _lock(folder, fd)
            if not os.fstat(fd).st_size:
                os.write(fd, msgspec.json.encode(plan.marker))
                os.fsync(fd)
            for partial in _partial_files(folder):
                partial.unlink()
        yield
    finally:
        os.close(fd)


def release(folder: Path) -> None:
    """The conversion is finished. Should the system go down now and forget this, the next run verifies once more."""
    (folder / UNFINISHED_NAME).unlink()


def is_unfinished(folder: Path) -> bool:
    """Whether a conversion into `folder` has begun and not been finished."""
    return (folder / UNFINISHED_NAME).exists()


def _refuse_foreign(folder: Path, marker: Marker) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ConfigError(f"{folder}: is a file; give a folder for the container")
    names = sorted(path.name for path in folder.iterdir())
    if names and UNFINISHED_NAME not in names:
        some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        raise ConfigError(
            f"{folder}: is not empty, and no unfinished conversion ({some}); give a new folder, or empty it"
        )
    if names and (found := (folder / UNFINISHED_NAME).read_bytes()):
        _refuse_other(folder, found, marker)


def _refuse_other(folder: Path, found: bytes, marker: Marker) -> None:
    try:
        other = msgspec.json.decode(found, type=Marker)
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"{folder}: its {UNFINISHED_NAME} cannot be read ({error}): empty the folder and begin again"
        ) from error
    for field in marker.__struct_fields__:
        if getattr(other, field) != getattr(marker, field):
            raise ConfigError(
                f"{folder}: holds an unfinished conversion with {field} = {getattr(other, field)!r}, this one has "
                f"{getattr(marker, field)!r}: go on with the same source and options, or give another folder"
            )


def _refuse_full_disk(folder: Path, plan: Plan) -> None:
    """What is missing must fit, in what is free and what torn files will give back."""
    needed_bytes = sum(job.file_bytes for job in plan.jobs if not (folder / job.name).exists())
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free_bytes = shutil.disk_usage(existing).free + sum(path.stat().st_size for path in _partial_files(folder))
    if needed_bytes + _SLACK_BYTES > free_bytes:
        raise WriteError(
            f"{folder}: {format_size(needed_bytes)} are still to be written, {format_size(free_bytes)} are free on that disk: "
            "make room, or give a folder on another disk"
        )


def _partial_files(folder: Path) -> list[Path]:
    return list(folder.glob(f"*{PARTIAL_SUFFIX}"))


def _lock(folder: Path, fd: int) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_ours = os.fstat(fd).st_nlink > 0  # a process that has just finished removed the file under our eyes
    except BlockingIOError:
        is_ours = False
    if not is_ours:
        raise ConfigError(f"{folder}: another process is converting into it: wait for it, or give another folder")
