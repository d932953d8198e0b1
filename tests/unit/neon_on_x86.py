"""The NEON kernels without an ARM machine; a script, since the instruction set is fixed when the kernels are imported.

    python neon_on_x86.py run out.npz       their code on this machine, `sdot` replaced by what it is defined to do -> products
    python neon_on_x86.py assembly          the assembly for an Apple M1 of the 4-bit and 8-bit kernels and the quantiser

Needs a COLIBRI_CACHE_DIR of its own: numba does not know that anything was replaced.
"""

import sys
from typing import Any

import numpy as np
from llvmlite import binding, ir

from colibri_mp.kernels import isa

isa.current = lambda: isa.Isa("neon_dot", "test")  # type: ignore[assignment]  # before anything else reads it

from colibri_mp.formats import Format  # noqa: E402
from colibri_mp.kernels import activations, emit, tiles  # noqa: E402

_real_call = emit.call


def _call(builder: Any, name: str, result: Any, args: Any) -> Any:
    """`sdot`: to each int32 lane, add the four products of the int8 lanes in its place. `tbl1`: bytes of the table by number."""
    if "tbl1" in name:
        return _real_call(builder, "llvm.x86.ssse3.pshuf.b.128", result, args)
    if "sdot" not in name:
        return _real_call(builder, name, result, args)
    acc, first, second = args
    wide = emit.vector(emit.I32, 16)
    products = builder.mul(builder.sext(first, wide), builder.sext(second, wide))
    for place in range(4):
        acc = builder.add(acc, emit.shuffle(builder, products, products, range(place, 16, 4)))
    return acc


def run(path: str) -> None:
    """Products of some formats of the test cases."""
    emit.call = _call
    import kernel_cases

    from colibri_mp.kernels.team import ThreadTeam

    with ThreadTeam(1) as team:
        np.savez(path, *[kernel_cases.product(team, encoding) for encoding in kernel_cases.NEON_FORMATS])


def _module(emit_body: Any, num_arguments: int) -> str:
    module = ir.Module(name="kernel")
    kind = ir.FunctionType(ir.VoidType(), [emit.I64] * num_arguments)
    function = ir.Function(module, kind, name="kernel")
    builder = ir.IRBuilder(function.append_basic_block())
    emit_body(builder, list(function.args))
    builder.ret_void()
    return str(module)


def assembly(text: str) -> str:
    """Optimised assembly of LLVM text for an Apple M1."""
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    triple = "arm64-apple-macosx"
    machine = binding.Target.from_triple(triple).create_target_machine(cpu="apple-m1", opt=3)
    module = binding.parse_assembly(text)
    module.triple = triple
    options = binding.create_pipeline_tuning_options(3)
    binding.create_pass_builder(machine, options).getModulePassManager().run(
        module, binding.create_pass_builder(machine, options)
    )
    return machine.emit_assembly(module)


if __name__ == "__main__":
    if sys.argv[1] == "run":
        run(sys.argv[2])
    else:
        for bits in (4, 8):
            matrix_format = Format("q4" if bits == 4 else "q8", 64, "bf16")
            for num_tokens in (1, tiles.TILE_TOKENS):
                body = lambda b, a, f=matrix_format, n=num_tokens: tiles._emit_quantised(b, a, f, 3, n)  # noqa: E731
                print(f"; {bits} bits, {num_tokens} tokens")
                print(assembly(_module(body, 5)))
        print("; quantiser")
        print(assembly(_module(lambda b, a: activations._emit_group(b, a[0], a[1], 64, 3), 2)))
