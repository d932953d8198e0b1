"""What is kept for the user between runs, and where: one folder, files that are replaced as a whole.

    kernels/        compiled kernels (see kernels.isa)
    disks.json      how fast each disk reads experts (see disks)
    checksums/      checksums of experts, by fingerprint of the checkpoint (see checksums)

The folder is $COLIBRI_CACHE_DIR, else $XDG_CACHE_HOME/colibri-mp, else ~/.cache/colibri-mp (macOS: ~/Library/Caches/colibri-mp).
All of it can be removed at any time.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


def user_cache_dir() -> Path:
    """The folder; it may not exist yet."""
    if override := os.environ.get("COLIBRI_CACHE_DIR"):
        return Path(override)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "colibri-mp"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "colibri-mp"


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old or the new content, never a part; makes its folder (0700).

    Raises OSError; nothing is left behind then.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(content)


@contextmanager
def replacing(path: Path, sync: bool = False) -> Iterator[BinaryIO]:
    """A new file (0600) that gets the name `path` when the block ends well; `sync`: and is on the disk by then.

    Raises OSError; nothing is left behind then, or when the block raises.
    """
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.")
    try:
        with os.fdopen(fd, "wb") as file:
            yield file
            if sync:
                file.flush()
                os.fsync(fd)
        Path(temporary).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(temporary).unlink()
        raise
