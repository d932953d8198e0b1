"""A cluster whose KV cache has 8 bits: near the exact one, said to be lossy, and the same for everybody within the setting."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri_mp import Cluster

FIXTURE = Path(__file__).parents[1] / "golden" / "tiny" / "olmoe"
GREEDY: dict[str, Any] = {"max_tokens": 20, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two workers, prompts in chunks of 16."""
    with Cluster.launch(FIXTURE, num_workers=2, num_threads=2, ctx=192, prefill_chunk=16, kv_bits=8) as running:
        yield running


def test_logits_are_near_the_reference_and_the_setting_is_named(cluster: Cluster) -> None:
    """Off by more than rounding and by less than a hundredth of the spread of the logits; `status` says lossy."""
    golden = np.load(FIXTURE / "golden.npz")
    logits = cluster.logits(golden["input_ids"].tolist() + golden["generated_ids"].tolist())
    error = np.abs(logits - golden["logits"])
    assert 1e-5 < error.max() < 0.05 * golden["logits"].std()
    assert "--kv-bits 8" in cluster.stats()["lossy"]
    assert any("lossy: --kv-bits 8" in note for note in cluster.notes)


def test_chunks_batches_and_shared_prefixes_do_not_matter(cluster: Cluster) -> None:
    """Within the setting the bits are the same however a prompt is cut, whoever is beside it, and with a cached prefix."""
    prompts = [[3 + 7 * i % 200 for i in range(50)], [9, 8, 7], [100] * 33]
    alone = [cluster.logits(prompt, chunk=1) for prompt in prompts]
    for got, want in zip(cluster.logits_batch(prompts), alone, strict=True):
        np.testing.assert_array_equal(got, want)
    first = cluster.generate(prompts[0] + [5], **GREEDY)
    assert first.stats["cached_tokens"] == 48
    tokens = prompts[0] + [5] + first.token_ids
    assert first.token_ids == cluster.logits(tokens)[50:-1].argmax(axis=1).tolist()
