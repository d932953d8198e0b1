"""`--verify always`: each time an expert in memory is used, its slab is compared with what the disk gives now.

A diagnostic: every use costs a read. It tells a slab that something has written into from one that was read wrongly,
which the checksums find.
"""

from collections.abc import Sequence

import numpy as np

from colibri_mp.checkpoint.experts import ExpertLayer
from colibri_mp.errors import ReadError
from colibri_mp.workers.expert_files import aligned_buffer, buffer_bytes
from colibri_mp.workers.expert_reader import Bytes, ExpertReader, scratch_bytes


def audit_bytes(layers: Sequence[ExpertLayer]) -> int:
    """Memory of a `SlabAudit` for these layers."""
    return scratch_bytes(layers, 1) + buffer_bytes(max(layer.shape.slab_bytes for layer in layers))


class SlabAudit:
    """Compares slabs in the thread that calls."""

    def __init__(self, reader: ExpertReader) -> None:
        self._reader = reader
        self._scratch = aligned_buffer(reader.scratch_bytes)
        self._slab = np.frombuffer(aligned_buffer(reader.largest_slab_bytes), np.uint8)

    def check(self, layer: int, experts: Sequence[int], slabs: Sequence[Bytes]) -> None:
        """Read each of `experts` and compare it with its slab; raises `ReadError` that names the first difference."""
        for expert, slab in zip(experts, slabs, strict=True):
            fresh = self._slab[: slab.size]
            self._reader.read(layer, expert, fresh, self._scratch)
            if not np.array_equal(slab, fresh):
                [first, *_] = np.flatnonzero(slab != fresh)
                raise ReadError(
                    f"layer {layer}, expert {expert}: byte {first} of its slab in memory is {slab[first]}, the disk has "
                    f"{fresh[first]}: the memory is damaged, or the file has been changed"
                )
