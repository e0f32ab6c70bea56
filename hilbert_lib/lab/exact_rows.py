"""A few rows of dilated attention and of its gradients in float64: the reference where a whole one has no room.

Each row is one softmax over all its keys, a key seen through c branches weighted c times. Only the first sequence of a
batch is looked at.
"""

import torch
from torch import Tensor

from hilbert_lib.attention.call import Call
from hilbert_lib.grid import Neighbourhood
from hilbert_lib.pattern import DilatedPattern

QUERIES_AT_ONCE = 2048  # rows whose weights are held in float64


def sampled_positions(
    pattern: DilatedPattern, length: int, *, kv_head: int, kv_heads: int, count: int, seed: int
) -> Tensor:
    """Random positions, moved inside their segments into the branches of a KV head, taken in turn; sorted, each once.

    A position stays where it is if the branch has none in its segment, as in a short last one.
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
    """Rows of the output at some positions of a query head, (rows, head_dim) float64; padding and dropout do not count.

    q, k and v are (batch, seq, heads, head_dim) in sequence order; `queries` are sorted.
    """
    out = torch.zeros(len(queries), q.shape[3], dtype=torch.float64, device=q.device)
    for rows, keys, weights in _weights(q, k, call, head, queries.to(q.device)):
        out[rows] += weights @ v[0, keys, _kv_head(q, k, head)].double()
    return out


def exact_gradients(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, call: Call, *, kv_head: int, queries: Tensor, keys: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of dq, of the first query head of a KV head, at `queries`, and of dk and dv at `keys`; as in `exact_out`."""
    group = q.shape[2] // k.shape[2]
    queries = queries.to(q.device)
    dq = torch.zeros(len(queries), q.shape[3], dtype=torch.float64, device=q.device)
    for rows, seen, _, dscores in _row_gradients(q, k, v, dout, call, kv_head * group, queries):
        dq[rows] += dscores @ k[0, seen, kv_head].double() * call.scale
    dk, dv = torch.zeros(2, len(keys), q.shape[3], dtype=torch.float64, device=q.device)
    for n, key in enumerate(keys.tolist()):
        for some in _attending(q, k, call, kv_head, key).split(QUERIES_AT_ONCE):
            for head in range(kv_head * group, (kv_head + 1) * group):
                for rows, seen, weights, dscores in _row_gradients(q, k, v, dout, call, head, some):
                    here = seen == key
                    at = some[rows] - call.first_query
                    dk[n] += (dscores[:, here].T @ q[0, at, head].double()).sum(0) * call.scale
                    dv[n] += (weights[:, here].T @ dout[0, at, head].double()).sum(0)
    return dq, dk, dv


def _row_gradients(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, call: Call, head: int, queries: Tensor
) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    # What `_weights` gives, and the gradients of the scores.
    delta = torch.zeros(len(queries), dtype=torch.float64, device=q.device)  # = rowsum(dout * out)
    parts = []
    for rows, keys, weights in _weights(q, k, call, head, queries):
        dout_rows = dout[0, queries[rows] - call.first_query, head].double()
        dweights = dout_rows @ v[0, keys, _kv_head(q, k, head)].double().T
        delta[rows] += (weights * dweights).sum(-1)
        parts.append((rows, keys, weights, dweights))
    return [(rows, keys, weights, weights * (dweights - delta[rows, None])) for rows, keys, weights, dweights in parts]


def _weights(q: Tensor, k: Tensor, call: Call, head: int, queries: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    # Segment by segment of each branch: which of the queries are in it, its keys, and the softmax weights of the pairs.
    g = _kv_head(q, k, head)
    parts = []
    for i in call.pattern.head_branches(g, k.shape[2]):
        w, r = call.pattern.branches[i]
        offset = call.pattern.offset(i, g, k.shape[2])
        inside = call.pattern.contains(i, queries, g, k.shape[2])
        for segment in (queries[inside] // w).unique().tolist():
            rows = (inside & (queries // w == segment)).nonzero()[:, 0]
            end = min(segment * w + w, k.shape[1])
            keys = torch.arange(segment * w + offset, end, r, device=q.device)
            scores = q[0, queries[rows] - call.first_query, head].double() @ k[0, keys, g].double().T * call.scale
            if call.is_causal:
                scores.masked_fill_(keys > queries[rows, None], -torch.inf)
            parts.append((rows, keys, scores))
    # One softmax over all of them: a key that is seen through two branches counts twice.
    lse = torch.full((len(queries),), -torch.inf, dtype=torch.float64, device=q.device)
    for rows, _, scores in parts:
        lse[rows] = torch.logaddexp(lse[rows], scores.logsumexp(-1))
    return [(rows, keys, (scores - lse[rows, None]).exp()) for rows, keys, scores in parts]


def _attending(q: Tensor, k: Tensor, call: Call, kv_head: int, key: int) -> Tensor:
    # Positions of the queries that see a key.
    found = [torch.empty(0, dtype=torch.int64, device=q.device)]
    first, last = call.first_query, call.first_query + q.shape[1]
    for i in call.pattern.head_branches(kv_head, k.shape[2]):
        w, r = call.pattern.branches[i]
        offset = call.pattern.offset(i, kv_head, k.shape[2])
        start = key // w * w
        if key % w % r == offset:
            queries = torch.arange(key if call.is_causal else start + offset, min(start + w, last), r, device=q.device)
            found.append(queries[queries >= first])
    return torch.cat(found).unique()


def _kv_head(q: Tensor, k: Tensor, head: int) -> int:
    return head // (q.shape[2] // k.shape[2])


def exact_grid_out(q: Tensor, k: Tensor, v: Tensor, neighbourhood: Neighbourhood, *, head: int, query: int) -> Tensor:
    """One row of the output, (head_dim,) float64, from its own keys alone.

    Tensors here are (batch, seq, heads, head_dim) in raster order; the first sequence of the batch counts.
    """
    keys = neighbourhood.keys(query).to(q.device)
    weights = _grid_weights(q, k, neighbourhood, head, torch.tensor([query], device=q.device), keys)
    return (weights @ v[0, keys, head].double())[0]


def exact_grid_dq(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, neighbourhood: Neighbourhood, *, head: int, query: int
) -> Tensor:
    """One row of dq, likewise."""
    keys = neighbourhood.keys(query).to(q.device)
    at = torch.tensor([query], device=q.device)
    _, dscores = _grid_score_gradients(q, k, v, dout, neighbourhood, head, at, keys)
    return (dscores @ k[0, keys, head].double())[0] * q.shape[3] ** -0.5


def exact_grid_dk_dv(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, neighbourhood: Neighbourhood, *, head: int, key: int
) -> tuple[Tensor, Tensor]:
    """One row of dk and one of dv, from the queries that attend to the key. Memory grows with window to the fourth."""
    queries = neighbourhood.queries(key)
    # The windows of all queries fill a rectangle, from the first window's corner to the last's.
    first = neighbourhood.first(neighbourhood.coordinates(queries))
    (top, left), (bottom, right) = first[0].tolist(), (first[-1] + neighbourhood.window).tolist()
    rows, cols = torch.arange(top, bottom, device="cpu"), torch.arange(left, right, device="cpu")
    keys = (rows[:, None] * neighbourhood.shape[1] + cols).flatten().to(q.device)
    queries = queries.to(q.device)
    weights, dscores = _grid_score_gradients(q, k, v, dout, neighbourhood, head, queries, keys)
    own = keys == key
    dk = dscores[:, own].T @ q[0, queries, head].double() * q.shape[3] ** -0.5
    return dk[0], (weights[:, own].T @ dout[0, queries, head].double())[0]


def _grid_weights(
    q: Tensor, k: Tensor, neighbourhood: Neighbourhood, head: int, queries: Tensor, keys: Tensor
) -> Tensor:
    # Softmax weights, (queries, keys), where keys hold all that the queries attend to.
    scores = q[0, queries, head].double() @ k[0, keys, head].double().T * q.shape[3] ** -0.5
    return scores.masked_fill_(~neighbourhood.attends(queries[:, None], keys), -torch.inf).softmax(-1)


def _grid_score_gradients(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, near: Neighbourhood, head: int, queries: Tensor, keys: Tensor
) -> tuple[Tensor, Tensor]:
    # Softmax weights and the gradients of the scores, (queries, keys).
    weights = _grid_weights(q, k, near, head, queries, keys)
    dweights = dout[0, queries, head].double() @ v[0, keys, head].double().T
    return weights, weights * (dweights - (weights * dweights).sum(-1, keepdim=True))
