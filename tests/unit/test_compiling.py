"""Compiling before the processes start: what it refuses."""

import pytest

from colibri_mp import compiling
from colibri_mp.errors import MemoryPlanError
from colibri_mp.limits import Room


def test_too_little_memory_to_compile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is started where the compiler would be killed; what it needs and what there is are named."""
    monkeypatch.setattr(compiling, "is_warm", lambda *_: False)
    monkeypatch.setattr(compiling, "tightest_room", lambda: Room("control group /x", 400_000_000, 100_000_000))
    with pytest.raises(MemoryPlanError, match=r"takes 290 MB .* 100 MB free in control group /x; free memory"):
        compiling.compile_kernels(frozenset(), 3, lambda _text: None, lambda: False)
