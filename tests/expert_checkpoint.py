"""Experts with random contents in files of every layout, for tests of the workers; no checkpoint around them."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from colibri_mp.checkpoint.experts import ExpertLayer
from colibri_mp.formats import Encoding
from colibri_mp.kernels.layout import pack

BF16 = Encoding("bf16")
Q4 = Encoding("affine", 4, 64, "bf16")
Q8 = Encoding("affine", 8, 32, "bf16")
FP8 = Encoding("fp8", 8, 128, "f32")
Bytes = NDArray[np.uint8]
Place = Callable[["ExpertBytes"], None]


@dataclass
class ExpertBytes:
    """The pieces of one layer's experts, and the files that they have been put in."""

    layer: int
    num_experts: int
    hidden: int
    width: int
    encodings: tuple[Encoding, Encoding, Encoding]
    pieces: list[list[Bytes]]  # [E][P]
    files: list[bytearray] = field(default_factory=lambda: [bytearray()])
    places: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    def put(self, expert: int, piece: int, file_idx: int = 0) -> None:
        """Append one piece to a file."""
        self.places[expert, piece] = (file_idx, len(self.files[file_idx]))
        self.files[file_idx] += self.pieces[expert][piece].tobytes()

    def shapes(self) -> list[tuple[Encoding, int, int]]:
        """Encoding, rows, cols of gate, up, down."""
        gate, up, down = self.encodings
        return [(gate, self.width, self.hidden), (up, self.width, self.hidden), (down, self.hidden, self.width)]

    def expert_layer(self, first_file: int = 0) -> ExpertLayer:
        """The table that a worker reads from; this layer's files follow `first_file` others."""
        num_pieces = len(self.pieces[0])
        table = np.array([[self.places[e, p] for p in range(num_pieces)] for e in range(self.num_experts)], np.int64)
        names = [
            (projection, part)
            for projection, encoding in zip(("gate", "up", "down"), self.encodings, strict=True)
            for part in encoding.parts
        ]
        return ExpertLayer(
            self.layer,
            self.num_experts,
            self.hidden,
            self.width,
            *self.encodings,
            tuple(names),
            np.array([piece.size for piece in self.pieces[0]], np.int64),
            (table[:, :, 0] + first_file).astype(np.int32),
            table[:, :, 1].copy(),
        )

    def slab(self, expert: int) -> Bytes:
        """What the slab of an expert must hold, without the padding: each matrix packed as a whole."""
        shape = self.expert_layer().shape
        slab = np.zeros(shape.nbytes, np.uint8)
        parts = iter(self.pieces[expert])
        offsets = (0, shape.up_offset, shape.down_offset, shape.nbytes)
        for i, (encoding, rows, cols) in enumerate(self.shapes()):
            matrix = [next(parts) for _ in encoding.parts]
            pack(encoding, rows, cols, matrix, slab[offsets[i] : offsets[i + 1]])
        return slab


def random_experts(
    layer: int, num_experts: int, hidden: int, width: int, encodings: tuple[Encoding, Encoding, Encoding], seed: int = 0
) -> ExpertBytes:
    """Random pieces: weights of about 1 / sqrt(cols), not yet put into files."""
    rng = np.random.default_rng([seed, layer])
    experts = ExpertBytes(layer, num_experts, hidden, width, encodings, [])
    for _ in range(num_experts):
        experts.pieces.append(
            [p for encoding, rows, cols in experts.shapes() for p in _matrix(rng, encoding, rows, cols)]
        )
    return experts


def _matrix(rng: np.random.Generator, encoding: Encoding, rows: int, cols: int) -> list[Bytes]:
    sizes = encoding.part_bytes(rows, cols)
    if encoding.kind == "bf16":
        return [_bf16(rng.standard_normal(rows * cols) / np.sqrt(cols))]
    if encoding.kind != "affine":
        return [rng.integers(0, 120, size, dtype=np.uint8) for size in sizes]
    codes = rng.integers(0, 256, sizes[0], dtype=np.uint8)
    step = 3.5 / 2**encoding.bits / np.sqrt(cols)
    scales = step * rng.uniform(0.5, 1.5, sizes[1] // 2)
    return [codes, _bf16(scales), _bf16(-scales * 2**encoding.bits / 2)]


def _bf16(values: NDArray[np.float64]) -> Bytes:
    return np.ascontiguousarray(values.astype(np.float32).view(np.uint16)[1::2]).view(np.uint8)


def stacked(experts: ExpertBytes) -> None:
    """As MLX stores them: one tensor for each part, all experts in it, starting at an odd offset."""
    experts.files[0] += bytes(1237)
    for piece in range(len(experts.pieces[0])):
        for expert in range(experts.num_experts):
            experts.put(expert, piece)


def per_expert(experts: ExpertBytes) -> None:
    """As Hugging Face stores them: an expert's pieces lie together, down before gate before up."""
    experts.files[0] += bytes(408)
    num_pieces = len(experts.pieces[0])
    order = [*range(num_pieces)[-num_pieces // 3 :], *range(num_pieces)[: -num_pieces // 3]]
    for expert in range(experts.num_experts):
        for piece in order:
            experts.put(expert, piece)


def scattered(experts: ExpertBytes) -> None:
    """Two files, any order, gaps of all sizes."""
    rng = np.random.default_rng(5)
    experts.files.append(bytearray())
    places = [(e, p) for e in range(experts.num_experts) for p in range(len(experts.pieces[0]))]
    for i in rng.permutation(len(places)).tolist():
        file_idx = int(rng.integers(0, 2))
        experts.files[file_idx] += bytes(int(rng.choice([0, 0, 1, 999, 70_000])))
        experts.put(*places[i], file_idx)


def slabs_of(experts: ExpertBytes) -> Bytes:
    """All slabs, uint8 [E, slab_bytes], padded with zeros; the pieces must have been placed."""
    shape = experts.expert_layer().shape
    slabs = np.zeros((experts.num_experts, shape.slab_bytes), np.uint8)
    for expert, slab in enumerate(slabs):
        slab[: shape.nbytes] = experts.slab(expert)
    return slabs


def checksums_of(experts: ExpertBytes) -> NDArray[np.uint64]:
    """xxh3-64 of each slab [E]."""
    return np.array([xxhash.xxh3_64_intdigest(slab.data) for slab in slabs_of(experts)], np.uint64)


def write_packed(folder: Path, experts: ExpertBytes) -> tuple[Path, ExpertLayer]:
    """One file of slabs, as a container has them: padded with zeros to whole pages, the first one at byte 8192."""
    per_expert(experts)
    layer, slabs = experts.expert_layer(), slabs_of(experts)
    size = layer.shape.slab_bytes
    path = folder / f"experts-{experts.layer:05d}.safetensors"
    path.write_bytes(bytes(8192) + slabs.tobytes())
    packed = replace(
        layer,
        piece_names=(("expert", "slab"),),
        piece_bytes=np.array([size], np.int64),
        file_idx=np.zeros((experts.num_experts, 1), np.int32),
        offset=8192 + size * np.arange(experts.num_experts, dtype=np.int64)[:, None],
        is_packed=True,
    )
    return path, packed


def write(folder: Path, experts: ExpertBytes, place: Place) -> tuple[Path, ...]:
    """Place the pieces and write the files."""
    place(experts)
    paths = []
    for i, content in enumerate(experts.files):
        paths.append(folder / f"layer-{experts.layer}-{i}.safetensors")
        paths[-1].write_bytes(content)
    return tuple(paths)
