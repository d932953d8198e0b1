"""Checksums of slabs: damage is found in every layout, read again once, and named; what they allow that nothing else does."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from expert_checkpoint import (
    BF16,
    Q4,
    Q8,
    Bytes,
    ExpertBytes,
    checksums_of,
    per_expert,
    random_experts,
    stacked,
    write,
    write_packed,
)

from colibri_mp.checkpoint.experts import ExpertLayer
from colibri_mp.config import IoMode, Verify
from colibri_mp.errors import ReadError
from colibri_mp.kernels.layout import pack
from colibri_mp.workers import expert_files
from colibri_mp.workers.copies import Copy, ExpertCopies
from colibri_mp.workers.expert_files import aligned_buffer
from colibri_mp.workers.expert_reader import ExpertReader
from colibri_mp.workers.slab_audit import SlabAudit

LAYER, DAMAGED = 5, 2
LAYOUTS = ("packed", "packed, through a buffer", "stacked", "per_expert")


class Disk:
    """Four experts in one file of a layout, with checksums."""

    def __init__(self, folder: Path, layout: str) -> None:
        self.experts = random_experts(LAYER, 4, 128, 64, (Q4, Q8, BF16))
        self.in_place = layout != "packed, through a buffer"
        self.file, self.layer = make(folder, self.experts, layout)
        self.layer = replace(self.layer, checksums=checksums_of(self.experts))
        self.offset = int(self.layer.offset[DAMAGED].min())
        self.slab = np.frombuffer(aligned_buffer(self.layer.shape.slab_bytes), np.uint8)

    def flip(self, offset: int | None = None) -> None:
        """Change one bit of the damaged expert's first piece, and no time stamp."""
        state = self.file.stat()
        with self.file.open("r+b") as file:
            file.seek(self.offset + 5 if offset is None else offset)
            [byte] = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 16]))
        os.utime(self.file, ns=(state.st_atime_ns, state.st_mtime_ns))

    @contextmanager
    def reader(self, verify: Verify = "first", mode: IoMode = "buffered", *mirrors: Path) -> Iterator[ExpertReader]:
        """An open reader."""
        copies = ExpertCopies([Copy((path,), mode, in_place=self.in_place) for path in (self.file, *mirrors)])
        reader = ExpertReader(copies, [self.layer], pack, verify)
        yield reader
        reader.close()

    def read(self, reader: ExpertReader, expert: int) -> Bytes:
        """The slab of an expert, in this thread."""
        self.slab[:] = 0xAA
        reader.read(LAYER, expert, self.slab, aligned_buffer(reader.scratch_bytes))
        return self.slab

    def is_right(self, slab: Bytes, expert: int) -> bool:
        """Whether a slab has the bytes of an expert and zeros behind."""
        expected = self.experts.slab(expert)
        return np.array_equal(slab[: expected.size], expected) and not slab[expected.size :].any()


def make(folder: Path, experts: ExpertBytes, layout: str) -> tuple[Path, ExpertLayer]:
    """The file and the table of a layout."""
    if layout.startswith("packed"):
        return write_packed(folder, experts)
    [file] = write(folder, experts, {"stacked": stacked, "per_expert": per_expert}[layout])
    return file, experts.expert_layer()


@pytest.fixture(params=LAYOUTS)
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Disk:
    """A disk in each layout."""
    return Disk(tmp_path, request.param)


@pytest.mark.parametrize("mode", ["buffered", "direct", "drop"])
def test_whole_experts_pass(disk: Disk, mode: IoMode) -> None:
    """Every slab has its checksum, whatever the layout of the file; each is compared once."""
    with disk.reader("first", mode) as reader:
        for expert in (0, 1, 2, 3, 3, 0):
            assert disk.is_right(disk.read(reader, expert), expert)
        counters = reader.counters()
    assert (counters.num_verified, counters.num_mismatches) == (4, 0)


def test_flipped_byte_is_refused_by_name(disk: Disk) -> None:
    """One bit on the disk: the error has layer, expert, file, offset; the other experts can be read."""
    disk.flip()
    with disk.reader() as reader:
        for _ in range(2):
            with pytest.raises(
                ReadError,
                match=rf"^layer 5, expert 2, at offset {disk.offset} of {disk.file}, has the checksum \w{{16}} ",
            ):
                disk.read(reader, DAMAGED)
        assert disk.is_right(disk.read(reader, 3), 3)
        assert reader.counters().num_mismatches == 2


def test_flipped_byte_goes_unseen_without_checks(disk: Disk) -> None:
    """With checks off the wrong byte gets through: it is the checksum that finds it."""
    disk.flip()
    with disk.reader("off") as reader:
        assert not disk.is_right(disk.read(reader, DAMAGED), DAMAGED)


def test_first_means_the_first_read(disk: Disk) -> None:
    """An expert that was right is not checked again by "first", and is by "always"."""
    for verify in ("first", "always"):
        with disk.reader(verify) as reader:  # type: ignore[arg-type]
            disk.read(reader, DAMAGED)
            disk.flip()
            if verify == "first":
                assert not disk.is_right(disk.read(reader, DAMAGED), DAMAGED)
            else:
                with pytest.raises(ReadError, match="layer 5, expert 2, at offset"):
                    disk.read(reader, DAMAGED)
            disk.flip()


class BitRot:
    """Stands in for os.preadv: one bit is wrong in the first reads that cover byte `position` of a file."""

    def __init__(self, position: int, num_wrong: int) -> None:
        self.position, self.num_wrong, self.preadv = position, num_wrong, os.preadv

    def __call__(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        nbytes = self.preadv(fd, buffers, offset)
        if self.num_wrong and offset <= self.position < offset + nbytes:
            self.num_wrong -= 1
            buffers[0][self.position - offset] ^= 1
        return nbytes


def test_damage_on_the_way_is_mended_by_reading_again(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Wrong once, right the second time: the slab is right, and the log says what happened."""
    with disk.reader() as reader, caplog.at_level(logging.WARNING):
        monkeypatch.setattr(expert_files.os, "preadv", BitRot(disk.offset, num_wrong=1))
        assert disk.is_right(disk.read(reader, DAMAGED), DAMAGED)
        assert reader.counters().num_mismatches == 1
    assert f"layer 5, expert 2, at offset {disk.offset} of {disk.file}" in caplog.text
    with disk.reader() as reader:
        monkeypatch.setattr(expert_files.os, "preadv", BitRot(disk.offset, num_wrong=2))
        with pytest.raises(ReadError, match="also when it is read again"):
            disk.read(reader, DAMAGED)


def test_damaged_copy_is_replaced_by_the_other(disk: Disk, tmp_path: Path) -> None:
    """With a mirror the second attempt reads both copies; damage of either is survived, of both is not."""
    mirror = tmp_path / "mirror"
    mirror.write_bytes(disk.file.read_bytes())
    disk.flip()
    with disk.reader("always", "buffered", mirror) as reader:
        for _ in range(4):
            assert disk.is_right(disk.read(reader, DAMAGED), DAMAGED)
        mirror.write_bytes(disk.file.read_bytes())
        with pytest.raises(ReadError, match="also when it is read again"):
            disk.read(reader, DAMAGED)


def test_checksums_tell_what_of_a_changed_file_is_right(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file written to while in use: with checksums what is right is used and what is wrong refused, at every read."""
    monkeypatch.setattr(expert_files, "SETTLE_S", 0.0)
    with disk.reader() as reader:
        for expert in range(4):
            disk.read(reader, expert)
        disk.flip()
        os.utime(disk.file, ns=(1, 1))
        assert disk.is_right(disk.read(reader, 3), 3)
        with pytest.raises(ReadError, match="layer 5, expert 2, at offset"):
            disk.read(reader, DAMAGED)
    with disk.reader("off") as reader:
        os.utime(disk.file, ns=(2, 2))
        with pytest.raises(ReadError, match=r"layer 5, expert 3: .*written to since it was opened"):
            disk.read(reader, 3)


def test_audit_finds_what_has_changed_in_memory(disk: Disk) -> None:
    """Each use is compared with the disk: a slab that something wrote into is refused, byte and expert named."""
    with disk.reader("always") as reader:
        audit = SlabAudit(reader)
        slab = disk.read(reader, 1).copy()
        audit.check(LAYER, [1], [slab])
        slab[77] ^= 3
        with pytest.raises(ReadError, match=rf"layer 5, expert 1: byte 77 of its slab in memory is {slab[77]}"):
            audit.check(LAYER, [1], [slab])
