"""What a kind of mixer says of itself.

Specs and tensors are those of the kind: `AttentionSpec` and `AttentionTensors` for attention, and so on.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from colibri_mp.checkpoint.matrices import StoredMatrix
from colibri_mp.checkpoint.safetensors_header import TensorInfo
from colibri_mp.checkpoint.source import Bytes
from colibri_mp.formats import Encoding
from colibri_mp.kernels.block import MixerStage
from colibri_mp.kernels.delta_inputs import DeltaStates
from colibri_mp.kernels.layout import PackedMatrix, packed_bytes
from colibri_mp.kernels.paged_cache import PagedCache
from colibri_mp.kernels.rope import RopeTables
from colibri_mp.kernels.team import ThreadTeam
from colibri_mp.messages import Floats


@dataclass(frozen=True)
class StageLimits:
    """What stages are made for: rows a step, positions of a sequence, threads, planes of activations, bits of the paged caches."""

    max_rows: int
    max_context: int
    num_threads: int
    planes: int
    kv_bits: int


class CacheShape(Protocol):
    """The shape of a paged cache. Equal shapes share a cache, so they are compared and hashed by value."""

    def nbytes(self, num_layers: int, num_blocks: int) -> int:
        """Bytes of a cache of this shape."""

    def make(self, num_layers: int, num_blocks: int) -> PagedCache:
        """A cache. Raises MemoryPlanError when there is no memory for it."""

    def __hash__(self) -> int: ...


class StateShape(Protocol):
    """The shape of a layer's recurrent state. Equal shapes share memory, so they are compared and hashed by value."""

    def nbytes(self, num_layers: int, num_slots: int) -> int:
        """Bytes of the states of so many layers and slots."""

    def make(self, num_layers: int, num_slots: int) -> DeltaStates:
        """Room for them. Raises MemoryPlanError when there is no memory for it."""

    def __hash__(self) -> int: ...


class WeightReader(Protocol):
    """Reads weights from a checkpoint. Raises ReadError."""

    def matrix(self, stored: StoredMatrix) -> PackedMatrix:
        """A matrix in the kernels' form."""

    def parts(self, stored: StoredMatrix) -> Sequence[Bytes]:
        """A matrix as stored, by the parts of its encoding."""

    def vector(self, info: TensorInfo | None) -> Floats | None:
        """A vector as float32; None where there is none."""


class MixerKind(ABC):
    """One kind of mixer. `block`: the name of its compiled blocks in `kernels.warming`."""

    block: ClassVar[str]

    def stage_spec(self, spec: Any) -> Any:
        """What layers that share a stage have in common: the spec without what the weights of a layer say themselves."""
        return spec

    def continues(self, spec: Any) -> bool:
        """Whether a layer uses what the one before it has left for the same rows: between the two they stay as they are."""
        del spec
        return False

    @abstractmethod
    def cache_shape(self, spec: Any, kv_bits: int) -> CacheShape | None:
        """The paged cache that a layer needs, or None."""

    def state_shape(self, spec: Any) -> StateShape | None:
        """The recurrent state that a layer has, or None."""
        del spec
        return None

    @abstractmethod
    def make_stage(self, team: ThreadTeam, spec: Any, tables: RopeTables, limits: StageLimits) -> MixerStage:
        """The stage for a `stage_spec`."""

    @abstractmethod
    def scratch_bytes(self, spec: Any, tensors: Sequence[Any], limits: StageLimits) -> int:
        """Bytes that the stage for a `stage_spec` allocates, at most; `tensors`: of each of its layers."""

    @abstractmethod
    def load(self, reader: WeightReader, spec: Any, tensors: Any) -> Any:
        """The weights of a layer, as the stage takes them."""

    def matrix_bytes(self, spec: Any, tensors: Any) -> int:
        """Bytes of a layer's matrices as `load` keeps them."""
        del spec
        return sum(packed_bytes(m.encoding.format, m.rows, m.cols) for m in tensors.matrices)

    def encodings(self, spec: Any, tensors: Any) -> Iterable[Encoding]:
        """Every encoding whose kernels a layer needs."""
        del spec
        return {matrix.encoding for matrix in tensors.matrices}
