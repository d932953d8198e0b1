"""Logits are the same bits for any number of workers and threads, any pool, any chunking, alone or in a batch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri_mp import Cluster
from colibri_mp.messages import Floats

GOLDEN = Path(__file__).parents[1] / "golden"
FIXTURES = [
    *("tiny/qwen3_moe_mixed", "tiny/olmoe", "tiny/mixtral_swa_tied", "tiny_mlx/qwen3_moe_q4"),
    *("tiny/glm4_moe_groups", "tiny/qwen2_moe", "tiny/gpt_oss_mxfp4", "tiny_mlx/qwen3_next_q4_g32", "tiny/deepseek_v3"),
    *("tiny/glm_moe_dsa_shared", "tiny/deepseek_v2", "tiny/qwen3_5_moe"),
]
NUM_EXPERTS, TOP_K = 8, 2  # of all fixtures but those in MORE_SLOTS, whose pools are no smaller than they need
MORE_SLOTS = {"glm4_moe_groups": 4, "deepseek_v3": 4, "deepseek_v2": 3}
REFERENCE = {"num_workers": 1, "num_threads": 1, "ctx": 128}
"""With all experts in memory."""
VARIANTS: list[dict[str, Any]] = [  # the usage that one has learned is read at the start of the next
    {"num_workers": 2, "num_threads": 2, "ctx": 128, "slots": TOP_K, "prefill_chunk": 5, "io_threads": 1},
    {"num_workers": 4, "num_threads": 1, "ctx": 240, "slots": NUM_EXPERTS // 2, "io": "direct", "policy": "lru"},
    {
        "num_workers": 2,
        "num_threads": 2,
        "ctx": 128,
        "slots": 4,
        "policy": "lrfu",
        "lookahead": "on",
        "lookahead_width": 3,
        "lookahead_distance": 2,
        "pins": 0.5,
        "repin": 2,
    },
]
CHUNKS = [1, 3, 7, None]


def num_layers(fixture: Path) -> int:
    """Layers with experts."""
    fewer = {"qwen3_moe_mixed": 3, "qwen3_moe_q4": 2, "glm4_moe_groups": 2, "qwen2_moe": 3, "deepseek_v3": 3}
    fewer |= {"glm_moe_dsa_shared": 3, "qwen3_next_q4_g32": 2, "deepseek_v2": 2}
    return fewer.get(fixture.name, 4)


def bits(logits: Floats) -> bytes:
    """The logits as bytes: equality to the last bit, signs of zeros included."""
    return logits.tobytes()


@pytest.fixture(scope="module", params=FIXTURES)
def model(request: pytest.FixtureRequest) -> Iterator[tuple[Path, list[list[int]], list[Floats]]]:
    """A fixture, prompts of several lengths, and the reference logits of each alone, in one piece."""
    fixture = GOLDEN / request.param
    golden = np.load(fixture / "golden.npz")
    ids, long_ids = golden["input_ids"].tolist(), golden["long_ids"].tolist()
    prompts = [ids + golden["generated_ids"].tolist(), long_ids[:37], ids[:1], ids[::-1]]
    with Cluster.launch(fixture, **REFERENCE) as cluster:
        yield fixture, prompts, [cluster.logits(prompt) for prompt in prompts]


def check(cluster: Cluster, prompts: list[list[int]], expected: list[Floats]) -> None:
    """Hold a cluster's logits against the reference's bits, for all chunkings, alone and batched."""
    for chunk in CHUNKS:
        assert bits(cluster.logits(prompts[0], chunk=chunk)) == bits(expected[0]), f"chunk {chunk}"
    for chunk in (3, None):
        for got, wanted in zip(cluster.logits_batch(prompts, chunk=chunk), expected, strict=True):
            assert bits(got) == bits(wanted), f"batch, chunk {chunk}"


@pytest.mark.parametrize("variant", range(len(VARIANTS)))
def test_same_bits(model: tuple[Path, list[list[int]], list[Floats]], variant: int) -> None:
    """Each variant of workers, threads, pool and reading gives the reference's bits."""
    fixture, prompts, expected = model
    settings = VARIANTS[variant] | {"num_workers": min(VARIANTS[variant]["num_workers"], num_layers(fixture))}
    settings["slots"] = max(settings["slots"], MORE_SLOTS.get(fixture.name, 0))
    with Cluster.launch(fixture, **settings) as cluster:
        check(cluster, prompts, expected)
        check(cluster, prompts, expected)  # again with the pool as the first round left it


def test_references_differ(model: tuple[Path, list[list[int]], list[Floats]]) -> None:
    """The comparison can fail: other prompts have other logits."""
    _, _, expected = model
    assert bits(expected[0][:1]) != bits(expected[1][:1])
    assert all(np.isfinite(logits).all() for logits in expected)
