"""The configuration of a cluster: one frozen dataclass, built once, from which flags, help and defaults come.

A field's metadata holds its flag's help text; `cli` makes the flags from it and `Cluster.launch` takes the same names
as keyword arguments. Hot code never reads this: objects chosen from it at start are passed down.
"""

import dataclasses
import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from colibri_mp.errors import ConfigError

IoMode = Literal["buffered", "direct"]
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(value: int | str) -> int:
    """Bytes of `value`: an int, or text such as "2GB" (10^9), "1.5GiB" (2^30), "800M", "4096".

    Raises:
        ConfigError: not a size.
    """
    if isinstance(value, int):
        if value <= 0:
            raise ConfigError(f"a size must be positive, not {value}")
        return value
    match = _SIZE.fullmatch(value)
    if match is None or float(match[1]) == 0:
        raise ConfigError(f"not a size: {value!r}; write bytes or a number with kB, MB, GB, TB, KiB, MiB, GiB or TiB")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** _POWERS[match[2].lower()])


def format_size(num_bytes: float) -> str:
    """A size for people, in the units that `parse_size` reads: "3.54 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(num_bytes) < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def _setting(default: Any, help_text: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help_text, **metadata})


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """How to launch a cluster. `ram` is the total of all processes, in bytes or as text; "auto" leaves the system room."""

    model: str = _setting(
        "demo", "model folder, Hugging Face id (org/name), or 'demo' for the built-in model", metavar="DIR"
    )
    ram: int | str = _setting(
        "auto", "memory for everything, all processes together: 2GB, 1.5GiB, or 'auto'", metavar="SIZE"
    )
    num_workers: int = _setting(
        0, "worker processes, each owns a group of layers (0: chosen, and said)", flag="--workers", least=0, metavar="N"
    )
    num_threads: int = _setting(
        0, "compute threads (0: the cores that this process may use)", flag="--threads", least=0, metavar="N"
    )
    ctx: int = _setting(
        0, "tokens of context that KV memory is reserved for (0: chosen, and said)", least=0, metavar="TOKENS"
    )
    prefill_chunk: int = _setting(0, "most rows of a step (0: chosen, and said)", least=0, metavar="TOKENS")
    slots: int = _setting(0, "experts cached per layer, at most (0: what --ram allows)", least=0, metavar="N")
    io: IoMode = _setting(
        "buffered", "how experts are read: through the system's page cache, or past it", choices=("buffered", "direct")
    )
    io_threads: int = _setting(8, "expert reads in flight per worker", least=1, most=64, metavar="N")
    planes: int = _setting(
        3, "int8 planes of an activation: 3 float32-level, 2 about 2e-5, 1 about 5e-3 (lossy)", choices=(1, 2, 3)
    )
    expert_top_k: int = _setting(
        0, "lossy: experts a token, fewer than the model's (0: the model's)", least=0, metavar="N"
    )
    expert_top_p: float = _setting(
        1.0, "lossy: of a token's experts keep the largest weights until this share of their sum",
        least=0.01, most=1.0, metavar="P",
    )  # fmt: skip
    trace: str = _setting("", "write the route trace, which `simulate` reads, to this file", metavar="FILE")
    step_timeout: float = _setting(
        120.0, "seconds after which a worker that does not answer is given up", least=0.1, metavar="S"
    )
    name: str = _setting("", "name of the cluster, for status and stop (default: 'default' for launch)", metavar="NAME")
    log_level: str = _setting("warning", "least severe log lines shown", choices=("debug", "info", "warning", "error"))

    def __post_init__(self) -> None:
        if self.ram != "auto":
            parse_size(self.ram)
        for spec in dataclasses.fields(self):
            _check(flag_of(spec), spec.metadata, getattr(self, spec.name))


def flag_of(spec: dataclasses.Field[Any]) -> str:
    """The command-line flag of a field."""
    return str(spec.metadata.get("flag", "--" + spec.name.replace("_", "-")))


def _check(flag: str, metadata: Mapping[str, Any], value: Any) -> None:
    choices, least, most = (metadata.get(key) for key in ("choices", "least", "most"))
    if choices and value not in choices:
        raise ConfigError(f"{flag} must be one of {', '.join(map(str, choices))}, not {value!r}")
    if least is not None and value < least:
        raise ConfigError(f"{flag} must be at least {least}, not {value}")
    if most is not None and value > most:
        raise ConfigError(f"{flag} must be at most {most}, not {value}")


Config = TypeVar("Config")


def from_keywords(kind: type[Config], values: dict[str, Any]) -> Config:
    """`kind(**values)`, where an unknown name is an error with the nearest known one.

    Raises:
        ConfigError: a name that `kind` does not have, or a value that it refuses.
    """
    known = [spec.name for spec in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"known are {', '.join(known)}"
            raise ConfigError(f"unknown setting {name!r}; {hint}")
    return kind(**values)
