"""A worker on MLX: the routed sums of the plain reference, from a pool and a device that hold less than a step needs."""

from pathlib import Path

import numpy as np
import pytest
from worker_fixture import NUM_EXPERTS, TOP_K, Model, random_batch, run_step, running

pytest.importorskip("mlx.core", reason="mlx is not installed: pip install 'colibri-mp[mlx]'")

from colibri_mp.messages import Route, Routed, from_frames, to_frames
from colibri_mp.mlx_backend.expert_tier import slot_bytes
from colibri_mp.workers.core import WorkerConfig


def config_of(model: Model, num_slots: int, num_on_device: int) -> WorkerConfig:
    """`num_on_device`: experts of each layer, about."""
    device_bytes = sum(num_on_device * slot_bytes(layer.shape) for layer in model.expert_layers)
    return model.config(num_slots, backend="mlx", device_bytes=device_bytes)


@pytest.mark.parametrize(("num_slots", "num_on_device"), [(NUM_EXPERTS, NUM_EXPERTS), (TOP_K, 2)])
def test_steps_are_the_reference(tmp_path: Path, num_slots: int, num_on_device: int) -> None:
    """Steps of both layers, of one and of many tokens, in rounds or at once, equal the reference."""
    model = Model(tmp_path)
    with running(config_of(model, num_slots, num_on_device)) as worker:
        for seed, layer in enumerate((1, 4, 1, 4)):
            batch = random_batch(seed, 1 if seed < 2 else 9, skip=0.2)
            out, counters = run_step(worker, layer, batch)
            expected = model.reference(layer, *batch)
            np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
            assert counters.misses > 0 or num_slots == NUM_EXPERTS


def test_answer_at_once(tmp_path: Path) -> None:
    """A short step whose experts are all in the pool is answered from its frame, with the bits of `step`."""
    model = Model(tmp_path)
    batch = random_batch(7, 2)
    with running(config_of(model, NUM_EXPERTS, 2)) as worker:
        out, _ = run_step(worker, 1, batch)
        (frame,) = to_frames(Route(3, 1, *batch))
        answer = worker.answer_at_once(bytes(frame), lambda: None)
        assert answer is not None
        routed = from_frames([bytes(answer)])
        assert isinstance(routed, Routed)
        np.testing.assert_array_equal(routed.y, out)
