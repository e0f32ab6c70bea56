"""A few rows of dilated attention and of its gradients in float64: the reference where a whole one has no room.

Each row is one softmax over all its keys, a key seen through c branches weighted c times. Only the first sequence of a
batch is looked at.
"""

import torch
from torch import Tensor

from hilbert_lib.attention.call import Call
from hilbert_lib.pattern import DilatedPattern

QUERIES_AT_ONCE = 2048  # rows of a dense (queries, keys) matrix in float64


def sampled_positions(
    pattern: DilatedPattern, length: int, *, kv_head: int, kv_heads: int, count: int, seed: int
) -> Tensor:
    """Random positions, moved inside their segments into the branches of a KV head, taken in turn; sorted, each once.

    A position stays where it is if the branch has none in its segment, as in a short last one.

    Args:
        pattern: the branches.
        length: tokens.
        kv_head, kv_heads: the KV head, and how many there are.
        count: how many are drawn; fewer come back where some are alike.
        seed: of the draw.

    Returns:
        (count,) int64 or fewer, on the CPU.

    >>> positions = sampled_positions(DilatedPattern((8,), (4,)), 64, kv_head=1, kv_heads=2, count=3, seed=0)
    >>> (positions % 4).unique().tolist()
    [1]
    """
    generator = torch.Generator("cpu").manual_seed(seed)
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


def exact_out(q: Tensor, k: Tensor, v: Tensor, call: Call, *, head: int, queries: Tensor) -> Tensor:
    """Rows of the output.

    Args:
        q: (batch, queries, heads, head_dim). k, v: (batch, keys, kv_heads, head_dim), in sequence order.
        call: the rest of the request; padding and dropout are not looked at.
        head: query head.
        queries: their positions, (rows,) int64, sorted.

    Returns:
        (rows, head_dim) float64.

    >>> x = torch.ones(1, 4, 1, 2)
    >>> exact_out(x, x, x, Call(DilatedPattern((4,), (1,))), head=0, queries=torch.tensor([1])).tolist()
    [[1.0, 1.0]]
    """
    weights, seen = _weights(q, k, call, head, queries.to(q.device))
    return weights @ v[0, seen, _kv_head(q, k, head)].double()


def exact_gradients(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, call: Call, *, kv_head: int, queries: Tensor, keys: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of dq, of the first query head of a KV head, and of dk and dv.

    Args:
        q, k, v, call: as in `exact_out`.
        dout: gradient of the output, shaped like q.
        kv_head: the KV head.
        queries, keys: positions, (rows,) and (columns,) int64, sorted.

    Returns:
        dq (rows, head_dim), dk and dv (columns, head_dim), all float64.

    >>> x = torch.ones(1, 4, 1, 2)
    >>> one = torch.tensor([1])
    >>> call = Call(DilatedPattern((4,), (1,)))
    >>> exact_gradients(x, x, x, x, call, kv_head=0, queries=one, keys=one)[2].tolist()
    [[1.0, 1.0]]
    """
    group = q.shape[2] // k.shape[2]
    queries, keys = queries.to(q.device), keys.to(q.device)
    _, dscores, seen = _row_gradients(q, k, v, dout, call, kv_head * group, queries)
    dq = dscores @ k[0, seen, kv_head].double() * call.scale
    dk, dv = torch.zeros(2, len(keys), q.shape[3], dtype=torch.float64, device=q.device)
    for n, key in enumerate(keys):
        attending = _attending(q, k, call, kv_head, key)
        if not len(attending):
            continue  # no query sees it: both gradients are 0
        for head in range(kv_head * group, (kv_head + 1) * group):
            for rows in attending.split(QUERIES_AT_ONCE):
                weights, dscores, seen = _row_gradients(q, k, v, dout, call, head, rows)
                at = rows - call.first_query
                dk[n] += dscores[:, key - seen.start] @ q[0, at, head].double() * call.scale
                dv[n] += weights[:, key - seen.start] @ dout[0, at, head].double()
    return dq, dk, dv


def _row_gradients(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, call: Call, head: int, queries: Tensor
) -> tuple[Tensor, Tensor, slice]:
    # Softmax weights and gradients of the scores, (rows, keys), and which keys these are.
    weights, seen = _weights(q, k, call, head, queries)
    dout_rows = dout[0, queries - call.first_query, head].double()
    dweights = dout_rows @ v[0, seen, _kv_head(q, k, head)].double().T
    delta = (weights * dweights).sum(-1, keepdim=True)  # = rowsum(dout * out)
    return weights, weights * (dweights - delta), seen


def _weights(q: Tensor, k: Tensor, call: Call, head: int, queries: Tensor) -> tuple[Tensor, slice]:
    g = _kv_head(q, k, head)
    seen = _segments_around(call.pattern, queries, k.shape[1])
    keys = torch.arange(seen.start, seen.stop, device=q.device)
    count = sum(mask.double() for mask in _masks(call, g, k.shape[2], queries, keys))
    scores = q[0, queries - call.first_query, head].double() @ k[0, seen, g].double().T * call.scale
    # A key that c branches see counts c times: log(c) on its score. A row without keys is NaN before the mask.
    return (scores + count.log()).softmax(-1).masked_fill(count == 0, 0.0), seen


def _attending(q: Tensor, k: Tensor, call: Call, kv_head: int, key: Tensor) -> Tensor:
    # Positions of the queries that see a key.
    near = _segments_around(call.pattern, key[None], k.shape[1])
    low, high = max(near.start, call.first_query), min(near.stop, call.first_query + q.shape[1])
    queries = torch.arange(low, high, device=q.device)
    return queries[torch.cat(_masks(call, kv_head, k.shape[2], queries, key[None]), -1).any(-1)]


def _masks(call: Call, kv_head: int, kv_heads: int, queries: Tensor, keys: Tensor) -> list[Tensor]:
    used = call.pattern.head_branches(kv_head, kv_heads)
    heads = {"kv_head": kv_head, "kv_heads": kv_heads}
    return [call.pattern.mask(i, queries, keys, is_causal=call.is_causal, **heads) for i in used]


def _segments_around(pattern: DilatedPattern, positions: Tensor, length: int) -> slice:
    # From the first to the last position of any segment that one of the positions is in.
    first, last = int(positions[0]), int(positions[-1])
    begin = min(first // w * w for w in pattern.segment_lengths)
    end = max((last // w + 1) * w for w in pattern.segment_lengths)
    return slice(begin, min(end, length))


def _kv_head(q: Tensor, k: Tensor, head: int) -> int:
    return head // (q.shape[2] // k.shape[2])
