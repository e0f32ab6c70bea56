"""Launches: the `forward` and `backward` of a backend, by the plain kernels, and by the warp-specialised ones."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import triton
from torch import Tensor

from hilbert_lib.attention.documents import check_rows
from hilbert_lib.attention.request import Request, Tensors
from hilbert_lib.attention.triton import decode, schedule
from hilbert_lib.attention.triton.arguments import as_asked, as_computed, config_of, launch_arguments, result
from hilbert_lib.attention.triton.backward import delta_kernel, dkv_kernel, dq_kernel
from hilbert_lib.attention.triton.forward import forward_kernel
from hilbert_lib.attention.triton.geometry import block_d
from hilbert_lib.attention.triton.hopper import division
from hilbert_lib.attention.triton.hopper import launch as hopper
from hilbert_lib.attention.triton.limits import POSITIONS
from hilbert_lib.attention.triton.packed import scheduled_length
from hilbert_lib.attention.triton.start import Start, start

PLAIN = {"forward": forward_kernel, "dq": dq_kernel, "dkv": dkv_kernel}


def forward(inputs: Tensors, call: Request) -> tuple[Tensor, Tensor]:
    """Output and lse of dilated attention; shapes as in `reference.forward`.

    Raises ValueError for more keys than the kernels can count.
    """
    q, k, v, *_ = inputs
    _check_positions(k, "triton")
    if call.cu_seqlens is not None:
        check_rows(call.cu_seqlens, k.shape[1], call.max_seqlen)
    if decode.serves(q, k, call):
        return decode.attend_in_parts(q, k, v, call)
    dtype = q.dtype
    q, k, v = as_computed(q, k, v)
    lse = _no_lse(q)
    todo = schedule.passes(call.pattern, _length(call, k), config_of("forward", q).block_m)
    out = result(q, todo, call)
    partial_out, partial_lse = out, lse
    if len(todo) > 1:
        partial_out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        partial_lse = torch.full_like(lse, -torch.inf)
    made = (out, lse, partial_out, partial_lse)

    def starts() -> list[Start]:
        return [_plain("forward", (q, k, v, *made, q), call, *one, IF_FLAG=False) for one in _in_order(todo)]

    _start(starts, (q, k, v), made, call, "forward")
    return *as_asked(dtype, out), lse


def _length(call: Request, k: Tensor) -> int:
    # The length of the sequence that tables are made for.
    return k.shape[1] if call.cu_seqlens is None else scheduled_length(call, k.shape[1])


def _check_positions(k: Tensor, backend: str) -> None:
    if k.shape[1] > POSITIONS:
        raise ValueError(f"k must have up to {POSITIONS:,} rows with backend={backend!r}, got {k.shape[1]:,}")


def _no_lse(q: Tensor) -> Tensor:
    # That of rows which no kernel visits.
    return torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=torch.float32, device=q.device)


def forward_on_hopper(inputs: Tensors, call: Request) -> tuple[Tensor, Tensor]:
    """The same by the warp-specialised kernels; a tensor that they cannot read is copied once.

    The plain kernels compute branches whose rows the copy engine does not reach, and again, where a tile is cut off,
    tiles with a NaN. In an exported program, which serves all lengths, they also compute the lengths that the
    warp-specialised kernels do not serve: elsewhere `hopper.launch.refusal_of_keys` refuses these.
    """
    q, k, v, *_ = inputs
    _check_positions(k, "hopper")
    if hopper.refusal_of_keys(q, k, call):
        return forward(inputs, call)
    q, k, v = hopper.as_read(q, k, v)
    lse = _no_lse(q)
    ours, theirs = division.launches(call.pattern, k.shape[1], k.shape[2], call.is_causal)
    out = result(q, ours[:1], call)
    block_n = hopper.HOPPER_FORWARD[hopper.columns_of(q)].block_n
    is_padded = call.key_padding_mask is not None
    masked = hopper.masked(call.pattern, ours, k.shape[1], call.is_causal, is_padded, block_n)
    flag = torch.zeros(1, dtype=torch.int32, device=q.device) if any(masked) else None
    tensors = (q, k, v, out, lse, out, lse)

    def starts() -> list[Start]:
        first = [
            hopper.forward_start(q, k, v, call, one, out, lse, flag if is_masked else None, first=number == 0)
            for number, (one, is_masked) in enumerate(zip(ours, masked, strict=True))
        ]
        # These go on from the results and replace them, rounded once more each time.
        last = [_plain("forward", (*tensors, q), call, one, False, True, IF_FLAG=False) for one in theirs]
        if flag is None:
            return first + last
        # Of tiles that are cut off, the plain kernel tells a NaN that was attended to from one that was not. Of several
        # launches the first then begins every row anew.
        again = [replace(ours[0], covers_all=len(ours) > 1 and not schedule.covers_all(call.pattern)), *ours[1:]]
        repeated = [
            _plain("forward", (*tensors, flag), call, one, number == 0, True, IF_FLAG=True)
            for number, one in enumerate(again)
        ]
        return first + repeated + last

    _start(starts, (q, k, v), (out, lse, flag), call, "forward on hopper")
    return out, lse


def backward(
    dout: Tensor, inputs: Tensors, out: Tensor, lse: Tensor, call: Request, dlse: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    q, k, v, *_ = inputs
    dtype = q.dtype
    q, k, v, dout, out = as_computed(q, k, v, dout, out)
    delta = torch.empty_like(lse)
    given = (q, k, v, dout, lse, delta)
    (dk, dv), sums_of_keys, of_keys = _in_passes("dkv", given, (k, v), call)
    (dq,), sums_of_queries, of_queries = _in_passes("dq", given, (q,), call)

    def starts() -> list[Start]:
        return [_delta(out, dout, dlse, delta), *of_keys(), *of_queries()]

    made = (delta, dk, dv, *sums_of_keys, dq, *sums_of_queries)
    _start(starts, (q, k, v, dout, lse, out, dlse), made, call, "backward")
    return as_asked(dtype, dq, dk, dv)


def backward_on_hopper(
    dout: Tensor, inputs: Tensors, out: Tensor, lse: Tensor, call: Request, dlse: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v by the warp-specialised kernels. dq is summed in an order that varies.

    Where torch asks for determinism, a plain kernel computes dq. With a query_start the plain kernels compute all: the
    others count every row of q from position 0. So they do of branches, and of lengths, as in `forward_on_hopper`.
    """
    q, k, v, *_ = inputs
    if call.query_start is not None or hopper.refusal_of_keys(q, k, call):
        return backward(dout, inputs, out, lse, call, dlse)
    q, k, v, dout = hopper.as_read(q, k, v, dout)
    delta = torch.empty_like(lse)
    given = (q, k, v, dout, lse, delta)
    # Each further pass adds its gradients to the results themselves. Sums are dense whatever q's strides.
    sums, more = None, ()
    ours, theirs = division.launches(call.pattern, k.shape[1], k.shape[2], call.is_causal)
    dk, dv = (result(x, ours[:1], call) for x in (k, v))

    def of_keys() -> list[Start]:
        first = [
            hopper.backward_start(dout, q, k, v, lse, delta, dk, dv, call, one, sums, first=number == 0)
            for number, one in enumerate(ours)
        ]
        tensors = (*given, dk, dv, dk, dv)
        return first + [_plain("dkv", tensors, call, one, False, True) for one in theirs]

    if torch.are_deterministic_algorithms_enabled():
        (dq,), own, of_queries = _in_passes("dq", given, (q,), call)
        more = (dq, *own)
    else:
        sums = torch.zeros_like(q, dtype=torch.float32, memory_format=torch.contiguous_format)

        def of_queries() -> list[Start]:
            tensors = (*given, sums, sums)
            return [_plain("dq", tensors, call, one, False, False) for one in theirs]

    def starts() -> list[Start]:
        return [_delta(out, dout, dlse, delta), *of_keys(), *of_queries()]

    _start(starts, (q, k, v, dout, lse, out, dlse), (delta, dk, dv, sums, *more), call, "backward on hopper")
    if sums is not None:
        dq = torch.mul(sums, call.scale, out=torch.empty_like(sums, dtype=q.dtype))
    return dq, dk, dv


def _in_passes(
    name: str, given: tuple[Tensor, ...], like: tuple[Tensor, ...], call: Request
) -> tuple[list[Tensor], list[Tensor], Callable[[], list[Start]]]:
    # Gradients by all passes of a plain kernel; several add them up in float32 first. And the starts.
    q, k = given[:2]
    config = config_of(name, q)
    length = _length(call, k)
    todo = schedule.passes(call.pattern, length, config.block_n if name == "dkv" else config.block_m)
    found = sums = [result(x, todo, call) for x in like]
    if len(todo) > 1:
        sums = [torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in like]
    tensors = (*given, *found, *sums)
    return found, sums, lambda: [_plain(name, tensors, call, *one) for one in _in_order(todo)]


def _start(starts: Callable[[], list[Start]], given: tuple, made: tuple, call: Request, name: str) -> None:
    # Packed documents have tables of their own in every call: nothing of it is kept.
    is_packed = call.cu_seqlens is not None
    start(starts, () if is_packed else (*given, *call.tensors), name, *call.options, made=made)


def _delta(out: Tensor, dout: Tensor, dlse: Tensor | None, delta: Tensor) -> Start:
    batch, queries, heads, head_dim = out.shape
    rows = batch * queries * heads
    named = {"HEAD_DIM": head_dim, "BLOCK_D": block_d(head_dim), "BLOCK_M": 32}
    tensors = (out, dout, dlse, delta, *dout.stride()[:3], rows, queries, heads)
    return Start(delta_kernel, (triton.cdiv(rows, 32),), tensors, named)


def _plain(name: str, tensors: tuple, call: Request, one: schedule.Pass, first: bool, last: bool, **named) -> Start:
    # The start of a plain kernel for a pass; tensors begin with q, k and v.
    if name != "forward":  # dout is the fourth
        named |= dict(zip(("stride_db", "stride_dn", "stride_dh"), tensors[3].stride()[:3], strict=True))
    rows = "keys" if name == "dkv" else "queries"
    config = config_of(name, tensors[0])
    grid, shared = launch_arguments(*tensors[:3], call, one, config, rows=rows, first=first, last=last)
    return Start(PLAIN[name], grid, tensors, shared | named)


def _in_order(todo: tuple[schedule.Pass, ...]) -> Iterator[tuple[schedule.Pass, bool, bool]]:
    # Each pass, whether it is the first, and whether it is the last.
    for number, one in enumerate(todo):
        yield one, number == 0, number == len(todo) - 1
