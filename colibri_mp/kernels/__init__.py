"""Compiled CPU kernels: matrix products, expert FFNs, attention, router, norms, each with a plain numpy reference.

    isa          which vector instructions, and where compiled code is kept
    jit          the one way functions are compiled; functions called by address
    emit         LLVM vectors for authors of intrinsics;  `vectors`: the same as values inside compiled code
    layout       the packed form of a weight matrix (`PackedMatrix`), of an expert (`ExpertShape`)
    team         threads that run one compiled stage together
    tiles        16 rows x a few tokens, by format and instruction set, out of `group_dots` and `codes`;  `activations`: what they read
    linear       matrix products from tiles;  `expert`: SwiGLU experts;  `attention`, `router`, `norm`, `rope`
    reference    plain numpy of each
    warming      compiles what a model needs before processes are spawned

Rule for all of them: the order of float operations for one (token, output row) is fixed, whatever the number of tokens,
tiles, chunks or threads.
"""

from colibri_mp.kernels import isa as isa

isa.prepare_cache()

from colibri_mp.kernels.warming import warm as warm  # noqa: E402  # nothing that imports numba comes before the cache folder is set
