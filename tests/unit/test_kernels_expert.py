"""The expert stage: against numpy, and the same bits whatever the batch, the order of arrival and the number of threads."""

from dataclasses import replace

import numpy as np
import pytest
from kernel_cases import BF16, EXPERT_ENCODINGS, F32, FP8, INT8, MXFP4, NVFP4, Experts, affine, int4

from colibri_mp.formats import Encoding
from colibri_mp.kernels import expert, reference
from colibri_mp.kernels.expert import ExpertStage, scratch_bytes
from colibri_mp.kernels.layout import ExpertShape
from colibri_mp.kernels.resident_expert import ResidentExpert
from colibri_mp.kernels.team import ThreadTeam, aligned_bytes
from colibri_mp.specs import ClampedSwiGLU

Q4, Q8 = affine(4, 64, "bf16"), affine(8, 64, "bf16")
CASES = (
    ((Q4, Q4, Q4), 128, 192),
    (EXPERT_ENCODINGS, 128, 96),  # a last chunk of 32 hidden columns
    ((BF16, BF16, BF16), 72, 40),  # columns of D and F that fill no block
    ((F32, Q4, Q8), 64, 64),  # gate and up read differently prepared activations
    ((Q4, Q4, affine(8, 128, "f32")), 64, 256),  # chunks of 128 hidden columns
    ((MXFP4, MXFP4, NVFP4), 96, 160),  # a last line of one group, and of two
    ((FP8, FP8, FP8), 136, 152),  # last tiles that are smaller, hidden columns that fill no chunk
    ((INT8, INT8, int4(48)), 128, 144),  # chunks of 96 hidden columns
)


@pytest.mark.parametrize(("encodings", "hidden", "width"), CASES)
def test_step_agrees_with_numpy(encodings: tuple[Encoding, Encoding, Encoding], hidden: int, width: int) -> None:
    """A batch of 70 tokens, enough for several passes of an expert, gives the weighted sums of the experts' outputs."""
    experts = Experts(encodings, hidden, width)
    batch = experts.batch(70, 4)
    with ThreadTeam(2) as team:
        out = experts.step(ExpertStage(team, experts.shape, len(experts.ids), 70, 4), batch, experts.ids)
    expected = reference.experts(*batch, experts.matrices)
    assert np.abs(out - expected).max() < 1e-6 * np.abs(expected).max()


@pytest.mark.parametrize(("encodings", "hidden", "width"), CASES[:3] + CASES[5:])
def test_bits_do_not_depend_on_order_batch_or_threads(
    encodings: tuple[Encoding, Encoding, Encoding], hidden: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts in any order and number of calls, tokens alone or together, one to three threads: the same bits."""
    monkeypatch.setattr(expert, "ALONE_BYTES", 0)
    experts, rng = Experts(encodings, hidden, width), np.random.default_rng(1)
    x, ids, weights = batch = experts.batch(13, 3)
    results = []
    for num_threads in (1, 2, 3):
        with ThreadTeam(num_threads) as team:
            stage = ExpertStage(team, experts.shape, len(experts.ids), 13, 3)
            results += [experts.step(stage, batch, rng.permutation(experts.ids), num_calls) for num_calls in (1, 2, 6)]
            results.append(np.full_like(x, np.nan))
            stage.run(*batch, experts.ids, experts.addresses(experts.ids), results[-1])
            rows = [slice(t, t + 1) for t in range(13)]
            results.append(np.concatenate([experts.step(stage, (x[r], ids[r], weights[r]), experts.ids) for r in rows]))
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def test_dense_block_is_one_expert_with_weight_one() -> None:
    """The coordinator uses the stage for dense layers: the sum with one weight of 1 is the expert's output."""
    experts = Experts((Q4, Q4, Q4), 64, 64, num_experts=1)
    x, _, _ = experts.batch(5, 1)
    with ThreadTeam(1) as team:
        stage = ExpertStage(team, experts.shape, len(experts.ids), 8, 1)
        out = experts.step(stage, (x, np.zeros((5, 1), np.int32), np.ones((5, 1), np.float32)), experts.ids)
    expected = reference.expert(x, *experts.matrices[0])
    assert np.abs(out - expected).max() < 1e-6 * np.abs(expected).max()


@pytest.mark.parametrize("encoding", [Q4, BF16], ids=["q4", "bf16"])
@pytest.mark.parametrize("clamp", [None, ClampedSwiGLU(0.5)], ids=["silu", "clamped"])
def test_biases_and_clamped_activation(encoding: Encoding, clamp: ClampedSwiGLU | None) -> None:
    """Biases in the slab after the matrices and the other activation, whole and in parts, as in plain numpy."""
    plain = Experts((encoding,) * 3, 64, 192, num_experts=4)
    shape = replace(plain.shape, has_bias=True, clamp=clamp)
    rng, slabs, matrices = np.random.default_rng(3), aligned_bytes(4 * shape.slab_bytes).reshape(4, -1), []
    for slab, before, values in zip(slabs, plain.slabs, plain.matrices, strict=True):
        biases = tuple(rng.standard_normal(size).astype(np.float32) for size in (192, 192, 64))
        slab[: plain.shape.nbytes] = before[: plain.shape.nbytes]
        for offset, bias in zip(shape.bias_offsets, biases, strict=True):
            slab[offset : offset + bias.nbytes] = bias.view(np.uint8)
        matrices.append((*values, biases))
    x, ids, weights = plain.batch(9, 2)
    addresses = np.array([slab.ctypes.data for slab in slabs], np.int64)
    out, parts = np.empty_like(x), np.empty_like(x)
    with ThreadTeam(2) as team:
        stage = ExpertStage(team, shape, 4, 9, 2)
        stage.run(x, ids, weights, plain.ids, addresses, out)
        stage.begin(x, ids, weights)
        for expert in (2, 0, 3, 1):
            stage.compute(plain.ids[expert : expert + 1], addresses[expert : expert + 1])
        stage.finish(parts)
    want = reference.experts(x, ids, weights, matrices, clamp)
    assert np.abs(out - want).max() < 2e-6 * np.abs(want).max()
    np.testing.assert_array_equal(out, parts)


@pytest.mark.parametrize("width", [64, 72])
def test_resident_expert(width: int) -> None:
    """The expert of every token, times the sigmoid of its gate if there is one; a row alone has the same bits."""
    experts = Experts((BF16,) * 3, width, 64, num_experts=1)
    (x, _, _), gate = experts.batch(7, 1), np.random.default_rng(5).standard_normal(width).astype(np.float32)
    with ThreadTeam(2) as team:
        stage = ResidentExpert(team, experts.shape, 8)
        plain, gated = stage(x, experts.slabs[0]), stage(x, experts.slabs[0], gate)
        alone = np.concatenate([stage(x[t : t + 1], experts.slabs[0], gate) for t in range(7)])
    want = reference.expert(x, *experts.matrices[0])
    assert np.abs(plain - want).max() < 2e-6 * np.abs(want).max()
    assert np.abs(gated - want / (1 + np.exp(-(x @ gate)))[:, None]).max() < 2e-6 * np.abs(want).max()
    np.testing.assert_array_equal(alone, gated)


def test_experts_that_nobody_chose_change_nothing() -> None:
    """Computing more experts than were routed, ids beyond the largest included, is allowed."""
    experts = Experts((Q4, Q4, Q4), 64, 64)
    x, ids, weights = experts.batch(4, 2)
    ids = np.minimum(ids, 2)
    with ThreadTeam(2) as team:
        stage = ExpertStage(team, experts.shape, len(experts.ids), 4, 2)
        every = experts.step(stage, (x, ids, weights), experts.ids)
        routed = experts.step(stage, (x, ids, weights), np.unique(ids[ids >= 0]))
    np.testing.assert_array_equal(every, routed)


def test_tokens_without_experts_give_zeros() -> None:
    """A step where nothing is routed to us ends without a compute call, and with zeros."""
    shape = ExpertShape(64, 64, Q4.format, Q4.format, Q4.format)
    out = np.ones((3, 64), np.float32)
    with ThreadTeam(1) as team:
        stage = ExpertStage(team, shape, 8, 4, 2)
        stage.begin(np.ones((3, 64), np.float32), np.full((3, 2), -1, np.int32), np.ones((3, 2), np.float32))
        stage.finish(out)
    assert not out.any()


def test_an_id_beyond_the_experts_is_refused() -> None:
    """By `begin` and by `run`, before it can reach beyond a table; the next step works."""
    experts = Experts((Q4, Q4, Q4), 64, 64)
    x, ids, weights = experts.batch(6, 2)
    wrong = np.where(ids == ids.max(), len(experts.ids), ids)
    with ThreadTeam(2) as team:
        stage = ExpertStage(team, experts.shape, len(experts.ids), 6, 2)
        before = experts.step(stage, (x, ids, weights), experts.ids)
        with pytest.raises(AssertionError, match="not below 6"):
            stage.begin(x, wrong, weights)
        with pytest.raises(AssertionError, match="rows were computed"):
            stage.run(x, wrong, weights, experts.ids, experts.addresses(experts.ids), np.empty_like(x))
        np.testing.assert_array_equal(experts.step(stage, (x, ids, weights), experts.ids), before)


def test_finish_refuses_a_step_with_missing_experts() -> None:
    """A forgotten expert is an error and not a wrong sum."""
    experts = Experts((Q4, Q4, Q4), 64, 64)
    with ThreadTeam(1) as team:
        stage = ExpertStage(team, experts.shape, len(experts.ids), 6, 2)
        batch, some = experts.batch(6, 2), experts.ids[:-1]
        with pytest.raises(AssertionError, match="rows were computed"):
            experts.step(stage, batch, some)
        with pytest.raises(AssertionError, match="rows were computed"):
            stage.run(*batch, some, experts.addresses(some), np.empty_like(batch[0]))


def test_scratch_is_what_the_plan_says() -> None:
    """`scratch_bytes` counts all arrays of a stage, to a few KiB."""
    shape = ExpertShape(128, 192, Q4.format, Q4.format, Q4.format)
    with ThreadTeam(1) as team:
        stage = ExpertStage(team, shape, 8, 50, 4)
    arrays = {id(value): value.nbytes for value in vars(stage).values() if isinstance(value, np.ndarray)}
    owned = sum(arrays.values())
    planned = scratch_bytes(shape, 50, 4, num_threads=1)
    assert planned <= owned <= planned + 16384
