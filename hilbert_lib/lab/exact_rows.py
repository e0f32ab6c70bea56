"""A few rows of attention and of its gradients in float64: the reference where a whole one has no room.

Each row is one softmax over all its keys, a key seen through c branches weighted c times; gradients are autograd's.
Tensors are (batch, seq, heads, head_dim), of which the first sequence counts; k and v have KV heads, each of which
serves a group of heads. Scores have the usual scale.
"""

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from hilbert_lib.lab.pairs import Results, relative_difference
from hilbert_lib.patterns.dilated import DilatedPattern
from hilbert_lib.patterns.neighbourhood import HeadNeighbourhoods, Neighbourhood
from hilbert_lib.patterns.pattern import Pattern
from hilbert_lib.patterns.points import PointNeighbourhood
from hilbert_lib.patterns.union import Union

Blocks = list[tuple[Tensor, Tensor, Tensor]]  # which of the queries, which keys, and which pairs of them attend
QUERIES_AT_ONCE = 2048  # rows whose weights are held in float64


class SampledRows:
    """Some rows of what a call on q, k, v and dout (`tensors`) should give, computed when first compared.

    queries: positions in each head, in whose rows out and dq are compared.
    keys: how many of those of a group's first head dk and dv are compared in.
    first: the position of q's first row.
    is_causal: whether keys after the query are excluded, along a sequence.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        pattern: Pattern,
        queries: Sequence[Tensor],
        *,
        keys: int,
        first: int = 0,
        is_causal: bool = False,
    ):
        self._tensors, self._pattern, self._first, self._keys = tensors, pattern, first, keys
        self._is_causal = is_causal
        self._queries = [rows.to(tensors[0].device) for rows in queries]
        group = tensors[0].shape[2] // tensors[1].shape[2]
        self._key_positions = [rows[:keys] for rows in self._queries[::group]]

    def error(self, results: Results, slots: Tensor | None = None) -> float:
        """Relative difference of (out,), or the largest of (dq, dk, dv). slots: the row of each position, if not it."""
        out, dq = self._of_queries
        exact = [out] if len(results) == 1 else [dq, *(self._of_keys if self._keys else ())]

        def rows_of(positions: Tensor) -> Tensor:
            return positions - self._first if slots is None else slots[positions]

        rows, keys = (list(map(rows_of, by_head)) for by_head in (self._queries, self._key_positions))
        sampled = [
            torch.cat([x[0, indices, head] for head, indices in enumerate(of_heads)])
            for x, of_heads, _ in zip(results, (rows, keys, keys), exact, strict=False)
        ]
        return relative_difference(sampled, exact)

    @cached_property
    def _of_queries(self) -> list[Tensor]:
        how = {"first": self._first, "is_causal": self._is_causal}
        by_head = [
            exact_rows(*self._tensors, self._pattern, head=head, queries=positions, **how)
            for head, positions in enumerate(self._queries)
        ]
        return list(map(torch.cat, zip(*by_head, strict=True)))

    @cached_property
    def _of_keys(self) -> list[Tensor]:
        by_head = [
            exact_keys(*self._tensors, self._pattern, kv_head=kv_head, keys=positions, is_causal=self._is_causal)
            for kv_head, positions in enumerate(self._key_positions)
        ]
        return list(map(torch.cat, zip(*by_head, strict=True)))


def sampled_positions(pattern: DilatedPattern, length: int, *, kv_head: int, kv_heads: int, count: int) -> Tensor:
    """Random positions, moved inside their segments into the branches of a KV head, taken in turn; sorted, each once.

    A position stays where it is if the branch has none in its segment, as in a short last one.
    """
    generator = torch.Generator("cpu").manual_seed(kv_head)
    positions = torch.randint(length, (count,), generator=generator, device="cpu")
    used = pattern.head_branches(kv_head, kv_heads)
    for n in range(count):
        branch = used[n % len(used)]
        w, r = pattern.branches[branch]
        p = int(positions[n])
        start = p // w * w
        inside = start + p % w // r * r + pattern.offset(branch, kv_head, kv_heads)
        if inside >= min(start + w, length):  # cut short before its residue: the r positions before have it
            inside -= r
        positions[n] = inside if inside >= start else p
    return positions.unique()


def exact_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    pattern: Pattern,
    *,
    head: int,
    queries: Tensor,
    first: int = 0,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rows of the output and of dq of a head at some positions, each (rows, head_dim) float64, without dropout."""
    kv_head = head * k.shape[2] // q.shape[2]
    blocks = blocks_of(pattern, queries, k.shape[1], kv_head, k.shape[2], is_causal=is_causal)
    rows = q[0, queries - first, head], dout[0, queries - first, head]
    _, out, dq, _, _ = from_blocks(*rows, blocks, lambda keys: (k[0, keys, kv_head], v[0, keys, kv_head]))
    return out, dq


def exact_keys(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    pattern: Pattern,
    *,
    kv_head: int,
    keys: Tensor,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rows of dk and dv of a KV head likewise, from all queries that attend to a key: on a grid window**4 weights."""
    kv_heads, group = k.shape[2], q.shape[2] // k.shape[2]
    dk, dv = torch.zeros(2, len(keys), q.shape[3], dtype=torch.float64, device=q.device)
    for n, key in enumerate(keys.tolist()):
        queries = _attending(pattern, key, q.shape[1], kv_head, kv_heads, is_causal=is_causal).to(q.device)
        for chunk in queries.split(QUERIES_AT_ONCE) if len(queries) else ():
            blocks = blocks_of(pattern, chunk, k.shape[1], kv_head, kv_heads, is_causal=is_causal)
            for head in range(kv_head * group, (kv_head + 1) * group):
                rows = q[0, chunk, head], dout[0, chunk, head]
                named, _, _, dk_rows, dv_rows = from_blocks(
                    *rows, blocks, lambda positions: (k[0, positions, kv_head], v[0, positions, kv_head])
                )
                dk[n] += dk_rows[named == key][0]
                dv[n] += dv_rows[named == key][0]
    return dk, dv


def from_blocks(
    q: Tensor, dout: Tensor, blocks: Blocks, keys_and_values: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows of one head in float64: the keys that blocks name, out and dq (rows of q), dk and dv (of those keys).

    A row without a key has an output of 0. keys_and_values: of (keys,) positions the rows of k and v.
    """
    named = torch.cat([keys for _, keys, _ in blocks] or [torch.empty(0, dtype=torch.int64, device=q.device)]).unique()
    leaves = q, k, v = [x.detach().double().requires_grad_() for x in (q, *keys_and_values(named))]
    highest, scores = torch.full((len(q),), -torch.inf, dtype=torch.float64, device=q.device), []
    for rows, keys, attends in blocks:
        products = q[rows] @ k[torch.searchsorted(named, keys)].T * q.shape[1] ** -0.5
        scores.append(products.masked_fill(~attends, -torch.inf))
        highest[rows] = highest[rows].maximum(scores[-1].detach().amax(-1))
    total, out = torch.zeros_like(highest), q * 0
    for (rows, keys, _), block_scores in zip(blocks, scores, strict=True):
        weights = (block_scores - highest[rows, None]).exp()
        total = total.index_add(0, rows, weights.sum(-1))
        out = out.index_add(0, rows, weights @ v[torch.searchsorted(named, keys)])
    out = out / torch.where(total > 0, total, 1.0)[:, None]
    zeros = {"allow_unused": True, "materialize_grads": True}  # where there are no keys
    return named, out.detach(), *torch.autograd.grad(out, leaves, dout.double(), **zeros)


def blocks_of(
    pattern: Pattern, queries: Tensor, length: int, head: int, heads: int, *, is_causal: bool = False
) -> Blocks:
    """Keys of some queries of a KV head: a block for each segment of a branch, or for each part of a pattern."""
    how = {"length": length, "head": head, "heads": heads, "is_causal": is_causal}
    if isinstance(pattern, Union):
        return [block for part in pattern.patterns for block in blocks_of(part, queries, **how)]
    if isinstance(pattern, HeadNeighbourhoods):
        return blocks_of(pattern.by_head[head], queries, **how)
    if isinstance(pattern, Neighbourhood):
        return [_block_of_window(pattern, queries)]
    if isinstance(pattern, DilatedPattern):
        return _blocks_of_branches(pattern, queries, **how)
    all_keys = torch.arange(length, device=queries.device)
    masks = {"kv_head": head, "kv_heads": heads, "is_causal": is_causal}
    blocks = []
    for part in pattern.head_parts(head, heads):
        attends = pattern.mask(part, queries, all_keys, **masks)
        keys = attends.any(0).nonzero()[:, 0]
        blocks.append((torch.arange(len(queries), device=queries.device), keys, attends[:, keys]))
    return [block for block in blocks if len(block[1])]


def _block_of_window(near: Neighbourhood, queries: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # Of all keys that a query sees on some axis; some of them no query attends to.
    inside = torch.ones((), dtype=torch.bool, device=queries.device)
    for axis, cell in zip(near.axes, near.coordinates(queries).unbind(1), strict=True):
        line = torch.arange(axis.cells, device=queries.device)
        inside = inside[..., None] & axis.attends(cell.unique()[:, None], line).any(0)
    keys = inside.flatten().nonzero()[:, 0]
    return torch.arange(len(queries), device=queries.device), keys, near.attends(queries[:, None], keys)


def _blocks_of_branches(
    pattern: DilatedPattern, queries: Tensor, *, length: int, head: int, heads: int, is_causal: bool
) -> Blocks:
    blocks = []
    for branch in pattern.head_branches(head, heads):
        w, r = pattern.branches[branch]
        inside = pattern.contains(branch, queries, head, heads)
        for segment in (queries[inside] // w).unique().tolist():
            rows = (inside & (queries // w == segment)).nonzero()[:, 0]
            first, end = segment * w + pattern.offset(branch, head, heads), min(segment * w + w, length)
            keys = torch.arange(first, end, r, device=queries.device)
            blocks.append((rows, keys, (keys <= queries[rows, None]) | (not is_causal)))
    return blocks


def _attending(pattern: Pattern, key: int, length: int, head: int, heads: int, *, is_causal: bool) -> Tensor:
    # Positions of the queries that see a key.
    how = {"length": length, "head": head, "heads": heads, "is_causal": is_causal}
    if isinstance(pattern, Union):
        return torch.cat([_attending(part, key, **how) for part in pattern.patterns]).unique()
    if isinstance(pattern, HeadNeighbourhoods):
        return _attending(pattern.by_head[head], key, **how)
    if isinstance(pattern, Neighbourhood | PointNeighbourhood):
        return pattern.queries(key)
    if isinstance(pattern, DilatedPattern):
        return _attending_in_branches(pattern, key, **how)
    all_queries, key_position = torch.arange(length, device="cpu"), torch.tensor([key], device="cpu")
    masks = {"kv_head": head, "kv_heads": heads, "is_causal": is_causal}
    attends = [pattern.mask(part, all_queries, key_position, **masks)[:, 0] for part in pattern.head_parts(head, heads)]
    return torch.stack(attends).any(0).nonzero()[:, 0]


def _attending_in_branches(
    pattern: DilatedPattern, key: int, *, length: int, head: int, heads: int, is_causal: bool
) -> Tensor:
    queries = [torch.empty(0, dtype=torch.int64, device="cpu")]
    for branch in pattern.head_branches(head, heads):
        (w, r), offset = pattern.branches[branch], pattern.offset(branch, head, heads)
        if key % w % r == offset:
            start = key if is_causal else key // w * w + offset
            queries.append(torch.arange(start, min(key // w * w + w, length), r, device="cpu"))
    return torch.cat(queries).unique()
