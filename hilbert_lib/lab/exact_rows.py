"""A few rows of attention and of its gradients in float64: the reference where a whole one has no room.

Each row is one softmax over all its keys, a key seen through c branches weighted c times; gradients are autograd's.
Tensors are (batch, seq, heads, head_dim), of which the first sequence counts, with as many KV heads as heads. Scores
have the usual scale.
"""

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from hilbert_lib.attention.request import Request
from hilbert_lib.lab.pairs import Results, relative_difference
from hilbert_lib.patterns.dilated import DilatedPattern
from hilbert_lib.patterns.neighbourhood import Neighbourhood

Seen = Request | Neighbourhood  # what a query sees
Blocks = list[tuple[Tensor, Tensor, Tensor]]  # which of the queries, which keys, and which pairs of them attend
QUERIES_AT_ONCE = 2048  # rows whose weights are held in float64


class SampledRows:
    """Some rows of what a call on q, k, v and dout (`tensors`) should give, computed when first compared.

    queries: positions in each head, in whose rows out and dq are compared; dk and dv in the first `keys` of them.
    first: the position of q's first row. seen: what a query sees.
    """

    def __init__(self, tensors: Sequence[Tensor], seen: Seen, queries: Sequence[Tensor], *, keys: int, first: int = 0):
        self._tensors, self._seen, self._first, self._keys = tensors, seen, first, keys
        self._queries = [rows.to(tensors[0].device) for rows in queries]

    def error(self, results: Results, slots: Tensor | None = None) -> float:
        """Relative difference of (out,), or the largest of (dq, dk, dv). slots: the row of each position, if not it."""
        out, dq = self._of_queries
        exact = [out] if len(results) == 1 else [dq, *(self._of_keys if self._keys else ())]
        rows = [positions - self._first if slots is None else slots[positions] for positions in self._queries]
        keys = [own[: self._keys] for own in rows]
        sampled = [
            torch.cat([x[0, own, head] for head, own in enumerate(of_heads)])
            for x, of_heads, _ in zip(results, (rows, keys, keys), exact, strict=False)
        ]
        return relative_difference(sampled, exact)

    @cached_property
    def _of_queries(self) -> list[Tensor]:
        at = enumerate(self._queries)
        found = [exact_rows(*self._tensors, self._seen, head=h, queries=own, first=self._first) for h, own in at]
        return list(map(torch.cat, zip(*found, strict=True)))

    @cached_property
    def _of_keys(self) -> list[Tensor]:
        at = enumerate(self._queries)
        found = [exact_keys(*self._tensors, self._seen, head=h, keys=own[: self._keys]) for h, own in at]
        return list(map(torch.cat, zip(*found, strict=True)))


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
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, seen: Seen, *, head: int, queries: Tensor, first: int = 0
) -> tuple[Tensor, Tensor]:
    """Rows of the output and of dq of a head at some positions, each (rows, head_dim) float64, without dropout."""
    blocks, at = blocks_of(seen, queries, k.shape[1], head, k.shape[2]), queries - first
    _, out, dq, _, _ = from_blocks(q[0, at, head], dout[0, at, head], blocks, lambda x: (k[0, x, head], v[0, x, head]))
    return out, dq


def exact_keys(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, seen: Seen, *, head: int, keys: Tensor
) -> tuple[Tensor, Tensor]:
    """Rows of dk and dv likewise, from all queries that attend to a key: on a grid window**4 weights."""
    dk, dv = torch.zeros(2, len(keys), q.shape[3], dtype=torch.float64, device=q.device)
    for n, key in enumerate(keys.tolist()):
        queries = _attending(seen, key, q.shape[1], head, q.shape[2]).to(q.device)
        for some in queries.split(QUERIES_AT_ONCE) if len(queries) else ():
            blocks, rows = blocks_of(seen, some, k.shape[1], head, k.shape[2]), (q[0, some, head], dout[0, some, head])
            named, _, _, dk_rows, dv_rows = from_blocks(*rows, blocks, lambda x: (k[0, x, head], v[0, x, head]))
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
    for (rows, keys, _), each in zip(blocks, scores, strict=True):
        weights = (each - highest[rows, None]).exp()
        total = total.index_add(0, rows, weights.sum(-1))
        out = out.index_add(0, rows, weights @ v[torch.searchsorted(named, keys)])
    out = out / torch.where(total > 0, total, 1.0)[:, None]
    zeros = {"allow_unused": True, "materialize_grads": True}  # where there are no keys
    return named, out.detach(), *torch.autograd.grad(out, leaves, dout.double(), **zeros)


def blocks_of(seen: Seen, queries: Tensor, length: int, head: int, heads: int) -> Blocks:
    """What some queries of a KV head attend to: segment by segment of each branch, or on a grid all in one block."""
    if isinstance(seen, Neighbourhood):
        inside = torch.ones((), dtype=torch.bool, device=queries.device)
        for axis, cell in zip(seen.axes, seen.coordinates(queries).unbind(1), strict=True):
            line = torch.arange(axis.cells, device=queries.device)
            inside = inside[..., None] & axis.attends(cell.unique()[:, None], line).any(0)
        keys = inside.flatten().nonzero()[:, 0]  # and some that none of the queries attends to
        return [(torch.arange(len(queries), device=queries.device), keys, seen.attends(queries[:, None], keys))]
    blocks = []
    for branch in seen.pattern.head_branches(head, heads):
        w, r = seen.pattern.branches[branch]
        inside = seen.pattern.contains(branch, queries, head, heads)
        for segment in (queries[inside] // w).unique().tolist():
            rows = (inside & (queries // w == segment)).nonzero()[:, 0]
            first, end = segment * w + seen.pattern.offset(branch, head, heads), min(segment * w + w, length)
            keys = torch.arange(first, end, r, device=queries.device)
            blocks.append((rows, keys, (keys <= queries[rows, None]) | (not seen.is_causal)))
    return blocks


def _attending(seen: Seen, key: int, length: int, head: int, heads: int) -> Tensor:
    # Positions of the queries that see a key.
    if isinstance(seen, Neighbourhood):
        return seen.queries(key)
    found = [torch.empty(0, dtype=torch.int64, device="cpu")]
    for i in seen.pattern.head_branches(head, heads):
        (w, r), offset = seen.pattern.branches[i], seen.pattern.offset(i, head, heads)
        if key % w % r == offset:
            start, end = key if seen.is_causal else key // w * w + offset, min(key // w * w + w, length)
            found.append(torch.arange(start, end, r, device="cpu"))
    return torch.cat(found).unique()
