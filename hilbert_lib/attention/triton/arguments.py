"""Configurations of the kernels, and the grid and arguments that all launches share."""

from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

from hilbert_lib.attention.dropout import drop_below
from hilbert_lib.attention.request import Request
from hilbert_lib.attention.triton import packed, schedule
from hilbert_lib.attention.triton.geometry import block_d, products_of_float32
from hilbert_lib.attention.triton.start import Made
from hilbert_lib.machine import get_gpu_info


@dataclass(frozen=True)
class Config:
    """Tile sizes and resources of one kernel."""

    block_m: int  # queries of a tile
    block_n: int  # keys of a tile
    num_warps: int = 4
    num_stages: int = 2
    maxnreg: int | None = None  # registers of a thread at its start; more would keep a second program off an SM
    together: int = schedule.TILES_TOGETHER  # as in `schedule.tables`


INTERPRETED = {name: Config(16, 16) for name in ("forward", "dq", "dkv", "backward")}
# (bytes of an element, largest head_dim) -> configuration, for Hopper. Times on an H200 are in reports/HISTORY.md
# ("Configurations of the plain kernels", and "float32" for products of TF32), of other configurations too.
CONFIGS = {
    "forward": {
        (2, 64): Config(128, 64, 4, 3), (2, 128): Config(128, 64, 8, 3), (2, 256): Config(64, 64, 8, 2),
        (4, 64): Config(64, 32, 4, 1), (4, 128): Config(32, 32, 4, 1), (4, 256): Config(16, 32, 8, 1),
    },
    "dq": {
        (2, 64): Config(64, 64, 4, 3), (2, 128): Config(128, 64, 8, 3), (2, 256): Config(64, 32, 4, 2),
        (4, 64): Config(64, 32, 4, 1), (4, 128): Config(16, 64, 4, 1), (4, 256): Config(16, 16, 8, 1),
    },
    "dkv": {
        (2, 64): Config(32, 128, 8, 3), (2, 128): Config(32, 128, 8, 3), (2, 256): Config(32, 64, 8, 2),
        (4, 64): Config(64, 16, 4, 1), (4, 128): Config(32, 32, 8, 1), (4, 256): Config(16, 16, 8, 1),
    },
    # Of short calls: square tiles, each of queries and of keys. None was timed beside others: the host takes longer.
    "backward": {
        (2, 64): Config(64, 64, 8, 1), (2, 128): Config(32, 32, 4, 1), (2, 256): Config(32, 32, 8, 1),
        (4, 64): Config(16, 16, 4, 1), (4, 128): Config(16, 16, 4, 1), (4, 256): Config(16, 16, 8, 1),
    },
}  # fmt: skip
# The same for every other GPU but a B200. Products of mma.sync hold their operands in registers, and an RTX 3090, 4090
# or 5090 gives a block 99 KiB of shared memory. So tiles are smaller, and at head_dim 64 and 128 in half precision no
# register is kept in memory: docs/kernels.md has what the compiler says for each kind of GPU.
ELSEWHERE = {
    "forward": {
        (2, 64): Config(128, 32, 8, 2), (2, 128): Config(64, 32, 8, 2), (2, 256): Config(64, 32, 8, 1),
        (4, 64): Config(64, 32, 4, 1), (4, 128): Config(32, 32, 4, 1), (4, 256): Config(16, 16, 8, 1),
    },
    "dq": {
        (2, 64): Config(64, 32, 8, 2), (2, 128): Config(64, 32, 8, 2), (2, 256): Config(64, 32, 8, 1),
        (4, 64): Config(32, 32, 4, 1), (4, 128): Config(16, 64, 4, 1), (4, 256): Config(16, 16, 8, 1),
    },
    "dkv": {
        (2, 64): Config(32, 64, 8, 1), (2, 128): Config(32, 32, 4, 1), (2, 256): Config(16, 64, 8, 1),
        (4, 64): Config(64, 16, 4, 1), (4, 128): Config(32, 32, 8, 1), (4, 256): Config(16, 16, 8, 1),
    },
    "backward": {
        (2, 64): Config(32, 32, 2, 1), (2, 128): Config(32, 32, 4, 1), (2, 256): Config(32, 32, 8, 1),
        (4, 64): Config(16, 16, 4, 1), (4, 128): Config(16, 16, 4, 1), (4, 256): Config(16, 16, 8, 1),
    },
}  # fmt: skip
# The same for a B200, whose products leave their sums in a memory of their own.
ON_B200 = ELSEWHERE | {
    "forward": ELSEWHERE["forward"] | {(2, 128): Config(64, 64, 8, 1)},
    "backward": ELSEWHERE["backward"] | {(2, 64): Config(64, 64, 8, 1)},
}
STRIDES = [f"stride_{name}{axis}" for name in "qkv" for axis in "bnh"]  # as the kernels name them


@cache  # every call asks
def is_measured(device: torch.device) -> bool:
    """Whether steps that were measured on Hopper are a device's. Where there is no GPU, one of Hopper is estimated."""
    return get_gpu_info(device).architecture in ("Hopper", "none")


@cache
def has_tensor_memory(device: torch.device) -> bool:
    """Whether products on a device leave their sums in a memory of their own, as on a B200. An RTX 5090 has none."""
    capability = get_gpu_info(device).capability
    return capability is not None and 10 <= capability[0] < 12


def for_device(device: torch.device, measured: dict, elsewhere: dict, on_b200: dict) -> dict:
    """The table of a device: `measured` on Hopper or without a GPU, `on_b200` on a B200, or `elsewhere`."""
    if is_measured(device):
        return measured
    return on_b200 if has_tensor_memory(device) else elsewhere


def fitting(table: dict, q: Tensor) -> object:
    """The entry of a table for q. Its keys are (bytes of an element, largest head_dim)."""
    size, head_dim = q.element_size(), q.shape[-1]
    return next(entry for (bytes_, largest), entry in table.items() if bytes_ == size and head_dim <= largest)


def config_of(kernel: str, q: Tensor) -> Config:
    """The configuration of a kernel for the dtype, the head_dim and the device of q."""
    return INTERPRETED[kernel] if is_interpreted() else compiled_config(kernel, q, q.device)


def compiled_config(kernel: str, q: Tensor, device: torch.device) -> Config:
    """The same where kernels are compiled, for a device on which q need not be."""
    return fitting(for_device(device, CONFIGS, ELSEWHERE, ON_B200)[kernel], q)


def strides_of(names: str, tensors: tuple[Tensor, ...]) -> dict[str, int]:
    """The strides of tensors (batch, rows, heads, head_dim), as kernels name them. names: a letter of each tensor."""
    pairs = zip(names, tensors, strict=True)
    return {f"stride_{name}{axis}": x.stride(n) for name, x in pairs for n, axis in enumerate("bnh")}


def as_asked(dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The results in `dtype`, that of the inputs before `as_computed`."""
    return tuple(x if x.dtype == dtype else x.to(dtype) for x in tensors)


def is_interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter in this process."""
    return triton.knobs.runtime.interpret


def as_computed(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors as a kernel takes them. The interpreter takes float32, since it computes bfloat16 wrongly."""
    return tuple(x.float() for x in tensors) if is_interpreted() else tensors


def result(like: Tensor, passes: tuple[schedule.Pass, ...], call: Request) -> Made:
    """An output tensor shaped like `like`. It is filled with 0 where some rows are in no pass."""
    written = len(passes) > 1 or schedule.covers_all(call.pattern)
    return Made(like.shape, like.dtype, None if written else 0.0)


def launch_arguments(
    q: Tensor, k: Tensor, v: Tensor, call: Request, branch_pass: schedule.Pass, config: Config,
    *, rows: str, first: bool, last: bool, places: packed.Places,
) -> tuple[tuple[int], dict]:  # fmt: skip
    """Grid and shared arguments of a pass over the tiles of `rows`, "queries" or "keys".

    q stands in for tensors that are not used. The first pass reads no partial results, and the last writes none.
    places: of packed documents, as `packed.Documents` finds them.
    """
    batch, queries, heads, head_dim = q.shape
    keys, kv_heads, first_query = k.shape[1], k.shape[2], call.query_start or 0
    if rows == "queries":
        begin, length, block, tile_heads = first_query, queries, config.block_m, heads
    else:
        begin, length, block, tile_heads = 0, keys, config.block_n, kv_heads
    if call.cu_seqlens is None:
        together = config.together if length == keys else 0
        tables, documents = schedule.tables(call.pattern, branch_pass, keys, kv_heads, block, together, q.device), None
        chunks = (begin + length - 1) // tables.chunk - begin // tables.chunk + 1
        programs = chunks * tables.items.shape[2]
    else:
        length = packed.scheduled_length(call, keys)
        tables = packed.tables(call.pattern, branch_pass, length, kv_heads, block, q.device).tables
        documents = places[branch_pass, block]
        programs = chunks = len(documents)
    phases, count = tables.items.shape[1:3]
    strides = q.stride()[:3] + k.stride()[:3] + v.stride()[:3]
    shared = {
        "branches": tables.branches, "offsets": tables.offsets, "branch_ids": tables.branch_ids,
        "items": tables.items, "classes": tables.classes, "documents": documents,
        "inverse": q if call.inverse is None else call.inverse,
        "padding": q if call.key_padding_mask is None else call.key_padding_mask.contiguous(),
        "seed": q if call.seed is None else call.seed,
        "scale": call.scale, "drop_below": drop_below(call.dropout_p),
        **dict(zip(STRIDES, strides, strict=True)),
        "first_query": first_query, "queries": queries, "keys": keys,
        "heads" if rows == "queries" else "kv_heads": tile_heads, "group": heads // kv_heads,
        "chunk": tables.chunk, "stride": branch_pass.stride, "chunks": chunks, "phases": phases, "count": count,
        "n_branches": len(branch_pass.branches),
        "HEAD_DIM": head_dim, "BLOCK_D": block_d(head_dim), "BLOCK_M": config.block_m, "BLOCK_N": config.block_n,
        "CAUSAL": call.is_causal, "GATHER": call.inverse is not None, "PADDING": call.key_padding_mask is not None,
        "DROPOUT": call.dropout_p > 0.0, "READ_PARTIAL": not first, "WRITE_PARTIAL": not last,
        "PRECISION": products_of_float32(), "num_warps": config.num_warps, "num_stages": config.num_stages,
    }  # fmt: skip
    return (batch * tile_heads * programs,), shared
