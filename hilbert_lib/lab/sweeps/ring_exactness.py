"""Rows of the ring's results against float64, of a sequence that no rank holds."""

import torch
import torch.distributed as dist
from torch import Tensor

from hilbert_lib.pattern import DilatedPattern


def sampled_errors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor | None,
    out: Tensor,
    dq: Tensor | None,
    pattern: DilatedPattern,
    *,
    is_causal: bool,
    count: int = 16,
) -> dict[str, float | None]:
    """Relative errors of rows of out and dq against float64, with keys from all the ranks that hold them.

    Args:
        q, dout, out, dq: this rank's shard of the first sequence, (1, rows, heads, head_dim); dout and dq may be None.
        k, v: likewise, (1, rows, kv_heads, head_dim), in sequence order. Shards are equally long.
        pattern, is_causal: of the attention.
        count: rows of each branch, at random among those that are in it; of one head each, in turn.

    Returns:
        "out" and "dq", the same on every rank: the norm of the difference over that of the exact rows. None for what
        was not given.
    """
    start, kv_heads = q.shape[1] * dist.get_rank(), k.shape[2]
    length, group = q.shape[1] * dist.get_world_size(), q.shape[2] // kv_heads
    generator = torch.Generator("cpu").manual_seed(0)

    def rows(x: Tensor, positions: Tensor, head: int) -> Tensor:
        own = (positions >= start) & (positions < start + x.shape[1])
        all_rows = torch.zeros(len(positions), x.shape[3], dtype=torch.float64, device=x.device)
        all_rows[own] = x[0, positions[own] - start, head].double()
        dist.all_reduce(all_rows)
        return all_rows

    squares = {"out": [0.0, 0.0], "dq": [0.0, 0.0]}
    for branch, (w, r) in enumerate(pattern.branches):
        used = pattern.branch_heads(branch, kv_heads)
        for head in (used[n % len(used)] for n in range(count)):
            inside = torch.randint(length, (1,), generator=generator) // w * w + pattern.offset(branch, head, kv_heads)
            inside = inside + torch.randint(max(1, min(w, length) // r), (1,), generator=generator) * r
            at = inside.clamp(max=length - 1).to(q.device)
            seen = pattern.keys(int(at), kv_head=head, kv_heads=kv_heads, length=length, is_causal=is_causal)
            keys, scale = seen.to(q.device), q.shape[3] ** -0.5
            (query,), key_rows, value_rows = rows(q, at, head * group), rows(k, keys, head), rows(v, keys, head)
            weights = (key_rows @ query * scale).softmax(0)
            exact = {"out": (out, weights @ value_rows)}
            if dout is not None:
                (dout_row,) = rows(dout, at, head * group)
                dweights = value_rows @ dout_row
                exact["dq"] = dq, (weights * (dweights - weights @ dweights)) @ key_rows * scale
            for name, (found, row) in exact.items():
                squares[name][0] += (rows(found, at, head * group)[0] - row).square().sum().item()
                squares[name][1] += row.square().sum().item()
    return {name: (wrong / whole) ** 0.5 if whole else None for name, (wrong, whole) in squares.items()}
