"""Zero keys: what `DilatedPattern(padding="zeros")` adds to the softmax, after any backend's forward.

n keys of score 0 and value 0 turn (out, lse) into (out * exp(lse - lse'), lse') with lse' = log(exp(lse) + n). With
these the backward needs nothing more. Padded keys of torchscale's LongNet are such keys.
"""

import torch
from torch import Tensor

from hilbert_lib.attention.documents import places_of
from hilbert_lib.attention.merge import kernel_serves
from hilbert_lib.attention.request import Request
from hilbert_lib.attention.starts import has_starts, lengths_of, positions_of
from hilbert_lib.graph_cache import cached_for_graphs
from hilbert_lib.patterns.dilated import DilatedPattern

KEPT = 2**25  # numbers in the tables that are kept, 128 MiB in float32


def add_zero_keys(out: Tensor, lse: Tensor, call: Request, first: int, length: int, kv_heads: int) -> None:
    """Add a call's zero keys, if it has any, to out (batch, queries, heads, head_dim) and lse, in place.

    first: position of the first query in a sequence of this length, where the call does not hold it on the device.
    """
    queries = lse.shape[2]
    if has_starts(call) and has_zero_keys(call, length):
        log_count = _log_count_of_starts(call, queries, length, kv_heads, lse)
    elif call.cu_seqlens is not None and call.pattern.padding == "zeros" and not call.is_causal:
        log_count = log_zero_keys(call.pattern, *places_of(call.cu_seqlens, queries), kv_heads, lse.dtype)
    elif has_zero_keys(call, length):
        log_count = _log_counts(call.pattern, first, queries, length, kv_heads, lse.dtype, lse.device)
    else:
        return
    if kernel_serves(out) and not has_starts(call):
        from hilbert_lib.attention.triton import rows  # triton is imported only where a kernel is used

        rows.add_zero_keys(out, lse, log_count)
        return
    by_group = lse.unflatten(1, (kv_heads, -1))
    # A logistic function, as in `merge`. A row without any keys stays 0 and -inf: -inf minus -inf is NaN.
    weight = (by_group - log_count).sigmoid_()
    torch.logaddexp(by_group, log_count, out=by_group)
    weight.masked_fill_(by_group == -torch.inf, 0.0)
    out.mul_(weight.flatten(1, 2).transpose(1, 2)[..., None])


def has_zero_keys(call: Request, length: int) -> bool:
    """Whether a query of a sequence of this length may see a zero key."""
    padding = getattr(call.pattern, "padding", "none")  # other kinds have no zero keys
    if padding == "none" or call.is_causal:  # they lie after the last position
        return False
    if call.key_start is not None:  # sequences of other lengths
        return True
    return any(min(w, length) % r or length % min(w, length) for w, r in call.pattern.branches)


@cached_for_graphs(KEPT, size=lambda pattern, first, queries, length, kv_heads, dtype, device: kv_heads * queries)
@torch.inference_mode(False)
def _log_counts(
    pattern: DilatedPattern, first: int, queries: int, length: int, kv_heads: int, dtype: torch.dtype,
    device: torch.device,
) -> Tensor:  # fmt: skip
    position = torch.arange(first, first + queries, device=device)
    return log_zero_keys(pattern, position, torch.full((), length, device=device), kv_heads, dtype)


def _log_count_of_starts(call: Request, queries: int, keys: int, kv_heads: int, lse: Tensor) -> Tensor:
    # (batch or 1, kv_heads, 1, queries). Position 0, which sees none, stands for rows of q at no row of their sequence.
    position, _ = positions_of(call, queries, keys, lse.device)
    length = position.new_full((), keys) if call.key_start is None else lengths_of(call, keys)[:, None]
    position, length = torch.broadcast_tensors(position, length)
    return log_zero_keys(call.pattern, position.clamp(min=0), length, kv_heads, lse.dtype)


def log_zero_keys(
    pattern: DilatedPattern, position: Tensor, length: Tensor, kv_heads: int, dtype: torch.dtype
) -> Tensor:
    """(kv_heads, 1, queries): the log of the number of zero keys that each query sees, in sequences of these lengths.

    position: int64 of (queries,), or of (batch, queries) with results (batch, kv_heads, 1, queries). length: int64 that
        broadcasts to it.
    """
    *batch, queries = position.shape
    count = torch.zeros(*batch, kv_heads, 1, queries, dtype=torch.float64, device=position.device)
    for branch, (w, r) in enumerate(pattern.branches):
        size, within = length.clamp(max=w), position % w
        rows = torch.minimum(length - (position - within), size)  # of the segment, that are of the sequence
        for offset, heads in pattern.offset_heads(branch, kv_heads).items():
            real = (rows - offset + r - 1).div(r, rounding_mode="floor").clamp(min=0)
            zeros = torch.where(within % r == offset, -(-size // r) - real, 0)
            count[..., heads, :, :] += zeros[..., None, None, :]
    return count.log().to(dtype)
