"""The route trace: which experts each step asked of each layer, and what came of it; docs/trace.md is the contract.

    0        24                    records_offset (multiple of 8)
    ├─ fixed ─┼─ header, JSON ─ 0 ──┼─ record ─┼─ record ─┼─ ...      all records have the same size, little-endian

The file is only ever appended to, so it is readable while it grows and after any end: up to its last whole record, and
what is missing is said. Written by `trace_writer`.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from colibri_mp.errors import TraceError
from colibri_mp.shm.policy import Eviction, PolicyName

MAGIC = b"COLITRCE"
VERSION = 2
_READABLE = (1, 2)
LAYER, STEP, LOAD, PIN, UNPIN, DROP, RESIZE, FILL = range(1, 9)
EVENTS = {"load": LOAD, "pin": PIN, "unpin": UNPIN, "drop": DROP, "resize": RESIZE, "fill": FILL}
"""Kinds of records. A LAYER record comes for each layer with experts of a step, then one STEP; the others are events."""

_FIXED = struct.Struct("<8sIIII")  # magic, version, bytes of a record, bytes of the JSON, offset of the first record
_FIELDS: tuple[tuple[str, str], ...] = (
    ("kind", "u1"), ("reserved", "u1"), ("layer", "<u2"), ("step", "<u4"),
    ("num_rows", "<u4"), ("num_prefill_rows", "<u4"),
    ("value", "<u4"),  # LAYER: choices of all rows; RESIZE: slots; other events: expert
    ("seconds", "<f4"),  # LAYER: from attention to the sum; STEP: the whole step
    ("hits", "<u2"), ("misses", "<u2"), ("evictions", "<u2"), ("promoted", "<u2"),
    ("bytes_read", "<u8"), ("disk_s", "<f4"), ("wait_s", "<f4"), ("compute_s", "<f4"),
    ("pause_s", "<f4"),  # STEP: since the end of the step before
)  # fmt: skip
RECORD = struct.Struct("<BBHIIIIfHHHHQffff")
"""A record up to its `asked`."""


class TracedLayer(msgspec.Struct, frozen=True):
    """One layer with experts: who owns it, its slots, and bytes of an expert in the pool and on disk; `prior` as in `Eviction`."""

    layer: int
    worker_id: int
    num_experts: int
    num_slots: int
    floor: int
    slab_bytes: int
    read_bytes: int
    prior: tuple[float, ...] = ()


class TraceHeader(msgspec.Struct, frozen=True):
    """What was traced. `settings` are those of the launch, so that the plan can be made again for another memory."""

    program: str
    started: str
    model: str
    model_type: str
    fingerprint: str
    top_k: int
    policy: PolicyName
    budget_bytes: int
    lossy: tuple[str, ...]
    settings: dict[str, Any]
    layers: tuple[TracedLayer, ...]
    half_life_tokens: float = 1.0

    @property
    def eviction(self) -> Eviction:
        """How the run's pools chose what went."""
        prior = {layer.layer: layer.prior for layer in self.layers if layer.prior}
        return Eviction(self.policy, self.half_life_tokens, prior)


def record_type(num_experts: int) -> np.dtype[np.void]:
    """The records of a model whose layers have at most `num_experts`; `asked` has bit e % 8 of byte e // 8 for expert e."""
    return np.dtype([*_FIELDS, ("asked", "u1", ((num_experts + 63) // 64 * 8,))])


@dataclass(frozen=True)
class Trace:
    """A trace as read: `records` [n] of `record_type`; `notes` say what is missing."""

    header: TraceHeader
    records: NDArray[np.void]
    notes: tuple[str, ...]

    def of_kind(self, kind: int) -> NDArray[np.void]:
        """The records of one kind, in order."""
        found: NDArray[np.void] = self.records[self.records["kind"] == kind]
        return found


def read_trace(path: Path) -> Trace:
    """The whole records of a trace file.

    Raises:
        TraceError: it cannot be read, is no trace, or of another version.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from error
    header, record_bytes, offset = _decode_header(path, data)
    kind = record_type(max(layer.num_experts for layer in header.layers))
    if kind.itemsize != record_bytes:
        raise TraceError(
            f"{path}: records of {record_bytes} bytes, this model's have {kind.itemsize}: the file is damaged"
        )
    num_records, left_over = divmod(len(data) - offset, record_bytes)
    records = np.frombuffer(data, kind, num_records, offset)
    _check(path, header, records)
    return Trace(header, records, _notes(path, records, left_over))


def _check(path: Path, header: TraceHeader, records: NDArray[np.void]) -> None:
    """Refuse records that no writer makes."""
    is_known = (records["kind"] >= LAYER) & (records["kind"] <= FILL)
    is_known &= (records["kind"] == STEP) | np.isin(records["layer"], [layer.layer for layer in header.layers])
    if not is_known.all():
        idx = int(np.argmin(is_known))
        kind, layer = records["kind"][idx], records["layer"][idx]
        raise TraceError(f"{path}: record {idx} is of kind {kind} and layer {layer}: the file is damaged")


def _notes(path: Path, records: NDArray[np.void], left_over: int) -> tuple[str, ...]:
    notes = []
    if left_over:
        notes.append(f"{path} ends in the middle of a record: its last {left_over} bytes are left out")
    steps = records[(records["kind"] == LAYER) | (records["kind"] == STEP)]
    unended = int(np.count_nonzero((np.diff(steps["step"]) != 0) & (steps["kind"][:-1] != STEP)))
    if unended:
        notes.append(
            f"{unended} steps failed or were cancelled while the run went on: from there a simulation may differ from it"
        )
    if len(steps) and steps["kind"][-1] != STEP:
        notes.append(f"the last step, {steps['step'][-1]}, is not complete: the run was cut short, or is still writing")
    return tuple(notes)


def encode_header(header: TraceHeader, record_bytes: int) -> bytes:
    """What comes before the first record."""
    body = msgspec.json.encode(header)
    offset = (_FIXED.size + len(body) + 7) // 8 * 8
    return (_FIXED.pack(MAGIC, VERSION, record_bytes, len(body), offset) + body).ljust(offset, b"\0")


def _decode_header(path: Path, data: bytes) -> tuple[TraceHeader, int, int]:
    """The header, the bytes of a record, and the offset of the first one."""
    if len(data) < _FIXED.size or not data.startswith(MAGIC):
        raise TraceError(f"{path} is no route trace; make one with `colibri-cluster run ... --trace FILE`")
    _, version, record_bytes, json_bytes, offset = _FIXED.unpack_from(data)
    if version not in _READABLE:
        raise TraceError(f"{path} is a trace of version {version}, this program reads versions 1 to {VERSION}")
    body = data[_FIXED.size : _FIXED.size + json_bytes]
    if len(body) < json_bytes or offset < _FIXED.size + json_bytes or len(data) < offset:
        raise TraceError(f"{path} is cut off in its header")
    try:
        header = msgspec.json.decode(body, type=TraceHeader)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise TraceError(f"{path}: the header cannot be understood: {error}") from error
    if not header.layers:
        raise TraceError(f"{path}: the header names no layers")
    return header, record_bytes, offset
