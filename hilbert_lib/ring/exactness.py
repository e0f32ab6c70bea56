"""What a rank runs to hold the ring against one process: a target of `workers.run_ranks`."""

from itertools import accumulate, product

import torch
import torch.distributed as dist

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
                name: ((a - b[:, own]).norm() / b.norm()).item()
                for name, a, b in zip(("out", "dq", "dk", "dv"), found, expected, strict=True)
            }
            rows.append({"rank": rank, "transport": transport, "ordering": kind, "is_causal": is_causal, **errors})
    return rows
