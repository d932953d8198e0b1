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
from colibri_mp.formats import ExpertBits
from colibri_mp.overlap import OverlapMode

Lookahead = Literal["auto", "off", "measure", "advise", "on"]
IoMode = Literal["buffered", "direct", "drop"]
"""How experts are read: through the page cache, past it, or through it giving the pages back right after."""
Verify = Literal["first", "off", "always"]
BackendName = Literal["cpu", "mlx"]
"""What computes: the compiled kernels, or MLX."""
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
    backend: BackendName | Literal["auto"] = _setting(
        "auto",
        "what computes: compiled kernels (cpu), MLX (mlx; pip install 'colibri-mp[mlx]'), or MLX where it has a GPU and "
        "computes the model, else cpu (auto)",
        choices=("auto", "cpu", "mlx"),
    )
    ctx: int = _setting(
        0, "tokens of context that one session may have (0: chosen, and said)", least=0, metavar="TOKENS"
    )
    kv_tokens: int = _setting(
        0, "tokens that KV memory is reserved for, of all sessions together (0: as many as --ctx)", least=0, metavar="N"
    )
    kv_bits: int = _setting(
        32, "bits of a number in the KV cache: 32 exact, 8 a quarter of the memory (lossy)", choices=(32, 8)
    )
    state_slots: int = _setting(
        8, "states of recurrent layers that there is memory for: one for each session that runs, the others for what is kept "
        "of earlier ones", least=1, metavar="N",
    )  # fmt: skip
    prefix_cache: Literal["on", "off"] = _setting(
        "on",
        "keep the KV of what was computed until its memory is needed, and share it between requests that begin alike",
        choices=("on", "off"),
    )
    prefill_chunk: int = _setting(0, "most rows of a step (0: chosen, and said)", least=0, metavar="TOKENS")
    draft: int = _setting(
        0,
        "guess up to so many next tokens, by the model's own predictor (MTP) or from the text itself, and compute them in the "
        "same step, where that is found to pay (0: off); the answer is the same, bit for bit",
        least=0, most=16, metavar="N",
    )  # fmt: skip
    queue: int = _setting(
        128, "requests that may wait until there is KV memory for them; one more is refused", least=1, metavar="N"
    )
    slots: int = _setting(0, "experts cached per layer, at most (0: what --ram allows)", least=0, metavar="N")
    io: IoMode | Literal["auto"] = _setting(
        "auto",
        "how experts are read: through the system's page cache (buffered), past it (direct), through it giving the pages "
        "back at once (drop), or as a measurement of the disk says (auto; remembered for each disk)",
        choices=("auto", "buffered", "direct", "drop"),
    )
    io_threads: int = _setting(8, "expert reads in flight per worker", least=1, most=64, metavar="N")
    verify: Verify = _setting(
        "first",
        "checksums of experts, where there are any: when an expert is read for the first time (first), never (off), or at "
        "each read, and the memory is compared with the disk at each use (always: slow, to find a fault)",
        choices=("first", "off", "always"),
    )
    mirror: str = _setting(
        "",
        "second copy of the checkpoint, on another disk: read beside the first, and instead of it where it fails",
        metavar="DIR",
    )
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
    expert_bits: ExpertBits = _setting(
        "stored",
        "lossy: quantise experts that are stored in bf16, f16 or f32 each time they are read, so that more of them fit in "
        "memory; mixed: gate and up 4, down 8. `convert --bits` does the same once",
        choices=("stored", "4", "8", "mixed"),
    )
    usage: str = _setting(
        "auto",
        "where the uses of experts are kept, which decide what is read at start: the user's cache (auto), nowhere (off), "
        "or a file, such as one beside the model",
        metavar="auto|off|FILE",
    )
    pins: float = _setting(
        0.25, "share of the expert slots that the most used experts keep for good", least=0.0, most=0.9, metavar="SHARE"
    )
    policy: Literal["lrfu", "lru"] = _setting(
        "lrfu",
        "which expert gives way: the one with the least uses, of which older ones weigh less (lrfu), or the least recently "
        "used one (lru)",
        choices=("lrfu", "lru"),
    )
    repin: int = _setting(
        0, "between two answers, each N tokens, give cold pins to experts that have become hot (0: never)",
        least=0, metavar="N",
    )  # fmt: skip
    lookahead: Lookahead = _setting(
        "auto",
        "predict the experts of the next layers and read them while the disk is idle: always (on), while that is found to be "
        "faster here (auto), "
        "only to measure how well it predicts (measure), only advise the system to read them into its page cache (advise), "
        "or never (off)",
        choices=("auto", "off", "measure", "advise", "on"),
    )
    lookahead_width: int = _setting(
        0, "experts predicted for each token (0: as many as the model uses)", least=0, most=64, metavar="N"
    )
    lookahead_distance: int = _setting(1, "layers that are looked ahead", least=1, most=4, metavar="N")
    overlap: OverlapMode = _setting(
        "auto",
        "sessions that decode: two groups under way at once, so that one computes while the other waits for the disk (on), one "
        "group for which each expert is read once (off), or what is found to be faster here (auto)",
        choices=("auto", "off", "on"),
    )
    trace: str = _setting("", "write the route trace, which `simulate` reads, to this file", metavar="FILE")
    step_timeout: float = _setting(
        120.0, "seconds after which a worker that does not answer is given up", least=0.1, metavar="S"
    )
    client: Literal["script", "server"] = _setting(
        "script",
        "what launches the cluster, as the memory plan counts it: a script, or an HTTP server, which takes more (set by `serve`)",
        choices=("script", "server"),
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
