"""Warming: says what it compiles, once, and leaves nothing to be compiled by a real step."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_kernels_isa import HERE

from colibri_mp.formats import Encoding
from colibri_mp.kernels import isa, warming

STEP = """
from numba.core import event
from colibri_mp.kernels import warm
import kernel_cases
import numpy as np
encoding = kernel_cases.FORMATS[0]
print("told:", *warm({encoding}, lambda text: None), sep="|")
passes = []
class Listener(event.Listener):
    def on_start(self, occurrence): passes.append(occurrence.data)
    def on_end(self, occurrence): pass
event.register("numba:run_pass", Listener())
from colibri_mp.kernels import layout
from colibri_mp.kernels.expert import ExpertStage
from colibri_mp.kernels.resident_expert import ResidentExpert
from colibri_mp.kernels.team import ThreadTeam
experts = kernel_cases.Experts((encoding,) * 3, 64, 128)
batch = experts.batch(70, 2)
experts.ids.flags.writeable = False
for array in batch:
    array.flags.writeable = False
with ThreadTeam(2) as team:
    ResidentExpert(team, experts.shape, 70)(batch[0], experts.slabs[0], batch[0][0])
    experts.step(ExpertStage(team, experts.shape, len(experts.ids), 70, 2), batch, experts.ids)
matrix, _ = kernel_cases.random_matrix(np.random.default_rng(1), encoding, 40, 128)
layout.gather_rows(matrix, experts.ids)
print("passes:", len(passes), passes[:3])
"""


def test_warm_leaves_nothing_to_compile() -> None:
    """After `warm`, packing, lookup and an expert step with read-only arrays run no compiler pass; a second `warm` has nothing to tell."""
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    environment["PYTHONPATH"] = str(HERE)
    for _ in range(2):
        command = [sys.executable, "-c", STEP]
        result = subprocess.run(
            command, cwd=HERE, env=environment, capture_output=True, text=True, timeout=110, check=False
        )
        assert result.returncode == 0, result.stderr
        told, passes = result.stdout.splitlines()
        assert passes == "passes: 0 []"
    assert told == "told:"


def test_progress_names_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step is told before it is done, noted after it, and left out of later calls; a step that fails is not noted."""
    monkeypatch.setattr(warming, "_noted", lambda: tmp_path / "compiled")
    done: list[str] = []

    def fail() -> None:
        raise OSError("no space left")

    steps = [("one", lambda: done.append("one")), ("two", fail)]
    monkeypatch.setattr(warming, "_steps", lambda encodings, planes: iter(steps))
    told: list[str] = []
    with pytest.raises(OSError, match="no space"):
        warming.warm([Encoding("f32")], told.append)
    prefix = f"compiling kernels for {isa.current().value}, once: "
    assert told == [prefix + "one", prefix + "two"]
    assert done == ["one"]
    steps[1] = ("two", lambda: done.append("two"))
    assert not warming.is_warm([Encoding("f32")])
    assert warming.warm([Encoding("f32")], told.append) == ["two"]
    assert warming.is_warm([Encoding("f32")])
    assert warming.warm([Encoding("f32")], told.append) == []
    assert done == ["one", "two"]
