"""What trades exactness for speed: opt-in, named lossy in `--help`, and reported at launch and by `status`.

Fewer experts a token are less to read and to compute, and no longer the model as trained. `--expert-top-k` overrides the
model's k; `--expert-top-p` keeps, of each token's k, the largest weights until they reach that share of their sum.
Narrower experts take less memory each: `--expert-bits` quantises them while they are read.
"""

from dataclasses import replace

from colibri_mp.config import LaunchConfig
from colibri_mp.errors import ConfigError
from colibri_mp.models.structure import ModelSpec, MoeSpec
from colibri_mp.recoding import quantised_when_read
from colibri_mp.specs import RouterSpec


def with_lossy_options(model: ModelSpec, config: LaunchConfig) -> ModelSpec:
    """The model with the routing and the experts that were asked for; the model itself if nothing was.

    Raises:
        ConfigError: more experts a token than the model was made for, or experts that cannot be quantised.
    """
    model_top_k = model.router.top_k
    if config.expert_top_k > model_top_k:
        raise ConfigError(
            f"--expert-top-k {config.expert_top_k} is more than the {model_top_k} experts a token of this model; lower it"
        )
    router = replace(model.router, top_k=config.expert_top_k or model_top_k, top_p=config.expert_top_p)
    layers = tuple(
        replace(layer, mlp=_changed(layer.mlp, router, config)) if isinstance(layer.mlp, MoeSpec) else layer
        for layer in model.layers
    )
    return replace(model, layers=layers)


def lossy_options(model: ModelSpec, config: LaunchConfig) -> tuple[str, ...]:
    """The options in force that change the logits, as flags with their values. `model` is as published."""
    model_top_k = model.router.top_k
    options = []
    if 0 < config.expert_top_k < model_top_k:
        options.append(f"--expert-top-k {config.expert_top_k} (the model's is {model_top_k})")
    if config.expert_top_p < 1:
        options.append(f"--expert-top-p {config.expert_top_p:g}")
    if config.expert_bits != "stored" and (kinds := _unquantised(model)):
        options.append(f"--expert-bits {config.expert_bits} (stored are {', '.join(kinds)})")
    if config.planes == 1:
        options.append("--planes 1")
    if config.kv_bits < 32:
        options.append(f"--kv-bits {config.kv_bits}")
    return tuple(options)


def _changed(mlp: MoeSpec, router: RouterSpec, config: LaunchConfig) -> MoeSpec:
    return replace(mlp, router=router, experts=quantised_when_read(mlp.experts, config.expert_bits))


def _unquantised(model: ModelSpec) -> list[str]:
    """Element types of the experts that are not quantised."""
    return sorted({e.kind for layer in model.expert_layers for e in layer.encodings if not e.group_size})
