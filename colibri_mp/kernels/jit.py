"""How everything in this package is compiled, typed once because numba is not.

- `compiled`: a function that compiled code calls (also from Python, releasing the GIL).
- `Native`: a function with int64 arguments and no result, compiled by itself and called *by address*. Stages and
  tile kernels are of this kind: a stage holds the addresses of the kernels for its weight formats, so that it is compiled
  once, and each format once, whatever their combinations.
- `intrinsic`: emits LLVM by hand. Keep those at module level and polymorphic over literal ints (`prefer_literal=True`):
  captured in a closure they would give numba an unstable cache key, and every process would compile again. Closures over ints are fine.

All code: no fast-math (one order of float operations), numpy's rules for division, no bounds checks, cached in `isa.prepare_cache()`.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar, cast

import numba
import numba.extending
from numba import types

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compile for use from compiled code and from Python, without the GIL."""
    decorator = numba.njit(cache=True, nogil=True, fastmath=False, error_model="numpy", boundscheck=False)
    return cast(F, decorator(function))


def intrinsic(function: Callable[..., Any]) -> Any:
    """numba's `intrinsic`, with literal ints kept as such."""
    return numba.extending.intrinsic(prefer_literal=True)(function)


class Native:
    """A function `f(int64, ...) -> None` compiled when its `address` is first asked for.

    It must not raise: nothing would receive the exception.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    @cached_property
    def _callback(self) -> Any:
        num_args = self._function.__code__.co_argcount
        signature = types.void(*[types.int64] * num_args)
        return numba.cfunc(signature, nopython=True, cache=True, error_model="numpy", boundscheck=False)(self._function)

    @property
    def address(self) -> int:
        """Address of the machine code, valid as long as this object; compiles, or loads from the cache, at first use."""
        return int(self._callback.address)

    @property
    def was_cached(self) -> bool:
        """Whether the machine code came from the cache (compiles if it must)."""
        return bool(self._callback.cache_hits)
