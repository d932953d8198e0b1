"""The error tree: one class for each meaning, every message says what, with which values, and the cure.

`exit_code` is what `colibri-cluster` ends with; `kind` is the name that travels over the wire (see `messages`),
from which `from_wire` makes the same class again on the other side.
"""

import signal
from typing import ClassVar


class ColibriError(Exception):
    """Base of all errors that a user can meet."""

    kind: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1


class ConfigError(ColibriError):
    """A flag, a file of settings or an argument is wrong."""

    kind = "config"
    exit_code = 2


class CheckpointError(ColibriError):
    """The checkpoint is missing, damaged, inconsistent or of an unsupported kind."""

    kind = "checkpoint"
    exit_code = 3


class MemoryPlanError(ColibriError):
    """The memory budget cannot hold what the run needs; nothing has been allocated."""

    kind = "memory_plan"
    exit_code = 4


class PoolError(ColibriError):
    """An expert pool cannot do what is asked, or its contents are damaged."""

    kind = "pool"
    exit_code = 5


class ReadError(ColibriError):
    """Reading an expert from disk failed; names file, offset, layer and expert."""

    kind = "read"
    exit_code = 6


class WorkerDied(ColibriError):
    """A worker process ended, or stopped making progress; names the worker, the signal or exit code."""

    kind = "worker_died"
    exit_code = 7


class CoordinatorDied(ColibriError):
    """The coordinator process ended while a client was waiting for it."""

    kind = "coordinator_died"
    exit_code = 8


class ProtocolError(ColibriError):
    """A message that cannot be understood: other version, truncated, wrong shape."""

    kind = "protocol"
    exit_code = 9


class RequestError(ColibriError):
    """One request cannot be served (too long, bad sampling value); the cluster goes on."""

    kind = "request"
    exit_code = 10


class Overloaded(ColibriError):
    """The cluster cannot take one more request now (queue or KV memory full); the same request may succeed later."""

    kind = "overloaded"
    exit_code = 13


class TraceError(ColibriError):
    """A route trace that cannot be read, or that is no trace."""

    kind = "trace"
    exit_code = 11


class WriteError(ColibriError):
    """A file cannot be written: a full disk, no permission, or what was written cannot be read back."""

    kind = "write"
    exit_code = 12


class SessionError(ColibriError):
    """A saved session that cannot be used: no session file, damaged, or of another model or setting."""

    kind = "session"
    exit_code = 14


def _all_classes(root: type[ColibriError]) -> list[type[ColibriError]]:
    return [root, *(cls for sub in root.__subclasses__() for cls in _all_classes(sub))]


def from_wire(kind: str, message: str) -> ColibriError:
    """The error of the class whose `kind` is given; a plain `ColibriError` for a kind that is not known."""
    for cls in _all_classes(ColibriError):
        if cls.kind == kind:
            return cls(message)
    return ColibriError(f"{kind}: {message}")


def describe_exit(exitcode: int, has_oom_killer_struck: bool = False) -> str:
    """An exit code of `multiprocessing` in words: negative is a signal.

    `has_oom_killer_struck`: whether the system's out-of-memory killer has ended some process meanwhile.
    """
    if exitcode >= 0:
        return f"ended with exit code {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = "an unknown signal"
    if -exitcode == signal.SIGKILL and has_oom_killer_struck:
        return "was killed (SIGKILL), probably by the system's out-of-memory killer; free memory, or lower --ram"
    return f"was killed by {name} (signal {-exitcode})"
