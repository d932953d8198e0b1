"""Names of shared memory segments that tests make themselves."""

import itertools
import os

from colibri_mp.shm.segment import segment_name

_NUMBERS = itertools.count()


def fresh_name() -> str:
    """A name that no other segment has; it begins with this process's id, as a cluster's do with its coordinator's."""
    return segment_name(f"{os.getpid():x}", next(_NUMBERS))
