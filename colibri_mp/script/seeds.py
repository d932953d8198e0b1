"""Seeds that no one has chosen: the same file gives the same ones, and no two turns share one.

A seed depends on the file's seed, the session's name, the repeat and the turn, and on nothing else: not on the launch, so that
launches can be compared, and not on the order in which sessions happen to run.
"""

import xxhash


def derive_seed(base: int, session: str, repeat: int, turn: int) -> int:
    """A seed in [0, 2^63); the hash is part of the format of scripts: changing it changes everybody's transcripts."""
    return xxhash.xxh3_64_intdigest(f"{base}\0{session}\0{repeat}\0{turn}".encode()) >> 1
