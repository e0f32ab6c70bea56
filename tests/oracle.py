"""The oracle of dilated attention, which shares no code with the library: its definition, query by query."""

from collections.abc import Iterator

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


def branches_of(pattern, query: int, kv_head: int, kv_heads: int) -> Iterator[tuple[int, int, int, int]]:
    """Of every branch that a query is in: where its segment starts, segment length, rate and offset."""
    for i, (w, r) in enumerate(zip(pattern.segment_lengths, pattern.dilation_rates, strict=True)):
        o = offset_of(pattern.offsets, i, r, kv_head, kv_heads)
        if uses(pattern.mixing, i, len(pattern.segment_lengths), kv_head, kv_heads) and query % w % r == o:
            yield query - query % w, w, r, o


def keys_of(pattern, query: int, length: int, kv_head: int, kv_heads: int, is_causal: bool) -> list[range]:
    """The positions of the keys that a query sees, of every branch that it is in."""
    last = query + 1 if is_causal else length
    return [
        range(start + o, min(start + w, length, last), r)
        for start, w, r, o in branches_of(pattern, query, kv_head, kv_heads)
    ]


def zero_keys_of(pattern, query: int, length: int, kv_head: int, kv_heads: int, is_causal: bool) -> int:
    """How many keys of zeros a query sees: rows of its segments, filled up to whole ones, at no position of theirs."""
    found = 0
    for start, w, r, o in branches_of(pattern, query, kv_head, kv_heads):
        size = min(w, length)
        filled = size if size % r == 0 else size + r - size % r
        rows = [j for j in range(o, filled, r) if not (is_causal and start + j > query)]
        found += sum(not (j < size and start + j < length) for j in rows)
    return found


def times_seen(pattern, queries: range, length: int, kv_head: int, kv_heads: int, is_causal: bool) -> Tensor:
    """How many times each query sees each key and, in a last column, keys of zeros: (queries, length + 1) float64."""
    times = torch.zeros(len(queries), length + 1, dtype=torch.float64)
    for row, query in zip(times, queries, strict=True):
        for keys in keys_of(pattern, query, length, kv_head, kv_heads, is_causal):
            row[keys.start : keys.stop : keys.step] += 1
        if pattern.padding == "zeros":
            row[length] = zero_keys_of(pattern, query, length, kv_head, kv_heads, is_causal)
    return times


def weighted(q: Tensor, k: Tensor, v: Tensor, times: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """out and lse of queries that see each key so many times: (batch, heads, queries, keys)."""
    is_empty = (times == 0).all(-1, keepdim=True)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale + (times + is_empty).log()
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1) * ~is_empty, v)
    return out, scores.logsumexp(-1).masked_fill(is_empty[..., 0], -torch.inf)


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
    (_, queries, heads, head_dim), (batch, length, kv_heads, _) = q.shape, k.shape
    rows = range(query_start, query_start + queries)
    each = [times_seen(pattern, rows, length, g, kv_heads, is_causal) for g in range(kv_heads)]
    times = torch.stack(each).repeat_interleave(heads // kv_heads, 0).repeat(batch, 1, 1, 1).to(q.device)
    if key_padding_mask is not None:
        times[..., :length] *= ~key_padding_mask[:, None, None]
    zero = k.new_zeros(batch, 1, kv_heads, head_dim)
    k, v = (torch.cat([x, zero], 1).repeat_interleave(heads // kv_heads, 2) for x in (k, v))
    return weighted(q, k, v, times, head_dim**-0.5 if scale is None else scale)
