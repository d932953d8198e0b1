"""How experts are read: the choice, from a measurement that is made once for each disk and not fooled by the page cache."""

import os
import sys
from pathlib import Path

import msgspec
import psutil
import pytest
from expert_checkpoint import BF16, per_expert, random_experts, write, write_packed
from hypothesis import given
from hypothesis import strategies as st

from colibri_mp import disks
from colibri_mp.checkpoint.source import Checkpoint
from colibri_mp.config import LaunchConfig
from colibri_mp.disks import DiskRecord, ExpertMemory, choose_copies, choose_mode
from colibri_mp.models import load_model
from colibri_mp.workers import disk_speed
from colibri_mp.workers.copies import Copy
from colibri_mp.workers.disk_speed import Speed
from colibri_mp.workers.expert_files import ExpertFiles
from colibri_mp.workers.read_plan import FileRange

GB = 10**9
MODEL = Path(__file__).parents[1] / "golden" / "tiny" / "qwen3_moe_fused"
MEMORY = ExpertMemory(stored=100 * GB, pools=10 * GB, page_cache=5 * GB)


def speed_of(direct: float, buffered: float, in_place: float = 0.0) -> Speed:
    """A measurement in GB/s."""
    return Speed(buffered * GB, direct * GB, in_place * GB)


def record_of(direct: float, buffered: float, in_place: float = 0.0) -> DiskRecord:
    """The same, as it is remembered."""
    return DiskRecord(*speed_of(direct, buffered, in_place), measured=0.0)


# ── the choice ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("pools", "page_cache", "share"),
    [(10, 5, 0.0), (10, 10, 0.0), (10, 55, 0.5), (10, 100, 1.0), (10, 400, 1.0), (0, 25, 0.25), (100, 5, 0.0)],
)
def test_share_that_the_page_cache_can_serve(pools: int, page_cache: int, share: float) -> None:
    """Of 100 experts: what fits the page cache beyond that which the pools hold anyway."""
    assert ExpertMemory(100, pools, page_cache).cached_share == pytest.approx(share)


@pytest.mark.parametrize(
    ("direct", "buffered", "page_cache", "mode"),
    [
        (2.0, 1.0, 5, "direct"),  # twice as fast, and the page cache is of no use
        (2.0, 1.0, 60, "buffered"),  # more than half of the misses come from the page cache
        (2.0, 1.0, 400, "buffered"),  # all of them do
        (1.05, 1.0, 5, "buffered"),  # no difference worth speaking of
        (0.7, 1.0, 5, "buffered"),
        (0.0, 1.0, 5, "buffered"),  # refused
    ],
)
def test_direct_reads_only_where_they_are_faster(direct: float, buffered: float, page_cache: int, mode: str) -> None:
    """Measurably faster, and after what the page cache would have served."""
    chosen, reason = choose_mode(record_of(direct, buffered), MEMORY._replace(page_cache=page_cache * GB))
    assert chosen == mode
    assert ("direct refused" in reason) == (direct == 0)
    assert "buffered 1 GB/s" in reason
    assert "of the pools' misses" in reason


@given(st.floats(0, 10), st.floats(0.01, 10), *[st.integers(0, 200)] * 2)
def test_more_page_cache_never_speaks_for_direct_reads(direct: float, buffered: float, less: int, more: int) -> None:
    """The choice is monotonic in what the page cache can hold."""
    record = record_of(direct, buffered)
    modes = [choose_mode(record, MEMORY._replace(page_cache=size * GB))[0] for size in sorted((less, more))]
    assert modes != ["buffered", "direct"]


@pytest.mark.parametrize(
    ("direct", "in_place", "is_better", "mode"),
    [
        (2.0, 2.0, True, "direct"),
        (2.0, 1.7, True, "direct"),
        (2.0, 0.9, False, "direct"),
        (1.2, 1.05, True, "buffered"),  # 1.05, in place, is what it comes to
        (2.0, 0.0, False, "direct"),
    ],
)
def test_buffers_only_where_they_pay(direct: float, in_place: float, is_better: bool, mode: str) -> None:
    """Slabs are read in place unless a buffer of huge pages makes the disk so much faster that the copy pays."""
    record = record_of(direct, 1.0, in_place)
    assert record.is_better_in_place == is_better
    assert choose_mode(record, MEMORY)[0] == mode
    assert record.rate("direct") == (in_place if is_better else direct) * GB
    assert ("without a buffer" in str(record)) == (in_place > 0)


def test_reasons_where_nothing_is_measured() -> None:
    """Everything resident, too little of it, and a system that does not say what it has cached."""
    everything = MEMORY._replace(pools=100 * GB)
    assert choose_mode(record_of(2.0, 1.0), everything) == ("buffered", "the pools have room for every expert")
    assert "too little" in choose_mode(None, MEMORY._replace(stored=10**7, pools=10**6))[1]
    assert "cannot be measured" in choose_mode(None, MEMORY)[1]


# ── the disks of a run ──────────────────────────────────────────────────────────────────────────────────────────


class Measurements:
    """Stands in for `disk_speed.measure`: what it says of a folder, and how often it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.speeds: dict[Path, Speed | None] = {}
        self.asked: list[Path] = []
        monkeypatch.setattr(disk_speed, "measure", self._measure)
        monkeypatch.setattr(disks, "_device", lambda file: (str(file.parent), hash(file.parent)))

    def _measure(self, files: tuple[Path, ...], _layers: object) -> Speed | None:
        self.asked.append(files[0].parent)
        return self.speeds[files[0].parent]


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Measurements:
    """Every folder is a disk of its own; the user's cache is empty."""
    monkeypatch.setenv("COLIBRI_CACHE_DIR", str(tmp_path / "cache"))
    return Measurements(monkeypatch)


def choose(memory: ExpertMemory = MEMORY, said: list[str] | None = None, **settings: str) -> tuple[Copy, ...]:
    """The copies for the tiny model, as if its experts were large."""
    checkpoint = Checkpoint.open(MODEL)
    layers = load_model(checkpoint).expert_layers
    progress = [].append if said is None else said.append
    return choose_copies(checkpoint, layers, LaunchConfig(model=str(MODEL), **settings), memory, progress)  # type: ignore[arg-type]


def copy_to(folder: Path) -> Path:
    """A second copy of the tiny model's weights."""
    folder.mkdir(exist_ok=True)
    for file in MODEL.glob("*.safetensors"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_disk_is_measured_once(measurements: Measurements, tmp_path: Path) -> None:
    """The first start measures and says so, the next ones remember; a damaged file or an old entry is measured again."""
    measurements.speeds[MODEL] = speed_of(2.0, 1.0)
    said: list[str] = []
    [copy] = choose(said=said)
    assert copy.mode == "direct"
    assert copy.reason.startswith("measured: direct 2 GB/s, buffered 1 GB/s; ")
    assert said == [f"measuring the disk of {MODEL}, once"]
    assert choose(said=said) == (copy,)
    assert (len(said), len(measurements.asked)) == (1, 1)
    file = tmp_path / "cache" / "disks.json"
    [(key, record)] = msgspec.json.decode(file.read_bytes())["disks"].items()
    assert str(MODEL) in key
    stale = {"version": 1, "disks": {key: {**record, "measured": record["measured"] - 31 * 24 * 3600}}}
    for content in (b"{", b'{"version": 2}', msgspec.json.encode(stale)):
        file.write_bytes(content)
        assert choose() == (copy,)
    assert len(measurements.asked) == 4


@pytest.mark.parametrize(
    ("memory", "settings"),
    [
        (MEMORY, {"io": "buffered"}),
        (MEMORY, {"io": "drop"}),
        (MEMORY, {"io": "direct"}),  # this model is not packed: there is no other place to read to
        (MEMORY._replace(pools=100 * GB), {}),
        (ExpertMemory(10**8, 10**7, 0), {}),
    ],
)
def test_nothing_is_measured_without_need(
    measurements: Measurements, memory: ExpertMemory, settings: dict[str, str]
) -> None:
    """Not when the mode is given, nor when every expert is resident, nor for a tiny model."""
    [copy] = choose(memory, **settings)
    assert measurements.asked == []
    assert copy.mode == settings.get("io", "buffered")


def test_unwritable_cache_is_said(measurements: Measurements, tmp_path: Path) -> None:
    """The measurement is used, and why it is not kept is shown."""
    measurements.speeds[MODEL] = speed_of(2.0, 1.0)
    (tmp_path / "cache").write_text("a file")
    said: list[str] = []
    assert choose(said=said)[0].mode == "direct"
    assert "cannot be kept" in said[-1]


@pytest.mark.parametrize(
    ("io", "modes", "share"),
    [
        ("auto", ("direct", "buffered"), 0.75),
        ("buffered", ("buffered", "buffered"), 0.5),
        ("direct", ("direct", "direct"), 0.75),  # the second disk refuses direct reads: its buffered speed counts
    ],
)
def test_mirror_gets_its_share(
    measurements: Measurements, tmp_path: Path, io: str, modes: tuple[str, str], share: float
) -> None:
    """Each copy is read as suits its disk, and as much as its speed says."""
    mirror = copy_to(tmp_path / "mirror")
    measurements.speeds = {MODEL: speed_of(3.0, 1.0), mirror: speed_of(0.0, 1.0)}
    first, second = choose(mirror=str(mirror), io=io)
    assert second.files[0].parent == mirror
    assert (first.mode, second.mode) == modes
    assert first.weight == share
    assert first.weight + second.weight == 1


def test_mirror_on_the_same_disk_stands_by(
    measurements: Measurements, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is gained by reading both."""
    monkeypatch.setattr(disks, "_device", lambda _file: ("one disk", 1))
    measurements.speeds[MODEL] = speed_of(3.0, 1.0)
    first, second = choose(mirror=str(copy_to(tmp_path)))
    assert (first.weight, second.weight) == (1.0, 0.0)
    assert "same disk" in second.reason


def test_slow_memory_is_noted_in_the_copy(measurements: Measurements) -> None:
    """Whether a buffer is used goes to the reader."""
    for in_place, expected in ((1.9, True), (0.9, False)):
        measurements.speeds[MODEL] = speed_of(2.0, 1.0, in_place)
        disks.user_cache_dir().joinpath("disks.json").unlink(missing_ok=True)
        assert choose()[0].in_place == expected


# ── the measurement ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux forgets pages when asked")
@pytest.mark.parametrize("packed", [False, True])
def test_measurement_reads_cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool) -> None:
    """What the page cache has is given back before it is read, and every expert is read at most once."""
    experts = random_experts(0, 40, 256, 192, (BF16, BF16, BF16))
    if packed:
        file, layer = write_packed(tmp_path, experts)
    else:
        [file] = write(tmp_path, experts, per_expert)
        layer = experts.expert_layer()
    os.sync()
    file.read_bytes()  # now the page cache has all of it
    reads: list[tuple[str, int]] = []
    read = ExpertFiles.read

    def watched(self: ExpertFiles, wanted: FileRange, buffer: memoryview) -> int:
        reads.append((self.mode, wanted.offset))
        return read(self, wanted, buffer)

    monkeypatch.setattr(ExpertFiles, "read", watched)
    before = psutil.Process().io_counters().read_bytes
    speed = disk_speed.measure([file], [layer])
    from_disk = psutil.Process().io_counters().read_bytes - before
    if speed is None or from_disk == 0:
        pytest.skip("this system does not let go of pages, or does not count what comes from the disk")
    assert {mode for mode, _ in reads} == ({"buffered", "direct"} if speed.direct else {"buffered"})
    assert (speed.in_place > 0) == (packed and speed.direct > 0)
    assert len({offset for _, offset in reads}) == len(reads) > 20
    assert from_disk >= len(reads) * layer.stored_bytes


def test_measurement_needs_pages_that_can_be_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where pages stay in memory there is nothing to measure."""
    experts = random_experts(0, 20, 64, 64, (BF16, BF16, BF16))
    files = write(tmp_path, experts, per_expert)
    monkeypatch.setattr(ExpertFiles, "is_cached", lambda *_: True)
    assert disk_speed.measure(files, [experts.expert_layer()]) is None
