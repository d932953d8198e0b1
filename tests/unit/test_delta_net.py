"""The compiled gated delta net against plain numpy, and against itself: cut, mixed and resumed."""

import numpy as np
import pytest
from delta_cases import MAX_TOKENS, MIXED, Net, batch_of, make_net

from colibri_mp.errors import CheckpointError
from colibri_mp.kernels import reference_delta as reference
from colibri_mp.kernels.delta_net import DeltaNetStage
from colibri_mp.kernels.team import ThreadTeam
from colibri_mp.specs import DeltaNetSpec

NETS: dict[str, dict[str, object]] = {
    "groups of three": {},
    "a head for each key": {"num_key_heads": 4, "num_value_heads": 4, "value_dim": 32},
    "wide values, long convolution": {"num_value_heads": 2, "value_dim": 48, "conv_tokens": 6},
    "short convolution": {"conv_tokens": 2, "key_dim": 16},
    "mixed formats": {"encodings": MIXED, "hidden": 64, "value_dim": 32},
}


def whole(net: Net, x: np.ndarray, num_threads: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """All rows of one sequence in one run from nothing to slot 1: what comes out, and the state as bytes."""
    states, out = net.states(), x.copy()
    with ThreadTeam(num_threads) as team:
        net.stage(team)(out, net.weights, states, 1, batch_of([(0, len(x), -1, 1)]))
    return out, states.copy_slot(1)


@pytest.mark.parametrize("name", NETS)
def test_delta_net_equals_the_reference(name: str) -> None:
    """Rows and state are those of plain numpy, whatever was in the slot before."""
    net = make_net(**NETS[name])  # type: ignore[arg-type]
    x, states, want = net.rows(MAX_TOKENS), net.states(), net.states()
    got, expected, batch = x.copy(), x.copy(), batch_of([(0, MAX_TOKENS, -1, 2)])
    reference.delta_net(expected, net.weights, net.spec, want, 0, batch)
    with ThreadTeam(2) as team:
        net.stage(team)(got, net.weights, states, 0, batch)
    assert np.allclose(got, expected, rtol=0, atol=2e-5)
    assert np.abs(expected - x).max() > 0.1
    np.testing.assert_allclose(states.states[0, 2], want.states[0, 2], rtol=0, atol=2e-5)
    np.testing.assert_allclose(states.tails[0, 2], want.tails[0, 2], rtol=0, atol=1e-5)


@pytest.mark.parametrize("cuts", [[1] * 40, [17, 1, 2, 20], [16, 24], [3, 37]])
def test_rows_do_not_depend_on_how_a_prompt_is_cut(cuts: list[int]) -> None:
    """Steps of any number of rows, on one thread or three, give the bits of one step, and the same state."""
    net = make_net(MIXED)
    x = net.rows(40)
    want, state = whole(net, x)
    got, states, start = x.copy(), net.states(), 0
    with ThreadTeam(3) as team:
        stage = net.stage(team)
        for count in cuts:
            rows = got[start : start + count].copy()
            stage(rows, net.weights, states, 1, batch_of([(0, count, 1 if start else -1, 1)]))
            got[start : start + count], start = rows, start + count
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(states.copy_slot(1), state)


def test_sequences_do_not_see_each_other() -> None:
    """Three sequences in one batch, one of them over two slots: each gives what it gives alone, and its states on the way are kept."""
    net = make_net()
    parts = [net.rows(5), net.rows(20), net.rows(1)]
    alone = [whole(net, part) for part in parts]
    states, x = net.states(), np.concatenate(parts)
    with ThreadTeam(3) as team:
        stage = net.stage(team)
        stage(x, net.weights, states, 1, batch_of([(0, 5, -1, 0), (1, 2, -1, 1), (1, 18, 1, 2), (2, 1, -1, 3)]))
        np.testing.assert_array_equal(x, np.concatenate([rows for rows, _ in alone]))
        for slot, (_, state) in zip((0, 2, 3), alone, strict=True):
            np.testing.assert_array_equal(states.copy_slot(slot), state)
        again = parts[1][2:].copy()  # from the state after its second row, which slot 1 has kept
        stage(again, net.weights, states, 1, batch_of([(0, 18, 1, 3)]))
    np.testing.assert_array_equal(again, alone[1][0][2:])


def test_a_state_can_be_moved() -> None:
    """`set_slot` is the inverse of `copy_slot`, in another object and slot too; nothing else changes."""
    net = make_net()
    _, state = whole(net, net.rows(9))
    states = net.states()
    states.set_slot(3, state)
    np.testing.assert_array_equal(states.copy_slot(3), state)
    assert state.nbytes == states.slot_bytes
    assert np.isnan(states.states[:, :3]).all()
    assert np.isnan(states.tails[:, :3]).all()


def test_delta_stages_allocate_no_more_than_planned() -> None:
    """`scratch_bytes` bounds what a stage holds after use, with one and with two forms of prepared rows."""
    for encodings, forms in ((None, 1), (MIXED, 2)):
        net = make_net(encodings)
        with ThreadTeam(2) as team:
            stage = net.stage(team)
            stage(net.rows(3), net.weights, net.states(), 0, batch_of([(0, 3, -1, 0)]))
            arrays = [stage._scratch, *stage._prepared.arrays]
            arrays += [array for rows in stage._activations.values() for array in (rows.data, rows.table)]
            held = sum({array.ctypes.data: array.nbytes for array in arrays}.values())
            planned = DeltaNetStage.scratch_bytes(net.spec, MAX_TOKENS, 2, forms)
        assert held <= planned <= 1.5 * held


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_value_heads": 3}, "2 key heads and 3"),
        ({"key_dim": 24}, "linear_key_head_dim"),
        ({"value_dim": 1024}, "linear_value_head_dim"),
        ({"conv_tokens": 1}, "convolution over 1"),
    ],
)
def test_impossible_shapes_are_refused(change: dict[str, int], message: str) -> None:
    """A config that the kernels cannot compute is an error that names the number."""
    sizes = {"hidden": 64, "num_key_heads": 2, "num_value_heads": 4, "key_dim": 16, "value_dim": 16, "conv_tokens": 4}
    with pytest.raises(CheckpointError, match=message):
        DeltaNetSpec(norm_eps=1e-6, **(sizes | change))
