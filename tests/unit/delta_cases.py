"""Seeded gated delta nets and batches for the tests of their stage."""

from dataclasses import dataclass

import numpy as np
from attention_cases import BF16, Q4, random_matrix

from colibri_mp.formats import Encoding
from colibri_mp.kernels.attention_inputs import Batch
from colibri_mp.kernels.delta_net import DeltaNetStage, DeltaNetWeights, DeltaStates
from colibri_mp.kernels.team import ThreadTeam
from colibri_mp.specs import DeltaNetSpec

MAX_TOKENS = 40
MIXED = {"qkv": Q4, "z": BF16, "b": Q4, "a": BF16, "out": Q4}


@dataclass
class Net:
    """A gated delta net with everything to run it."""

    spec: DeltaNetSpec
    weights: DeltaNetWeights
    rng: np.random.Generator

    def stage(self, team: ThreadTeam) -> DeltaNetStage:
        """The compiled stage."""
        return DeltaNetStage(team, self.spec, MAX_TOKENS)

    def states(self, num_slots: int = 4) -> DeltaStates:
        """Of two layers; with numbers in them that nobody may use."""
        states = DeltaStates(self.spec, 2, num_slots)
        states.states[:], states.tails[:] = np.nan, np.nan
        return states

    def rows(self, count: int) -> np.ndarray:
        """x [count, D]."""
        return self.rng.standard_normal((count, self.spec.hidden)).astype(np.float32)


def make_net(encodings: dict[str, Encoding] | None = None, **shape: int) -> Net:
    """A net of 2 key heads and 6 value heads, 16 wide, if nothing else is said."""
    sizes = {"hidden": 64, "num_key_heads": 2, "num_value_heads": 6, "key_dim": 32, "value_dim": 16, "conv_tokens": 4}
    spec = DeltaNetSpec(norm_eps=1e-3, **(sizes | shape))
    rng, heads = np.random.default_rng(7), spec.num_value_heads
    kinds = encodings or dict.fromkeys(("qkv", "z", "b", "a", "out"), BF16)

    def vector(*size: int, centre: float = 0.0, scale: float = 0.1) -> np.ndarray:
        return (centre + scale * rng.standard_normal(size)).astype(np.float32)

    weights = DeltaNetWeights(
        norm=vector(spec.hidden, centre=1.0),
        qkv=random_matrix(rng, kinds["qkv"], spec.conv_width, spec.hidden),
        z=random_matrix(rng, kinds["z"], spec.value_width, spec.hidden),
        b=random_matrix(rng, kinds["b"], heads, spec.hidden),
        a=random_matrix(rng, kinds["a"], heads, spec.hidden),
        out=random_matrix(rng, kinds["out"], spec.hidden, spec.value_width),
        conv=vector(spec.conv_tokens, spec.conv_width, scale=0.5),
        rate=-np.exp(rng.uniform(-3, 0.5, heads)).astype(np.float32),
        dt_bias=vector(heads, scale=0.5),
        head_norm=vector(spec.value_dim, centre=1.0),
    )
    return Net(spec, weights, rng)


def batch_of(runs: list[tuple[int, int, int, int]]) -> Batch:
    """Runs of (sequence, number of rows, source, target)."""
    sequences = np.repeat([run[0] for run in runs], [run[1] for run in runs]).astype(np.int32)
    first = np.cumsum([0] + [run[1] for run in runs])[:-1]
    table = np.array([(start, *run[1:]) for start, run in zip(first, runs, strict=True)], np.int32)
    return Batch(np.zeros_like(sequences), sequences, np.zeros((sequences[-1] + 1, 1), np.int32), table)
