"""How everything in this package is compiled, typed once because numba is not.

- `compiled`: a function that compiled code calls (also from Python, releasing the GIL).
- `Native`: a function with int64 arguments and no result, compiled by itself and called *by address*. Stages and
  tile kernels are of this kind: a stage holds the addresses of the kernels for its weight formats, so that it is compiled
  once, and each format once, whatever their combinations.
- `operation`: emits LLVM instructions by hand (numba calls it an intrinsic). Keep operations at module level: captured in a
  closure they would give numba an unstable cache key, and every process would compile again. Closures over ints are fine.

All code: no fast-math (one order of float operations), numpy's rules for division, no bounds checks, cached in `isa.prepare_cache()`.

A function is compiled anew for every *literal* int that compiled code calls it with; constants that are passed on are
therefore best written as `fixed(3)`.
"""

import inspect
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numba.extending
import numpy as np
from numba import types

F = TypeVar("F", bound=Callable[..., Any])

carray = numba.carray
"""carray(pointer, shape): an array over memory, inside compiled code; see the `pointer_*` in `vectors`."""


def compiled(function: F) -> F:
    """Compile for use from compiled code and from Python, without the GIL."""
    decorator = numba.njit(cache=True, nogil=True, fastmath=False, error_model="numpy", boundscheck=False)
    return cast(F, decorator(function))


def fixed(number: int) -> int:
    """A module-level constant that numba takes for a plain int64 and not for a literal."""
    return cast(int, np.int64(number))


def intrinsic(function: Callable[..., Any]) -> Any:
    """numba's `intrinsic`, with literal ints kept as such; for what `operation` cannot say."""
    return numba.extending.intrinsic(prefer_literal=True)(function)


def operation(result: Any, *arguments: Any, num_literals: int = 0) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: make `function(builder, *values)`, which emits LLVM instructions, callable from compiled code.

    result, arguments: numba types; a void operation returns None. The last `num_literals` parameters, after those of `arguments`, are
    ints that must be known when a caller is compiled (literals, or ints of its closure); the function gets them as Python ints.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        def define(_typing: Any, *kinds: Any) -> Any:
            literals = kinds[len(arguments) :]
            if not all(isinstance(kind, types.IntegerLiteral) for kind in literals):
                return None
            numbers = [kind.literal_value for kind in literals]

            def generate(context: Any, builder: Any, _sig: Any, values: Any) -> Any:
                value = function(builder, *values[: len(arguments)], *numbers)
                return context.get_dummy_value() if value is None else value

            return result(*arguments, *literals), generate

        parameters = list(
            inspect.signature(function).parameters.values()
        )  # the builder stands for numba's typing context
        assert len(parameters) == 1 + len(arguments) + num_literals
        define.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # numba asks for the signature
        define.__name__, define.__doc__ = function.__name__, function.__doc__
        return intrinsic(define)

    return decorate


_compiling = threading.Lock()
_kept: list[Any] = []
"""Machine code that was given an address: it stays for the life of the process, frames may hold the address."""


class Native:
    """A function `f(int64, ...) -> None` compiled when its `address` is first asked for, by any thread.

    It must not raise: nothing would receive the exception.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function
        self._address = 0

    @property
    def address(self) -> int:
        """Address of the machine code, for the life of the process; compiled, or loaded from the cache, at first use."""
        if not self._address:
            with _compiling:
                self._address = self._address or self._compile()
        return self._address

    def _compile(self) -> int:
        signature = types.void(*[types.int64] * self._function.__code__.co_argcount)
        decorator = numba.cfunc(signature, nopython=True, cache=True, error_model="numpy", boundscheck=False)
        _kept.append(decorator(self._function))
        return int(_kept[-1].address)
