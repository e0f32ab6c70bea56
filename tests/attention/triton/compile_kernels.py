"""Compile kernels for one architecture, without a GPU, and print what their speed and exactness rest on.

The arguments are the architecture, and "sample" or "every"; or "portable" and how the names of those that are wanted
begin (`portable_kernels`). Without arguments the hashes of every kernel for every architecture are printed
(ptx_hashes.txt): that of a kernel's PTX, without line information, changes only with what is compiled, and no file may
move a kernel and change it. A process of its own: where TRITON_INTERPRET is set, Triton does not compile.
"""

import hashlib
import json
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from itertools import accumulate, pairwise, product

import torch
import triton
from gathered_starts import gathering
from held_operands import held_operands, kept_in_memory, narrow_products, overwritten_tiles, transposed_products
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from hilbert_lib.attention.request import Request, Tensors
from hilbert_lib.attention.starts import STARTS
from hilbert_lib.attention.triton import arguments, copies, grid_launch, lists_launch
from hilbert_lib.attention.triton import decode as decoding
from hilbert_lib.attention.triton import rows as by_row
from hilbert_lib.attention.triton.backward import (
    backward_kernel,
    delta_kernel,
    dkv_kernel,
    dq_kernel,
    scale_kernel,
)
from hilbert_lib.attention.triton.decode_line import line_kernel
from hilbert_lib.attention.triton.forward import forward_kernel
from hilbert_lib.attention.triton.geometry import products_of_float32
from hilbert_lib.attention.triton.hopper import backward as hopper_backward
from hilbert_lib.attention.triton.hopper import forward as hopper_forward
from hilbert_lib.attention.triton.hopper import grid_launch as box_launch
from hilbert_lib.attention.triton.hopper import queries as hopper_queries
from hilbert_lib.attention.triton.hopper import wide_keys, wide_queries
from hilbert_lib.attention.triton.hopper.division import BRANCHES
from hilbert_lib.attention.triton.hopper.launch import (
    HOPPER_BACKWARD,
    HOPPER_DQ,
    HOPPER_FORWARD,
    HOPPER_KEYS,
    HOPPER_WIDE_DQ,
    LOW,
)
from hilbert_lib.attention.triton.packed import DOCUMENTS, PROGRAMS, places_kernel
from hilbert_lib.attention.triton.start import Start
from hilbert_lib.curves.kernels import decode_kernel, encode_kernel
from hilbert_lib.patterns import point_kernels
from hilbert_lib.patterns.neighbourhood import Neighbourhood
from hilbert_lib.patterns.packed_lists import PackedLists
from hilbert_lib.patterns.points import ListedPairs

ARCHITECTURES = (80, 90, 100)
DTYPES = {2: torch.bfloat16, 4: torch.float32}
ATTENTION_TYPES = {
    **dict.fromkeys(("q", "k", "v", "out", "dout", "dq", "dk", "dv", "extra_k", "extra_v", "bias"), "*bf16"),
    **dict.fromkeys(("lse", "dlse", "delta", "sums", "partial_out", "partial_lse"), "*fp32"),
    **dict.fromkeys(("partial_dq", "partial_dk", "partial_dv"), "*fp32"),
    **dict.fromkeys(("branches", "offsets", "classes", "items", "branch_ids", "inverse", "flag", "table"), "*i32"),
    "windows": "*i32",
    "documents": "*i32",
    **dict.fromkeys(STARTS, "*i64"),
    **{"padding": "*i1", "extra_padding": "*i1", "seed": "*i64", "scale": "fp32", "drop_below": "i64"},
}
ATTENTION = {"forward": forward_kernel, "dq": dq_kernel, "dkv": dkv_kernel, "backward": backward_kernel}
CURVE_TYPES = {
    **dict.fromkeys(("out", "coordinates"), "*i64"),
    **dict.fromkeys(("outside", "rows", "before", "layouts", "lists", "cells", "places"), "*i32"),
}
SOME = BRANCHES - 1  # so that one of the warp-specialised kernels' branches has no descriptor
# What a kernel for grids makes, and what it makes where it is told a flag.
ROLES = {
    "forward_kernel": (("forward",), ""),
    "query_kernel": (("forward", "dq"), "BACKWARD"),
    "backward_kernel": (("dq", "dkv"), "OF_KEYS"),
    "wide_kernel": (("forward",), ""),
    "wide_backward_kernel": (("dq", "dkv"), "OF_KEYS"),
    "whole_kernel": (("forward",), ""),
    "key_kernel": (("dkv", "extra"), "EXTRA"),
    "pair_kernel": (("pairs",), ""),
    "entry_kernel": (("entries",), ""),
}
BESIDE_BOXES = ("table_kernel", "bound_kernel", "gradient_kernel")
STRIDES = ("stride_", "out_", "total_")  # how arguments begin that are multiples of 16
ATTENTION_FLAGS = {
    **{"HEAD_DIM": 64, "BLOCK_D": 64, "CAUSAL": True, "PRECISION": products_of_float32()},
    **dict.fromkeys(("GATHER", "PADDING", "DROPOUT", "READ_PARTIAL", "WRITE_PARTIAL", "IF_FLAG"), False),
    "documents": None,
}


def configure(architecture: int) -> None:
    """Gives the launches the steps of an architecture, since they ask for a GPU's; 0 has none of its own."""
    arguments.is_measured = lambda device: architecture == 90
    arguments.has_tensor_memory = lambda device: architecture == 100


def compiled(kernel, types: dict, constants: dict, options: dict, architecture: int):
    """One kernel as Triton compiles it; constants that it does not have are left out."""
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    aligned = {
        (n,): [["tt.divisibility", 16]]
        for n, name in enumerate(kernel.arg_names)
        if str(signature[name]).startswith("*") or (name.startswith(STRIDES) and signature[name] != "constexpr")
    }
    # Numbers in a tuple are of the kinds that Triton makes of these.
    for n, name in enumerate(kernel.arg_names):
        if isinstance(numbers := types.get(name), tuple) and name not in constants:
            signature[name] = tuple("constexpr" if x == 1 else "i32" for x in numbers)
            constants |= {(n, place): 1 for place, x in enumerate(numbers) if x == 1}
            aligned |= {(n, place): [["tt.divisibility", 16]] for place, x in enumerate(numbers) if not x % 16}
    source = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    target = GPUTarget("cuda", architecture, 32)
    return triton.compile(source(kernel, signature, constants, aligned), target=target, options=options)


def configured(name: str, size: int, head_dim: int, **flags: bool) -> tuple:
    """What `compiled` takes for a fused kernel as it is configured for `configure`, before the architecture."""
    like = torch.empty(0, head_dim, dtype=DTYPES[size])
    config = arguments.config_of(name, like)
    types = ATTENTION_TYPES if size == 2 else {x: kind.replace("bf16", "fp32") for x, kind in ATTENTION_TYPES.items()}
    constants = {**ATTENTION_FLAGS, "HEAD_DIM": head_dim, "BLOCK_D": head_dim}
    constants |= {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n} | flags
    return ATTENTION[name], types, constants, {"num_warps": config.num_warps, "num_stages": config.num_stages}


def plain_kernels() -> dict[str, tuple]:
    """The fused kernels as they are configured: by name, element size and head_dim; with dropout; of documents."""
    made = {
        f"{name} {size} {head_dim}": configured(name, size, head_dim)
        for name in ATTENTION
        for size, head_dim in arguments.CONFIGS[name]
    }
    for name in ATTENTION:
        kernel, types, constants, options = made[f"{name} 2 128"]
        made[f"dropout {name} 2 128"] = kernel, types, constants | {"DROPOUT": True}, options
        kernel, types, constants, options = made[f"{name} 4 256"]  # whose tiles are the smallest
        made[f"masked dropout {name} 4 256"] = kernel, types, constants | {"DROPOUT": True, "PADDING": True}, options
        kernel, types, constants, options = made[f"{name} 2 64"]
        of_documents = {key: value for key, value in constants.items() if key != "documents"}
        if name != "backward":  # of short calls, which have no documents
            made[f"packed {name} 2 64"] = kernel, types, of_documents, options
    sizes = {"HEAD_DIM": 64, "BLOCK_D": 64, "BLOCK_M": 32}
    none = {"dlse": None, "sums": None}
    made["delta"] = delta_kernel, ATTENTION_TYPES, sizes | none, {"num_warps": 4}
    made["delta with dlse"] = delta_kernel, ATTENTION_TYPES, sizes | {"sums": None}, {"num_warps": 4}
    made["delta with sums"] = delta_kernel, ATTENTION_TYPES, sizes | {"dlse": None}, {"num_warps": 4}
    made["scale"] = scale_kernel, ATTENTION_TYPES, {"BLOCK": 2048}, {"num_warps": 4}
    return made


def places_of_documents() -> tuple:
    """What `compiled` takes for the kernel that finds the places of packed documents, before the architecture."""
    types = dict.fromkeys(("cu_seqlens", "first_rows", "places"), "*i32")
    types |= dict.fromkeys(("documents", "programs", "chunk", "count"), "i32")
    return places_kernel, types, {"PROGRAMS": PROGRAMS, "DOCUMENTS": DOCUMENTS}, {"num_warps": 4}


def decode_kernels() -> dict[str, tuple]:
    """The kernels for a few queries, of one and of several, and their merge."""
    common = {name: ATTENTION_FLAGS[name] for name in ("CAUSAL", "PRECISION", "GATHER", "PADDING", "DROPOUT")}
    common |= {"HEAD_DIM": 128, "BLOCK_D": 128, "BLOCK_N": 64, "PAIRS": 16, "BLOCK": 64}
    options = {"num_warps": 4, "num_stages": 3}
    with_starts, common = common, common | dict.fromkeys(STARTS)
    line = {name: x for name, x in with_starts.items() if name != "PADDING"} | {"BLOCK_M": 16, "EDGE": 0}
    one, several = {"BLOCK_M": 16, "SEVERAL": False}, {"BLOCK_M": 32, "SEVERAL": True}
    return {
        "decode one": (decoding.decode_kernel, ATTENTION_TYPES, common | one, options),
        "decode several": (decoding.decode_kernel, ATTENTION_TYPES, common | several, options),
        "decode one with starts": (decoding.decode_kernel, ATTENTION_TYPES, with_starts | one, options),
        "decode several with starts": (decoding.decode_kernel, ATTENTION_TYPES, with_starts | several, options),
        "decode merge": (decoding.merge_kernel, ATTENTION_TYPES, common, {"num_warps": 4}),
        "decode merge with starts": (decoding.merge_kernel, ATTENTION_TYPES, with_starts, {"num_warps": 4}),
        "decode line": (
            line_kernel,
            ATTENTION_TYPES,
            line | dict.fromkeys(("padding", "extra_padding", "bias")),
            options,
        ),
        "decode line with all": (line_kernel, ATTENTION_TYPES, line | {"CAUSAL": False, "EDGE": 2}, options),
    }


def curve_kernels() -> dict[str, tuple]:
    """The Hilbert curve's kernels, in 2-D and 3-D."""
    return {
        f"curve {name} {ndim}": (kernel, CURVE_TYPES, {"NDIM": ndim, size: 256}, {"num_warps": 1})
        for ndim in (2, 3)
        for name, kernel, size in (("decode", decode_kernel, "STEP"), ("encode", encode_kernel, "BLOCK"))
    }


def row_kernels() -> dict[str, tuple]:
    """What merges rows and results, adds to rows and adds zero keys, of sixteen bits and of thirty-two."""
    constants = {"HEAD_DIM": 128, "BLOCK_D": 128, "BLOCK_M": by_row.ELEMENTS // 128, "out_dim": 1, "total_dim": 1}
    constants["BLOCK"] = by_row.ELEMENTS
    types = dict.fromkeys(("lse", "other_lse", "result_lse", "log_count", "x"), "*fp32") | {
        "first": "*i64",
        "second": "*i64",
    }
    return {
        f"rows {name} {bits}": (kernel, types | dict.fromkeys(wholes, dtype), constants, {"num_warps": 4})
        for name, kernel, wholes in (
            ("merge", by_row.merge_kernel, ("out", "other_out")),
            ("add", by_row.add_kernel, ("total", "addend")),
            ("zeros", by_row.zero_kernel, ("out",)),
            ("results", by_row.results_kernel, ("out", "other_out", "result")),
            ("sums", by_row.sum_kernel, ("x", "y", "total")),
            ("parts", by_row.parts_kernel, ("total",)),
        )
        for bits, dtype in ((16, "*bf16"), (32, "*fp32"))
    }


def copy_kernels() -> dict[str, tuple]:
    """What copies and sums rows of sixteen bits: gathers of two tensors and of lse, their way back, and sums."""
    starts, at, by_head = [], torch.arange(8), torch.arange(16)
    copies.start = gathering(starts)
    wholes, some = (torch.zeros(2, 1, n, 2, 128, dtype=torch.bfloat16) for n in (64, 8))
    lse, some_lse = (torch.zeros(1, 2, n).transpose(1, 2)[..., None] for n in (64, 8))
    moved = copies.Copy(some[0], wholes[0], at), copies.Copy(some_lse, lse, at)
    other = torch.zeros(1, 16, 1, 128, dtype=torch.bfloat16)
    copies.gather_rows([copies.Copy(some[1], wholes[1], by_head, other), *moved])
    copies.scatter_rows(moved)
    grads, numbers = torch.zeros(1, 16, 1, 128), torch.zeros(64, dtype=torch.int64)
    copies.add_rows([copies.Copy(grads, wholes[0], by_head, through=numbers)])
    parts = [copies.Part(*torch.zeros(2, 1, 8, 2, 128), at)] * 2
    answers = copies.Answers(torch.zeros(16, 2, 1, 128), torch.zeros(16, 3, dtype=torch.int64))
    copies.sum_rows((wholes[0], wholes[1]), at, parts, answers)
    found = {}
    for name, each in zip(("gather", "scatter", "add", "sum"), starts, strict=True):
        found[f"copies {name}"] = as_started(each)
    return found


def list_kernels(both: bool = False) -> dict[str, tuple]:
    """What reads packed lists, as it is launched: without options, and with extra keys and masks; what makes them.

    both: at both head_dims without and with options, and nothing that makes lists.
    """
    found, starts = {}, []
    lists_launch.start = gathering(starts)
    for columns, more in product((64, 128), (False, True)) if both else ((64, False), (128, True)):
        starts.clear()
        x, lists = torch.zeros(1, 64, 2, columns, dtype=torch.bfloat16), PackedLists.from_mask(torch.ones(64, 64) > 0)
        extra = x[:, : 10 if more else 0]
        masks = [torch.zeros(1, n, dtype=torch.bool) if more else None for n in (64, 10)]
        masks = {"key_padding_mask": masks[0], "extra_padding_mask": masks[1]}
        given, request = Tensors(x, x, x, extra, extra), Request(ListedPairs(), lists=lists.tensors, **masks)
        out, lse = lists_launch.forward(given, request)
        lists_launch.backward(out, given, out, lse, request)
        lists_launch.MOST_TILES_AT_ONCE, before = 0, lists_launch.MOST_TILES_AT_ONCE
        lists_launch.backward(out, given, out, lse, request)
        lists_launch.MOST_TILES_AT_ONCE = before
        for name, each in zip(("forward", "backward", "delta", "dq", "dkv", "extra"), starts, strict=False):
            found[f"lists {name} {columns} {more}"] = as_started(each)
    if both:
        return found
    window = torch.zeros(3, 64, dtype=torch.int32)
    for name, dtype in (("met", torch.bool), ("words", torch.int64)):
        numbers, results = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 64, dtype=dtype)
        types = dict(zip(point_kernels.seen_kernel.arg_names, map(type_of, (window,) * 3), strict=False))
        types |= {"query_blocks": type_of(numbers), "key_places": type_of(numbers), "out": type_of(results)}
        constants = {"AXES": 3, "BLOCK": 64, "WORDS": name == "words"}
        found[f"points {name}"] = point_kernels.seen_kernel, types, constants, {"num_warps": 4}
    return found


def as_started(each: Start) -> tuple:
    """What `compiled` takes for a start, before the architecture."""
    arguments = dict(zip(each.kernel.arg_names, each.arguments, strict=False)) | each.named
    constants = {x.name: arguments[x.name] for x in each.kernel.params if x.is_constexpr}
    constants |= {name: None for name, x in arguments.items() if x is None}
    types = {name: x if isinstance(x, tuple) else type_of(x) for name, x in arguments.items() if x is not None}
    options = {name: arguments[name] for name in ("num_warps", "num_stages", "maxnreg") if name in arguments}
    return each.kernel, types, constants, {"num_warps": 4} | options


def described(block: list[int], dtype=gl.bfloat16) -> str:
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    return f"tensordesc<{dtype}{block},{layout!r}>".replace(" ", "")


def forward_on_hopper(
    columns: int, causal: bool, goes_on: bool, padding: bool = False, dropout: bool = False, packed: bool = False
) -> tuple:
    """What `compiled` takes for the warp-specialised forward, before the architecture."""
    config = HOPPER_FORWARD[columns]
    keys = described([1, config.block_n, 1, 1, columns])
    types = ATTENTION_TYPES | {f"{x}{i}": keys for x in "kv" for i in range(BRANCHES)}
    constants = {"HEAD_DIM": columns, "BLOCK_D": columns, "N_BRANCHES": SOME, "CAUSAL": causal}
    constants |= {"MASKED": causal or padding or packed} | options_of_keys(padding, dropout, packed)
    constants |= {"BLOCK_N": config.block_n, "STAGES": config.num_stages, "READ_PARTIAL": goes_on}
    constants |= {f"{x}{i}": None for x in "kv" for i in range(SOME, BRANCHES)}
    return hopper_forward.forward_kernel, types, constants, {"num_warps": 4, "maxnreg": config.maxnreg}


def dq_on_hopper(columns: int, causal: bool, goes_on: bool, dropout: bool = False, packed: bool = False) -> tuple:
    """What `compiled` takes for the warp-specialised dq, before the architecture."""
    config = HOPPER_DQ[columns]
    keys = described([1, config.block_n, 1, 1, columns])
    types = ATTENTION_TYPES | {f"{x}{i}": keys for x in "kv" for i in range(BRANCHES)}
    constants = {"HEAD_DIM": columns, "BLOCK_D": columns, "N_BRANCHES": SOME, "CAUSAL": causal}
    constants |= {"BLOCK_N": config.block_n, "STAGES": config.num_stages, "READ_PARTIAL": goes_on}
    constants |= options_of_keys(False, dropout, packed)
    constants |= {f"{x}{i}": None for x in "kv" for i in range(SOME, BRANCHES)}
    return hopper_queries.dq_kernel, types, constants, {"num_warps": 4}


def keys_on_hopper(head_dim: int, causal: bool, goes_on: bool, padding: bool = False, dropout: bool = False) -> tuple:
    """What `compiled` takes for the warp-specialised dk and dv of wide heads, before the architecture."""
    high = head_dim - LOW
    config, b_stages = HOPPER_KEYS[high]
    types, constants = of_parts("qd", config.block_m, high, 1 if dropout else SOME)
    constants |= {"HEAD_DIM": head_dim, "CAUSAL": causal, "READ_PARTIAL": goes_on}
    constants |= {"STAGES": config.num_stages, "B_STAGES": b_stages} | options_of_keys(padding, dropout)
    return wide_keys.wide_keys_kernel, types, constants, {"num_warps": 4}


def wide_dq_on_hopper(head_dim: int, causal: bool, goes_on: bool, dropout: bool = False) -> tuple:
    """The same for dq of wide heads by parts of columns."""
    high = head_dim - LOW
    config, v_stages = HOPPER_WIDE_DQ[high]
    types, constants = of_parts("kv", config.block_n, high, SOME)
    constants |= {"HEAD_DIM": head_dim, "CAUSAL": causal, "READ_PARTIAL": goes_on}
    constants |= {"STAGES": config.num_stages, "V_STAGES": v_stages} | options_of_keys(False, dropout)
    return wide_queries.wide_dq_kernel, types, constants, {"num_warps": 4}


def of_parts(tensors: str, rows: int, high: int, branches: int) -> tuple[dict, dict]:
    """Types and constants of two tensors' descriptors of low and high parts."""
    parts = {"": described([1, rows, 1, 1, LOW]), "_high": described([1, rows, 1, 1, high])}
    names = {of: [f"{x}{i}{of}" for i in range(BRANCHES) for x in tensors] for of in parts}
    missing = names[""][2 * branches :] + names["_high"][0 if high == LOW else 2 * branches :]
    types = ATTENTION_TYPES | {name: part for of, part in parts.items() for name in names[of]}
    return types, dict.fromkeys(missing) | {"BLOCK_E": high, "N_BRANCHES": branches}


def options_of_keys(padding: bool, dropout: bool, packed: bool = False) -> dict:
    """Constants of a warp-specialised kernel: the arguments that it has not are None."""
    left_out = ([] if packed else ["documents"]) + ([] if padding else ["padding"])
    left_out += [] if dropout else ["seed", "drop_below", "branch_ids"]
    return dict.fromkeys(left_out) | {"PADDING": padding, "DROPOUT": dropout}


def backward_on_hopper(
    columns: int, causal: bool, cut: bool, with_dq: bool, padding: bool = False, dropout: bool = False,
    packed: bool = False,
) -> tuple:  # fmt: skip
    """What `compiled` takes for the warp-specialised backward, before the architecture."""
    config = HOPPER_BACKWARD[columns]
    queries = described([1, config.block_m, 1, 1, columns])
    part = described([1, config.block_m, 1, 1, columns // 2], gl.float32)
    types = ATTENTION_TYPES | {f"{x}{i}": queries for x in "qd" for i in range(BRANCHES)}
    types |= {f"dq{i}": part for i in range(BRANCHES)}
    branches = 1 if dropout else SOME
    constants = {"HEAD_DIM": columns, "BLOCK_D": columns, "N_BRANCHES": branches, "CAUSAL": causal, "CUT": cut}
    constants |= {"READ_PARTIAL": causal, "BLOCK_M": config.block_m, "STAGES": config.num_stages, "WITH_DQ": with_dq}
    constants |= options_of_keys(padding, dropout, packed)
    constants |= {f"{x}{i}": None for x in ("q", "d", "dq") for i in range(branches, BRANCHES)}
    return hopper_backward.backward_kernel, types, constants, {"num_warps": 4}


def starts_on(
    module, columns: int, near: Neighbourhood, more: bool, has_bias: bool = False, dtype: torch.dtype = torch.bfloat16
) -> list[Start]:
    """Starts of a forward and a backward on a grid; more: with extra keys and all masks."""
    x = torch.zeros(1, near.length, 2, columns, dtype=dtype)
    extra = x[:, : 70 if more else 0]
    masks = [torch.zeros(1, n, dtype=torch.bool) if more else None for n in (near.length, 70)]
    bias = torch.zeros(2, *near.of_heads(2).bias_sides) if has_bias else None
    given, request = (
        Tensors(x, x, x, extra, extra, bias),
        Request(near.of_heads(2), key_padding_mask=masks[0], extra_padding_mask=masks[1], has_bias=has_bias),
    )
    starts = []
    module.start = grid_launch.start = gathering(starts)
    module.multiprocessors = lambda device: 132
    out, lse = module.forward(given, request)
    module.backward(out, given, out, lse, request)
    return starts


def launched(
    module, columns: int, near: Neighbourhood, more: bool, has_bias: bool = False, dtype: torch.dtype = torch.bfloat16
) -> Iterator[tuple[str, tuple]]:
    """What `compiled` takes for a module's kernels that a call on a grid launches.

    Of those by boxes the warp-specialised ones: the others are plain kernels.
    """
    for each in starts_on(module, columns, near, more, has_bias, dtype):
        is_by_boxes = isinstance(each.kernel, GluonJITFunction)
        if each.kernel.__name__ in ROLES and is_by_boxes == (module is box_launch):
            call = as_started(each)
            names, flag = ROLES[each.kernel.__name__]
            yield names[bool(call[2].get(flag))], call


def type_of(x) -> str:
    if isinstance(x, TensorDescriptor):
        return described(x.block_shape)
    kinds = {
        torch.bfloat16: "*bf16",
        torch.float32: "*fp32",
        torch.int32: "*i32",
        torch.int64: "*i64",
        torch.bool: "*i1",
    }
    return kinds[x.dtype] if isinstance(x, torch.Tensor) else "fp32" if isinstance(x, float) else "i32"


PLANE = Neighbourhood((64, 64), 17)
STRIDED = Neighbourhood((64, 64), 33, stride=8)
WHOLE = Neighbourhood((64, 64), 32, stride=16)
SMALL = Neighbourhood((64, 64), 3)
UNEVEN = Neighbourhood((64, 65), 17, dilation=2)
VOLUME = Neighbourhood((12, 24, 24), (3, 5, 7), dilation=(1, 2, 1), edge=("wrap", "clip", "shift"))


def for_grids(module, of: str) -> dict[str, tuple]:
    """A module's kernels for grids: of a plane, and of a volume with all that a call may ask for."""
    return {
        f"{of} {name} {columns} {more}": call
        for columns, (near, more) in product((64, 128), ((PLANE, False), (VOLUME, True)))
        for name, call in launched(module, columns, near, more)
    }


def for_grids_by_dtype() -> dict[str, tuple]:
    """The plain kernels for grids in each configuration, of a volume with all that a call may ask for."""
    return {
        f"grid {name} {size} {columns}": call
        for size, columns in grid_launch.CONFIGS
        for name, call in launched(grid_launch, columns, VOLUME, True, dtype=DTYPES[size])
    }


def strided_kernels() -> dict[str, tuple]:
    """The kernels by boxes of a plane with strides, and of residues of two sizes (one launch of each kernel).

    Of forwards also those with boxes of keys of another form than a group's.
    """
    strided = {
        f"hopper {of} {name} 128": call
        for of, near in (("strided", STRIDED), ("uneven", UNEVEN))
        for name, call in launched(box_launch, 128, near, False)
    }
    others = ("whole", 128, WHOLE), ("small", 64, SMALL), ("small", 128, SMALL)
    return strided | {
        f"hopper {of} {name} {columns}": call
        for of, columns, near in others
        for name, call in launched(box_launch, columns, near, False)
        if name == "forward"
    }


def wide_kernels() -> dict[str, tuple]:
    """The kernels by boxes of heads above 128: of a plane, and of a volume with all that a call may ask for."""
    return {
        f"hopper wide {name} {columns}": call
        for columns, near, more in ((192, PLANE, False), (256, VOLUME, True))
        for name, call in launched(box_launch, columns, near, more)
    }


def kernels_with_bias() -> dict[str, tuple]:
    """The kernels by boxes of a plane with a bias, and the plain ones of a volume with all that a call may ask for.

    Beside the first their tables: of a forward, then of a backward.
    """
    by_boxes = {
        f"hopper bias {name} {columns}": call
        for columns in (64, 128)
        for name, call in launched(box_launch, columns, PLANE, False, True)
    }
    starts = [each for each in starts_on(box_launch, 64, PLANE, False, True) if each.kernel.__name__ in BESIDE_BOXES]
    names = ("tables", "tables and zeros", "bounds", "gradient")
    by_boxes |= {f"bias {name}": as_started(each) for name, each in zip(names, starts, strict=True)}
    return by_boxes | {f"grid bias {name} 64": call for name, call in launched(grid_launch, 64, VOLUME, True, True)}


def hopper_kernels() -> dict[str, tuple]:
    """The warp-specialised kernels: columns, causal, and what else they are told."""
    flags = (False, True)
    forwards = {
        f"hopper forward {columns} {causal} {goes_on}": forward_on_hopper(columns, causal, goes_on)
        for columns, causal, goes_on in product((32, 64, 128), flags, flags)
    }
    forwards |= {f"hopper forward 256 {causal} {causal}": forward_on_hopper(256, causal, causal) for causal in flags}
    forwards |= {
        f"hopper padded forward {columns} {causal} {causal}": forward_on_hopper(columns, causal, causal, True)
        for columns, causal in product((32, 64, 128), flags)
    }
    backwards = {
        f"hopper backward {columns} {causal} {cut} {with_dq}": backward_on_hopper(columns, causal, cut, with_dq)
        for columns, causal, cut, with_dq in product((32, 64, 128), flags, flags, flags)
    }
    # With dropout, without and with all else: causal, cut, and with a mask of keys.
    dropping = {
        f"hopper dropout forward {columns} {more} {more}": forward_on_hopper(columns, more, more, more, True)
        for columns, more in product((32, 64, 128, 256), flags)
    }
    dropping |= {
        f"hopper dropout backward {columns} {more} {more} {with_dq}": backward_on_hopper(
            columns, more, more, with_dq, more, True
        )
        for columns, more, with_dq in product((32, 64, 128), flags, flags)
    }
    alone = {
        f"hopper queries {columns} {more}": dq_on_hopper(columns, more, more, more or columns < 256)
        for columns, more in product((32, 64, 128, 256), flags)
    }
    of_wide = {
        f"hopper keys {head_dim} {more}": keys_on_hopper(head_dim, more, more, more)
        for head_dim, more in product((192, 256), flags)
    }
    of_wide |= {
        f"hopper dropout keys {head_dim} {more}": keys_on_hopper(head_dim, more, more, more, True)
        for head_dim, more in product((192, 256), flags)
    }
    of_wide |= {
        f"hopper dq {head_dim} {more} {drops}": wide_dq_on_hopper(head_dim, more, more, drops)
        for head_dim, more, drops in product((192,), flags, flags)
    }
    of_documents = {
        f"hopper packed forward {columns} {causal}": forward_on_hopper(columns, causal, False, packed=True)
        for columns, causal in product((64, 128), flags)
    }
    of_documents |= {
        f"hopper packed backward {columns} {with_dq}": backward_on_hopper(columns, False, True, with_dq, packed=True)
        for columns, with_dq in product((64, 128), flags)
    }
    of_documents |= {
        f"hopper packed queries {columns}": dq_on_hopper(columns, False, False, packed=True) for columns in (64, 128)
    }
    return (
        forwards
        | backwards
        | dropping
        | alone
        | of_wide
        | of_documents
        | {
            f"hopper padded backward {columns} {causal} {causal} {with_dq}": backward_on_hopper(
                columns, causal, causal, with_dq, True
            )
            for columns, causal, with_dq in product((32, 64, 128), flags, flags)
        }
    )


def kernels_for(architecture: int) -> dict[str, tuple]:
    """What `compiled` takes for every kernel that an architecture has, by name, before the architecture."""
    configure(architecture)
    every = plain_kernels() | decode_kernels() | curve_kernels() | row_kernels() | copy_kernels()
    every |= list_kernels() | {"places": places_of_documents()}
    if architecture == 80:  # whose shared memory is the least
        every |= for_grids_by_dtype()
    if architecture != 90:
        return every
    grids = for_grids(grid_launch, "grid") | for_grids(box_launch, "hopper grid")
    return every | hopper_kernels() | grids | kernels_with_bias() | strided_kernels() | wide_kernels()


def portable_kernels(architecture: int) -> dict[str, tuple]:
    """The plain kernels that any GPU runs, in bfloat16, of each kind of pattern: plain calls, and calls with all.

    architecture: whose steps they have, as `configure` takes it.
    """
    configure(architecture)
    with_all = dict.fromkeys(("PADDING", "GATHER"), True)
    of_sequences = {
        f"sequence {name} {head_dim}{more}": configured(name, 2, head_dim, **flags)
        for head_dim, (more, flags), name in product((64, 128), (("", {}), (" all", with_all)), ATTENTION)
    }
    of_grids = {
        f"grid {name} {head_dim}{' all' if more else ''}": call
        for head_dim, (near, more) in product((64, 128), ((PLANE, False), (VOLUME, True)))
        for name, call in launched(grid_launch, head_dim, near, more)
    }
    of_lists = {
        name.removesuffix(" False").replace("True", "all"): call
        for name, call in list_kernels(both=True).items()
        if not name.startswith("lists delta")
    }
    return of_sequences | of_grids | of_lists


def machine_codes(cubins: list[bytes], architecture: int) -> list[str]:
    """The machine code of each kernel as nvdisasm prints it, with a label wherever a jump goes.

    nvdisasm takes longer to start than to print a kernel: it is started once, on the code of all of them. Targets of
    indirect jumps, which take long to find, are left out.
    """
    codes = list(map(code_of, cubins))
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(b"".join(codes))
        file.flush()
        target = f"SM{architecture}{'a' if architecture >= 90 else ''}"
        command = [triton.knobs.nvidia.nvdisasm.path, "--binary", target, "-ndf", file.name]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = [line for line in printed.splitlines() if ADDRESS.match(line)]
    ends = [n // INSTRUCTION_BYTES for n in accumulate(map(len, codes), initial=0)]
    assert len(lines) == ends[-1], "nvdisasm prints each instruction on a line of its own"
    return [labelled(lines[begin:end]) for begin, end in pairwise(ends)]


def code_of(cubin: bytes) -> bytes:
    """The machine code in an ELF file of one kernel."""
    (sections,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, of_names = struct.unpack_from("<3H", cubin, 0x3A)
    # Of each section where its name stands among the names, where it begins, and how long it is.
    headers = [struct.unpack_from("<I20x2Q", cubin, sections + n * size) for n in range(count)]
    names = headers[of_names][1]
    (code,) = (cubin[at : at + length] for name, at, length in headers if cubin.startswith(b".text.", names + name))
    return code


def labelled(lines: list[str]) -> str:
    """Lines of raw code, whose jumps go to addresses, in the form of a file's, whose jumps go to labels."""
    targets = {int(jump[2], 16) for line in lines if (jump := JUMP.search(line))}
    found = []
    for line in lines:
        address = int(ADDRESS.match(line)[1], 16)
        if address in targets:
            found.append(f".L_x_{address}:")
        found.append(JUMP.sub(lambda jump: f"{jump[1]}`(.L_x_{int(jump[2], 16)})", line))
    return "\n".join(found)


def of_warp_specialised(kernel, ptxas_log: str) -> dict:
    """How many programs an H100's multiprocessor holds, and how often a product waits."""
    # The assembler of Triton 3.9 calls itself ptxas-blackwell.
    assert re.search(r"ptxas\S* info", ptxas_log), "without its words no wait would be counted"
    ptx = kernel.asm["ptx"]
    registers, threads = (int(re.search(rf"\.{size} (\d+)", ptx)[1]) for size in ("maxnreg", "reqntid"))
    return {
        "programs": min(65536 // (registers * threads), 228 * 1024 // (kernel.metadata.shared + 1024)),
        "serialized": ptxas_log.count("are serialized"),
    }


def of_their_loops(sass: str) -> dict:
    """What stands in the loops of a warp-specialised kernel."""
    # Each loop of a forward from the wait for scores to that for the product with v, held late.
    loops = re.findall(r"DEPBAR\.LE gsb0, 0x1(.*?)DEPBAR\.LE gsb0, 0x0", sass, re.DOTALL)
    return {"exponentials": [loop.count("MUFU.EX2") for loop in loops], **held_operands(sass)}


def resources(ptxas_log: str) -> dict:
    """Registers of a thread, and bytes that it keeps in memory beside them."""
    (registers,), (spilled,) = (
        re.findall(wanted, ptxas_log) for wanted in (r"Used (\d+) registers", r"(\d+) bytes spill stores")
    )
    return {"registers": int(registers), "spilled": int(spilled)}


def unjoined_arrivals(ptx: str) -> int:
    """Arrivals of a group at a barrier whose warps need not have done their assembly's work in shared memory."""
    count, is_pending = 0, False
    for line in ptx.splitlines():
        if "red.shared" in line or "ld.shared.s32" in line:
            is_pending = True
        elif "bar.sync" in line:
            is_pending = False
        elif "mbarrier.arrive.shared" in line:
            count += is_pending
    return count


def compiled_and_logged(call: tuple, architecture: int) -> tuple:
    """A kernel as Triton compiles it, and what ptxas says of it. call: its value in `kernels_for`."""
    kernel, *rest = call
    with redirect_stdout(StringIO()) as log:
        made = compiled(kernel, *rest, architecture)
    assert "hilbert_lib" not in made.asm["ptx"], "a name of a module in the PTX changes with the module's place"
    return made, log.getvalue()


def hash_of(name: str, made, architecture: int) -> str:
    return f"{architecture} {name}: {hashlib.sha256(made.asm['ptx'].encode()).hexdigest()[:16]}"


def facts(calls: dict[str, tuple], architecture: int) -> dict[str, dict]:
    """What the speed and exactness of some kernels rest on, and a hash of their PTX. calls: as `kernels_for` has them.

    "in loops": how often loops of products move registers that are kept in memory.
    """
    found, cubins = {}, {}
    for name, call in calls.items():
        made, ptxas_log = compiled_and_logged(call, architecture)
        ptx, ttgir = made.asm["ptx"], made.asm["ttgir"]
        found[name] = {
            "triton": triton.__version__,
            "hash": hash_of(name, made, architecture),
            "shared": made.metadata.shared,
            **resources(ptxas_log),
            "in loops": 0,
            "instructions": sorted(set(INSTRUCTIONS.findall(ptx))),
            "overwritten": overwritten_tiles(ttgir),
            "transposed": transposed_products(ttgir),
            "narrow": narrow_products(ttgir),
            "unjoined": unjoined_arrivals(ptx),
            **(of_warp_specialised(made, ptxas_log) if name.startswith("hopper") else {}),
        }
        if found[name]["spilled"] or name.startswith("hopper"):
            cubins[name] = made.asm["cubin"]
    for name, sass in zip(cubins, machine_codes(list(cubins.values()), architecture) if cubins else (), strict=True):
        if found[name]["spilled"]:
            found[name]["in loops"] = kept_in_memory(sass)
        if name.startswith("hopper"):
            found[name] |= of_their_loops(sass)
    return found


# A forward and a backward of each file, which take seconds.
SAMPLE = (
    "forward 2 64",
    "dq 2 64",
    "masked dropout dq 4 256",
    "dkv 2 64",
    "packed dkv 2 64",
    "backward 2 64",
    "decode one",
    "decode merge",
)
SAMPLE += (
    "curve decode 2",
    "curve encode 2",
    "rows merge 16",
    "rows add 16",
    "rows zeros 16",
    "copies gather",
    "copies sum",
)
SAMPLE += ("lists forward 64 False", "lists dkv 64 False", "points words", "hopper forward 64 True False")
SAMPLE += ("hopper padded forward 128 False False", "hopper backward 64 True True True")
SAMPLE += ("hopper padded backward 64 True True True", "grid dkv 64 False")
SAMPLE += ("hopper dropout forward 128 False False", "hopper dropout backward 64 True True True")
SAMPLE += ("hopper queries 256 False", "hopper keys 256 False", "hopper dq 192 False False")
SAMPLE += ("hopper grid forward 64 False", "hopper grid forward 128 False", "hopper bias dq 64")
SAMPLE += ("bias bounds", "grid bias pairs 64", "hopper strided dkv 128", "hopper whole forward 128")
SAMPLE += ("hopper wide forward 192", "hopper wide dkv 192")
SAMPLE += ("hopper packed forward 128 False", "hopper packed backward 128 True", "places")
SAMPLE += ("hopper forward 32 True True", "hopper backward 32 False False True", "scale")
INSTRUCTIONS = re.compile(
    r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma|cp\.async\.cg|cp\.(?:reduce\.)?async\.bulk\.tensor|"
    r"(?:ex2|lg2)\.approx|(?:ld|st)\.global\.v\d\.b\d+)"
)
INSTRUCTION_BYTES = 16  # of machine code, since Volta
ADDRESS = re.compile(r"\s+/\*([0-9a-f]{4,})\*/ ")  # how nvdisasm begins an instruction
JUMP = re.compile(r"(\bBRA\b.*?)\b0x([0-9a-f]+)(?=\s*;)")

if __name__ == "__main__":
    triton.knobs.cache.dir = tempfile.mkdtemp()
    triton.knobs.compilation.disable_line_info = True
    triton.knobs.nvidia.dump_ptxas_log = True  # to standard output
    if sys.argv[1:]:
        architecture, which = int(sys.argv[1]), sys.argv[2]
        if which in ("portable", "elsewhere"):
            wanted = tuple(sys.argv[3:]) or ("",)
            found = portable_kernels(architecture if which == "portable" else 0)
            calls = {name: x for name, x in found.items() if name.startswith(wanted)}
        else:
            calls = kernels_for(architecture)
        if which == "sample":
            calls = {name: call for name, call in calls.items() if name in SAMPLE}
        print(json.dumps(facts(calls, architecture)))
    else:
        print("triton", triton.__version__)
        for architecture in ARCHITECTURES:
            for name, call in kernels_for(architecture).items():
                made, _ = compiled_and_logged(call, architecture)
                print(hash_of(name, made, architecture), flush=True)
