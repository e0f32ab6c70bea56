"""Rows of the ring's results against float64, of a sequence that no rank holds."""

import torch
import torch.distributed as dist
from torch import Tensor

from hilbert_lib.attention.call import Call
from hilbert_lib.lab.exact_rows import blocks_of, from_blocks, sampled_positions

SAMPLED_QUERIES = 16  # of each KV head


def sampled_errors(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None, out: Tensor, dq: Tensor | None, call: Call
) -> dict[str, float | None]:
    """Relative errors of rows of out and dq against float64, the same on every rank; None for what was not given.

    All are this rank's shard of the first sequence, (1, rows, heads, head_dim), k and v in sequence order; shards are
    equally long. Keys come from all the ranks that hold them.
    """
    start, kv_heads = q.shape[1] * dist.get_rank(), k.shape[2]
    length, group = q.shape[1] * dist.get_world_size(), q.shape[2] // kv_heads

    def rows(x: Tensor, positions: Tensor, head: int) -> Tensor:
        own = (positions >= start) & (positions < start + x.shape[1])
        all_rows = torch.zeros(len(positions), x.shape[3], dtype=torch.float64, device=x.device)
        all_rows[own] = x[0, positions[own] - start, head].double()
        dist.all_reduce(all_rows)
        return all_rows

    squares = {"out": [0.0, 0.0], "dq": [0.0, 0.0]}
    for g in range(kv_heads):
        drawn = {"kv_head": g, "kv_heads": kv_heads, "count": SAMPLED_QUERIES, "seed": g}
        at, head = sampled_positions(call.pattern, length, **drawn).to(q.device), g * group + g % group
        given = [rows(x, at, head) for x in (q, q if dout is None else dout)]
        blocks = blocks_of(call, at, length, g, kv_heads)
        _, *exact, _, _ = from_blocks(*given, blocks, lambda keys, g=g: (rows(k, keys, g), rows(v, keys, g)))
        for name, found, true in zip(squares, (out, dq), exact, strict=True):
            if found is not None:
                squares[name][0] += (rows(found, at, head) - true).square().sum().item()
                squares[name][1] += true.square().sum().item()
    return {name: (wrong / whole) ** 0.5 if whole else None for name, (wrong, whole) in squares.items()}
