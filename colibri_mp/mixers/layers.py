"""The mixers of a model, ready to run: a stage for each distinct spec, a paged cache or states in slots for each distinct shape."""

from typing import NamedTuple

from colibri_mp.kernels.block import MixerStage
from colibri_mp.kernels.delta_inputs import DeltaStates
from colibri_mp.kernels.paged_cache import PagedCache, PagedCaches
from colibri_mp.kernels.rope import rope_tables
from colibri_mp.kernels.state_memory import StateMemory
from colibri_mp.kernels.team import ThreadTeam
from colibri_mp.mixers.kind import StageLimits
from colibri_mp.mixers.kinds import KINDS, by_cache, by_stage, by_state
from colibri_mp.models.structure import ModelSpec


class LayerMixer(NamedTuple):
    """What a layer is computed with; it is layer `cache_layer` of `cache`, or of the states that it has in its place."""

    stage: MixerStage
    cache: PagedCache | DeltaStates | None
    cache_layer: int


class Mixers:
    """`layers[i]`: of layer i; `caches`: all paged caches as one; `states`: all recurrent states as one."""

    def __init__(
        self, team: ThreadTeam, model: ModelSpec, limits: StageLimits, num_blocks: int, num_state_slots: int
    ) -> None:
        tables = rope_tables(model.rope, limits.max_context)
        stages: dict[int, MixerStage] = {}
        for spec, layers in by_stage(model).items():
            stage = KINDS[type(spec)].make_stage(team, spec, tables, limits)
            stages |= dict.fromkeys(layers, stage)
        caches: dict[int, tuple[PagedCache | DeltaStates | None, int]] = {}
        made: list[PagedCache] = []
        for shape, layers in by_cache(model, limits.kv_bits).items():
            made.append(shape.make(len(layers), num_blocks))
            caches |= {layer: (made[-1], idx) for idx, layer in enumerate(layers)}
        states: list[DeltaStates] = []
        for state_shape, layers in by_state(model).items():
            states.append(state_shape.make(len(layers), num_state_slots))
            caches |= {layer: (states[-1], idx) for idx, layer in enumerate(layers)}
        self.layers = [LayerMixer(stages[i], *caches.get(i, (None, 0))) for i in range(len(model.layers))]
        self.caches = PagedCaches(made, num_blocks, limits.kv_bits)
        self.states = StateMemory(states)
