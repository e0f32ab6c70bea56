"""Compile the steps of notebook 11 for Hopper, without a GPU, and print what they became. A process of its own."""

import json

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from hilbert_lib.lab.inside import STEPS, kernels
from hilbert_lib.lab.inside.steps import constants_of

HEAD_DIM = 64


def compiled(step):
    kernel = kernels.tile_kernel if step.box else kernels.row_kernel
    constants = constants_of(step, HEAD_DIM, vars(kernels))
    types = {**dict.fromkeys(("q", "k", "v", "out"), "*bf16"), "scale": "fp32"}
    if step.stages:
        box = [*step.box, 1, HEAD_DIM]
        layout = gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16)
        types |= dict.fromkeys("kv", f"tensordesc<bf16{box},{layout!r}>".replace(" ", ""))
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    aligned = {
        (n,): [["tt.divisibility", 16]] for n, name in enumerate(kernel.arg_names) if name in ("q", "k", "v", "out")
    }
    source = GluonASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


def compile_all() -> dict:
    """Instructions of tensor cores and copies of boxes in each step's PTX."""
    found = {}
    for step in STEPS:
        ptx = compiled(step).asm["ptx"]
        found[step.name] = {"wgmma": ptx.count("wgmma.mma_async"), "boxes": ptx.count("cp.async.bulk.tensor.4d")}
    return found


if __name__ == "__main__":  # pytest imports it too, for doctests, with Triton's interpreter
    print(json.dumps(compile_all()))
