"""colibri-mp: mixture-of-experts language models that are larger than the machine's memory, exactly, on one box.

`Cluster` is the Python API (see `colibri_mp.client`); `colibri-cluster` the command line (see `colibri_mp.cli`).
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Cluster", "Completion", "__version__"]

if TYPE_CHECKING:
    from colibri_mp.client import Cluster, Completion


def __getattr__(name: str) -> Any:
    """Load the client on first use: workers and the coordinator import this package too and do not need it."""
    if name in ("Cluster", "Completion"):
        from colibri_mp import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
