"""What ranks run to hold the ring against float64: whole and small, or a few rows of a sequence that no rank holds."""

from itertools import accumulate, product

import torch
import torch.distributed as dist
from torch import Tensor

from hilbert_lib.attention.api import dilated_attention
from hilbert_lib.ordering import OrderingSpec
from hilbert_lib.pattern import DilatedPattern
from hilbert_lib.ring.attention import ring_dilated_attention


def compare_with_one_process(arguments: dict) -> list[dict]:
    """Output and gradients of this rank's shard beside those of one float64 process, in every way of exchanging.

    Args:
        arguments: "segment_lengths" and "dilation_rates" of the pattern; "shard_lengths", one a rank; "heads",
            "kv_heads" and "head_dim"; "transports"; "orderings" of the stored shards of k and v.

    Returns:
        A row for each transport, ordering, and causal or not: "rank", "transport", "ordering", "is_causal", and the
        relative errors "out", "dq", "dk" and "dv" in float32, against the norm of the whole.
    """
    pattern = DilatedPattern(arguments["segment_lengths"], arguments["dilation_rates"])
    lengths, rank = arguments["shard_lengths"], dist.get_rank()
    end = list(accumulate(lengths))[rank]
    own = slice(end - lengths[rank], end)
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    torch.manual_seed(0)  # every rank draws the same whole
    heads = arguments["heads"], arguments["kv_heads"], arguments["kv_heads"], arguments["heads"]
    q, k, v, dout = (torch.randn(1, sum(lengths), each, arguments["head_dim"], device=device) for each in heads)
    rows = []
    for is_causal in (False, True):
        whole = [x.double().requires_grad_() for x in (q, k, v)]
        out = dilated_attention(*whole, pattern, is_causal=is_causal, backend="reference")
        expected = out.detach(), *torch.autograd.grad(out, whole, dout.double())
        for transport, kind in product(arguments["transports"], arguments["orderings"]):
            shards = [x[:, own].clone().requires_grad_() for x in (q, k, v)]
            order = OrderingSpec(kind).ordering(lengths[rank]).to(device)
            stored = shards[0], order.apply(shards[1], dim=1), order.apply(shards[2], dim=1)
            out = ring_dilated_attention(
                *stored, pattern, transport=transport, is_causal=is_causal, kv_ordering=OrderingSpec(kind)
            )
            found = out.detach(), *torch.autograd.grad(out, shards, dout[:, own])
            errors = {
                name: (a - b[:, own]).norm().item() / (b.norm().item() or 1.0)
                for name, a, b in zip(("out", "dq", "dk", "dv"), found, expected, strict=True)
            }
            rows.append({"rank": rank, "transport": transport, "ordering": kind, "is_causal": is_causal, **errors})
    return rows


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
        pattern: which keys a query sees.
        is_causal: whether keys after the query are excluded.
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
        for n in range(count):
            head = used[n % len(used)]
            inside = torch.randint(length, (1,), generator=generator) // w * w + pattern.offset(branch, head, kv_heads)
            inside = inside + torch.randint(max(1, min(w, length) // r), (1,), generator=generator) * r
            at = inside.clamp(max=length - 1).to(q.device)
            seen = pattern.keys(int(at), kv_head=head, kv_heads=kv_heads, length=length, is_causal=is_causal)
            keys = seen.to(q.device)
            (query,), key_rows, value_rows = rows(q, at, head * group), rows(k, keys, head), rows(v, keys, head)
            weights = (key_rows @ query * q.shape[3] ** -0.5).softmax(0)
            exact = {"out": weights @ value_rows}
            if dout is not None:
                (dout_row,) = rows(dout, at, head * group)
                dweights = value_rows @ dout_row
                dscores = weights * (dweights - weights @ dweights)
                exact["dq"] = dscores @ key_rows * q.shape[3] ** -0.5
            for name, row in exact.items():
                (found,) = rows({"out": out, "dq": dq}[name], at, head * group)
                squares[name][0] += (found - row).square().sum().item()
                squares[name][1] += row.square().sum().item()
    return {name: (wrong / whole) ** 0.5 if whole else None for name, (wrong, whole) in squares.items()}
