"""The streamer: right bytes in every layout and mode, few reads, and a named error for everything that goes wrong."""

import errno
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from expert_checkpoint import (
    BF16,
    Q4,
    Q8,
    Bytes,
    ExpertBytes,
    Place,
    per_expert,
    random_experts,
    scattered,
    stacked,
    write,
)

from colibri_mp.config import IoMode
from colibri_mp.errors import ReadError
from colibri_mp.formats import Encoding
from colibri_mp.kernels.layout import pack
from colibri_mp.workers import expert_files, read_plan
from colibri_mp.workers.expert_files import aligned_buffer, buffer_bytes
from colibri_mp.workers.read_plan import ALIGNMENT, GAP_BYTES, LayerPlan
from colibri_mp.workers.streamer import Landed, Packer, Streamer, scratch_bytes

ENCODINGS = ((Q4, Q4, Q4), (BF16, BF16, BF16), (Q8, Q4, BF16))


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No open file may be left by a closed streamer."""
    before = num_fds()
    yield
    assert num_fds() == before


def num_fds() -> int:
    """Open file descriptors of this process."""
    return len(list(Path("/dev/fd").iterdir()))


def open_streamer(
    files: Sequence[Path], experts: ExpertBytes, mode: IoMode = "buffered", num_threads: int = 3, packer: Packer = pack
) -> Streamer:
    """A streamer for one layer."""
    return Streamer(files, [experts.expert_layer()], packer, mode, num_threads)


def read_all(streamer: Streamer, experts: ExpertBytes) -> tuple[list[Bytes], list[Landed]]:
    """Read every expert at once; slabs by expert, completions in the order of landing."""
    size = experts.expert_layer().shape.slab_bytes
    slabs = [np.full(size, 0xAA, np.uint8) for _ in range(len(experts.ids))]
    for expert, slab in enumerate(slabs):
        streamer.submit(experts.layer, expert, slab, tag=expert)
    landed: list[Landed] = []
    while len(landed) < len(slabs):
        some = streamer.landed(20.0)
        assert some, "no read ended within 20 s"
        landed += some
    return slabs, landed


def assert_slabs(slabs: Sequence[Bytes], experts: ExpertBytes) -> None:
    """Each slab is what packing whole matrices gives, and its padding is untouched."""
    for expert, slab in enumerate(slabs):
        expected = experts.slab(expert)
        assert np.array_equal(slab[: expected.size], expected)
        assert (slab[expected.size :] == 0xAA).all()


@pytest.mark.parametrize("mode", ["buffered", "direct"])
@pytest.mark.parametrize("encodings", ENCODINGS)
@pytest.mark.parametrize("place", [stacked, per_expert, scattered])
def test_slabs_have_the_right_bytes(
    tmp_path: Path, place: Place, encodings: tuple[Encoding, Encoding, Encoding], mode: IoMode
) -> None:
    """In every layout of the files, a slab holds its own expert, packed."""
    experts = random_experts(3, 6, 128, 192, encodings)
    streamer = open_streamer(write(tmp_path, experts, place), experts, mode)
    slabs, landed = read_all(streamer, experts)
    streamer.close()
    assert [done.error for done in landed] == [None] * 6
    assert sorted(done.tag for done in landed) == list(range(6))
    assert_slabs(slabs, experts)


@pytest.mark.parametrize("encodings", ENCODINGS)
@pytest.mark.parametrize("mode", ["buffered", "direct"])
def test_large_experts_are_cut_into_row_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encodings: tuple[Encoding, Encoding, Encoding], mode: IoMode
) -> None:
    """An expert above the task size is read in several tasks, rows not a multiple of the block included: same bytes."""
    monkeypatch.setattr(read_plan, "TASK_BYTES", 8192)
    experts = random_experts(0, 3, 128, 192, encodings)
    files = write(tmp_path, experts, scattered)
    assert len(LayerPlan(experts.expert_layer()).tasks(0)) >= 6
    streamer = open_streamer(files, experts, mode)
    slabs, _ = read_all(streamer, experts)
    streamer.close()
    assert_slabs(slabs, experts)


def test_expert_whose_pieces_touch_is_one_read(tmp_path: Path) -> None:
    """Nine pieces that lie together are one request; in MLX's layout they are nine."""
    for place, num_reads in ((per_expert, 4), (stacked, 4 * 9)):
        experts = random_experts(0, 4, 1024, 192, (Q4, Q4, Q4))
        streamer = open_streamer(write(tmp_path, experts, place), experts)
        read_all(streamer, experts)
        counters = streamer.counters()
        streamer.close()
        if place is per_expert:
            assert (counters.num_reads, counters.bytes_read) == (num_reads, 4 * experts.expert_layer().stored_bytes)
        else:
            assert counters.num_reads <= num_reads
        assert counters.busy_s > 0
        assert counters.reads_s >= counters.busy_s * 0.999
        assert counters.pack_s > 0


def test_small_gaps_are_read_through() -> None:
    """Pieces closer than 64 KiB share a request, others do not; parts are found at their place in the scratch buffer."""
    for gap, num_ranges in ((GAP_BYTES - 1, 1), (GAP_BYTES, 3)):
        experts = random_experts(0, 1, 64, 64, (BF16, BF16, BF16))
        for piece in (1, 2, 0):
            experts.put(0, piece)
            experts.files[0] += bytes(gap)
        [task] = LayerPlan(experts.expert_layer()).tasks(0)
        assert len(task.ranges) == num_ranges
        assert all(wanted.scratch_offset % ALIGNMENT == 0 for wanted in task.ranges)
        starts = [start for (start,) in task.part_offsets]
        assert sorted(starts) == [starts[1], starts[2], starts[0]]


@pytest.mark.parametrize("place", [stacked, per_expert, scattered])
def test_scratch_is_large_enough(place: Place) -> None:
    """No task needs more scratch memory than the plan states."""
    experts = random_experts(0, 5, 320, 256, (Q4, Q8, BF16))
    place(experts)
    plan = LayerPlan(experts.expert_layer())
    for expert in range(5):
        for task in plan.tasks(expert):
            last = task.ranges[-1]
            end = last.scratch_offset + -(-(last.offset % ALIGNMENT + last.nbytes) // ALIGNMENT) * ALIGNMENT
            assert end <= plan.scratch_bytes
    assert 0 <= scratch_bytes([experts.expert_layer()], 4) - 4 * plan.scratch_bytes < 4 * ALIGNMENT


@pytest.mark.parametrize("nbytes", [1, 5000, (2 << 20) - 1, 2 << 20, 5 << 20])
def test_buffers_are_aligned(nbytes: int) -> None:
    """Scratch memory starts on a page, large buffers on 2 MiB, and is as large as the memory plan says."""
    buffer = aligned_buffer(nbytes)
    address = np.frombuffer(buffer, np.uint8).ctypes.data
    assert address % (ALIGNMENT if nbytes < 2 << 20 else 2 << 20) == 0
    assert nbytes <= len(buffer) == buffer_bytes(nbytes) < nbytes + (2 << 20)


def test_task_fits_one_huge_page() -> None:
    """Whatever the shape, quantised experts in files of any layout need at most 2 MiB of scratch a thread."""
    for hidden, width in ((2048, 1024), (4096, 14336), (512, 256), (7168, 2048)):
        experts = ExpertBytes(0, 1, hidden, width, (Q4, Q8, Q4), [[]])
        sizes = [nbytes for encoding, rows, cols in experts.shapes() for nbytes in encoding.part_bytes(rows, cols)]
        experts.pieces[0] = [np.broadcast_to(np.uint8(0), nbytes) for nbytes in sizes]
        experts.places = {(0, piece): (0, piece << 32) for piece in range(9)}
        assert LayerPlan(experts.expert_layer()).scratch_bytes <= 2 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="O_DIRECT is Linux")
def test_direct_reads_cover_whole_blocks(tmp_path: Path) -> None:
    """Direct mode asks for the blocks around each piece, up to the end of the file."""
    experts = random_experts(0, 3, 128, 64, (BF16, BF16, BF16))
    streamer = open_streamer(write(tmp_path, experts, per_expert), experts, "direct")
    if streamer.mode[0] == "buffered":
        streamer.close()
        pytest.skip(f"this file system has no direct reads: {streamer.mode[1]}")
    _, landed = read_all(streamer, experts)
    streamer.close()
    assert sum(done.nbytes for done in landed) > 3 * experts.expert_layer().stored_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="O_DIRECT is Linux")
def test_refused_direct_reads_fall_back_with_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without O_DIRECT gives buffered reads, and says so."""
    really_open = os.open

    def refuse_direct(path: str, flags: int, *args: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return really_open(path, flags, *args)

    monkeypatch.setattr(os, "open", refuse_direct)
    experts = random_experts(0, 2, 64, 64, (BF16, BF16, BF16))
    streamer = open_streamer(write(tmp_path, experts, stacked), experts, "direct")
    mode, reason = streamer.mode
    slabs, _ = read_all(streamer, experts)
    streamer.close()
    assert mode == "buffered"
    assert "Invalid argument" in reason
    assert_slabs(slabs, experts)


def test_missing_file_is_named(tmp_path: Path) -> None:
    """A file that cannot be opened is an error at start; the others are closed again."""
    experts = random_experts(0, 2, 64, 64, (BF16, BF16, BF16))
    files = write(tmp_path, experts, stacked)
    with pytest.raises(ReadError, match=r"gone\.safetensors"):
        open_streamer([*files, tmp_path / "gone.safetensors"], experts)


@pytest.mark.parametrize("mode", ["buffered", "direct"])
def test_truncated_file_is_named(tmp_path: Path, mode: IoMode) -> None:
    """A file cut while it is open: an error with file, layer, expert and offset for what is gone."""
    experts = random_experts(7, 4, 128, 64, (BF16, BF16, BF16))
    [file] = write(tmp_path, experts, per_expert)
    streamer = open_streamer([file], experts, mode)
    os.truncate(file, experts.places[2, 1][1] + 100)
    _, landed = read_all(streamer, experts)
    streamer.close()
    errors = {done.tag: str(done.error) for done in landed}
    assert "layer 7, expert 2: reading" in errors[2]
    assert "truncated" in errors[2]
    assert str(file) in errors[2]
    assert "changed since it was opened" in errors[0]


def test_rewritten_file_is_noticed(tmp_path: Path) -> None:
    """A file of the same size with a new time of change is not trusted."""
    experts = random_experts(0, 2, 64, 64, (BF16, BF16, BF16))
    [file] = write(tmp_path, experts, stacked)
    streamer = open_streamer([file], experts)
    os.utime(file, ns=(1, 1))
    _, landed = read_all(streamer, experts)
    streamer.close()
    assert all("changed since it was opened" in str(done.error) for done in landed)


class FlakyReads:
    """Stands in for os.preadv: fails as told for the first reads, or returns short."""

    def __init__(self, errors: list[int], most_bytes: int = 1 << 30) -> None:
        self.errors, self.most_bytes = errors, most_bytes
        self.preadv = os.preadv

    def __call__(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        if self.errors:
            code = self.errors.pop()
            raise OSError(code, os.strerror(code))
        return self.preadv(fd, [buffers[0][: self.most_bytes]], offset)


def test_transient_errors_are_retried_and_short_reads_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EAGAIN twice and reads of 1000 bytes at most: the slab is right all the same."""
    experts = random_experts(0, 2, 64, 64, (BF16, BF16, BF16))
    files = write(tmp_path, experts, stacked)
    streamer = open_streamer(files, experts, num_threads=1)
    monkeypatch.setattr(expert_files.os, "preadv", FlakyReads([errno.EAGAIN, errno.EAGAIN], most_bytes=1000))
    slabs, _ = read_all(streamer, experts)
    streamer.close()
    assert_slabs(slabs, experts)


@pytest.mark.parametrize(("code", "name"), [(errno.EIO, "EIO"), (errno.EAGAIN, "EAGAIN")])
def test_disk_error_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, name: str) -> None:
    """An error of the disk, or a transient one that does not pass, ends only the expert that it hit."""
    experts = random_experts(0, 3, 64, 64, (BF16, BF16, BF16))
    files = write(tmp_path, experts, per_expert)
    streamer = open_streamer(files, experts, num_threads=1)
    errors = [code] * (1 if code == errno.EIO else expert_files.MAX_RETRIES)
    monkeypatch.setattr(expert_files.os, "preadv", FlakyReads(errors))
    slabs, landed = read_all(streamer, experts)
    streamer.close()
    failed = [done for done in landed if done.error]
    assert [done.tag for done in failed] == [0]
    assert isinstance(failed[0].error, ReadError)
    assert f"({name})" in str(failed[0].error)
    assert np.array_equal(slabs[1][: experts.slab(1).size], experts.slab(1))


def test_defect_in_packing_reaches_the_waiting_thread(tmp_path: Path) -> None:
    """Any exception in an I/O thread is the completion of its expert; the thread goes on."""

    def broken(encoding: Encoding, rows: int, cols: int, parts: Sequence[Bytes], out: Bytes) -> None:
        raise ValueError("broken packer")

    experts = random_experts(0, 3, 64, 64, (BF16, BF16, BF16))
    streamer = open_streamer(write(tmp_path, experts, stacked), experts, packer=broken, num_threads=1)
    _, landed = read_all(streamer, experts)
    streamer.close()
    assert [repr(done.error) for done in landed] == ["ValueError('broken packer')"] * 3


def test_waiting_has_an_end(tmp_path: Path) -> None:
    """With nothing to come, landed returns empty after its timeout."""
    experts = random_experts(0, 1, 64, 64, (BF16, BF16, BF16))
    streamer = open_streamer(write(tmp_path, experts, stacked), experts)
    assert streamer.landed(0.0) == []
    assert streamer.landed(0.01) == []
    streamer.close()


def test_close_drops_waiting_reads_and_reports_a_hanging_one(tmp_path: Path) -> None:
    """Close with reads queued ends soon; a thread that does not come back is an error, and a later close succeeds."""
    begun, go_on = threading.Event(), threading.Event()

    def slow(encoding: Encoding, rows: int, cols: int, parts: Sequence[Bytes], out: Bytes) -> None:
        begun.set()
        go_on.wait(30)

    experts = random_experts(0, 8, 64, 64, (BF16, BF16, BF16))
    streamer = open_streamer(write(tmp_path, experts, stacked), experts, packer=slow, num_threads=1)
    slabs = [np.zeros(experts.expert_layer().shape.slab_bytes, np.uint8) for _ in range(8)]
    for expert, slab in enumerate(slabs):
        streamer.submit(0, expert, slab, expert)
    assert begun.wait(20)
    with pytest.raises(ReadError, match="1 I/O threads did not end"):
        streamer.close(0.01)
    go_on.set()
    streamer.close()
    errors = [done.error for done in streamer.landed(0.0)]
    assert errors[0] is None
    assert {str(error) for error in errors[1:]} == {"the worker is closing"}
