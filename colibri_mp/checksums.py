"""Checksums of the experts of a checkpoint in a published layout: computed once by `colibri-cluster checksum`, kept for the user.

    <user cache>/checksums/<key>.npz      "layout": the slab's layout; "layer_<n>": uint64 [E]

A checksum is the xxh3-64 of an expert's whole slab in the kernels' layout, padding zeroed, so that one check after packing
covers what was read and what was made of it. A container from `convert` has them in its own metadata. Experts that are
quantised while they are read (`--expert-bits`) make other slabs, whose checksums have a file of their own.
"""

import io
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from colibri_mp.checkpoint.experts import ExpertLayer
from colibri_mp.config import format_size
from colibri_mp.errors import CheckpointError, ReadError
from colibri_mp.kernels.layout import LAYOUT_VERSION, pack
from colibri_mp.kernels.quantising import SEARCH_VERSION
from colibri_mp.user_cache import replace_file, user_cache_dir
from colibri_mp.workers.copies import Copy, ExpertCopies
from colibri_mp.workers.expert_files import aligned_buffer
from colibri_mp.workers.expert_reader import Bytes, ExpertReader, checksum
from colibri_mp.workers.streamer import Streamer

DEPTH = 8
_READ_TIMEOUT_S = 60.0
_REPORT_S = 0.5

Sums = dict[int, NDArray[np.uint64]]
"""By layer: [E]."""


def checksum_path(key: str) -> Path:
    """Where the checksums of a checkpoint are kept; see `checksum_key`."""
    return user_cache_dir() / "checksums" / f"{key}.npz"


def checksum_key(fingerprint: str, layers: Sequence[ExpertLayer]) -> str:
    """What the checksums of these slabs are kept under: the checkpoint, and what its experts are quantised to when read."""
    targets = next((layer.targets for layer in layers if layer.targets), None)
    if targets is None:
        return fingerprint
    widths = "-".join(f"{target.bits}.{target.group_size}" for target in targets)
    return f"{fingerprint}-{SEARCH_VERSION}-{widths}"


def with_checksums(layers: Sequence[ExpertLayer], fingerprint: str) -> tuple[ExpertLayer, ...]:
    """The layers with the checksums that are known of them; those that have their own keep them.

    Raises `CheckpointError` if the file of checksums is damaged or belongs to other experts.
    """
    key = checksum_key(fingerprint, layers)
    known = load(key)
    for layer in layers:
        if layer.layer in known and known[layer.layer].shape != (layer.num_experts,):
            raise _unusable(checksum_path(key), f"layer {layer.layer} has {layer.num_experts} experts")
    return tuple(
        replace(layer, checksums=known[layer.layer]) if layer.checksums is None and layer.layer in known else layer
        for layer in layers
    )


def describe(layers: Sequence[ExpertLayer], verify: str) -> str:
    """What a launch says about checksums."""
    num_with = sum(layer.checksums is not None for layer in layers)
    if num_with == 0:
        same = " with the same --expert-bits" if any(layer.targets for layer in layers) else ""
        return f"checksums: none; `colibri-cluster checksum`{same} makes them, so that damage on the disk is noticed"
    when = {"first": "when they are first read", "always": "at each read", "off": "never, as asked"}[verify]
    return f"checksums: experts of {num_with} of {len(layers)} layers are checked {when}"


def load(key: str) -> Sums:
    """The checksums that are kept under a key, empty if there are none. Raises `CheckpointError` for a damaged file."""
    path = checksum_path(key)
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
            layout = str(file["layout"])
            sums = {int(name.removeprefix("layer_")): file[name] for name in file.files if name != "layout"}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise _unusable(path, str(error)) from error
    return sums if layout == LAYOUT_VERSION else {}


def save(key: str, sums: Sums) -> Path:
    """Keep checksums under a key, in place of earlier ones; returns where."""
    path, content = checksum_path(key), io.BytesIO()
    arrays: dict[str, Any] = {f"layer_{layer}": found for layer, found in sums.items()}
    np.savez(content, layout=np.array(LAYOUT_VERSION), **arrays)
    replace_file(path, content.getvalue())
    return path


class Report(NamedTuple):
    """What `check_or_compute` has done: experts and bytes read, those that had a checksum before, and where all are kept."""

    num_experts: int
    num_known: int
    bytes_read: int
    seconds: float
    path: str


def check_or_compute(
    files: Sequence[Path], layers: Sequence[ExpertLayer], fingerprint: str, progress: Callable[[str], None]
) -> Report:
    """Read every expert once: those with a known checksum are held against it, those of the others are kept.

    Raises `ReadError` that names experts which differ; nothing is kept then.
    """
    started = time.perf_counter()
    known, key = with_checksums(layers, fingerprint), checksum_key(fingerprint, layers)
    sums = compute(files, layers, progress)
    _refuse_differences(known, sums, checksum_path(key))
    if any(layer.checksums is None for layer in known):
        save(key, {layer.layer: sums[layer.layer] for layer in layers if layer.checksums is None})
    return Report(
        num_experts=sum(layer.num_experts for layer in layers),
        num_known=sum(layer.num_experts for layer in known if layer.checksums is not None),
        bytes_read=sum(layer.num_experts * layer.stored_bytes for layer in layers),
        seconds=time.perf_counter() - started,
        path=str(checksum_path(key)),
    )


def compute(files: Sequence[Path], layers: Sequence[ExpertLayer], progress: Callable[[str], None]) -> Sums:
    """Checksums of all experts as the disk has them now. Raises `ReadError`."""
    sums = {layer.layer: np.zeros(layer.num_experts, np.uint64) for layer in layers}
    total = sum(layer.num_experts * layer.stored_bytes for layer in layers)
    reporter = _Reporter(total, progress)
    reader = ExpertReader(ExpertCopies([Copy(tuple(files), "direct")]), layers, pack, verify="off")
    with closing(Streamer(reader, DEPTH)) as streamer:
        for layer, expert, slab in _slabs(streamer, layers):
            sums[layer.layer][expert] = checksum(slab)
            reporter.add(layer.stored_bytes)
    return sums


def _slabs(streamer: Streamer, layers: Sequence[ExpertLayer]) -> Iterator[tuple[ExpertLayer, int, Bytes]]:
    """Every expert's slab, in the order in which they are read; valid until the next one is asked for."""
    left = iter([(layer, expert) for layer in layers for expert in range(layer.num_experts)])
    size = max(layer.shape.slab_bytes for layer in layers)
    buffers = [np.frombuffer(aligned_buffer(size), np.uint8) for _ in range(2 * DEPTH)]
    under_way: dict[int, tuple[ExpertLayer, int]] = {}

    def submit(tag: int) -> None:
        if (found := next(left, None)) is not None:
            layer, expert = under_way[tag] = found
            streamer.submit(layer.layer, expert, buffers[tag][: layer.shape.slab_bytes], tag)

    for tag in range(len(buffers)):
        submit(tag)
    while under_way:
        landed = streamer.landed(_READ_TIMEOUT_S)
        if not landed:
            raise ReadError(f"the disk has not delivered an expert within {_READ_TIMEOUT_S:.0f} s")
        for done in landed:
            if done.error is not None:
                raise done.error
            layer, expert = under_way.pop(done.tag)
            yield layer, expert, buffers[done.tag][: layer.shape.slab_bytes]
            submit(done.tag)


class _Reporter:
    """Says now and then how far it is."""

    def __init__(self, total: int, progress: Callable[[str], None]) -> None:
        self._total, self._progress = total, progress
        self._done = 0
        self._started = self._said = time.perf_counter()

    def add(self, nbytes: int) -> None:
        """Count bytes that are done."""
        self._done += nbytes
        now = time.perf_counter()
        if now - self._said >= _REPORT_S:
            self._said = now
            left_s = (now - self._started) * (self._total - self._done) / self._done
            self._progress(
                f"checksums: {self._done / self._total:.0%} of {format_size(self._total)}, {left_s:.0f} s left"
            )


def _refuse_differences(known: Sequence[ExpertLayer], sums: Sums, path: Path) -> None:
    different = [
        f"layer {layer.layer}, expert {expert}"
        for layer in known
        if layer.checksums is not None
        for expert in np.flatnonzero(layer.checksums != sums[layer.layer]).tolist()
    ]
    if different:
        names = "; ".join(different[:8]) + ("; ..." if len(different) > 8 else "")
        raise ReadError(
            f"{len(different)} experts differ from their checksums: {names}; the files are damaged: restore them (if they "
            f"were changed on purpose, remove {path} and compute the checksums again)"
        )


def _unusable(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"the checksums in {path} cannot be used: {why}; remove the file and compute them again")
