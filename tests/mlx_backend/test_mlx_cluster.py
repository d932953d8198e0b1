"""Clusters on MLX: real processes, workers that evict and read ahead, prefixes, session files."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed: pip install 'colibri-mp[mlx]'")

from colibri_mp import Cluster

QWEN3 = Path(__file__).parents[1] / "golden" / "tiny_mlx" / "qwen3_moe_q4"
SETTINGS = {"num_threads": 1, "ctx": 128, "num_workers": 1, "usage": "off"}


def test_mlx_is_the_reference(tmp_path: Path) -> None:
    """With a quarter of the experts in memory: reference logits and tokens, prefixes shared, a session file restored."""
    golden = np.load(QWEN3 / "golden.npz")
    prompt, generated = golden["input_ids"].ravel().tolist(), golden["generated_ids"].ravel().tolist()
    session = tmp_path / "session"
    with Cluster.launch(QWEN3, backend="mlx", slots=4, lookahead="on", **SETTINGS) as cluster:
        logits = cluster.logits(prompt + generated)
        np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=2e-4)
        done = cluster.generate(prompt, max_tokens=len(generated), temperature=0.0, ignore_eos=True)
        assert done.token_ids == generated
        again = cluster.generate(prompt + generated[:-1], max_tokens=1, temperature=0.0, ignore_eos=True)
        assert again.token_ids == generated[-1:]
        assert again.stats["cached_tokens"] >= 16
        status = cluster.stats()
        assert status["model"]["backend"] == "mlx"
        assert any(note.startswith("backend mlx: MLX") for note in status["notes"])
        assert status["tiers"]["lookahead"]["predictions"] > 0
        cluster.save_session(prompt + generated, session)
    with Cluster.launch(QWEN3, backend="mlx", **SETTINGS) as cluster:
        cluster.restore_session(session)
        again = cluster.generate(prompt + generated[:-1], max_tokens=1, temperature=0.0, ignore_eos=True)
        assert again.token_ids == generated[-1:]
        assert again.stats["cached_tokens"] >= 16
