"""The streamer: right bytes in every layout and mode, few reads, and a named error for everything that goes wrong."""

import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from expert_checkpoint import (
    BF16,
    FP8,
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
    write_packed,
)

from colibri_mp.checkpoint.experts import ExpertLayer
from colibri_mp.config import IoMode
from colibri_mp.errors import ReadError
from colibri_mp.formats import Encoding
from colibri_mp.kernels.layout import pack
from colibri_mp.workers import read_plan
from colibri_mp.workers.copies import Copy, CopyRead, ExpertCopies
from colibri_mp.workers.expert_files import aligned_buffer, buffer_bytes
from colibri_mp.workers.expert_reader import ExpertReader, Packer, scratch_bytes
from colibri_mp.workers.read_plan import ALIGNMENT, GAP_BYTES, LayerPlan
from colibri_mp.workers.streamer import Landed, Streamer

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


def open_reader(
    files: Sequence[Path], layer: ExpertLayer, mode: IoMode = "buffered", packer: Packer = pack, in_place: bool = True
) -> ExpertReader:
    """A reader of one layer from one copy."""
    return ExpertReader(ExpertCopies([Copy(tuple(files), mode, in_place=in_place)]), [layer], packer)


def open_streamer(
    files: Sequence[Path], experts: ExpertBytes, mode: IoMode = "buffered", num_threads: int = 3, packer: Packer = pack
) -> Streamer:
    """A streamer for one layer."""
    return Streamer(open_reader(files, experts.expert_layer(), mode, packer), num_threads)


def read_all(streamer: Streamer, experts: ExpertBytes) -> tuple[list[Bytes], list[Landed]]:
    """Read every expert at once; slabs by expert, completions in the order of landing."""
    size = experts.expert_layer().shape.slab_bytes
    slabs = [np.full(size, 0xAA, np.uint8) for _ in range(experts.num_experts)]
    return slabs, submit_all(streamer, experts.layer, slabs)


def submit_all(streamer: Streamer, layer: int, slabs: Iterable[Bytes]) -> list[Landed]:
    """Read expert 0, 1, ... into the slabs, with the expert's number as the tag, and wait for all."""
    num_left = 0
    for expert, slab in enumerate(slabs):
        streamer.submit(layer, expert, slab, tag=expert)
        num_left += 1
    landed: list[Landed] = []
    while len(landed) < num_left:
        some = streamer.landed(20.0)
        assert some, "no read ended within 20 s"
        landed += some
    return landed


def assert_slabs(slabs: Sequence[Bytes], experts: ExpertBytes) -> None:
    """Each slab is what packing whole matrices gives, and its padding is zero."""
    for expert, slab in enumerate(slabs):
        expected = experts.slab(expert)
        assert np.array_equal(slab[: expected.size], expected)
        assert not slab[expected.size :].any()


@pytest.mark.parametrize("mode", ["buffered", "direct", "drop"])
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


@pytest.mark.parametrize("mode", ["buffered", "direct", "drop"])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("task_bytes", [read_plan.PACKED_TASK_BYTES, 3 * ALIGNMENT])
def test_packed_experts_are_not_packed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: IoMode, task_bytes: int, in_place: bool
) -> None:
    """A container's expert goes to its slab, padding included, straight or through scratch, in one request or a few."""

    def no_packing(encoding: Encoding, rows: int, cols: int, parts: Sequence[Bytes], out: Bytes) -> None:
        raise AssertionError("a packed expert is packed again")

    monkeypatch.setattr(read_plan, "PACKED_TASK_BYTES", task_bytes)
    experts = random_experts(3, 6, 128, 192, (Q8, Q4, BF16))
    path, layer = write_packed(tmp_path, experts)
    size = layer.shape.slab_bytes
    streamer = Streamer(open_reader([path], layer, mode, no_packing, in_place), 3)
    slabs = np.frombuffer(aligned_buffer(6 * size), np.uint8)[: 6 * size].reshape(6, size)
    slabs[:] = 0xAA
    landed = submit_all(streamer, 3, slabs)
    counters = streamer.counters()
    streamer.close()
    assert [done.error for done in landed] == [None] * 6
    assert (counters.num_reads, counters.bytes_read) == (6 * -(-size // task_bytes), 6 * size)
    assert_slabs(list(slabs), experts)
    assert scratch_bytes([layer], 3) == 3 * buffer_bytes(min(size, task_bytes))


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


def test_tiles_are_not_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of fp8 that share scales are read in one task, last tiles that are smaller included: same bytes."""
    monkeypatch.setattr(read_plan, "TASK_BYTES", 8192)
    experts = random_experts(0, 2, 264, 304, (FP8, FP8, FP8))
    files = write(tmp_path, experts, scattered)
    matrices = [matrix for task in LayerPlan(experts.expert_layer()).tasks(0) for matrix in task.matrices]
    assert [matrix.rows for matrix in matrices] == [128, 128, 48] * 2 + [128, 128, 8]
    streamer = open_streamer(files, experts)
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
        assert all(wanted.target_offset % ALIGNMENT == 0 for wanted in task.ranges)
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
            end = last.target_offset + -(-(last.offset % ALIGNMENT + last.nbytes) // ALIGNMENT) * ALIGNMENT
            assert end <= plan.scratch_bytes
    assert scratch_bytes([experts.expert_layer()], 4) == 4 * buffer_bytes(plan.scratch_bytes)


@pytest.mark.parametrize(
    ("nbytes", "alignment"),
    [
        (1, ALIGNMENT),
        (5000, ALIGNMENT),
        (1 << 19, ALIGNMENT),
        ((1 << 19) + 1, 2 << 20),
        (2 << 20, 2 << 20),
        (5 << 20, 2 << 20),
    ],
)
def test_buffers_are_aligned(nbytes: int, alignment: int) -> None:
    """Small scratch buffers are whole pages, others whole huge pages, as large as the memory plan says."""
    buffer = aligned_buffer(nbytes)
    assert np.frombuffer(buffer, np.uint8).ctypes.data % alignment == 0
    assert nbytes <= len(buffer) == buffer_bytes(nbytes) < nbytes + alignment
    assert aligned_buffer(0).nbytes == 0


def test_task_fits_one_huge_page() -> None:
    """Whatever the shape, quantised experts in files of any layout need at most 2 MiB of scratch a thread."""
    for hidden, width in ((2048, 1024), (4096, 14336), (512, 256), (7168, 2048)):
        experts = ExpertBytes(0, 1, hidden, width, (Q4, Q8, Q4), [[]])
        sizes = [nbytes for encoding, rows, cols in experts.shapes() for nbytes in encoding.part_bytes(rows, cols)]
        experts.pieces[0] = [np.broadcast_to(np.uint8(0), nbytes) for nbytes in sizes]
        experts.places = {(0, piece): (0, piece << 32) for piece in range(9)}
        assert LayerPlan(experts.expert_layer()).scratch_bytes <= 2 << 20


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


class HeldReader:
    """Stands in for an `ExpertReader` with two tasks an expert: each task is held until its expert is let go."""

    scratch_bytes = 0

    def __init__(self) -> None:
        self.begun: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.may_end = [threading.Event() for _ in range(8)]

    def num_tasks(self, layer: int) -> int:
        return 2

    def run_task(self, layer: int, expert: int, task_idx: int, slab: Bytes, scratch: memoryview) -> CopyRead:
        self.begun.put(expert)
        assert self.may_end[expert].wait(20)
        return CopyRead(100, None)

    def finish(self, *_: object) -> None: ...

    def close(self) -> None: ...

    def wait_for(self, *experts: int) -> None:
        """Tasks of exactly these experts begin next; then nothing more does."""
        assert sorted(self.begun.get(timeout=20) for _ in experts) == sorted(experts)
        with pytest.raises(queue.Empty):
            self.begun.get(timeout=0.02)


@pytest.fixture
def held() -> Iterator[tuple[HeldReader, Streamer]]:
    """A streamer of five threads whose reads end when the test says so."""
    reader = HeldReader()
    streamer = Streamer(reader, num_threads=5, max_background=1)  # type: ignore[arg-type]
    yield reader, streamer
    for event in reader.may_end:
        event.set()
    streamer.close()


NO_SLAB = np.zeros(0, np.uint8)


def test_background_reads_wait_for_an_idle_disk(held: tuple[HeldReader, Streamer]) -> None:
    """A background read begins when no other is under way, one task at a time, and steps back when one comes."""
    reader, streamer = held
    streamer.submit(0, 0, NO_SLAB, tag=10)
    reader.wait_for(0, 0)
    streamer.submit(0, 1, NO_SLAB, tag=11, background=True)
    streamer.submit(0, 2, NO_SLAB, tag=12)
    reader.wait_for(2, 2)
    reader.may_end[0].set()
    assert streamer.landed(20.0) == [Landed(10, 200, None)]
    reader.may_end[2].set()
    reader.wait_for(1)
    streamer.submit(0, 3, NO_SLAB, tag=13)
    reader.wait_for(3, 3)
    reader.may_end[1].set()
    reader.wait_for()
    reader.may_end[3].set()
    reader.wait_for(1)
    assert {done.tag for _ in range(3) for done in streamer.landed(1.0)} == {11, 12, 13}


def test_promoted_read_does_not_wait(held: tuple[HeldReader, Streamer]) -> None:
    """A background read that is awaited now begins beside the others, whole; promoting what has landed is nothing."""
    reader, streamer = held
    streamer.submit(0, 0, NO_SLAB, tag=0)
    streamer.submit(0, 1, NO_SLAB, tag=1, background=True)
    reader.wait_for(0, 0)
    streamer.promote(1)
    reader.wait_for(1, 1)
    reader.may_end[1].set()
    assert [done.tag for done in streamer.landed(20.0)] == [1]
    streamer.promote(1)
    assert not streamer.cancel(1)


def test_only_what_has_not_begun_can_be_cancelled(held: tuple[HeldReader, Streamer]) -> None:
    """A cancelled read has no completion, and its tag can be used again; one that has begun goes on."""
    reader, streamer = held
    streamer.submit(0, 1, NO_SLAB, tag=1, background=True)
    reader.wait_for(1)
    streamer.submit(0, 2, NO_SLAB, tag=2, background=True)
    streamer.submit(0, 3, NO_SLAB, tag=3, background=True)
    assert not streamer.cancel(1)
    assert streamer.cancel(2)
    assert not streamer.cancel(2)
    streamer.submit(0, 4, NO_SLAB, tag=2, background=True)
    for event in reader.may_end:
        event.set()
    landed = [done.tag for _ in range(3) for done in streamer.landed(1.0)]
    assert sorted(landed) == [1, 2, 3]
    reader.wait_for(1, 3, 3, 4, 4)
    streamer.submit(0, 5, NO_SLAB, tag=5)
    assert not streamer.cancel(5)


def test_close_ends_background_reads_too(held: tuple[HeldReader, Streamer]) -> None:
    """What waits in the background when the worker closes is answered like everything else."""
    reader, streamer = held
    streamer.submit(0, 0, NO_SLAB, tag=0)
    reader.wait_for(0, 0)
    streamer.submit(0, 1, NO_SLAB, tag=1, background=True)
    closing = threading.Thread(target=streamer.close)
    closing.start()
    [done] = streamer.landed(20.0)
    reader.may_end[0].set()
    closing.join(20)
    assert (done.tag, str(done.error)) == (1, "the worker is closing")
