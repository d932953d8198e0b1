"""The instruction set, its cache folder, what is compiled when; and that all instruction sets of this machine agree."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import kernel_cases
import numpy as np
import pytest

from colibri_mp.kernels import isa

HERE = Path(__file__).parent
X86 = isa.current().value in ("avx512_vnni", "avx2")


def run(*arguments: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own."""
    env = {**os.environ, "PYTHONPATH": str(HERE), **environment}
    env.pop("NUMBA_CACHE_DIR", None)
    command = [sys.executable, *arguments]
    result = subprocess.run(command, env=env, cwd=HERE, capture_output=True, text=True, timeout=110, check=False)
    assert not check or result.returncode == 0, result.stderr
    return result


WHERE = """
import json, sys
from colibri_mp.kernels import isa
print(json.dumps([*isa.current(), *map(str, isa.prepare_cache()), "numba" in sys.modules]))
"""


def where(**environment: str) -> list[str]:
    """[instruction set, reason, cache folder, reason, whether numba was imported]."""
    answer: list[str] = json.loads(run("-c", WHERE, **environment).stdout)
    return answer


@pytest.mark.parametrize(
    ("cpu", "expected"),
    [("haswell", "avx2"), ("znver3", "avx2"), ("icelake-server", "avx512_vnni"), ("generic", "generic"), ("apple-m1", "neon_dot"),
     ("nehalem", "generic"), ("neoverse-n1", "neon_dot")],
)  # fmt: skip
def test_cpu_name_decides(cpu: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NUMBA_CPU_NAME stands for the instruction set of that processor."""
    monkeypatch.setenv("NUMBA_CPU_NAME", cpu)
    assert isa._detect() == isa.Isa(expected, f"NUMBA_CPU_NAME={cpu}")


def test_cache_folder_is_known_without_numba(tmp_path: Path) -> None:
    """The folder carries the instruction set's name, differs between them, is private, and needs no import of numba."""
    value, _, folder, reason, has_numba = where(COLIBRI_CACHE_DIR=str(tmp_path))
    path = Path(folder)
    assert path.parent == tmp_path / "kernels"
    assert path.name.startswith(value)
    assert path.stat().st_mode & 0o777 == 0o700
    assert (reason, has_numba) == ("the user's cache", False)
    other = where(COLIBRI_CACHE_DIR=str(tmp_path), COLIBRI_ISA="generic")
    assert other[0] == "generic"
    assert other[2] != folder


def test_old_cache_folders_go(tmp_path: Path) -> None:
    """Of folders of other versions the eight used last stay, and those used within a day."""
    folders = tmp_path / "kernels"
    for age_days in range(12):
        (folders / f"generic-{age_days:02}").mkdir(parents=True)
        os.utime(folders / f"generic-{age_days:02}", (0, time.time() - age_days * 86400 + 60))
    current = Path(where(COLIBRI_CACHE_DIR=str(tmp_path))[2])
    left = {path.name for path in folders.iterdir()}
    assert left == {current.name} | {f"generic-{age_days:02}" for age_days in range(7)}


def test_unwritable_cache_gives_a_temporary_folder(tmp_path: Path) -> None:
    """A home that cannot be written is no error: the folder is in TMPDIR, private, found again, and the reason says why."""
    blocked = tmp_path / "file"
    blocked.touch()
    first, second = (where(COLIBRI_CACHE_DIR=str(blocked), TMPDIR=str(tmp_path)) for _ in range(2))
    assert first[2] == second[2]
    assert Path(first[2]).parent == tmp_path / f"colibri-mp-{os.getuid()}"
    assert Path(first[2]).parent.stat().st_mode & 0o777 == 0o700
    assert first[3] == f"{blocked / 'kernels' / Path(first[2]).name} cannot be written"


def test_instruction_set_that_the_machine_lacks_is_refused() -> None:
    """COLIBRI_ISA with a word that cannot be obeyed is an error that names the possible ones."""
    result = run("-c", WHERE, check=False, COLIBRI_ISA="altivec")
    assert result.returncode != 0
    assert "COLIBRI_ISA=altivec cannot be used here" in result.stderr
    assert "generic" in result.stderr


COUNT_PASSES = """
import sys, time
start = time.perf_counter()
from numba.core import event
passes = []
class Listener(event.Listener):
    def on_start(self, occurrence): passes.append(occurrence.data)
    def on_end(self, occurrence): pass
event.register("numba:run_pass", Listener())
import kernel_cases
from colibri_mp.kernels.team import ThreadTeam
from colibri_mp.kernels.expert import ExpertStage
experts = kernel_cases.Experts((kernel_cases.FORMATS[0],) * 3, 64, 64)
with ThreadTeam(2) as team:
    experts.step(ExpertStage(team, experts.shape, len(experts.ids), 5, 2), experts.batch(5, 2), experts.ids)
print(len(passes), time.perf_counter() - start)
"""


def test_second_process_compiles_nothing(record_property: object) -> None:
    """What one process compiled, the next one loads: numba runs no pass, and it takes a moment."""
    run("-c", COUNT_PASSES)
    num_passes, seconds = run("-c", COUNT_PASSES).stdout.split()
    record_property("load_seconds", seconds)  # type: ignore[operator]
    print(f"import and load of an expert stage: {float(seconds):.2f} s")
    assert int(num_passes) == 0


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    """Outputs of this process's instruction set."""
    return kernel_cases.outputs()


def outputs_of(tmp_path: Path, **environment: str) -> tuple[str, dict[str, np.ndarray]]:
    """(instruction set, outputs) of a process with that environment."""
    value = run("kernel_cases.py", str(tmp_path / "out.npz"), **environment).stdout.strip()
    with np.load(tmp_path / "out.npz") as file:
        return value, dict(file)


@pytest.mark.skipif(not X86, reason="needs AVX2")
def test_avx2_gives_the_same_bits(tmp_path: Path, expected: dict[str, np.ndarray]) -> None:
    """Integer dot products are exact and float operations in the same order, so AVX2 and AVX-512 do not differ."""
    value, outputs = outputs_of(tmp_path, NUMBA_CPU_NAME="haswell")
    assert value == "avx2"
    assert outputs.keys() == expected.keys()
    for name, result in outputs.items():
        np.testing.assert_array_equal(result, expected[name], err_msg=name)


def test_generic_agrees(tmp_path: Path, expected: dict[str, np.ndarray]) -> None:
    """Plain float32 without fused operations: within 2e-6 of the largest value."""
    value, outputs = outputs_of(tmp_path, NUMBA_CPU_NAME="generic")
    assert value == "generic"
    assert outputs.keys() == expected.keys()
    for name, result in outputs.items():
        assert np.abs(result - expected[name]).max() < 2e-6 * np.abs(expected[name]).max(), name
