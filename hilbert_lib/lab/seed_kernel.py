"""The kernel pair of the documents under examination, restated: what is timed for a claim, not how to compute.

One program serves one row of one head, multiplies element by element where tensor cores would multiply tiles, and
subtracts no maximum before exp2, so that large scores overflow: so the documents' kernels work.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

KEYS_AT_ONCE = 32


@triton.jit(do_not_specialize=["segment", "rate"])
def row_kernel(
    q, k, v, out, order, segment, rate, scale_log2, heads,
    HEAD_DIM: tl.constexpr, KEYS: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    """Attention of one row, or of query order[row], over every rate-th slot of its segment."""
    query, h = tl.program_id(0), tl.program_id(1)
    if ORDERED:
        query = tl.load(order + query)
    dims = tl.arange(0, HEAD_DIM)
    at = (query * heads + h) * HEAD_DIM
    q_row = tl.load(q + at + dims).to(tl.float32)
    acc = tl.zeros([HEAD_DIM], tl.float32)
    total = 0.0
    start = query // segment * segment
    for step in range(0, segment // rate, KEYS):
        number = step + tl.arange(0, KEYS)
        exists = number < segment // rate
        key = start + number * rate
        if ORDERED:
            key = tl.load(order + key, mask=exists, other=0)
        rows = (key * heads + h) * HEAD_DIM
        k_rows = tl.load(k + rows[:, None] + dims[None, :], mask=exists[:, None], other=0.0).to(tl.float32)
        v_rows = tl.load(v + rows[:, None] + dims[None, :], mask=exists[:, None], other=0.0).to(tl.float32)
        weights = tl.exp2(tl.sum(k_rows * q_row[None, :], 1) * scale_log2)
        weights = tl.where(exists, weights, 0.0)
        acc += tl.sum(weights[:, None] * v_rows, 0)
        total += tl.sum(weights, 0)
    tl.store(out + at + dims, (acc / total).to(out.dtype.element_ty))


def seed_attention(
    q: Tensor, k: Tensor, v: Tensor, *, segment_length: int, dilation_rate: int, order: Tensor | None = None
) -> Tensor:
    """One of the two functions that the documents timed; `seeds.seed_key_sets` says which keys they select.

    q, k, v and the result are (1, seq, heads, head_dim), contiguous, head_dim a power of two, seq a multiple of
    segment_length. order is the documents' mapping, (seq,) int32, for their "Hilbert" kernel, else None.
    """
    _, length, heads, head_dim = q.shape
    out = torch.empty_like(q)
    mapping = q if order is None else order  # q stands in for a mapping that is not read
    scale_log2 = head_dim**-0.5 * 1.4426950408889634
    constants = {"HEAD_DIM": head_dim, "KEYS": KEYS_AT_ONCE, "ORDERED": order is not None}
    row_kernel[(length, heads)](q, k, v, out, mapping, segment_length, dilation_rate, scale_log2, heads, **constants)
    return out
