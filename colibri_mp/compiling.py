"""Compiling the kernels before the processes that need them start, once for this machine and these sources.

It happens in a process of its own: the compiler's memory, some hundred MB, goes back to the system with it, and stopping
in the middle is possible.
"""

import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection

from colibri_mp.config import format_size
from colibri_mp.control_groups import KillCounter
from colibri_mp.errors import ColibriError, MemoryPlanError, describe_exit
from colibri_mp.formats import Encoding
from colibri_mp.kernels import isa
from colibri_mp.kernels.warming import is_warm, warm
from colibri_mp.limits import tightest_room

_TICK_S = 0.2
COMPILER_BYTES = 290_000_000  # measured; gone before the cluster's own memory is taken


class Stopping(Exception):
    """The cluster is to end: leave what is under way."""


def compile_kernels(
    encodings: frozenset[Encoding], planes: int, progress: Callable[[str], None], should_stop: Callable[[], bool],
    quantises: bool = False, blocks: frozenset[str] = frozenset(),
) -> None:  # fmt: skip
    """Make sure that what the encodings need is in the cache; does nothing if it is, which takes a millisecond.

    `quantises`: experts are quantised while they are read. `blocks`: see `kernels.warming`.

    Raises:
        MemoryPlanError: there is too little memory to compile.
        Stopping: `should_stop` said so.
        ColibriError: the compiler failed; its messages are on stderr.
    """
    folder = isa.prepare_cache()
    if folder.reason != isa.USER_CACHE:
        progress(f"compiled kernels are kept in {folder.path}: {folder.reason}")
    if is_warm(encodings, planes, quantises, blocks):
        return
    if (room := tightest_room()).free_bytes < COMPILER_BYTES:
        raise MemoryPlanError(
            f"compiling the kernels, once for this machine, takes {format_size(COMPILER_BYTES)} before anything else, "
            f"there are {room}; free memory"
        )
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(
        target=_compile, args=(encodings, planes, quantises, blocks, theirs), name="colibri-compiler"
    )
    kills = KillCounter()
    process.start()
    theirs.close()
    try:
        _follow(ours, progress, should_stop)
        process.join()
        if process.exitcode:
            described = describe_exit(process.exitcode, kills.has_risen())
            raise ColibriError(f"compiling the kernels failed: the compiler {described}")
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()


def _follow(connection: Connection, progress: Callable[[str], None], should_stop: Callable[[], bool]) -> None:
    """Pass on what the compiler says until it ends."""
    while True:
        if should_stop():
            raise Stopping
        if connection.poll(_TICK_S):
            try:
                progress(connection.recv_bytes().decode())
            except EOFError:
                return


def _compile(
    encodings: frozenset[Encoding], planes: int, quantises: bool, blocks: frozenset[str], connection: Connection
) -> None:
    """The process: compile, and say what."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warm(encodings, lambda text: connection.send_bytes(text.encode()), planes, quantises, blocks)
