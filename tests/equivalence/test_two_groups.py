"""Two groups in flight: each session's tokens and log probabilities are, to the bit, those of the session alone."""

from pathlib import Path
from typing import Any

import numpy as np

from colibri_mp import Cluster
from colibri_mp.messages import Failed, Finished, Piece

FIXTURE = Path(__file__).parents[1] / "golden" / "tiny" / "glm_moe_dsa_shared"
OPTIONS: dict[str, Any] = {"max_tokens": 40, "temperature": 0.8, "ignore_eos": True, "logprobs": 0}
NUM_SESSIONS = 5


def test_layers_that_share_a_choice_of_positions() -> None:
    """A layer goes on with what the layer before has chosen for its own group, whatever the other has computed in between."""
    ids = np.load(FIXTURE / "golden.npz")["long_ids"].tolist()
    prompts = [ids[session:][:30] for session in range(NUM_SESSIONS)]
    with Cluster.launch(
        FIXTURE, num_workers=2, num_threads=1, ctx=128, kv_tokens=640, slots=4, overlap="on"
    ) as cluster:
        alone = []
        for session, prompt in enumerate(prompts):
            done = cluster.generate(prompt, **OPTIONS, seed=session)
            alone.append([(entry.token_id, entry.logprob) for entry in done.logprobs])
        assert cluster.stats()["progress"]["two_groups"]["steps"] == 0
        together: dict[int, list[tuple[int, float]]] = {
            cluster.submit(prompt, **OPTIONS, seed=session): [] for session, prompt in enumerate(prompts)
        }
        while (event := cluster.next_event()) is not None:
            match event:
                case (request, Piece(logprobs=logprobs)):
                    together[request] += [(entry.token_id, entry.logprob) for entry in logprobs]
                case (_, Failed() as failed):
                    raise AssertionError(failed.message)
                case (_, Finished(finish_reason=reason)):
                    assert reason == "length"
        assert list(together.values()) == alone
        assert cluster.stats()["progress"]["two_groups"]["steps"] > OPTIONS["max_tokens"]
