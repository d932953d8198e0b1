"""The route trace: its bytes, what a damaged or truncated file gives, and that writing never ends a run."""

import json
import struct
from pathlib import Path

import msgspec
import numpy as np
import pytest
from trace_fixture import header, write_run

from colibri_mp import trace_writer
from colibri_mp.errors import ConfigError, TraceError
from colibri_mp.messages import StepCounters
from colibri_mp.shm.policy import Eviction, Lru
from colibri_mp.trace import DROP, LAYER, LOAD, PIN, RESIZE, STEP, UNPIN, read_trace, record_type
from colibri_mp.trace_writer import NoTrace, TraceWriter

COUNTERS = StepCounters(hits=3, misses=2, evictions=1, bytes_read=2**33, disk_s=0.5, wait_s=0.25, compute_s=0.125)


def write_one(path: Path) -> None:
    """Two tokens in layer 1 of a step, one choice dropped; then an event."""
    writer = TraceWriter(path, header())
    writer.start_step(7, 2, 2)
    writer.add_layer(1, np.array([[-1, 0], [8, 11]], np.int32), 3, COUNTERS, 2.0)
    writer.end_step(4.0)
    writer.add_event(PIN, 1, 9)
    writer.close()


def test_bytes_are_those_of_the_docs(tmp_path: Path) -> None:
    """Fixed part, header and records lie where docs/trace.md says."""
    write_one(tmp_path / "t")
    data = (tmp_path / "t").read_bytes()
    magic, version, record_bytes, json_bytes, offset = struct.unpack_from("<8sIIII", data)
    assert (magic, version, record_bytes, offset % 8) == (b"COLITRCE", 2, 64, 0)
    head = json.loads(data[24 : 24 + json_bytes])
    assert head["layers"][1] == {
        "layer": 1, "worker_id": 0, "num_experts": 12, "num_slots": 5, "floor": 2, "slab_bytes": 4096, "read_bytes": 1000,
        "prior": [],
    }  # fmt: skip
    assert not data[24 + json_bytes : offset].strip(b"\0")
    records = [data[start : start + 64] for start in range(offset, len(data), 64)]
    layer = struct.pack("<BBHIIIIfHHHHQfff", 1, 0, 1, 7, 2, 2, 3, 2.0, 3, 2, 1, 0, 2**33, 0.5, 0.25, 0.125)
    assert records[0] == layer + struct.pack("<f", 0.0) + bytes([0b00000001, 0b00001001]) + bytes(6)
    assert records[1][:24] == struct.pack("<BBHIIIIf", 2, 0, 0, 7, 2, 2, 0, 4.0)
    assert records[1][24:52] == records[1][56:] + bytes(20) == bytes(28)
    assert records[2] == struct.pack("<BBHIIII", 4, 0, 1, 7, 2, 2, 9) + bytes(44)


def test_kinds_have_the_numbers_of_the_docs() -> None:
    """And records are as long as their largest layer needs."""
    assert (LAYER, STEP, LOAD, PIN, UNPIN, DROP, RESIZE) == (1, 2, 3, 4, 5, 6, 7)
    assert [record_type(n).itemsize for n in (1, 64, 65, 512)] == [64, 64, 72, 120]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """More records than are gathered at a time, all there and in order, nothing missing."""
    steps = [[[i % 12, (i + 5) % 12], [3, i % 3]] for i in range(1, 1500)]
    trace = write_run(tmp_path / "t", header(), steps)
    layers = trace.of_kind(LAYER)
    assert trace.header == header()
    assert trace.notes == ()
    assert len(trace.of_kind(STEP)) == 1499
    assert layers["step"].tolist() == np.repeat(np.arange(1, 1500), 2).tolist()
    bits = np.unpackbits(layers["asked"], axis=1, bitorder="little")
    assert [np.flatnonzero(row).tolist() for row in bits] == [
        sorted(set(union)) for unions in steps for union in unions
    ]


def test_older_traces_are_of_lru(tmp_path: Path) -> None:
    """Version 1 knew neither half-life nor prior."""
    steps = [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    write_run(tmp_path / "t", header(), steps)
    data = (tmp_path / "t").read_bytes()
    json_bytes, offset = struct.unpack_from("<II", data, 16)
    head = json.loads(data[24 : 24 + json_bytes])
    del head["half_life_tokens"]
    for layer in head["layers"]:
        del layer["prior"]
    old = msgspec.json.encode(head).ljust(json_bytes)
    (tmp_path / "t").write_bytes(
        struct.pack("<8sIIII", b"COLITRCE", 1, 64, json_bytes, offset) + old + data[24 + json_bytes :]
    )
    trace = read_trace(tmp_path / "t")
    assert isinstance(trace.header.eviction.make(0, 12, 2), Lru)
    assert len(trace.of_kind(STEP)) == 2


def test_policy_of_the_run_is_in_the_header(tmp_path: Path) -> None:
    """With its half-life and, layer by layer, what it started with."""
    head = header(policy="lrfu", half_life_tokens=3.0)
    layers = (head.layers[0], msgspec.structs.replace(head.layers[1], prior=(0.1,) * 12))
    TraceWriter(tmp_path / "t", msgspec.structs.replace(head, layers=layers)).close()
    assert read_trace(tmp_path / "t").header.eviction == Eviction("lrfu", 3.0, {1: (0.1,) * 12})


def test_truncated_anywhere(tmp_path: Path) -> None:
    """Every cut behind the header leaves the whole records before it, and is said unless it falls between two steps."""
    whole = write_run(tmp_path / "t", header(), [[[0, 1], [2, 3]]] * 2)
    data = (tmp_path / "t").read_bytes()
    start = len(data) - 6 * 64
    for size in range(start, len(data)):
        (tmp_path / "cut").write_bytes(data[:size])
        trace = read_trace(tmp_path / "cut")
        assert len(trace.records) == (size - start) // 64
        assert np.array_equal(trace.records, whole.records[: len(trace.records)])
        assert any("middle of a record" in note for note in trace.notes) == bool((size - start) % 64)
        assert any("is not complete" in note for note in trace.notes) == ((size - start) // 64 % 3 > 0)
    for size in range(start):
        (tmp_path / "cut").write_bytes(data[:size])
        with pytest.raises(TraceError, match=r"is no route trace|cut off in its header"):
            read_trace(tmp_path / "cut")


def test_failed_steps_are_said(tmp_path: Path) -> None:
    """A step without its end in the middle of the file is named as what it is."""
    writer = TraceWriter(tmp_path / "t", header())
    for number in (1, 2, 3):
        writer.start_step(number, 1, 0)
        writer.add_layer(0, np.array([[0, 1]], np.int32), 2, COUNTERS, 1.0)
        if number != 2:
            writer.add_layer(1, np.array([[0, 1]], np.int32), 2, COUNTERS, 1.0)
            writer.end_step(1.0)
    writer.close()
    assert read_trace(tmp_path / "t").notes == (
        "1 steps failed or were cancelled while the run went on: from there a simulation may differ from it",
    )


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, b"X", "is no route trace"),
        (8, b"\x03", "version 3, this program reads versions 1 to 2"),
        (12, b"\x48", "records of 72 bytes, this model's have 64"),
        (24, b"[", "header cannot be understood"),
        (-64, b"\x09", "record 2 is of kind 9 and layer 1: the file is damaged"),
        (-62, b"\x05", "record 2 is of kind 4 and layer 5: the file is damaged"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, at: int, value: bytes, message: str) -> None:
    """One error for each defect, with the file's name."""
    write_one(tmp_path / "t")
    data = bytearray((tmp_path / "t").read_bytes())
    data[at : at + 1 if at != -1 else None] = value
    (tmp_path / "t").write_bytes(data)
    with pytest.raises(TraceError, match=message) as refusal:
        read_trace(tmp_path / "t")
    assert str(tmp_path / "t") in str(refusal.value)


def test_file_that_cannot_be_made_or_is_something_else(tmp_path: Path) -> None:
    """A folder that is missing, a full disk, and a file of another kind, which is left alone; an older trace is replaced."""
    other = tmp_path / "model.safetensors"
    other.write_bytes(b"weights")
    for path, message in (
        (tmp_path / "no" / "t", "No such file"),
        (Path("/dev/full"), "No space left"),
        (other, "is no trace; give another name"),
    ):
        with pytest.raises(ConfigError, match=message):
            TraceWriter(path, header())
    assert other.read_bytes() == b"weights"
    write_one(tmp_path / "t")
    write_one(tmp_path / "t")
    assert len(read_trace(tmp_path / "t").records) == 3


def test_full_disk_ends_the_trace_and_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The error is said once; what had been written can be read."""
    writer = TraceWriter(tmp_path / "t", header())
    ids = np.array([[0, 1]], np.int32)
    writer.start_step(1, 1, 0)
    writer.add_layer(0, ids, 2, COUNTERS, 1.0)
    writer.flush()
    writer._file.close()
    writer._file = open("/dev/full", "ab")  # noqa: PTH123, SIM115 - the writer closes it
    for _ in range(3 * trace_writer._BATCH):
        writer.add_layer(0, ids, 2, COUNTERS, 1.0)
    writer.close()
    assert [record.message.split(":")[0] for record in caplog.records] == [
        f"the trace {tmp_path / 't'} ends here, it cannot be written any more"
    ]
    assert len(read_trace(tmp_path / "t").records) == 1


def test_steps_are_written_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the given time, and when asked; not before."""
    sizes = []
    writer = TraceWriter(tmp_path / "t", header())
    for flush_s in (1e9, 0.0, 1e9):
        monkeypatch.setattr(trace_writer, "_FLUSH_S", flush_s)
        writer.start_step(1, 1, 0)
        writer.end_step(1.0)
        sizes.append(len(read_trace(tmp_path / "t").records))
    writer.flush()
    sizes.append(len(read_trace(tmp_path / "t").records))
    writer.close()
    assert sizes == [0, 2, 2, 3]


def test_no_trace_takes_everything() -> None:
    """The stand-in has every method of the writer."""
    names = {name for name in vars(TraceWriter) if not name.startswith("_")}
    assert names == {name for name in vars(NoTrace) if not name.startswith("_")}
