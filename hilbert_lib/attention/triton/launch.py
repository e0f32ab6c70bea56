"""Launches: the kernels as the `forward` and `backward` of a backend."""

from dataclasses import replace

import torch
import triton
from torch import Tensor

from hilbert_lib.attention.call import Call
from hilbert_lib.attention.triton import decode, schedule
from hilbert_lib.attention.triton.arguments import config_of, is_interpreted, launch_arguments, result
from hilbert_lib.attention.triton.backward import delta_kernel, dkv_kernel, dq_kernel
from hilbert_lib.attention.triton.forward import forward_kernel
from hilbert_lib.attention.triton.geometry import block_d
from hilbert_lib.attention.triton.hopper import division
from hilbert_lib.attention.triton.hopper import launch as hopper
from hilbert_lib.attention.triton.limits import POSITIONS
from hilbert_lib.attention.triton.start import Start, start


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Output and lse of dilated attention; shapes as in `reference.forward`.

    Raises:
        ValueError: for more keys than the kernels can count.
    """
    if k.shape[1] > POSITIONS:
        raise ValueError(f"k must have up to {POSITIONS:,} rows with backend='triton', got {k.shape[1]:,}")
    if decode.serves(q, k, call):
        return decode.forward(q, k, v, call)
    dtype = q.dtype
    q, k, v = _as_computed(q, k, v)
    config = config_of("forward", q)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=torch.float32, device=q.device)
    starts: list[Start] = []
    if hopper.runs((q, k, v), k.shape[1], call):
        ours, theirs = division.launches(call.pattern, k.shape[1], k.shape[2], call.is_causal)
        out = result(q, ours[:1], call)
        block_n = hopper.HOPPER_FORWARD[hopper.columns_of(q)].block_n
        masked = [hopper.is_masked(call, one, k.shape[1], block_n) for one in ours]
        flag = torch.zeros(1, dtype=torch.int32, device=q.device) if any(masked) else None
        for number, (one, is_masked) in enumerate(zip(ours, masked, strict=True)):
            own = flag if is_masked else None
            starts.append(hopper.forward(q, k, v, call, one, out, lse, own, first=number == 0))

        def plain(one: schedule.Pass, first: bool, flag: Tensor | None) -> None:
            grid, shared = launch_arguments(q, k, v, call, one, config, rows="queries", first=first, last=True)
            if_flag = flag is not None
            tensors = (q, k, v, out, lse, out, lse, flag if if_flag else q)
            starts.append(Start(forward_kernel, grid, tensors, shared | {"IF_FLAG": if_flag}))

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
    out = result(q, todo, call)
    partial_out, partial_lse = out, lse
    if len(todo) > 1:
        partial_out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        partial_lse = torch.full_like(lse, -torch.inf)
    for number, one in enumerate(todo):
        last = number == len(todo) - 1
        grid, shared = launch_arguments(q, k, v, call, one, config, rows="queries", first=number == 0, last=last)
        tensors = (q, k, v, out, lse, partial_out, partial_lse, q)
        starts.append(Start(forward_kernel, grid, tensors, shared | {"IF_FLAG": False}))
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
    tensors = (out, dout, delta, *dout.stride()[:3], rows, queries, heads)
    named = {"HEAD_DIM": head_dim, "BLOCK_D": block_d(head_dim), "BLOCK_M": 32}
    starts = [Start(delta_kernel, (triton.cdiv(rows, 32),), tensors, named)]
    strides_d = dict(zip(("stride_db", "stride_dn", "stride_dh"), dout.stride()[:3], strict=True))

    on_hopper = call.query_start is None and hopper.runs((q, k, v, dout), k.shape[1], call)
    if on_hopper:
        # Each further pass adds its gradients to the results themselves. Sums are dense whatever q's strides.
        is_deterministic = torch.are_deterministic_algorithms_enabled()
        sums = None if is_deterministic else torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        ours, theirs = division.launches(call.pattern, k.shape[1], k.shape[2], call.is_causal)
        dk, dv = (result(x, ours[:1], call) for x in (k, v))
        for number, one in enumerate(ours):
            starts.append(hopper.backward(dout, q, k, v, lse, delta, dk, dv, call, one, sums, first=number == 0))
        config = config_of("dkv", q)
        for one in theirs:
            grid, shared = launch_arguments(q, k, v, call, one, config, rows="keys", first=False, last=True)
            tensors = (q, k, v, dout, lse, delta, dk, dv, dk, dv)
            starts.append(Start(dkv_kernel, grid, tensors, shared | strides_d))
        if sums is not None:
            config = config_of("dq", q)
            for one in theirs:
                grid, shared = launch_arguments(q, k, v, call, one, config, rows="queries", first=False, last=False)
                starts.append(Start(dq_kernel, grid, (q, k, v, dout, lse, delta, sums, sums), shared | strides_d))
            start(starts)
            return torch.mul(sums, call.scale, out=torch.empty_like(sums, dtype=dtype)), dk, dv

    config = config_of("dq", q)
    todo = schedule.passes(call.pattern, k.shape[1], config.block_m)
    dq = result(q, todo, call)
    partial = dq if len(todo) == 1 else torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    for number, one in enumerate(todo):
        last = number == len(todo) - 1
        grid, shared = launch_arguments(q, k, v, call, one, config, rows="queries", first=number == 0, last=last)
        starts.append(Start(dq_kernel, grid, (q, k, v, dout, lse, delta, dq, partial), shared | strides_d))
    if on_hopper:
        start(starts)
        return dq, dk, dv

    config = config_of("dkv", q)
    todo = schedule.passes(call.pattern, k.shape[1], config.block_n)
    dk, dv = result(k, todo, call), result(v, todo, call)
    partials = (
        (dk, dv) if len(todo) == 1 else [torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v)]
    )
    for number, one in enumerate(todo):
        last = number == len(todo) - 1
        grid, shared = launch_arguments(q, k, v, call, one, config, rows="keys", first=number == 0, last=last)
        starts.append(Start(dkv_kernel, grid, (q, k, v, dout, lse, delta, dk, dv, *partials), shared | strides_d))
    start(starts)
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


def _as_computed(*tensors: Tensor) -> tuple[Tensor, ...]:
    # The interpreter computes bfloat16 wrongly (products, sums, where): it is given float32.
    if is_interpreted():
        return tuple(x.float() for x in tensors)
    return tensors
