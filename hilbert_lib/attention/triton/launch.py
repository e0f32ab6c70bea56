"""Tables, grids and launches: the kernels as the `forward` and `backward` of a backend."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from hilbert_lib.attention.call import Call
from hilbert_lib.attention.triton import schedule
from hilbert_lib.attention.triton.backward import delta_kernel, dkv_kernel, dq_kernel
from hilbert_lib.attention.triton.forward import forward_kernel


@dataclass(frozen=True)
class Config:
    """Tile sizes and resources of one kernel.

    Attributes:
        block_m, block_n: queries and keys of a tile.
        num_warps, num_stages: as Triton takes them.
    """

    block_m: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 2


INTERPRETED = {name: Config(16, 16) for name in ("forward", "dq", "dkv")}
# By bytes of an element and largest head_dim. First choices: the bf16 ones at 64 and 128 were the fastest of a few tile
# shapes tried by hand on one H200; the others only fit its registers and shared memory.
CONFIGS = {
    "forward": {
        (2, 64): Config(128, 64, 4, 3),
        (2, 128): Config(128, 64, 8, 3),
        (2, 256): Config(64, 64, 4, 2),
        (4, 64): Config(64, 32, 4, 2),
        (4, 128): Config(32, 32, 4, 2),
        (4, 256): Config(16, 32, 4, 1),
    },
    "dq": {
        (2, 64): Config(64, 64, 4, 3),
        (2, 128): Config(128, 64, 8, 3),
        (2, 256): Config(64, 32, 4, 2),
        (4, 64): Config(32, 32, 4, 2),
        (4, 128): Config(32, 32, 4, 1),
        (4, 256): Config(16, 16, 4, 1),
    },
    "dkv": {
        (2, 64): Config(64, 128, 8, 3),
        (2, 128): Config(32, 128, 8, 3),
        (2, 256): Config(32, 64, 4, 1),
        (4, 64): Config(32, 32, 4, 1),
        (4, 128): Config(16, 32, 4, 1),
        (4, 256): Config(16, 16, 4, 1),
    },
}


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Output and lse of dilated attention; shapes as in `reference.forward`."""
    dtype = q.dtype
    q, k, v = _as_computed(q, k, v)
    config = config_of("forward", q)
    todo = schedule.passes(call.pattern, k.shape[1], config.block_m)
    out = _result(q, todo, call)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=torch.float32, device=q.device)
    partial_out, partial_lse = out, lse
    if len(todo) > 1:
        partial_out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        partial_lse = torch.full_like(lse, -torch.inf)
    for number, one in enumerate(todo):
        last = number == len(todo) - 1
        grid, shared = _launch(q, k, v, call, one, config, rows="queries", first=number == 0, last=last)
        forward_kernel[grid](q, k, v, out, lse, partial_out, partial_lse, **shared)
    return out.to(dtype), lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; no atomics, so the same bits in every run."""
    dtype = q.dtype
    q, k, v, dout, out = _as_computed(q, k, v, dout, out)
    batch, queries, heads, head_dim = q.shape
    delta = torch.empty_like(lse)
    block_d = max(16, triton.next_power_of_2(head_dim))
    rows = batch * queries * heads
    delta_kernel[(triton.cdiv(rows, 32),)](
        out, dout, delta, *dout.stride()[:3], rows, queries, heads, HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_M=32
    )
    strides_d = dict(zip(("stride_db", "stride_dn", "stride_dh"), dout.stride()[:3], strict=True))

    config = config_of("dq", q)
    todo = schedule.passes(call.pattern, k.shape[1], config.block_m)
    dq = _result(q, todo, call)
    partial = dq if len(todo) == 1 else torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    for number, one in enumerate(todo):
        last = number == len(todo) - 1
        grid, shared = _launch(q, k, v, call, one, config, rows="queries", first=number == 0, last=last)
        dq_kernel[grid](q, k, v, dout, lse, delta, dq, partial, **shared, **strides_d)

    config = config_of("dkv", q)
    todo = schedule.passes(call.pattern, k.shape[1], config.block_n)
    dk, dv = _result(k, todo, call), _result(v, todo, call)
    partials = (
        (dk, dv) if len(todo) == 1 else [torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v)]
    )
    for number, one in enumerate(todo):
        last = number == len(todo) - 1
        grid, shared = _launch(q, k, v, call, one, config, rows="keys", first=number == 0, last=last)
        dkv_kernel[grid](q, k, v, dout, lse, delta, dk, dv, *partials, **shared, **strides_d)
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
    # Grid and the arguments that the three kernels share. Where an argument is not used, q stands in for it.
    batch, queries, heads, head_dim = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    start, rows_there, block = (
        (call.first_query, queries, config.block_m) if rows == "queries" else (0, keys, config.block_n)
    )
    tables = schedule.tables(call.pattern, one, keys, kv_heads, block, q.device)
    chunks = (start + rows_there - 1) // one.chunk - start // one.chunk + 1
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
        "dropout_p": call.dropout_p,
        **{
            f"stride_{name}{axis}": x.stride(n)
            for name, x in zip("qkv", (q, k, v), strict=True)
            for n, axis in enumerate("bnh")
        },
        "first_query": call.first_query,
        "queries": queries,
        "keys": keys,
        **tile_heads,
        "group": heads // kv_heads,
        "chunk": one.chunk,
        "stride": one.stride,
        "chunks": chunks,
        "phases": phases,
        "count": count,
        "n_branches": len(one.branches),
        "HEAD_DIM": head_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "CAUSAL": call.is_causal,
        "GATHER": call.inverse is not None,
        "PADDING": call.key_padding_mask is not None,
        "DROPOUT": call.dropout_p > 0.0,
        "READ_PARTIAL": not first,
        "WRITE_PARTIAL": not last,
        "PRECISION": "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee",
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    return (batch * (heads if rows == "queries" else kv_heads) * chunks * count,), shared
