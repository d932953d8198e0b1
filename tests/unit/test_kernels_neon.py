"""The NEON kernels, as far as a machine without NEON can tell: their assembly, and their results with `sdot` spelled out."""

import platform
from pathlib import Path

import kernel_cases
import numpy as np
import pytest
from test_kernels_isa import run

from colibri_mp.kernels.team import ThreadTeam
from colibri_mp.kernels.tiles import TILE_TOKENS

pytestmark = pytest.mark.skipif(
    platform.machine() in ("arm64", "aarch64"), reason="the other tests run these kernels here"
)


def test_assembly_is_made_of_sdot(tmp_path: Path) -> None:
    """Cross-compiled for Apple M1: every dot product is one by-element `sdot`, and nothing calls a library."""
    lines = run("neon_on_x86.py", "assembly", COLIBRI_CACHE_DIR=str(tmp_path)).stdout.splitlines()
    dots = [line for line in lines if "\tsdot\t" in line]
    units, lanes, planes = 16, 4, 3
    assert len(dots) == units * lanes * planes * (1 + TILE_TOKENS) * (1 + 2)  # 4-bit codes once, 8-bit ones twice
    assert all("[" in line for line in dots)
    assert not [line for line in lines if line.startswith(("\tbl\t", "\tblr\t"))]


def test_results_are_the_same_bits(tmp_path: Path) -> None:
    """With `sdot` replaced by its definition, products have the bits of this machine's own instruction set."""
    run("neon_on_x86.py", "run", str(tmp_path / "out.npz"), COLIBRI_CACHE_DIR=str(tmp_path))
    with ThreadTeam(1) as team, np.load(tmp_path / "out.npz") as results:
        for encoding, result in zip(kernel_cases.NEON_FORMATS, results.values(), strict=True):
            np.testing.assert_array_equal(result, kernel_cases.product(team, encoding), err_msg=str(encoding))
