"""Compile kernels for one architecture, without a GPU, and print how often they have what their speed rests on.

The arguments are the architecture, and groups of kernels, of `GROUPS`. Under "ptx" a hash of each kernel's PTX stands:
without line information it changes only with what is compiled, and no file may move a kernel and change it. Without
arguments every group is compiled for the GPUs that it is for, and their hashes are printed (ptx_hashes.txt).
A process of its own: where TRITON_INTERPRET is set, Triton does not compile.
"""

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from functools import partial
from itertools import product

import triton
from held_operands import held_operands
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from hilbert_lib.attention.triton import decode as decoding
from hilbert_lib.attention.triton import rows as by_row
from hilbert_lib.attention.triton.arguments import CONFIGS
from hilbert_lib.attention.triton.backward import dkv_kernel, dq_kernel
from hilbert_lib.attention.triton.forward import forward_kernel
from hilbert_lib.attention.triton.hopper import backward as hopper_backward
from hilbert_lib.attention.triton.hopper import forward as hopper_forward
from hilbert_lib.attention.triton.hopper.division import BRANCHES
from hilbert_lib.attention.triton.hopper.launch import HOPPER_BACKWARD, HOPPER_FORWARD
from hilbert_lib.curves.kernels import decode_kernel, encode_kernel

ATTENTION_TYPES = {
    **dict.fromkeys(("q", "k", "v", "out", "dout", "dq", "dk", "dv"), "*bf16"),
    **dict.fromkeys(("lse", "delta", "partial_out", "partial_lse", "partial_dq", "partial_dk", "partial_dv"), "*fp32"),
    **dict.fromkeys(("branches", "offsets", "classes", "items", "branch_ids", "inverse", "flag", "table"), "*i32"),
    **{"padding": "*i1", "seed": "*i64", "scale": "fp32", "drop_below": "i64"},
}
ATTENTION = {"forward": forward_kernel, "dq": dq_kernel, "dkv": dkv_kernel}
CURVE_TYPES = {
    **dict.fromkeys(("out", "coordinates"), "*i64"),
    **dict.fromkeys(("outside", "rows", "before", "layouts", "lists", "cells", "places"), "*i32"),
}
HASHES = []  # of the PTX of every kernel, in the order in which they were compiled
SOME = BRANCHES - 1  # so that one of the warp-specialised kernels' branches has no descriptor
STRIDES = ("stride_", "out_", "total_")  # how arguments begin that are multiples of 16
ATTENTION_FLAGS = {
    **{"HEAD_DIM": 64, "BLOCK_D": 64, "CAUSAL": True, "PRECISION": "ieee"},
    **dict.fromkeys(("GATHER", "PADDING", "DROPOUT", "READ_PARTIAL", "WRITE_PARTIAL", "IF_FLAG"), False),
}


def compiled(kernel, types: dict, constants: dict, options: dict, architecture: int, source=ASTSource):
    """One kernel as Triton compiles it; constants that it does not have are left out."""
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    aligned = {
        (n,): [["tt.divisibility", 16]]
        for n, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or (name.startswith(STRIDES) and signature[name] != "constexpr")
    }
    target = GPUTarget("cuda", architecture, 32)
    made = triton.compile(source(kernel, signature, constants, aligned), target=target, options=options)
    assert "hilbert_lib" not in made.asm["ptx"], "a name of a module in the PTX changes with the module's place"
    HASHES.append(f"{kernel.__name__} {hashlib.sha256(made.asm['ptx'].encode()).hexdigest()[:16]}")
    return made


def ptx_of(*arguments, **options) -> str:
    """The PTX of one kernel; arguments as `compiled` takes them."""
    return compiled(*arguments, **options).asm["ptx"]


def configured(name: str, size: int, head_dim: int) -> tuple:
    """What `compiled` takes for a fused kernel as it is configured, before the architecture."""
    config = CONFIGS[name][size, head_dim]
    types = ATTENTION_TYPES if size == 2 else {x: kind.replace("bf16", "fp32") for x, kind in ATTENTION_TYPES.items()}
    constants = {**ATTENTION_FLAGS, "HEAD_DIM": head_dim, "BLOCK_D": head_dim}
    constants |= {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
    return ATTENTION[name], types, constants, {"num_warps": config.num_warps, "num_stages": config.num_stages}


def attention(architecture: int) -> dict[str, str]:
    """The PTX of the fused kernels."""
    return {name: ptx_of(*configured(name, 2, 64), architecture) for name in ATTENTION}


def configurations(architecture: int) -> dict[str, int]:
    """Bytes of shared memory that each entry of the fused kernels' configurations takes."""
    return {
        f"{name} {size} {head_dim}": compiled(*configured(name, size, head_dim), architecture).metadata.shared
        for name in ATTENTION
        for size, head_dim in CONFIGS[name]
    }


def decode(architecture: int) -> dict[str, str]:
    """The PTX of the kernels for a few queries, of one and of several, and of their merge."""
    common = {name: ATTENTION_FLAGS[name] for name in ("CAUSAL", "PRECISION", "GATHER", "PADDING", "DROPOUT")}
    common |= {"HEAD_DIM": 128, "BLOCK_D": 128, "BLOCK_N": 64, "PAIRS": 16}
    ptx = {}
    for block_m, several in ((16, False), (32, True)):
        constants = {**common, "BLOCK_M": block_m, "SEVERAL": several}
        options = {"num_warps": 4, "num_stages": 3}
        ptx[f"{block_m} rows"] = ptx_of(decoding.decode_kernel, ATTENTION_TYPES, constants, options, architecture)
    constants = {"HEAD_DIM": 128, "BLOCK_D": 128, "BLOCK": 64}
    ptx["merge"] = ptx_of(decoding.merge_kernel, ATTENTION_TYPES, constants, {"num_warps": 4}, architecture)
    return ptx


def curves(architecture: int) -> dict[str, str]:
    """The PTX of the Hilbert curve's kernels, in 2-D and 3-D."""
    ptx = {}
    for ndim in (2, 3):
        for name, kernel in (("decode", decode_kernel), ("encode", encode_kernel)):
            constants = {"NDIM": ndim, "STEP" if name == "decode" else "BLOCK": 256}
            ptx[f"{name} {ndim}"] = ptx_of(kernel, CURVE_TYPES, constants, {"num_warps": 1}, architecture)
    return ptx


def rows(architecture: int) -> dict[str, str]:
    """The PTX of what merges rows and adds to them, of sixteen bits and of thirty-two."""
    constants = {"HEAD_DIM": 128, "BLOCK_D": 128, "BLOCK_M": by_row.ELEMENTS // 128, "out_dim": 1, "total_dim": 1}
    ptx = {}
    for kernel, wholes in ((by_row.merge_kernel, ("out", "other_out")), (by_row.add_kernel, ("total", "more"))):
        for dtype in ("*bf16", "*fp32"):
            types = dict.fromkeys(wholes, dtype) | dict.fromkeys(("lse", "other_lse"), "*fp32")
            types |= {"first": "*i64", "second": "*i64"}
            name = f"{kernel.__name__} {dtype}"
            ptx[name] = ptx_of(kernel, types, constants, {"num_warps": 4}, architecture)
    return ptx


def described(rows: int, columns: int, dtype) -> str:
    """The type of a descriptor of tiles of dilated rows."""
    block = [1, rows, 1, 1, columns]
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    return f"tensordesc<{dtype}{block},{layout!r}>".replace(" ", "")


def forward_on_hopper(columns: int, causal: bool, goes_on: bool = False) -> tuple:
    """What `compiled` takes for the warp-specialised forward, before the architecture."""
    config = HOPPER_FORWARD[columns]
    keys = described(config.block_n, columns, gl.bfloat16)
    types = ATTENTION_TYPES | {f"{x}{i}": keys for x in "kv" for i in range(BRANCHES)}
    constants = {"HEAD_DIM": columns, "BLOCK_D": columns, "N_BRANCHES": SOME, "CAUSAL": causal, "MASKED": causal}
    constants |= {"BLOCK_N": config.block_n, "STAGES": config.num_stages, "READ_PARTIAL": goes_on}
    constants |= {f"{x}{i}": None for x in "kv" for i in range(SOME, BRANCHES)}
    return hopper_forward.forward_kernel, types, constants, {"num_warps": 4, "maxnreg": config.maxnreg}


def backward_on_hopper(columns: int, causal: bool, with_dq: bool = True, cut: bool = True) -> tuple:
    """What `compiled` takes for the warp-specialised backward, before the architecture."""
    config = HOPPER_BACKWARD[columns]
    queries = described(config.block_m, columns, gl.bfloat16)
    part = described(config.block_m, columns // 2, gl.float32)
    types = ATTENTION_TYPES | {f"{x}{i}": queries for x in "qd" for i in range(BRANCHES)}
    types |= {f"dq{i}": part for i in range(BRANCHES)}
    constants = {"HEAD_DIM": columns, "BLOCK_D": columns, "N_BRANCHES": SOME, "CAUSAL": causal, "CUT": cut}
    constants |= {"READ_PARTIAL": causal, "BLOCK_M": config.block_m, "STAGES": config.num_stages, "WITH_DQ": with_dq}
    constants |= {f"{x}{i}": None for x in ("q", "d", "dq") for i in range(SOME, BRANCHES)}
    return hopper_backward.backward_kernel, types, constants, {"num_warps": 4}


def hopper(architecture: int, every: bool = True) -> dict[str, str]:
    """The PTX of the warp-specialised kernels, causal and not; unless every one, a forward and a backward with dq."""
    ptx = {}
    for columns in (64, 128):
        for causal in (False, True):
            forward, backward = (every or one == (columns, causal) for one in ((64, True), (128, False)))
            for goes_on in (True, False)[: forward + every]:
                args = *forward_on_hopper(columns, causal, goes_on), architecture, GluonASTSource
                ptx[f"forward {columns} {causal} {goes_on}"] = ptx_of(*args)
            for with_dq in (True, False)[: backward + (causal and every)]:
                args = *backward_on_hopper(columns, causal, with_dq), architecture, GluonASTSource
                ptx[f"backward {columns} {causal}" + ("" if with_dq else " without dq")] = ptx_of(*args)
    return ptx


def sass_of(kernel) -> str:
    """The machine code of a compiled kernel, as text."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def waits(architecture: int) -> dict[str, str]:
    """The SASS of each loop of the forward from the wait for scores to that for the product with v, held late."""
    sass = sass_of(compiled(*forward_on_hopper(128, False), architecture, GluonASTSource))
    loops = re.findall(r"DEPBAR\.LE gsb0, 0x1(.*?)DEPBAR\.LE gsb0, 0x0", sass, re.DOTALL)
    return {f"group {number}": loop for number, loop in enumerate(loops)}


def resident(architecture: int) -> dict[str, dict[str, int]]:
    """How many programs of the kernels for narrow rows a multiprocessor of an H100 holds; how often a product waits."""
    found = {}
    kernels = {f"forward causal {causal}": forward_on_hopper(64, causal) for causal in (False, True)}
    for name, source in (kernels | {"backward causal True": backward_on_hopper(64, True)}).items():
        kernel = compiled(*source, architecture, GluonASTSource)
        ptx = kernel.asm["ptx"]
        registers, threads = (int(re.search(rf"\.{size} (\d+)", ptx)[1]) for size in ("maxnreg", "reqntid"))
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
            file.write(ptx)
            file.flush()
            ptxas = f"{triton.knobs.nvidia.ptxas.path} -v -arch=sm_{architecture}a {file.name} -o /dev/null"
            told = subprocess.run(ptxas.split(), check=True, capture_output=True, text=True).stderr
        programs = min(65536 // (registers * threads), 228 * 1024 // (kernel.metadata.shared + 1024))
        found[name] = {"programs": programs, "serialized": told.count("are serialized")}
    return found


def operands(architecture: int, every: bool = True) -> dict[str, dict]:
    """What of the warp-specialised backwards is held and spoilt (`held_operands`); unless every one, of three.

    They hold keys and values in registers from before their loops. The forward makes weights for the next pass.
    """
    return {
        f"{columns} {causal} {cut} {with_dq}": held_operands(sass_of(kernel))
        for columns, causal, cut, with_dq in product((64, 128), (False, True), (False, True), (False, True))
        if every or (columns == 64 and causal == cut and (cut or not with_dq))
        for kernel in [compiled(*backward_on_hopper(columns, causal, with_dq, cut), architecture, GluonASTSource)]
    }


GROUPS = {
    **{"attention": attention, "configurations": configurations},
    **{"decode": decode, "curves": curves, "rows": rows},
    **{"hopper": hopper, "some of hopper": partial(hopper, every=False), "waits": waits, "resident": resident},
    **{"operands": operands, "some operands": partial(operands, every=False)},
}
INSTRUCTIONS = re.compile(
    r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma|cp\.async\.cg|cp\.(?:reduce\.)?async\.bulk\.tensor|"
    r"(?:ex2|lg2)\.approx|(?:ld|st)\.global\.v\d\.b\d+|MUFU\.EX2)"
)

PLAIN = ("attention", "configurations", "decode", "curves", "rows")
WHOLE = {80: PLAIN, 90: (*PLAIN, "hopper", "operands"), 100: PLAIN}


def made_by(architecture: int, groups: tuple[str, ...]) -> dict[str, dict]:
    """What each group gives, instructions counted, and the hashes of its PTX."""
    found = {"ptx": {}}
    for group in groups:
        HASHES.clear()
        kernels = GROUPS[group](architecture).items()
        found[group] = {name: Counter(INSTRUCTIONS.findall(x)) if isinstance(x, str) else x for name, x in kernels}
        found["ptx"][group] = [f"{architecture} {group.replace(' ', '_')} {n} {one}" for n, one in enumerate(HASHES)]
    return found


if __name__ == "__main__":
    triton.knobs.cache.dir = tempfile.mkdtemp()
    triton.knobs.compilation.disable_line_info = True
    architecture, *groups = sys.argv[1:] or [0]
    if groups:
        print(json.dumps(made_by(int(architecture), tuple(groups))))
    else:
        print("triton", triton.__version__)
        for architecture, groups in sorted(WHOLE.items()):
            made = made_by(architecture, groups)["ptx"].values()
            print("\n".join(line for lines in made for line in lines), flush=True)
