"""A second copy of a checkpoint: the same weight files in another folder, best on another disk."""

from dataclasses import replace
from pathlib import Path

from colibri_mp.checkpoint.safetensors_header import read_header
from colibri_mp.checkpoint.source import Checkpoint
from colibri_mp.errors import CheckpointError


def mirror_files(checkpoint: Checkpoint, folder: Path) -> tuple[Path, ...]:
    """The files of the copy in `folder`, parallel to `checkpoint.files`; nothing there is ever written.

    Raises `CheckpointError` for the first difference: a file that is missing, or of another size, header or contents
    (samples of each file, as in the fingerprint).
    """
    if folder.resolve() == checkpoint.path.resolve():
        raise CheckpointError(f"--mirror {folder} is the checkpoint itself; give the folder of a second copy")
    files = tuple(folder / path.name for path in checkpoint.files)
    for file_idx, file in enumerate(files):
        _check_same(checkpoint, file_idx, file)
    if replace(checkpoint, files=files).fingerprint != checkpoint.fingerprint:
        raise CheckpointError(
            f"--mirror {folder} has the tensors of {checkpoint.path} with other contents; it is no copy of it"
        )
    return files


def _check_same(checkpoint: Checkpoint, file_idx: int, file: Path) -> None:
    """Size and header."""
    if not file.is_file():
        raise CheckpointError(f"--mirror {file.parent} has no {file.name}; copy all weight files there")
    original, nbytes = checkpoint.files[file_idx], checkpoint.file_bytes[file_idx]
    if file.stat().st_size != nbytes:
        raise CheckpointError(f"{file} has {file.stat().st_size} bytes, {original} has {nbytes}: copy it again")
    if read_header(file, file_idx).digest != checkpoint.header_digests[file_idx]:
        raise CheckpointError(f"{file} has another header than {original}: it is a file of another checkpoint")
