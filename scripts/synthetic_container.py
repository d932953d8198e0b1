"""The container of a synthetic checkpoint whose experts were never written: `make_synthetic_model --container`.

Headers, sizes and resident tensors are `convert`'s own work on a checkpoint that has holes in place of experts; slabs are random codes in
the packed layout, with scales as the script gives them and biases that centre the values.
"""

import json
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from colibri_mp.checkpoint.container import MARKER_KEY
from colibri_mp.checkpoint.convert.files import CHUNK_BYTES, PartialFile, checksum, page_aligned
from colibri_mp.checkpoint.convert.plan import LayerJob, Options, Plan, make_plan
from colibri_mp.checkpoint.source import Checkpoint
from colibri_mp.kernels.layout import BLOCK_ROWS, Bytes, code_bits

Scales = Mapping[int, npt.NDArray[np.uint16]]
"""By columns of a matrix: 256 bf16 scales, of which each group has one."""


def fill_container(source: Path, folder: Path, scales: Scales, seed: int) -> None:
    """Write the container of the checkpoint in `source`, its experts made up, into the existing `folder`.

    The source's weights are removed as soon as they are copied: the disk may have no room for both.
    """
    plan = make_plan(Checkpoint.open(source), Options())
    _write_resident(plan, folder)
    for path in source.glob("*.safetensors"):
        path.unlink()
    for job in plan.layers:
        _write_layer(job, folder, scales, seed)
    for path in source.iterdir():
        if path.suffix != ".safetensors" and path.name not in ("config.json", "model.safetensors.index.json"):
            shutil.copyfile(path, folder / path.name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config[MARKER_KEY] = msgspec.to_builtins(plan.marker)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def _write_resident(plan: Plan, folder: Path) -> None:
    job, digest, offset = plan.resident, xxhash.xxh3_64(), plan.resident.room
    with PartialFile(folder / job.name) as file:
        for info in job.tensors:
            for start in range(0, info.nbytes, CHUNK_BYTES):
                size = min(CHUNK_BYTES, info.nbytes - start)
                chunk = plan.checkpoint.read(info.file_idx, info.offset + start, size)
                digest.update(chunk.data)
                file.write(chunk, offset)
                offset += size
        file.write(job.header_block(digest.hexdigest()), 0)
        file.commit()


def _write_layer(job: LayerJob, folder: Path, scales: Scales, seed: int) -> None:
    checksums: list[str] = []
    slab = page_aligned(job.shape.slab_bytes)
    with PartialFile(folder / job.name, direct=True) as file:
        for expert in range(job.experts.num_experts):
            key = zlib.crc32(f"{job.name}.{expert}".encode())
            fill_slab(job, slab, scales, np.random.SFC64(np.random.SeedSequence([seed, key])))
            file.write(slab, job.room + expert * slab.nbytes)
            checksums.append(checksum(slab))
        file.write(job.header_block(checksums, {}), 0)
        file.commit()


def fill_slab(job: LayerJob, slab: Bytes, scales: Scales, stream: np.random.SFC64) -> None:
    """Random codes, scales and biases for gate, up and down."""
    formats = (job.shape.gate, job.shape.up, job.shape.down)
    for piece, form in zip(job.header.pieces, formats, strict=True):
        bits = code_bits(form)
        assert form.scale == "bf16"
        word_bytes = BLOCK_ROWS * form.group_size * bits // 8
        records = slab[piece.offset : piece.offset + piece.nbytes].reshape(-1, word_bytes + 4 * BLOCK_ROWS)
        count = len(records)
        records[:, :word_bytes] = stream.random_raw(count * word_bytes // 8).view(np.uint8).reshape(count, -1)
        levels = scales[piece.cols][stream.random_raw(count * BLOCK_ROWS // 8).view(np.uint8)].reshape(count, -1)
        centres = (levels.astype(np.uint32) << 16).view(np.float32) * np.float32(-((1 << bits) - 1) / 2)
        records[:, word_bytes : word_bytes + 2 * BLOCK_ROWS] = levels.view(np.uint8)
        biases = (centres.view(np.uint32) >> 16).astype(np.uint16)
        records[:, word_bytes + 2 * BLOCK_ROWS :] = biases.view(np.uint8)
