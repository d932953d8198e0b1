"""Which vector instructions the kernels use, and the folder that keeps what was compiled for them.

Nothing here imports numba: `prepare_cache` has to run before numba reads its environment, and `colibri_mp.kernels` calls it on
import. Both answers are fixed for the life of a process; spawned children inherit them through the environment.

    COLIBRI_ISA         one of ISAS: use this instead of the best one (a coarser one than the machine has, for tests)
    COLIBRI_CACHE_DIR   root of the caches (see user_cache)
    NUMBA_CPU_NAME      numba's own switch; the instruction set follows it
"""

import hashlib
import os
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import llvmlite.binding as llvm

from colibri_mp.errors import ConfigError
from colibri_mp.user_cache import user_cache_dir

ISAS = ("avx512_vnni", "avx2", "neon_dot", "generic")
"""Best first. The first three have exact integer dot products and give the same bits; generic computes in plain float32."""

_AVX512_CPUS = ("cascadelake", "cooperlake", "icelake", "tigerlake", "rocketlake", "sapphirerapids", "emeraldrapids",
                "graniterapids", "znver4", "znver5")  # fmt: skip
_AVX2_CPUS = ("haswell", "broadwell", "skylake", "cannonlake", "alderlake", "raptorlake", "meteorlake", "arrowlake", "lunarlake",
              "znver1", "znver2", "znver3", "x86-64-v3", "x86-64-v4")  # fmt: skip
_NEON_DOT_CPUS = ("apple-m", "neoverse-n", "neoverse-v", "cortex-a76", "cortex-a78", "cortex-x")


class Isa(NamedTuple):
    """An instruction set of `ISAS`, and why it was chosen."""

    value: str
    reason: str


def _from_features(features: set[str]) -> str:
    if {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni", "fma", "f16c"} <= features:
        return "avx512_vnni"
    if {"avx2", "fma", "f16c"} <= features:
        return "avx2"
    return "neon_dot" if "dotprod" in features else "generic"


def _host_features() -> set[str]:
    try:
        return {name for name, present in llvm.get_host_cpu_features().items() if present}
    except RuntimeError:
        return set()


def _from_cpu_name(cpu: str) -> str:
    for value, names in (("avx512_vnni", _AVX512_CPUS), ("avx2", _AVX2_CPUS), ("neon_dot", _NEON_DOT_CPUS)):
        if cpu.startswith(names):
            return value
    return "generic"


def _detect() -> Isa:
    cpu = os.environ.get("NUMBA_CPU_NAME", "")
    if cpu and cpu != "host":
        return Isa(_from_cpu_name(cpu), f"NUMBA_CPU_NAME={cpu}")
    if sys.platform == "darwin" and llvm.get_host_cpu_name().startswith("apple-m"):
        return Isa("neon_dot", "every Apple silicon processor has it")
    return Isa(_from_features(_host_features()), f"features of this {llvm.get_host_cpu_name()}")


@lru_cache(maxsize=1)
def current() -> Isa:
    """The instruction set of this process. Raises ConfigError when COLIBRI_ISA asks for one that the processor lacks."""
    best, wanted = _detect(), os.environ.get("COLIBRI_ISA", "")
    if not wanted:
        return best
    possible = {
        "avx512_vnni": ("avx512_vnni", "avx2", "generic"),
        "avx2": ("avx2", "generic"),
        "neon_dot": ("neon_dot", "generic"),
    }
    allowed = possible.get(best.value, ("generic",))
    if wanted not in allowed:
        raise ConfigError(f"COLIBRI_ISA={wanted} cannot be used here ({best.reason}); possible: {', '.join(allowed)}")
    return Isa(wanted, f"COLIBRI_ISA, instead of {best.value}")


def _cache_key() -> str:
    """Hash of everything that decides the machine code, other than the instruction set: numba's own key sees one file only."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
        digest.update(
            f"{path.stat().st_mtime_ns}\0".encode()
        )  # numba compiles again when the time of a file has changed
    cpu = os.environ.get("NUMBA_CPU_NAME") or llvm.get_host_cpu_name()
    features = os.environ.get("NUMBA_CPU_FEATURES") or ",".join(sorted(_host_features()))
    for part in (cpu, features, version("numba"), version("llvmlite"), sys.version, str(Path(__file__).parent)):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:16]


def _make_writable(folder: Path) -> bool:
    """Create the folder (0700); False unless it is ours and files can be made in it. The cache holds pickles: nobody else's will do."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder.stat().st_uid == os.getuid()
    except OSError:
        return False


USER_CACHE = "the user's cache"
"""Reason of the usual folder."""


KEPT_FOLDERS, KEPT_SECONDS = 8, 24 * 3600
"""Folders of other versions are kept if they are among the last 8 used, or were used within a day."""


class CacheFolder(NamedTuple):
    """Where compiled kernels are kept, and why there."""

    path: Path
    reason: str


def _forget_old(folders: Path, in_use: Path) -> None:
    """Remove all but the folders used last: each new version of the sources gets one (some 10 MB)."""
    with suppress(OSError):  # another process may be doing the same
        os.utime(in_use)
        by_age = sorted(folders.iterdir(), key=lambda folder: folder.stat().st_mtime, reverse=True)
        for folder in by_age[KEPT_FOLDERS:]:
            if folder != in_use and time.time() - folder.stat().st_mtime > KEPT_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


@lru_cache(maxsize=1)
def prepare_cache() -> CacheFolder:
    """Point numba's cache to a folder for exactly these sources, this numba and this processor; creates it.

    An unwritable cache root gives a temporary folder of the user, so that later starts still find it; failing that, a new one.
    """
    name = f"{current().value}-{_cache_key()}"
    folder = CacheFolder(user_cache_dir() / "kernels" / name, USER_CACHE)
    if not _make_writable(folder.path):
        temporary = Path(tempfile.gettempdir()) / f"colibri-mp-{os.getuid()}"
        reason = f"{folder.path} cannot be written"
        folder = CacheFolder(temporary / name, reason)
        if not (_make_writable(temporary) and temporary.stat().st_mode & 0o077 == 0 and _make_writable(folder.path)):
            folder = CacheFolder(
                Path(tempfile.mkdtemp(prefix="colibri-mp-")), f"{reason}, nor {temporary}; used by this process only"
            )
    else:
        _forget_old(folder.path.parent, folder.path)
    os.environ["NUMBA_CACHE_DIR"] = str(folder.path)
    if "numba" in sys.modules:  # it has read its environment already
        sys.modules["numba"].config.CACHE_DIR = str(folder.path)
    return folder
