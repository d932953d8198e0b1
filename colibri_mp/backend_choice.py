"""Which backend computes (`--backend`): decided once, at launch or for a plan, from what there is and what the model needs."""

import sys
from dataclasses import replace
from importlib.metadata import distributions
from importlib.util import find_spec

from colibri_mp.config import LaunchConfig
from colibri_mp.errors import ConfigError
from colibri_mp.models.structure import ModelSpec

_INSTALL = "install it (pip install 'colibri-mp[mlx]'), or launch with --backend cpu"


def with_backend(config: LaunchConfig, model: ModelSpec) -> LaunchConfig:
    """The configuration with a backend in place of "auto": MLX where it has a GPU and computes the model, else the kernels.

    Raises:
        ConfigError: MLX was asked for, and it is not there or cannot do what is asked; names the cure.
    """
    match config.backend:
        case "cpu":
            return config
        case "mlx":
            if reason := _hindrance(model, config):
                raise ConfigError(f"--backend mlx: {reason}")
            return config
    chosen = has_gpu() and not _hindrance(model, config)
    return replace(config, backend="mlx" if chosen else "cpu")


def is_installed() -> bool:
    """Whether MLX can be imported here."""
    return find_spec("mlx") is not None and find_spec("mlx.core") is not None


def has_gpu() -> bool:
    """Whether MLX can be imported here and has Metal or CUDA. On Linux it is imported only if its CUDA package is there."""
    if not is_installed():
        return False
    if sys.platform == "linux" and not any(name.startswith("mlx-cuda") for name in _distributions()):
        return False
    import mlx.core as mx

    return bool(mx.metal.is_available() or mx.cuda.is_available())


def _distributions() -> list[str]:
    return [(found.name or "").lower() for found in distributions()]


def _hindrance(model: ModelSpec, config: LaunchConfig) -> str:
    """Why MLX cannot run this; "" if it can."""
    if not is_installed():
        return f"MLX is not installed; {_INSTALL}"
    if config.kv_bits != 32:
        return f"--kv-bits {config.kv_bits} is of the compiled kernels; leave it out, or launch with --backend cpu"
    from colibri_mp.mlx_backend.mixers import missing_kinds

    if missing := missing_kinds(model):
        return (
            f"a layer of {model.model_type} has {' and '.join(missing)}, which MLX does not compute here; "
            "launch with --backend cpu"
        )
    return ""
