"""The oracle of dilated attention, which shares no code with the library: its definition, query by query."""

import torch
from torch import Tensor


def offset_of(rule: str, branch: int, rate: int, kv_head: int, kv_heads: int) -> int:
    """The residue of a head, written from the table of the semantics."""
    blocks = (kv_heads + rate - 1) // rate
    return {"head": kv_head % rate, "head_block": kv_head // blocks, "branch": branch % rate, "zero": 0}[rule]


def uses(mixing: str, branch: int, branches: int, kv_head: int, kv_heads: int) -> bool:
    """Whether a head uses a branch."""
    if mixing == "softmax":
        return True
    groups = torch.tensor_split(torch.arange(kv_heads), branches)
    return kv_head in groups[branch].tolist()


def keys_of(pattern, query: int, length: int, kv_head: int, kv_heads: int, is_causal: bool) -> list[tuple[int, int]]:
    """Every (branch, key position) that a query sees."""
    seen = []
    for i, (w, r) in enumerate(zip(pattern.segment_lengths, pattern.dilation_rates, strict=True)):
        o = offset_of(pattern.offsets, i, r, kv_head, kv_heads)
        if not uses(pattern.mixing, i, len(pattern.segment_lengths), kv_head, kv_heads) or (query % w) % r != o:
            continue
        start = (query // w) * w
        seen += [
            (i, j)
            for j in range(start, min(start + w, length))
            if (j - start) % r == o and not (is_causal and j > query)
        ]
    return seen


def zero_keys_of(pattern, query: int, length: int, kv_head: int, kv_heads: int, is_causal: bool) -> int:
    """How many keys of zeros a query sees: rows of its segments, filled up to whole ones, at no position of theirs."""
    found = 0
    for i, (w, r) in enumerate(zip(pattern.segment_lengths, pattern.dilation_rates, strict=True)):
        o = offset_of(pattern.offsets, i, r, kv_head, kv_heads)
        if not uses(pattern.mixing, i, len(pattern.segment_lengths), kv_head, kv_heads) or (query % w) % r != o:
            continue
        size, start = min(w, length), query - query % w
        filled = size if size % r == 0 else size + r - size % r
        rows = [j for j in range(filled) if j % r == o and not (is_causal and start + j > query)]
        found += sum(not (j < size and start + j < length) for j in rows)
    return found


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    key_padding_mask: Tensor | None = None,
    query_start: int = 0,
) -> tuple[Tensor, Tensor]:
    """out (batch, queries, heads, head_dim) and lse (batch, heads, queries), float64, differentiable."""
    q, k, v = q.double(), k.double(), v.double()
    batch, queries, heads, head_dim = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    scale = head_dim**-0.5 if scale is None else scale
    outs, lses = [], []
    for b in range(batch):
        for h in range(heads):
            g = h // (heads // kv_heads)
            for t in range(queries):
                seen = [j for _, j in keys_of(pattern, query_start + t, keys, g, kv_heads, is_causal)]
                if key_padding_mask is not None:
                    seen = [j for j in seen if not key_padding_mask[b, j]]
                zeros = 0
                if pattern.padding == "zeros":
                    zeros = zero_keys_of(pattern, query_start + t, keys, g, kv_heads, is_causal)
                if not seen and not zeros:
                    outs.append(q.new_zeros(head_dim))
                    lses.append(q.new_full((), -torch.inf))
                    continue
                all_k, all_v = (torch.cat([x[b, seen, g], x.new_zeros(zeros, head_dim)]) for x in (k, v))
                scores = all_k @ q[b, t, h] * scale
                outs.append(scores.softmax(0) @ all_v)
                lses.append(scores.logsumexp(0))
    out = torch.stack(outs).view(batch, heads, queries, head_dim).transpose(1, 2)
    return out, torch.stack(lses).view(batch, heads, queries)
