"""A few rows of attention and of its gradients in float64: the reference where a whole one has no room.

Each row is one softmax over all its keys, a key seen through c branches weighted c times. Tensors are (batch, seq,
heads, head_dim), of which the first sequence counts.
"""

import torch
from torch import Tensor

from hilbert_lib.attention.call import Call
from hilbert_lib.grid import Neighbourhood
from hilbert_lib.pattern import DilatedPattern

Parts = list[tuple[Tensor, Tensor, Tensor]]
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
    """Rows of the output at some (sorted) positions of a query head, (rows, head_dim) float64, without dropout."""
    parts = _weights(q, k, call, head, queries.to(q.device))
    return _weighted(parts, v[0, :, _kv_head(q, k, head)], len(queries))


def exact_gradients(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, call: Call, *, kv_head: int, queries: Tensor, keys: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of dq, of the first query head of a KV head, at `queries`, and of dk and dv at `keys`; as in `exact_out`."""
    group = q.shape[2] // k.shape[2]

    def rows_of(head: int, positions: Tensor) -> tuple[Tensor, Tensor, Parts, Parts]:
        q_rows, dout_rows = (x[0, positions - call.first_query, head] for x in (q, dout))
        parts = _weights(q, k, call, head, positions)
        return q_rows, dout_rows, parts, _score_gradients(parts, v[0, :, kv_head], dout_rows)

    *_, dscores = rows_of(kv_head * group, queries.to(q.device))
    dq = _weighted(dscores, k[0, :, kv_head], len(queries))
    dk, dv = torch.zeros(2, len(keys), q.shape[3], dtype=torch.float64, device=q.device)
    for n, key in enumerate(keys.tolist()):
        for some in _attending(q, k, call, kv_head, key).split(QUERIES_AT_ONCE):
            for head in range(kv_head * group, (kv_head + 1) * group):
                q_rows, dout_rows, parts, dscores = rows_of(head, some)
                dk[n] += _of_key(dscores, key, q_rows)
                dv[n] += _of_key(parts, key, dout_rows)
    return dq * call.scale, dk * call.scale, dv


def exact_grid_out(q: Tensor, k: Tensor, v: Tensor, neighbourhood: Neighbourhood, *, head: int, query: int) -> Tensor:
    """One row of the output, (head_dim,) float64, from its own keys alone. Tensors are in raster order."""
    parts = _grid_weights(q, k, neighbourhood, head, torch.tensor([query], device=q.device))
    return _weighted(parts, v[0, :, head], 1)[0]


def exact_grid_dq(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, neighbourhood: Neighbourhood, *, head: int, query: int
) -> Tensor:
    """One row of dq, likewise."""
    parts = _grid_weights(q, k, neighbourhood, head, torch.tensor([query], device=q.device))
    dscores = _score_gradients(parts, v[0, :, head], dout[0, [query], head])
    return _weighted(dscores, k[0, :, head], 1)[0] * q.shape[3] ** -0.5


def exact_grid_dk_dv(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, neighbourhood: Neighbourhood, *, head: int, key: int
) -> tuple[Tensor, Tensor]:
    """One row of dk and one of dv, from the queries that attend to the key. Memory grows with window to the fourth."""
    queries = neighbourhood.queries(key).to(q.device)
    parts = _grid_weights(q, k, neighbourhood, head, queries)
    dscores = _score_gradients(parts, v[0, :, head], dout[0, queries, head])
    dk = _of_key(dscores, key, q[0, queries, head]) * q.shape[3] ** -0.5
    return dk, _of_key(parts, key, dout[0, queries, head])


# Below, parts are blocks of pairs: which rows among the queries, which keys, and a value of each pair.


def _weighted(parts: Parts, x: Tensor, count: int) -> Tensor:
    # Of each of so many rows, the sum over its keys of value times x's row.
    out = torch.zeros(count, x.shape[1], dtype=torch.float64, device=x.device)
    for rows, keys, values in parts:
        out[rows] += values @ x[keys].double()
    return out


def _of_key(parts: Parts, key: int, x: Tensor) -> Tensor:
    # Of one key, the sum over its rows of value times x's row.
    return sum((values[:, keys == key].T @ x[rows].double()).sum(0) for rows, keys, values in parts)


def _score_gradients(weights: Parts, v: Tensor, dout: Tensor) -> Parts:
    # Of the softmax weights, the gradients of the scores.
    delta = torch.zeros(len(dout), dtype=torch.float64, device=dout.device)  # = rowsum(dout * out)
    parts = [(rows, keys, each, dout[rows].double() @ v[keys].double().T) for rows, keys, each in weights]
    for rows, _, each, dweights in parts:
        delta[rows] += (each * dweights).sum(-1)
    return [(rows, keys, each * (dweights - delta[rows, None])) for rows, keys, each, dweights in parts]


def _weights(q: Tensor, k: Tensor, call: Call, head: int, queries: Tensor) -> Parts:
    # Softmax weights, segment by segment of each branch.
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


def _grid_weights(q: Tensor, k: Tensor, neighbourhood: Neighbourhood, head: int, queries: Tensor) -> Parts:
    # One part: each query beside the keys of all.
    keys = torch.cat([neighbourhood.keys(query) for query in queries.tolist()]).unique().to(q.device)
    scores = q[0, queries, head].double() @ k[0, keys, head].double().T * q.shape[3] ** -0.5
    scores.masked_fill_(~neighbourhood.attends(queries[:, None], keys), -torch.inf)
    return [(torch.arange(len(queries), device=q.device), keys, scores.softmax(-1))]


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
