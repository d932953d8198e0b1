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
    watch.sample([("me", os.getpid())], lambda: 0)
    peak = watch.peak_bytes
    watch.sample([("nobody", 2**22 + 1)], lambda: 0)
    assert watch.last.total_bytes == 0
    assert watch.peak_bytes == peak > 0


@pytest.mark.parametrize("readings", [(5, 7), (7, 5)])
def test_pools_that_fill_during_a_sample_count_with_the_larger_figure(readings: tuple[int, int]) -> None:
    """What the pools have taken meanwhile must not look like other memory."""
    watch, pools = MemoryWatch(), iter(readings)
    watch.sample([], lambda: next(pools))
    assert watch.last.slab_bytes == 7
