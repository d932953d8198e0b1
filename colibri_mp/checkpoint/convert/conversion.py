"""The run: what an earlier one has finished is verified and kept, the rest written, all of it read back, then the folder opened.

    claim the folder ─▶ verify what is there ─▶ resident file, layer after layer ─▶ tokenizer files
        ─▶ read back what was written ─▶ config.json ─▶ open it as a checkpoint ─▶ remove conversion.json

config.json comes after the last check, so a folder that has it and no conversion.json is whole.
"""

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import xxhash

from colibri_mp.checkpoint.container import MARKER_KEY, LayerHeader, Rounding
from colibri_mp.checkpoint.convert.files import (
    CHUNK_BYTES,
    PartialFile,
    checksum,
    verify_layer,
    verify_resident,
    write_whole,
)
from colibri_mp.checkpoint.convert.plan import LayerJob, Options, Plan, ResidentJob, make_plan
from colibri_mp.checkpoint.convert.slabs import SlabMaker
from colibri_mp.checkpoint.convert.unfinished import claimed, release
from colibri_mp.checkpoint.experts import PROJECTIONS
from colibri_mp.checkpoint.source import Checkpoint
from colibri_mp.errors import CheckpointError, ReadError, WriteError
from colibri_mp.memory import usable_cores
from colibri_mp.models import load_model
from colibri_mp.recoding import add

COPIED = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "*.tiktoken", "chat_template.jinja", "chat_template.json",
    "additional_chat_templates/*.jinja", "LICENSE*", "NOTICE*",
)  # fmt: skip
"""What is taken over as it is. Nothing else of the source folder is: what a user keeps there is not part of the model."""


class Listener(Protocol):
    """Who is told how far the conversion is."""

    def show(self, doing: str, done_bytes: int, total_bytes: int) -> None:
        """Progress of one phase; called for each expert."""

    def note(self, text: str) -> None:
        """Something that the user should know, once."""


@dataclass(frozen=True)
class ProjectionReport:
    """What became of one projection in all layers that are stored alike. Errors are relative: root of squared error over
    squared weights; `plain_error`: of plain rounding. None where nothing was rounded.
    """

    projection: str
    stored: str
    packed: str
    reason: str
    num_layers: int
    error: float | None
    plain_error: float | None


@dataclass(frozen=True)
class Report:
    """The end of a conversion. `written_bytes` and `seconds`: of this run; `kept_files` are of an earlier one."""

    path: str
    num_layers: int
    num_experts: int
    kept_files: int
    stored_expert_bytes: int
    expert_bytes: int
    resident_bytes: int
    written_bytes: int
    seconds: float
    projections: tuple[ProjectionReport, ...]

    def as_dict(self) -> dict[str, Any]:
        """The report for `--json`."""
        return asdict(self)


def convert(source: Path, folder: Path, options: Options, listener: Listener) -> Report:
    """Convert the checkpoint in `source` into a container in `folder`, or go on where an earlier run was interrupted.

    Raises:
        CheckpointError: the source is damaged or not understood; nothing has been written if its headers show it.
        ConfigError: the options do not fit the model, or `folder` holds something else.
        ReadError, WriteError: a disk failed; what is finished is kept.
    """
    started = time.monotonic()
    plan = make_plan(Checkpoint.open(source), options)
    with claimed(folder, plan):
        conversion = _Conversion(plan, folder, listener)
        conversion.keep_finished()
        conversion.write_missing()
        conversion.copy_texts()
        conversion.verify()
        conversion.finish()
    return conversion.report(time.monotonic() - started)


class _Conversion:
    def __init__(self, plan: Plan, folder: Path, listener: Listener) -> None:
        self._plan, self._folder, self._listener = plan, folder, listener
        self._finished: dict[int, LayerHeader] = {}
        self._missing: list[ResidentJob | LayerJob] = list(plan.jobs)
        self._phase, self._done_bytes, self._total_bytes = "", 0, 0

    def keep_finished(self) -> None:
        """Verify the files that are there; one that does not hold is removed, to be written again."""
        found = [job for job in self._plan.jobs if (self._folder / job.name).exists()]
        self._begin("verifying what is there", found)
        for job in found:
            try:
                self._verify(job)
                self._missing.remove(job)
            except CheckpointError as error:
                self._listener.note(f"{error}: it is written again")
                (self._folder / job.name).unlink()

    def write_missing(self) -> None:
        """Write the files that are not there."""
        self._begin("converting", self._missing)
        with SlabMaker(self._plan, usable_cores()[0]) as maker:
            for job in self._missing:
                with PartialFile(self._folder / job.name, direct=isinstance(job, LayerJob)) as file:
                    if isinstance(job, ResidentJob):
                        self._write_resident(file, job)
                    else:
                        self._write_layer(file, job, maker)
                    maker.check_source()
                    file.commit()

    def copy_texts(self) -> None:
        """Take over tokenizer, chat templates, generation settings and licence."""
        source = self._plan.checkpoint.path
        for path in sorted({path for pattern in COPIED for path in source.glob(pattern) if path.is_file()}):
            try:
                content = path.read_bytes()
            except OSError as error:
                raise ReadError(f"{path}: cannot be read: {error.strerror}") from error
            write_whole(self._folder / path.relative_to(source), content)

    def verify(self) -> None:
        """Read back what this run has written. Raises `WriteError`; the next run writes the damaged file again."""
        self._begin("reading back", self._missing)
        for job in self._missing:
            try:
                self._verify(job)
            except CheckpointError as error:
                raise WriteError(
                    f"{error}: the disk does not give back what was written. Run the same command again: it keeps what "
                    "is whole and writes the rest anew; if it happens again, use another disk"
                ) from error

    def finish(self) -> None:
        """Write config.json and open the container: it must be a whole checkpoint now."""
        config = json.loads((self._plan.checkpoint.path / "config.json").read_text(encoding="utf-8"))
        config[MARKER_KEY] = msgspec.to_builtins(self._plan.marker)
        write_whole(self._folder / "config.json", (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode())
        load_model(Checkpoint.open(self._folder))
        release(self._folder)

    def report(self, seconds: float) -> Report:
        """What has been done."""
        layers = self._plan.layers
        return Report(
            path=str(self._folder),
            num_layers=len(layers),
            num_experts=sum(job.experts.num_experts for job in layers),
            kept_files=len(self._plan.jobs) - len(self._missing),
            stored_expert_bytes=sum(job.experts.num_experts * job.experts.stored_bytes for job in layers),
            expert_bytes=sum(job.data_bytes for job in layers),
            resident_bytes=self._plan.resident.data_bytes,
            written_bytes=sum(job.file_bytes for job in self._missing),
            seconds=seconds,
            projections=tuple(_projection_reports(layers, self._finished)),
        )

    def _write_resident(self, file: PartialFile, job: ResidentJob) -> None:
        digest = xxhash.xxh3_64()
        offset = job.room
        for info in job.tensors:
            for start in range(0, info.nbytes, CHUNK_BYTES):
                size = min(CHUNK_BYTES, info.nbytes - start)
                chunk = self._plan.checkpoint.read(info.file_idx, info.offset + start, size)
                digest.update(chunk.data)
                file.write(chunk, offset)
                offset += size
                self._advance(size)
        file.write(job.header_block(digest.hexdigest()), 0)

    def _write_layer(self, file: PartialFile, job: LayerJob, maker: SlabMaker) -> None:
        checksums: list[str] = []
        costs: list[dict[str, Rounding]] = []
        for expert in range(job.experts.num_experts):
            slab, cost = maker.make(job, expert)
            file.write(slab, job.room + expert * slab.nbytes)
            checksums.append(checksum(slab))
            costs.append(cost)
            self._advance(slab.nbytes)
        rounding = {projection: add(cost[projection] for cost in costs) for projection in costs[0]}
        file.write(job.header_block(checksums, rounding), 0)

    def _verify(self, job: ResidentJob | LayerJob) -> None:
        path = self._folder / job.name
        if isinstance(job, ResidentJob):
            verify_resident(path, job.header, self._advance)
        else:
            self._finished[job.experts.layer] = verify_layer(path, job.header, self._advance)

    def _begin(self, phase: str, jobs: Iterable[ResidentJob | LayerJob]) -> None:
        self._phase, self._done_bytes = phase, 0
        self._total_bytes = sum(job.data_bytes for job in jobs)

    def _advance(self, nbytes: int) -> None:
        self._done_bytes += nbytes
        self._listener.show(self._phase, self._done_bytes, self._total_bytes)


def _projection_reports(layers: Iterable[LayerJob], finished: dict[int, LayerHeader]) -> Iterable[ProjectionReport]:
    for i, projection in enumerate(PROJECTIONS):
        alike: dict[Any, list[LayerJob]] = {}
        for job in layers:
            alike.setdefault(job.recodings[i], []).append(job)
        for recoding, jobs in alike.items():
            costs = [finished[job.experts.layer].rounding.get(projection) for job in jobs]
            error = add(cost for cost in costs if cost) if recoding.is_quantised else None
            yield ProjectionReport(
                projection=projection,
                stored=recoding.stored.describe(),
                packed=recoding.target.describe(),
                reason=recoding.reason,
                num_layers=len(jobs),
                error=_relative(error.squared_error, error) if error else None,
                plain_error=_relative(error.plain_squared_error, error) if error else None,
            )


def _relative(squared_error: float, rounding: Rounding) -> float:
    return float((squared_error / rounding.squared_weights) ** 0.5) if rounding.squared_weights else 0.0
