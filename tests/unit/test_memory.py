"""Readings of what processes use."""

import os
import sys

import numpy as np
import pytest

from colibri_mp.memory import MemoryWatch, own_bytes, process_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="PSS is Linux's")
def test_readings_see_an_allocation() -> None:
    """Memory that this process touches shows in its figures, and a process that does not exist has none."""
    before, own_before = process_bytes(os.getpid()), own_bytes()
    block = np.ones(50_000_000, np.uint8)
    for grown in (process_bytes(os.getpid()) - before, own_bytes() - own_before):
        assert block.nbytes * 0.9 < grown < block.nbytes * 1.5
    assert process_bytes(2**22 + 1) == 0


def test_watch_keeps_the_peak() -> None:
    """The peak is that of the sum."""
    watch = MemoryWatch()
    watch.sample([("me", os.getpid())])
    peak = watch.peak_bytes
    watch.sample([("nobody", 2**22 + 1)])
    assert watch.total_bytes == 0
    assert watch.peak_bytes == peak > 0
