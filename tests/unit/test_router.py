"""The compiled router and head against plain numpy, and their exactness."""

import time
from typing import Any

import numpy as np
import pytest
from attention_cases import BF16, F32, Q4, Q8, batch_of, make_block, random_matrix

from colibri_mp.errors import CheckpointError
from colibri_mp.formats import Encoding
from colibri_mp.kernels import reference_attention as reference
from colibri_mp.kernels.block import BlockStage
from colibri_mp.kernels.head import HeadStage
from colibri_mp.kernels.norm import rms_norm
from colibri_mp.kernels.router import RouterStage, RouterWeights
from colibri_mp.kernels.team import ThreadTeam
from colibri_mp.specs import RouterSpec

HIDDEN, TOKENS = 64, 21


def rows(seed: int, num_rows: int = TOKENS) -> tuple[np.ndarray, np.ndarray]:
    """(x [T, D], norm [D])"""
    rng = np.random.default_rng(seed)
    norm = 1 + 0.1 * rng.standard_normal(HIDDEN)
    return rng.standard_normal((num_rows, HIDDEN)).astype(np.float32), norm.astype(np.float32)


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("encoding", [BF16, F32, Q4, Q8], ids=lambda encoding: f"{encoding.kind}{encoding.bits}")
@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (128, 8), (500, 64), (3, 3)])
def test_router_equals_the_reference(num_experts: int, top_k: int, encoding: Encoding, renormalise: bool) -> None:
    """Normed rows, ids and weights are those of plain numpy, ids ascending."""
    (x, norm), gate = rows(1), random_matrix(np.random.default_rng(2), encoding, num_experts, HIDDEN)
    spec = RouterSpec(num_experts, top_k, renormalise)
    with ThreadTeam(2) as team:
        stage = RouterStage(team, spec, HIDDEN, 1e-6, TOKENS)
        h, ids, weights = stage(x, norm, RouterWeights(gate))
    want_h, want_ids, want_weights = reference.route(x, norm, RouterWeights(gate), spec, 1e-6)
    assert np.allclose(h, want_h, rtol=0, atol=2e-6)
    assert np.array_equal(ids, want_ids)
    assert (np.diff(ids, axis=1) > 0).all()
    assert np.allclose(weights, want_weights, rtol=1e-5, atol=0)
    assert np.allclose(stage.logits(TOKENS), reference.linear(want_h, gate), rtol=0, atol=1e-5)


def grouped(num_experts: int, top_k: int, num_groups: int, kept_groups: int, **more: Any) -> RouterSpec:
    """A noaux_tc router."""
    return RouterSpec(
        num_experts, top_k, True, scoring="sigmoid", num_groups=num_groups, kept_groups=kept_groups, scaling=2.5, **more
    )


GROUPED = {
    "one group": grouped(40, 6, 1, 1),
    "groups": grouped(64, 8, 8, 4),
    "one of its groups": grouped(24, 3, 6, 1),
    "top-p": grouped(40, 6, 4, 2, top_p=0.6),
}


@pytest.mark.parametrize("spec", GROUPED.values(), ids=GROUPED.keys())
def test_sigmoid_router_equals_the_reference(spec: RouterSpec) -> None:
    """Chosen by corrected scores, negative ones too, in the best groups; weights are the plain scores; alone as in a batch."""
    (x, norm), rng = rows(11), np.random.default_rng(12)
    correction = (0.2 * rng.standard_normal(spec.num_experts) - 0.6).astype(np.float32)
    weights = RouterWeights(random_matrix(rng, BF16, spec.num_experts, HIDDEN), None, correction)
    with ThreadTeam(2) as team:
        stage = RouterStage(team, spec, HIDDEN, 1e-6, TOKENS)
        _, ids, shares = (part.copy() for part in stage(x, norm, weights))
        alone = [stage(x[t : t + 1], norm, weights)[2][0].copy() for t in range(TOKENS)]
    _, want_ids, want_shares = reference.route(x, norm, weights, spec, 1e-6)
    assert np.array_equal(ids, want_ids)
    assert np.allclose(shares, want_shares, rtol=1e-5, atol=0)
    assert np.allclose(shares.sum(axis=1), 2.5, rtol=1e-5)
    assert np.array_equal(alone, shares)


def test_bias_of_the_logits() -> None:
    """It is added before the softmax, and takes part in choice and weights; another router on the same stage has its own."""
    (x, norm), rng = rows(13), np.random.default_rng(14)
    spec = RouterSpec(20, 4, True)
    biased = RouterWeights(random_matrix(rng, BF16, 20, HIDDEN), rng.standard_normal(20).astype(np.float32))
    plain = RouterWeights(random_matrix(rng, BF16, 20, HIDDEN))
    with ThreadTeam(1) as team:
        stage = RouterStage(team, spec, HIDDEN, 1e-6, TOKENS)
        for weights in (biased, plain, biased):
            _, ids, shares = stage(x, norm, weights)
            _, want_ids, want_shares = reference.route(x, norm, weights, spec, 1e-6)
            assert np.array_equal(ids, want_ids)
            assert np.allclose(shares, want_shares, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("num_experts", "top_k", "num_groups", "kept_groups"),
    [(40, 6, 7, 2), (40, 6, 40, 8), (40, 11, 4, 1), (40, 6, 4, 5)],
)
def test_impossible_groups(num_experts: int, top_k: int, num_groups: int, kept_groups: int) -> None:
    """Groups that are not equal, of one expert, too small for the choice, or more than there are."""
    with pytest.raises(CheckpointError, match=f"{kept_groups} of {num_groups} groups"):
        grouped(num_experts, top_k, num_groups, kept_groups)


def test_ties_go_to_the_lower_id() -> None:
    """Of equal probabilities the first ones are taken, and weights belong to their ids."""
    gate_rows = np.zeros((20, HIDDEN), np.float32)
    gate_rows[[3, 7, 11, 19]] = 1.0 / HIDDEN
    gate = random_matrix(np.random.default_rng(0), F32, 20, HIDDEN)
    gate.data.view(np.float32)[:] = (
        np.pad(gate_rows, ((0, 12), (0, 0))).reshape(2, 16, HIDDEN).transpose(0, 2, 1).reshape(-1)
    )
    x, ones = np.ones((1, HIDDEN), np.float32), np.ones(HIDDEN, np.float32)
    with ThreadTeam(1) as team:
        for top_k, chosen in ((2, [3, 7]), (4, [3, 7, 11, 19]), (6, [0, 1, 3, 7, 11, 19])):
            _, ids, weights = RouterStage(team, RouterSpec(20, top_k, False), HIDDEN, 0.0, 1)(
                x, ones, RouterWeights(gate)
            )
            assert ids[0].tolist() == chosen
            assert np.allclose(weights[0], [np.exp(float(i in (3, 7, 11, 19))) / (16 + 4 * np.e) for i in chosen])


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.7, 0.95])
def test_top_p_keeps_the_largest_weights(top_p: float, renormalise: bool) -> None:
    """The fewest of the largest weights that reach the share stay, the others have id -1 and weight 0; as plain numpy."""
    (x, norm), gate = rows(9), random_matrix(np.random.default_rng(10), BF16, 40, HIDDEN)
    with ThreadTeam(2) as team:
        everything, kept = (
            [
                part.copy()
                for part in RouterStage(team, RouterSpec(40, 8, renormalise, p), HIDDEN, 1e-6, TOKENS)(
                    x, norm, RouterWeights(gate)
                )
            ]
            for p in (1.0, top_p)
        )
    _, want_ids, want_weights = reference.route(
        x, norm, RouterWeights(gate), RouterSpec(40, 8, renormalise, top_p), 1e-6
    )
    assert np.array_equal(kept[1], want_ids)
    assert np.allclose(kept[2], want_weights, rtol=1e-5, atol=0)
    assert (kept[2][kept[1] < 0] == 0).all()
    for (_, all_ids, all_weights), (_, ids, weights) in zip(
        zip(*everything, strict=True), zip(*kept, strict=True), strict=True
    ):
        share = dict(zip(all_ids.tolist(), (all_weights / all_weights.sum()).tolist(), strict=True))
        stay = [share.pop(expert) for expert in ids.tolist() if expert >= 0]
        assert sum(stay) >= top_p - 1e-6 > sum(stay) - min(stay) - 2e-6
        assert min(stay) >= max(share.values(), default=0.0)
        assert np.isclose(weights.sum(), 1.0 if renormalise else sum(stay) * all_weights.sum(), rtol=1e-5)


def test_top_p_of_equal_weights_keeps_the_lower_ids() -> None:
    """Of 4 equal weights, half of the sum is 2 experts, a little more is 3; dropped ones come first."""
    gate, norm = random_matrix(np.random.default_rng(0), F32, 4, HIDDEN), np.ones(HIDDEN, np.float32)
    gate.data[:] = 0
    with ThreadTeam(1) as team:
        for top_p, chosen in (
            (0.5, [-1, -1, 0, 1]),
            (0.51, [-1, 0, 1, 2]),
            (0.001, [-1, -1, -1, 0]),
            (1.0, [0, 1, 2, 3]),
        ):
            _, ids, _ = RouterStage(team, RouterSpec(4, 4, True, top_p), HIDDEN, 1e-6, 1)(
                norm[None], norm, RouterWeights(gate)
            )
            assert ids[0].tolist() == chosen


@pytest.mark.parametrize("top_p", [0.0, -0.1, 1.5])
def test_impossible_top_p(top_p: float) -> None:
    """A share must be above 0 and at most 1."""
    with pytest.raises(CheckpointError, match=str(top_p)):
        RouterSpec(8, 2, True, top_p)


@pytest.mark.parametrize("encoding", [BF16, Q4], ids=["bf16", "q4"])
def test_router_does_not_depend_on_the_batch(encoding: Encoding) -> None:
    """One token alone on one thread has the bits that it has among others on two."""
    (x, norm), gate = rows(3), random_matrix(np.random.default_rng(4), encoding, 40, HIDDEN)
    weights = RouterWeights(gate)
    with ThreadTeam(1) as one, ThreadTeam(2) as two:
        together = [
            part.copy()
            for part in RouterStage(two, RouterSpec(40, 6, True), HIDDEN, 1e-6, TOKENS)(x, norm, RouterWeights(gate))
        ]
        stage = RouterStage(one, RouterSpec(40, 6, True), HIDDEN, 1e-6, 1)
        for t in range(TOKENS):
            for got, want in zip(stage(x[t : t + 1], norm, weights), together, strict=True):
                assert np.array_equal(got[0], want[t])


@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 0), (8, 9), (513, 8), (512, 65)])
def test_impossible_routers_are_checkpoint_errors(num_experts: int, top_k: int) -> None:
    """More experts chosen than there are, none, or more than the kernels take."""
    with pytest.raises(CheckpointError, match=f"{top_k} of {num_experts}"):
        RouterSpec(num_experts, top_k, True)


@pytest.mark.parametrize("encoding", [BF16, Q4, Q8], ids=lambda encoding: f"{encoding.kind}{encoding.bits}")
def test_head_equals_the_reference_and_does_not_depend_on_the_batch(encoding: Encoding) -> None:
    """Logits are those of plain numpy; a row alone has the same bits as among others. 300 rows do not fill whole blocks."""
    (x, norm), weight = rows(5), random_matrix(np.random.default_rng(6), encoding, 300, HIDDEN)
    with ThreadTeam(2) as team:
        stage = HeadStage(team, HIDDEN, 300, 1e-5, TOKENS)
        logits = stage(x, norm, weight).copy()
        assert logits.shape == (TOKENS, 300)
        assert np.allclose(logits, reference.head(x, norm, weight, 1e-5), rtol=0, atol=2e-5)
        for t in range(0, TOKENS, 5):
            assert np.array_equal(stage(x[t : t + 1], norm, weight)[0], logits[t])


def test_planned_bytes_cover_what_is_allocated() -> None:
    """The buffers of router and head take no more than their `scratch_bytes`."""
    spec = RouterSpec(40, 6, True)
    with ThreadTeam(1) as team:
        router, head = RouterStage(team, spec, HIDDEN, 1e-6, TOKENS), HeadStage(team, HIDDEN, 300, 1e-6, TOKENS)
        (x, norm), rng = rows(7), np.random.default_rng(8)
        router(x, norm, RouterWeights(random_matrix(rng, Q8, 40, HIDDEN)))
        head(x, norm, random_matrix(rng, F32, 300, HIDDEN))
        own = [router._probabilities, router._ids, router._weights, router._group_scores]
        for linear, planned, more in (
            (router._linear, RouterStage.scratch_bytes(spec, HIDDEN, TOKENS), own),
            (head._linear, HeadStage.scratch_bytes(HIDDEN, 300, TOKENS), []),
        ):
            arrays = [linear.h, linear.y, linear._prepared, linear._ys, *linear._tables.values(), *more]
            assert sum(array.nbytes for array in arrays) <= planned


@pytest.mark.parametrize("width", [16, 24, 7, 2048])
def test_rms_norm_equals_the_reference(width: int) -> None:
    """Widths that fill no vector included."""
    rng = np.random.default_rng(width)
    x, weight = rng.standard_normal((5, width)).astype(np.float32), rng.standard_normal(width).astype(np.float32)
    assert np.allclose(rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_block_has_the_bits_of_attention_and_router(num_threads: int) -> None:
    """One call for both gives what one after the other gives, for a batch and for a single row after it."""
    block = make_block(encodings=dict.fromkeys("qkvo", Q4))
    gate = RouterWeights(random_matrix(np.random.default_rng(2), BF16, 12, HIDDEN))
    table = np.arange(2, dtype=np.int32)[None]
    x, norm = block.rows(TOKENS), rows(3)[1]
    alone, fused, kept = x.copy(), x.copy(), (block.cache(TOKENS), block.cache(TOKENS))
    with ThreadTeam(num_threads) as team:
        attention, router = block.stage(team), RouterStage(team, RouterSpec(12, 3, True), HIDDEN, 1e-6, TOKENS)
        both = BlockStage(team, attention, router)
        for some in (slice(0, TOKENS - 1), slice(TOKENS - 1, TOKENS)):
            batch = batch_of([(position, 0) for position in range(*some.indices(TOKENS))], table)
            attention(alone[some], block.weights, kept[0], 1, batch)
            expected = [part.copy() for part in router(alone[some], norm, gate)]
            started_s = time.perf_counter()
            results = both(fused[some], block.weights, kept[1], 1, batch, norm, gate)
            assert started_s < both.mixer_ended_s < time.perf_counter()
            for got, want in zip(results, expected, strict=True):
                np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(fused, alone)
