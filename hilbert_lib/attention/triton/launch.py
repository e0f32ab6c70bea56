"""Tables, grids and launches: the kernels as the `forward` and `backward` of a backend."""

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
from torch import Tensor

from hilbert_lib.attention.backends.registry import TRITON_POSITIONS
from hilbert_lib.attention.call import Call
from hilbert_lib.attention.dropout import drop_below
from hilbert_lib.attention.triton import decode, schedule
from hilbert_lib.attention.triton.backward import delta_kernel, dkv_kernel, dq_kernel
from hilbert_lib.attention.triton.forward import forward_kernel
from hilbert_lib.attention.triton.geometry import block_d, products_of_float32
from hilbert_lib.attention.triton.hopper import division
from hilbert_lib.attention.triton.start import Start, start
from hilbert_lib.machine import get_gpu_info


@dataclass(frozen=True)
class Config:
    """Tile sizes and resources of one kernel.

    Attributes:
        block_m, block_n: queries and keys of a tile.
        num_warps, num_stages: as Triton takes them.
        maxnreg: registers that a thread begins with, where more would keep a second program off a multiprocessor.
        together: as in `schedule.tables`.
    """

    block_m: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 2
    maxnreg: int | None = None
    together: int = schedule.TILES_TOGETHER


INTERPRETED = {name: Config(16, 16) for name in ("forward", "dq", "dkv")}
# By bytes of an element and largest head_dim; an A100's shared memory holds all of them. What they take on an H200 and
# what others do is in reports/HISTORY.md ("Configurations of the plain kernels").
CONFIGS = {
    "forward": {
        (2, 64): Config(128, 64, 4, 3),
        (2, 128): Config(128, 64, 8, 3),
        (2, 256): Config(64, 64, 8, 2),
        (4, 64): Config(64, 64, 8, 2),
        (4, 128): Config(64, 32, 8, 2),
        (4, 256): Config(32, 32, 8, 2),
    },
    "dq": {
        (2, 64): Config(64, 64, 4, 3),
        (2, 128): Config(128, 64, 8, 3),
        (2, 256): Config(64, 32, 4, 2),
        (4, 64): Config(32, 32, 4, 2),
        (4, 128): Config(64, 32, 8, 2),
        (4, 256): Config(16, 16, 4, 1),
    },
    "dkv": {
        (2, 64): Config(32, 128, 8, 3),
        (2, 128): Config(32, 128, 8, 3),
        (2, 256): Config(32, 64, 8, 2),
        (4, 64): Config(32, 32, 4, 1),
        (4, 128): Config(32, 32, 8, 1),
        (4, 256): Config(16, 16, 4, 1),
    },
}

# The warp-specialised kernels by head_dim: the fastest of those tried on an H200, as reports/HISTORY.md tells. What
# they reach is recorded in reports/h200.
HOPPER_FORWARD = {
    64: Config(128, 128, 4, 2, maxnreg=80, together=2 * schedule.TILES_TOGETHER),
    128: Config(128, 128, 4, 2),
}
HOPPER_BACKWARD = {64: Config(64, 128, 4, 3), 128: Config(64, 128, 4, 2)}
STRIDES = [f"stride_{name}{axis}" for name in "qkv" for axis in "bnh"]  # as the kernels name them


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Output and lse of dilated attention; shapes as in `reference.forward`.

    Raises:
        ValueError: for more keys than the kernels can count.
    """
    if k.shape[1] > TRITON_POSITIONS:
        raise ValueError(f"k must have up to {TRITON_POSITIONS:,} rows with backend='triton', got {k.shape[1]:,}")
    if decode.serves(q, k, call):
        return decode.forward(q, k, v, call)
    dtype = q.dtype
    q, k, v = _as_computed(q, k, v)
    config = config_of("forward", q)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=torch.float32, device=q.device)
    starts: list[Start] = []
    if _on_hopper((q, k, v), k.shape[1], call):
        ours, theirs = division.launches(call.pattern, k.shape[1], k.shape[2], call.is_causal)
        out = _result(q, ours[:1], call)
        block_n = HOPPER_FORWARD[_columns(q)].block_n
        masked = [_is_masked(call, one, k.shape[1], block_n) for one in ours]
        flag = torch.zeros(1, dtype=torch.int32, device=q.device) if any(masked) else None
        for number, (one, is_masked) in enumerate(zip(ours, masked, strict=True)):
            own = flag if is_masked else None
            starts.append(_forward_on_hopper(q, k, v, call, one, out, lse, own, first=number == 0))

        def plain(one: schedule.Pass, first: bool, flag: Tensor | None) -> None:
            grid, shared = _launch(q, k, v, call, one, config, rows="queries", first=first, last=True)
            if_flag = flag is not None
            arguments = (q, k, v, out, lse, out, lse, flag if if_flag else q)
            starts.append(Start(forward_kernel, grid, arguments, shared | {"IF_FLAG": if_flag}))

        if flag is not None:
            # Of tiles that are cut off, the plain kernel tells a NaN that was attended to from one that was not. Of
            # several launches the first then begins every row anew.
            covers_all = len(ours) > 1 and not schedule.covers_all(call.pattern)
            plain(replace(ours[0], covers_all=covers_all), True, flag)
            for one in ours[1:]:
                plain(one, False, flag)
        for one in theirs:  # these go on from the results and replace them, rounded once more each time
            plain(one, False, None)
        start(starts)
        return out, lse
    todo = schedule.passes(call.pattern, k.shape[1], config.block_m)
    out = _result(q, todo, call)
    partial_out, partial_lse = out, lse
    if len(todo) > 1:
        partial_out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        partial_lse = torch.full_like(lse, -torch.inf)
    for number, one in enumerate(todo):
        last = number == len(todo) - 1
        grid, shared = _launch(q, k, v, call, one, config, rows="queries", first=number == 0, last=last)
        arguments = (q, k, v, out, lse, partial_out, partial_lse, q)
        starts.append(Start(forward_kernel, grid, arguments, shared | {"IF_FLAG": False}))
    start(starts)
    return out.to(dtype), lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v. On Hopper dq is summed in an order that varies, unless torch asks for determinism."""
    dtype = q.dtype
    q, k, v, dout, out = _as_computed(q, k, v, dout, out)
    batch, queries, heads, head_dim = q.shape
    delta = torch.empty_like(lse)
    rows = batch * queries * heads
    arguments = (out, dout, delta, *dout.stride()[:3], rows, queries, heads)
    named = {"HEAD_DIM": head_dim, "BLOCK_D": block_d(head_dim), "BLOCK_M": 32}
    starts = [Start(delta_kernel, (triton.cdiv(rows, 32),), arguments, named)]
    strides_d = dict(zip(("stride_db", "stride_dn", "stride_dh"), dout.stride()[:3], strict=True))

    on_hopper = call.query_start is None and _on_hopper((q, k, v, dout), k.shape[1], call)
    if on_hopper:
        # Each further pass adds its gradients to the results themselves. Sums are dense whatever q's strides.
        is_deterministic = torch.are_deterministic_algorithms_enabled()
        sums = None if is_deterministic else torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        ours, theirs = division.launches(call.pattern, k.shape[1], k.shape[2], call.is_causal)
        dk, dv = (_result(x, ours[:1], call) for x in (k, v))
        for number, one in enumerate(ours):
            starts.append(_backward_on_hopper(dout, q, k, v, lse, delta, dk, dv, call, one, sums, first=number == 0))
        config = config_of("dkv", q)
        for one in theirs:
            grid, shared = _launch(q, k, v, call, one, config, rows="keys", first=False, last=True)
            arguments = (q, k, v, dout, lse, delta, dk, dv, dk, dv)
            starts.append(Start(dkv_kernel, grid, arguments, shared | strides_d))
        if sums is not None:
            config = config_of("dq", q)
            for one in theirs:
                grid, shared = _launch(q, k, v, call, one, config, rows="queries", first=False, last=False)
                starts.append(Start(dq_kernel, grid, (q, k, v, dout, lse, delta, sums, sums), shared | strides_d))
            start(starts)
            return torch.mul(sums, call.scale, out=torch.empty_like(sums, dtype=dtype)), dk, dv

    config = config_of("dq", q)
    todo = schedule.passes(call.pattern, k.shape[1], config.block_m)
    dq = _result(q, todo, call)
    partial = dq if len(todo) == 1 else torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    for number, one in enumerate(todo):
        last = number == len(todo) - 1
        grid, shared = _launch(q, k, v, call, one, config, rows="queries", first=number == 0, last=last)
        starts.append(Start(dq_kernel, grid, (q, k, v, dout, lse, delta, dq, partial), shared | strides_d))
    if on_hopper:
        start(starts)
        return dq, dk, dv

    config = config_of("dkv", q)
    todo = schedule.passes(call.pattern, k.shape[1], config.block_n)
    dk, dv = _result(k, todo, call), _result(v, todo, call)
    partials = (
        (dk, dv) if len(todo) == 1 else [torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v)]
    )
    for number, one in enumerate(todo):
        last = number == len(todo) - 1
        grid, shared = _launch(q, k, v, call, one, config, rows="keys", first=number == 0, last=last)
        starts.append(Start(dkv_kernel, grid, (q, k, v, dout, lse, delta, dk, dv, *partials), shared | strides_d))
    start(starts)
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


def config_of(kernel: str, q: Tensor) -> Config:
    """The configuration of a kernel for a dtype and head_dim."""
    if is_interpreted():
        return INTERPRETED[kernel]
    size, head_dim = q.element_size(), q.shape[-1]
    return next(
        config for (bytes_, largest), config in CONFIGS[kernel].items() if bytes_ == size and head_dim <= largest
    )


def is_interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter in this process."""
    return triton.knobs.runtime.interpret


def _as_computed(*tensors: Tensor) -> tuple[Tensor, ...]:
    # The interpreter computes bfloat16 wrongly (products, sums, where): it is given float32.
    if is_interpreted():
        return tuple(x.float() for x in tensors)
    return tensors


def hopper_serves(q: Tensor, keys: int, call: Call) -> bool:
    """Whether the warp-specialised kernels can serve some branch of a call.

    They do so on a GPU that runs them; the plain kernels serve every call, and the other branches.

    Args:
        q: queries; shape and dtype count.
        keys: rows of k and v.
        call: the rest of the request.
    """
    return (
        q.element_size() == 2
        and q.shape[-1] <= 128
        and q.shape[-1] % 8 == 0
        and call.inverse is None
        and call.key_padding_mask is None
        and call.dropout_p == 0.0
        and any(division.is_reached(w, r, keys) for w, r in call.pattern.branches)
    )


def _branches(call: Call, one: schedule.Pass) -> list[tuple[int, int]]:
    # Segment length and rate of a pass's branches.
    branches = call.pattern.branches
    return [branches[i] for i in one.branches]


def _columns(q: Tensor) -> int:
    # Of a tile in the warp-specialised kernels.
    return 64 if q.shape[-1] <= 64 else 128


def _is_masked(call: Call, one: schedule.Pass, keys: int, block_n: int) -> bool:
    # Whether a tile of block_n keys may be cut off, by causality or by the end of a segment.
    return call.is_causal or any(min(w, keys) % (r * block_n) or keys % min(w, keys) for w, r in _branches(call, one))


def _on_hopper(tensors: tuple[Tensor, ...], keys: int, call: Call) -> bool:
    # Whether the warp-specialised kernels serve a call with these tensors.
    q = tensors[0]
    return (
        q.is_cuda
        and get_gpu_info(q.device).capability == (9, 0)
        and hopper_serves(q, keys, call)
        # The copy engine takes no tensor that is expanded.
        and all(stride > 0 for x in tensors for stride in x.stride())
    )


def _forward_on_hopper(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: Call,
    one: schedule.Pass,
    out: Tensor,
    lse: Tensor,
    flag: Tensor | None,
    *,
    first: bool,
) -> Start:
    # Writes out and lse; unless it is the first, goes on from them. flag is that of `hopper/forward.py`, or None
    # where no tile can be cut off.
    from hilbert_lib.attention.triton.hopper import forward, tiles  # only where it runs: the interpreter knows no Gluon

    columns = _columns(q)
    config = HOPPER_FORWARD[columns]
    branches = _branches(call, one)
    descriptors = [tiles.descriptor(x, r, config.block_n, columns) for _, r in branches for x in (k, v)]
    descriptors += [None] * (2 * division.BRANCHES - len(descriptors))
    grid, shared = _launch(q, k, v, call, one, config, rows="queries", first=first, last=True)
    named = _known(forward.forward_kernel, shared) | {"BLOCK_D": columns, "STAGES": config.num_stages}
    named |= {"N_BRANCHES": len(branches), "MASKED": flag is not None, "maxnreg": config.maxnreg}
    return Start(forward.forward_kernel, grid, (q, out, lse, q if flag is None else flag, *descriptors), named)


def _backward_on_hopper(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    dk: Tensor,
    dv: Tensor,
    call: Call,
    one: schedule.Pass,
    sums: Tensor | None,
    *,
    first: bool,
) -> Start:
    # Writes dk and dv; unless it is the first, adds to them. It adds dq, without its scale, to sums in an order that
    # varies. Without sums the bits are always the same.
    from hilbert_lib.attention.triton.hopper import backward, tiles

    columns = _columns(q)
    config = HOPPER_BACKWARD[columns]
    branches = _branches(call, one)
    part = (config.block_m, columns // 2)  # of one group of warps
    descriptors = []
    for _, r in branches:
        descriptors += [tiles.descriptor(x, r, config.block_m, columns) for x in (q, dout)]
        descriptors.append(descriptors[-1] if sums is None else tiles.descriptor(sums, r, *part))
    descriptors += [None] * (3 * division.BRANCHES - len(descriptors))
    grid, shared = _launch(q, k, v, call, one, config, rows="keys", first=first, last=True)
    tables = schedule.tables(call.pattern, one, k.shape[1], k.shape[2], config.block_n, config.together, q.device)
    named = _known(backward.backward_kernel, shared) | {"BLOCK_D": columns, "STAGES": config.num_stages}
    named |= {"N_BRANCHES": len(branches), "CUT": tables.cut, "WITH_DQ": sums is not None}
    return Start(backward.backward_kernel, grid, (k, v, lse, delta, dk, dv, *descriptors), named)


def _known(kernel, shared: dict) -> dict:
    # Of the arguments that kernels share, those that this one takes; its own BLOCK_D; four warps a group.
    names = _names(kernel)
    return {name: value for name, value in shared.items() if name in names} | {"num_warps": 4}


@cache
def _names(kernel) -> frozenset[str]:
    return frozenset(kernel.arg_names) - {"BLOCK_D"}


def _result(like: Tensor, todo: tuple[schedule.Pass, ...], call: Call) -> Tensor:
    # Rows that no pass visits are 0.
    written = len(todo) > 1 or schedule.covers_all(call.pattern)
    return (torch.empty if written else torch.zeros)(like.shape, dtype=like.dtype, device=like.device)


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: Call,
    one: schedule.Pass,
    config: Config,
    *,
    rows: str,
    first: bool,
    last: bool,
) -> tuple[tuple[int], dict]:
    # Grid and the arguments that the kernels share. Where an argument is not used, q stands in for it.
    batch, queries, heads, head_dim = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    start, rows_there, block = (
        (call.first_query, queries, config.block_m) if rows == "queries" else (0, keys, config.block_n)
    )
    together = config.together if rows_there == keys else 0
    tables = schedule.tables(call.pattern, one, keys, kv_heads, block, together, q.device)
    chunks = (start + rows_there - 1) // tables.chunk - start // tables.chunk + 1
    phases, count = tables.items.shape[1:3]
    tile_heads = {"heads": heads} if rows == "queries" else {"kv_heads": kv_heads}
    shared = {
        "branches": tables.branches,
        "offsets": tables.offsets,
        "branch_ids": tables.branch_ids,
        "items": tables.items,
        "classes": tables.classes,
        "inverse": q if call.inverse is None else call.inverse,
        "padding": q if call.key_padding_mask is None else call.key_padding_mask.contiguous(),
        "seed": q if call.seed is None else call.seed,
        "scale": call.scale,
        "drop_below": drop_below(call.dropout_p),
        **dict(zip(STRIDES, q.stride()[:3] + k.stride()[:3] + v.stride()[:3], strict=True)),
        "first_query": call.first_query,
        "queries": queries,
        "keys": keys,
        **tile_heads,
        "group": heads // kv_heads,
        "chunk": tables.chunk,
        "stride": one.stride,
        "chunks": chunks,
        "phases": phases,
        "count": count,
        "n_branches": len(one.branches),
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_d(head_dim),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "CAUSAL": call.is_causal,
        "GATHER": call.inverse is not None,
        "PADDING": call.key_padding_mask is not None,
        "DROPOUT": call.dropout_p > 0.0,
        "READ_PARTIAL": not first,
        "WRITE_PARTIAL": not last,
        "PRECISION": products_of_float32(),
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    return (batch * (heads if rows == "queries" else kv_heads) * chunks * count,), shared
