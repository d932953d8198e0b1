"""The memory plan of a model of which there is only a config.json: what it would take, and how fast it could be, before a download.

The model is built by its family's file from invented tensors (`checkpoint.invented`), and planned by `planner`: what is said here
of memory is what `plan` says of the checkpoint, but for the tokenizer, whose size is estimated.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from colibri_mp.checkpoint.experts import ExpertLayer
from colibri_mp.checkpoint.invented import InventedTable, StoredAs
from colibri_mp.checkpoint.json_file import read_json_object
from colibri_mp.checkpoint.matrices import StoredMatrix
from colibri_mp.config import LaunchConfig, parse_size
from colibri_mp.errors import CheckpointError
from colibri_mp.forecast import Forecast, Machine, forecast
from colibri_mp.formats import ELEMENT_BYTES, Encoding
from colibri_mp.limits import Room
from colibri_mp.lossy import with_lossy_options
from colibri_mp.models import find_model
from colibri_mp.models.structure import ModelSpec, MoeSpec
from colibri_mp.plan_terms import TENSOR_BYTES, resident_bytes, top_k
from colibri_mp.planner import Plan, make_plan, smallest_budget

_TOKENIZER_BYTES_A_TOKEN = 1200  # of vocabulary, in memory: tokenizer.json has 75 to 140 bytes for each
_SIZES = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # GB


@dataclass(frozen=True)
class ModelFacts:
    """What a model is made of. `..._code_bytes` are the weights alone, `..._extra_bytes` what is stored with them: scales and biases.

    `num_experts` is of all layers, those of the predictors (layers that predict further tokens, which a run without `--draft` leaves
    out) included; `resident_...` leaves them out, and includes the routers, which are bf16. `resident_bytes` is what the
    coordinator keeps, as the plan has it.
    """

    model_type: str
    num_layers: int
    num_expert_layers: int
    num_predictors: int
    num_experts: int
    num_predictor_experts: int
    experts_per_token: int
    expert_code_bytes: int
    expert_extra_bytes: int
    slab_bytes: int
    resident_bytes: int
    resident_code_bytes: int
    resident_extra_bytes: int
    router_code_bytes: int
    predictor_code_bytes: int
    max_context: int


@dataclass(frozen=True)
class SizedPlan:
    """What a `--ram` gives: `plan`, slots of each layer, and the speed that follows."""

    plan: Plan
    least_slots: int
    most_slots: int
    forecast: Forecast


@dataclass(frozen=True)
class ConfigPlan:
    """The answer: facts, the smallest legal `--ram`, and what the sizes that were asked for give."""

    facts: ModelFacts
    stored: StoredAs
    smallest_ram_bytes: int
    machine: Machine
    sizes: tuple[SizedPlan, ...]

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "model": asdict(self.facts),
            "stored": {name: encoding.describe() for name, encoding in self.stored._asdict().items()},
            "smallest_ram_bytes": self.smallest_ram_bytes,
            "machine": asdict(self.machine),
            "sizes": [
                {
                    "ram_bytes": size.plan.budget_bytes,
                    "slots_per_layer": [size.least_slots, size.most_slots],
                    "forecast": size.forecast.as_dict(),
                    "plan": size.plan.as_dict(),
                }
                for size in self.sizes
            ],
        }


def plan_from_config(path: Path, config: LaunchConfig, stored: StoredAs, machine: Machine) -> ConfigPlan:
    """The plan for the model of config.json `path` (or of the folder that holds it), with matrices as in `stored`.

    With `config.ram` "auto" for several sizes, since the machine may be another one.

    Raises:
        CheckpointError: no such file, or no model that can be run.
        MemoryPlanError: `config.ram` is too small.
    """
    table = InventedTable(stored)
    published = find_model(_read(path), table)
    model = with_lossy_options(published.with_predictor() if config.draft else published, config)
    tables = model.vocab_size * _TOKENIZER_BYTES_A_TOKEN + len(table.used) * TENSOR_BYTES
    smallest = smallest_budget(model, config, tables)
    budgets: Iterable[int | str] = [config.ram] if config.ram != "auto" else _budgets(smallest, model)
    return ConfigPlan(
        facts=describe(model),
        stored=stored,
        smallest_ram_bytes=smallest,
        machine=machine,
        sizes=tuple(_sized(model, config, budget, tables, machine) for budget in budgets),
    )


def describe(model: ModelSpec) -> ModelFacts:
    """The facts of a model. Experts that differ between layers are told by the largest."""
    everything = _with_predictors(model)
    experts = [layer for layer in model.expert_layers if layer.layer < model.depth]
    num_experts = sum(layer.num_experts for layer in everything.expert_layers)
    largest = max(experts, key=lambda layer: layer.stored_bytes)
    expert_codes = sum(bits * math.prod(shape) // 8 for bits, shape in _projections(largest))
    matrices = list(model.resident_matrices())
    codes = sum(map(_code_bytes, matrices))
    merges = [predictor.merge for predictor in model.predictors]
    return ModelFacts(
        model_type=model.model_type,
        num_layers=model.depth,
        num_expert_layers=len(experts),
        num_predictors=len(model.predictors),
        num_experts=num_experts,
        num_predictor_experts=num_experts - sum(layer.num_experts for layer in experts),
        experts_per_token=sum(top_k(model, layer) for layer in experts),
        expert_code_bytes=expert_codes,
        expert_extra_bytes=largest.stored_bytes - expert_codes,
        slab_bytes=max(layer.shape.slab_bytes for layer in experts),
        resident_bytes=resident_bytes(model),
        resident_code_bytes=codes,
        resident_extra_bytes=sum(matrix.stored_bytes for matrix in matrices) - codes,
        router_code_bytes=sum(_code_bytes(layer.mlp.gate) for layer in model.layers if isinstance(layer.mlp, MoeSpec)),
        predictor_code_bytes=sum(map(_code_bytes, [*everything.resident_matrices(), *merges])) - codes,
        max_context=model.max_context,
    )


def _with_predictors(model: ModelSpec) -> ModelSpec:
    """The model as if its predictors were layers like the others."""
    return replace(
        model, layers=(*model.layers[: model.depth], *(found.layer for found in model.predictors)), uses_predictor=False
    )


def _projections(experts: ExpertLayer) -> Iterator[tuple[int, tuple[int, int]]]:
    """Bits of a weight, and shape, of gate, up and down."""
    for encoding in (experts.gate, experts.up, experts.down):
        yield _weight_bits(encoding), (experts.width, experts.hidden)


def _code_bytes(matrix: StoredMatrix) -> int:
    return matrix.rows * matrix.cols * _weight_bits(matrix.encoding) // 8


def _weight_bits(encoding: Encoding) -> int:
    """Bits of one weight, without its share of a group's scale."""
    return encoding.bits or 8 * ELEMENT_BYTES[encoding.kind]


def _read(path: Path) -> dict[str, Any]:
    """config.json `path`, or that of the folder `path`."""
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        raise CheckpointError(f"{file}: no such file; give the config.json of a model, or the folder that holds it")
    return read_json_object(file)


def _budgets(smallest: int, model: ModelSpec) -> Iterator[int]:
    """The smallest budget, and usual sizes of memory above it, up to the first that holds every expert."""
    yield smallest
    everything = smallest + sum(layer.num_experts * layer.shape.slab_bytes for layer in model.expert_layers)
    usual = [size * 10**9 for size in _SIZES if size * 10**9 > smallest]
    yield from (size for idx, size in enumerate(usual) if not idx or usual[idx - 1] < everything)


def _sized(model: ModelSpec, config: LaunchConfig, budget: int | str, tables: int, machine: Machine) -> SizedPlan:
    ram = parse_size(budget)
    plan = make_plan(model, replace(config, ram=ram), Room("the machine", 2 * ram, 2 * ram), tables)
    slots = [count for share in plan.workers for count in share.num_slots]
    return SizedPlan(plan, min(slots), max(slots), forecast(model, plan, config.kv_bits, machine))
