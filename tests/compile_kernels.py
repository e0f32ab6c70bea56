"""Compile the fused kernels for one architecture, without a GPU, and print which matrix instructions they use.

A process of its own: where TRITON_INTERPRET is set, Triton does not compile.
"""

import json
import re
import sys
import tempfile

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hilbert_lib.attention.triton.backward import dkv_kernel, dq_kernel
from hilbert_lib.attention.triton.forward import forward_kernel
from hilbert_lib.attention.triton.launch import CONFIGS

TYPES = {
    **dict.fromkeys(("q", "k", "v", "out", "dout", "dq", "dk", "dv"), "*bf16"),
    **dict.fromkeys(("lse", "delta", "partial_out", "partial_lse", "partial_dq", "partial_dk", "partial_dv"), "*fp32"),
    **dict.fromkeys(("branches", "offsets", "classes", "branch_ids", "inverse"), "*i32"),
    **{"padding": "*i1", "seed": "*i64", "scale": "fp32", "dropout_p": "fp32"},
}
FLAGS = {
    **{"HEAD_DIM": 64, "BLOCK_D": 64, "CAUSAL": True, "PRECISION": "ieee"},
    **dict.fromkeys(("GATHER", "PADDING", "DROPOUT", "READ_PARTIAL", "WRITE_PARTIAL"), False),
}


def compiled(kernel, config, architecture: int) -> str:
    """The PTX of one kernel."""
    constants = {**FLAGS, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
    signature = {name: "constexpr" if name in constants else TYPES.get(name, "i32") for name in kernel.arg_names}
    aligned = {
        (n,): [["tt.divisibility", 16]]
        for n, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name.startswith("stride_")
    }
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    target = GPUTarget("cuda", architecture, 32)
    return triton.compile(ASTSource(kernel, signature, constants, aligned), target=target, options=options).asm["ptx"]


if __name__ == "__main__":
    triton.knobs.cache.dir = tempfile.mkdtemp()
    kernels = {"forward": forward_kernel, "dq": dq_kernel, "dkv": dkv_kernel}
    ptx = {name: compiled(kernel, CONFIGS[name][2, 64], int(sys.argv[1])) for name, kernel in kernels.items()}
    print(
        json.dumps(
            {
                name: sorted(set(re.findall(r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)", text)))
                for name, text in ptx.items()
            }
        )
    )
