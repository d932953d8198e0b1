"""Compiles what a model needs, once, before processes are spawned; used as `kernels.warm`.

Each kernel would also be compiled at its first use; but then in every process at once, in the middle of a step, without a
word. What has been compiled is noted in the cache folder (`isa.prepare_cache`), which is for exactly these sources and this
machine, so that later calls do nothing.

Compiling is done by running small instances, so that every function is met with the types of real calls.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from colibri_mp.formats import Encoding, Format
from colibri_mp.kernels import isa

Step = tuple[str, Callable[[], None]]


def warm(
    encodings: Iterable[Encoding], progress: Callable[[str], None], planes: int = 3, quantises: bool = False,
    blocks: Iterable[str] = (),
) -> list[str]:  # fmt: skip
    """Compile all stages, and the kernels for the encodings that a model's matrices have; returns the names of what was compiled.

    `quantises`: the search for scales too; `blocks`: these mixers with their routers (names in `BLOCKS`). progress: told before
    each compilation, e.g. "compiling kernels for avx512_vnni, once: expert FFN". Safe in several processes at once. Later calls
    return [] within a millisecond.
    """
    compiled = []
    for name, compile_step in _missing(encodings, planes, quantises, blocks):
        progress(f"compiling kernels for {isa.current().value}, once: {name}")
        compile_step()
        with _noted().open("a") as file:
            file.write(name + "\n")
        compiled.append(name)
    return compiled


def is_warm(
    encodings: Iterable[Encoding], planes: int = 3, quantises: bool = False, blocks: Iterable[str] = ()
) -> bool:
    """Whether `warm` would find everything compiled."""
    return not _missing(encodings, planes, quantises, blocks)


def _missing(encodings: Iterable[Encoding], planes: int, quantises: bool, blocks: Iterable[str]) -> list[Step]:
    before = set(_noted().read_text().splitlines()) if _noted().exists() else set()
    steps = [*_steps(sorted(set(encodings), key=str), planes)]
    if quantises:
        steps.append(("quantising", _warm_quantising))
    steps += [(f"{name} and router", BLOCKS[name]) for name in sorted(blocks)]
    return [step for step in steps if step[0] not in before]


def _noted() -> Path:
    return isa.prepare_cache().path / "compiled"


def _steps(encodings: Iterable[Encoding], planes: int) -> Iterator[Step]:
    for encoding in encodings:
        yield f"weights {_describe(encoding)}", lambda encoding=encoding: _warm_encoding(encoding)  # type: ignore[misc]  # bound in the loop
    for matrix_format in sorted({encoding.format for encoding in encodings}):
        name = f"products with {_name(matrix_format)}, {planes} planes"
        yield name, lambda matrix_format=matrix_format: _warm_format(matrix_format, planes)  # type: ignore[misc]  # likewise
    yield "expert FFN", _warm_experts
    yield "head", _warm_head


def _name(matrix_format: Format) -> str:
    return "/".join(str(part) for part in matrix_format if part)


def _describe(encoding: Encoding) -> str:
    return (
        f"{encoding.kind} {encoding.bits} bit, groups of {encoding.group_size}, {encoding.scale}"
        if encoding.group_size
        else encoding.kind
    )


def _warm_encoding(encoding: Encoding) -> None:
    import numpy as np

    from colibri_mp.kernels import layout
    from colibri_mp.kernels.team import aligned_bytes

    rows, cols = 16, encoding.group_size or 16
    parts = [np.zeros(size, np.uint8) for size in encoding.part_bytes(rows, cols)]
    packed = aligned_bytes(layout.packed_bytes(encoding.format, rows, cols))
    layout.pack(encoding, rows, cols, parts, packed)
    layout.gather_rows(layout.PackedMatrix(encoding.format, rows, cols, packed), np.zeros(1, np.int32))


def _warm_quantising() -> None:
    import numpy as np

    from colibri_mp.kernels.quantising import quantise

    quantise(np.zeros((1, 32), np.float32), 4, 32)


def _warm_format(matrix_format: Format, planes: int) -> None:
    from colibri_mp.kernels.linear import describe_format

    describe_format(matrix_format, 16, matrix_format.group_size or 16, planes)


_SMALL = Format("f32")
"""The format of the small instances: the stages are the same for all."""


def _warm_experts() -> None:
    import numpy as np

    from colibri_mp.kernels.expert import ExpertStage
    from colibri_mp.kernels.layout import ExpertShape
    from colibri_mp.kernels.resident_expert import ResidentExpert
    from colibri_mp.kernels.team import ThreadTeam, aligned_bytes

    shape = ExpertShape(16, 16, _SMALL, _SMALL, _SMALL)
    slab = aligned_bytes(shape.slab_bytes)
    x, ids, weights = np.zeros((1, 16), np.float32), np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32)
    with ThreadTeam(2) as team:
        stage, addresses = ExpertStage(team, shape, 1, 1, 1), np.array([slab.ctypes.data], np.int64)
        stage.begin(x, ids, weights)
        stage.compute(ids[0], addresses)
        stage.finish(x)
        stage.run(x, ids, weights, ids[0], addresses, x)
        ResidentExpert(team, shape, 1)(x, slab, x[0])


def _warm_attention() -> None:
    import numpy as np

    from colibri_mp.kernels.attention import AttentionStage, AttentionWeights, Batch
    from colibri_mp.kernels.block import BlockStage
    from colibri_mp.kernels.kv_cache import KVCache
    from colibri_mp.kernels.layout import PackedMatrix, packed_bytes
    from colibri_mp.kernels.rope import rope_tables
    from colibri_mp.kernels.router import RouterStage, RouterWeights
    from colibri_mp.kernels.team import ThreadTeam, aligned_bytes
    from colibri_mp.specs import AttentionSpec, RopeSpec, RouterSpec

    spec = AttentionSpec(hidden=16, num_heads=1, num_kv_heads=1, head_dim=16, scale=1.0, norm_eps=1e-6)
    matrix = PackedMatrix(_SMALL, 16, 16, aligned_bytes(packed_bytes(_SMALL, 16, 16)))
    weights = AttentionWeights(np.ones(16, np.float32), matrix, matrix, matrix, matrix)
    x, zero = np.ones((1, 16), np.float32), np.zeros(1, np.int32)
    kv, batch = KVCache(1, 1, 1, 16), Batch(zero, zero, np.zeros((1, 1), np.int32))
    with ThreadTeam(2) as team:
        attention = AttentionStage(team, spec, rope_tables(RopeSpec(theta=1e4, rotary_dim=16), 16), 1, 16)
        router = RouterStage(team, RouterSpec(16, 1, True), 16, 1e-6, 1)
        attention(x, weights, kv, 0, batch)
        BlockStage(team, attention, router)(x, weights, kv, 0, batch, weights.norm, RouterWeights(matrix))


def _warm_delta_net() -> None:
    import numpy as np

    from colibri_mp.kernels.attention_inputs import Batch
    from colibri_mp.kernels.block import BlockStage
    from colibri_mp.kernels.delta_net import DeltaNetStage, DeltaNetWeights, DeltaStates
    from colibri_mp.kernels.layout import PackedMatrix, packed_bytes
    from colibri_mp.kernels.router import RouterStage, RouterWeights
    from colibri_mp.kernels.team import ThreadTeam, aligned_bytes
    from colibri_mp.specs import DeltaNetSpec, RouterSpec

    def matrix(rows: int) -> PackedMatrix:
        return PackedMatrix(_SMALL, rows, 16, aligned_bytes(packed_bytes(_SMALL, rows, 16)))

    spec, ones, one = DeltaNetSpec(16, 1, 1, 16, 16, 2, 1e-6), np.ones(16, np.float32), np.ones(1, np.float32)
    weights = DeltaNetWeights(
        norm=ones, qkv=matrix(48), z=matrix(16), b=matrix(1), a=matrix(1), out=matrix(16),
        conv=np.ones((2, 48), np.float32), rate=-one, dt_bias=one, head_norm=ones,
    )  # fmt: skip
    x, zero = np.ones((1, 16), np.float32), np.zeros(1, np.int32)
    states, batch = DeltaStates(spec, 1, 1), Batch(zero, zero, zero.reshape(1, 1), np.array([[0, 1, -1, 0]], np.int32))
    with ThreadTeam(2) as team:
        stage, router = DeltaNetStage(team, spec, 1), RouterStage(team, RouterSpec(16, 1, True), 16, 1e-6, 1)
        stage(x, weights, states, 0, batch)
        BlockStage(team, stage, router)(x, weights, states, 0, batch, ones, RouterWeights(matrix(16)))


def _warm_head() -> None:
    import numpy as np

    from colibri_mp.kernels.head import HeadStage
    from colibri_mp.kernels.layout import PackedMatrix, packed_bytes
    from colibri_mp.kernels.linear import linear
    from colibri_mp.kernels.norm import rms_norm
    from colibri_mp.kernels.team import ThreadTeam, aligned_bytes

    matrix = PackedMatrix(_SMALL, 16, 16, aligned_bytes(packed_bytes(_SMALL, 16, 16)))
    x, norm = np.ones((1, 16), np.float32), np.ones(16, np.float32)
    with ThreadTeam(2) as team:
        HeadStage(team, 16, 16, 1e-6, 1)(x, norm, matrix)
        linear(team, x, matrix, None, x)
    rms_norm(x, norm, 1e-6)


def _warm_latent_attention() -> None:
    import numpy as np

    from colibri_mp.kernels.attention_inputs import Batch
    from colibri_mp.kernels.block import BlockStage
    from colibri_mp.kernels.latent_cache import LatentCache
    from colibri_mp.kernels.layout import PackedMatrix, packed_bytes
    from colibri_mp.kernels.mla import MlaStage
    from colibri_mp.kernels.mla_weights import MlaWeights
    from colibri_mp.kernels.rope import rope_tables
    from colibri_mp.kernels.router import RouterStage, RouterWeights
    from colibri_mp.kernels.team import ThreadTeam, aligned_bytes
    from colibri_mp.specs import MlaSpec, RopeSpec, RouterSpec

    spec = MlaSpec(16, 1, None, 16, 16, 16, 16, scale=1.0, norm_eps=1e-6)
    narrow, wide = (PackedMatrix(_SMALL, rows, 16, aligned_bytes(packed_bytes(_SMALL, rows, 16))) for rows in (16, 32))
    ones = np.ones(16, np.float32)
    weights = MlaWeights(ones, None, None, wide, wide, ones, narrow, narrow, narrow)
    x, zero = np.ones((1, 16), np.float32), np.zeros(1, np.int32)
    cache, batch = LatentCache(1, 1, 16, 16), Batch(zero, zero, np.zeros((1, 1), np.int32))
    with ThreadTeam(2) as team:
        attention = MlaStage(team, spec, rope_tables(RopeSpec(theta=1e4, rotary_dim=16), 16), 1, 16)
        router = RouterStage(team, RouterSpec(16, 1, True), 16, 1e-6, 1)
        attention(x, weights, cache, 0, batch)
        BlockStage(team, attention, router)(x, weights, cache, 0, batch, ones, RouterWeights(narrow))


BLOCKS: dict[str, Callable[[], None]] = {
    "attention": _warm_attention,
    "latent attention": _warm_latent_attention,
    "gated delta net": _warm_delta_net,
}
"""Mixers by name, each compiled together with the router."""
