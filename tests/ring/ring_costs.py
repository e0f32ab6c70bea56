"""What ranks send, hold and take, in the tests of the ring."""

import math
from contextlib import contextmanager
from functools import partial
from itertools import accumulate

import torch
import torch.distributed as dist
from cases import BRANCHES
from ring_ranks import device, inputs

from hilbert_lib.attention.api import dilated_attention
from hilbert_lib.lab.sweeps import ring as benchmarks
from hilbert_lib.limits.memory import begin_peak
from hilbert_lib.pattern import DilatedPattern
from hilbert_lib.ring.attention import ring_dilated_attention
from hilbert_lib.ring.plan.plan import plan_ring


def count_bytes(
    branches: str, lengths: list[int], transport: str, *, is_causal: bool, dtype: str, padded: bool = False, **planning
) -> list[list[int]]:
    """Bytes sent and received forward, and backward: as counted where torch is called, and as planned."""
    dtype = getattr(torch, dtype)
    pattern, rank = DilatedPattern(*BRANCHES[branches]), dist.get_rank()
    *leaves, dout = inputs(lengths[rank], dtype=dtype)
    leaves = [x.requires_grad_() for x in leaves]
    mask = torch.arange(2 * lengths[rank], device=device()).view(2, -1) % 3 == 0 if padded else None
    call = {"key_padding_mask": mask, "transport": transport, "is_causal": is_causal, **planning}
    with counted() as forward:
        out = ring_dilated_attention(*leaves, pattern, **call)
    with counted() as backward:
        torch.autograd.grad(out, leaves, dout)
    plan = plan_ring(
        pattern,
        lengths,
        batch=2,
        heads=4,
        kv_heads=4,
        head_dim=8,
        dtype=dtype,
        is_causal=is_causal,
        transport=transport,
        padded=padded,
        **planning,
    )
    cost = plan.ranks[rank]
    planned = [cost.sent_forward, cost.received_forward, cost.sent_backward, cost.received_backward]
    return [[forward["sent"], forward["received"], backward["sent"], backward["received"]], planned]


@contextmanager
def counted():
    """Counts the bytes that torch's collectives carry between ranks, but for the header's."""
    total = {"sent": 0, "received": 0}
    all_to_all, batched = dist.all_to_all_single, dist.batch_isend_irecv

    def counting_all_to_all(output, input, output_split_sizes, input_split_sizes, **options):
        for name, x, sizes in (("sent", input, input_split_sizes), ("received", output, output_split_sizes)):
            row = math.prod(x.shape[1:]) * x.element_size()
            total[name] += row * (sum(sizes) - sizes[dist.get_rank()])
        return all_to_all(output, input, output_split_sizes, input_split_sizes, **options)

    def counting_batched(operations):
        for operation in operations:
            name = "sent" if operation.op is dist.isend else "received"
            total[name] += operation.tensor.numel() * operation.tensor.element_size()
        return batched(operations)

    dist.all_to_all_single, dist.batch_isend_irecv = counting_all_to_all, counting_batched
    try:
        yield total
    finally:
        dist.all_to_all_single, dist.batch_isend_irecv = all_to_all, batched


def peak_memory(branches: list, tokens: int, transport: str, *, is_causal: bool) -> list[list[int]]:
    """Bytes at the highest point of a forward, and of a backward: as allocated by torch; as planned; and what the
    backend takes beside a call's tensors, as it does in a call of one process with this rank's rows."""
    length, dtype = tokens // dist.get_world_size(), torch.bfloat16 if device().type == "cuda" else torch.float32
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 64}
    generator = torch.Generator().manual_seed(dist.get_rank())
    shapes = [(1, length, n, sizes["head_dim"]) for n in (4, 2, 2, 4)]
    *leaves, dout = (torch.randn(shape, generator=generator, dtype=dtype).to(device()) for shape in shapes)
    leaves = [x.requires_grad_() for x in leaves]
    pattern = DilatedPattern(*branches)
    rows = {"pattern": pattern, "is_causal": is_causal}
    forward, backward = _peaks(partial(ring_dilated_attention, transport=transport, **rows), leaves, dout)
    own_forward, own_backward = _peaks(partial(dilated_attention, **rows), leaves, dout)
    qkv, scalars = sum(x.nbytes for x in leaves), 4 * length * sizes["heads"]  # lse, and delta
    own_forward -= qkv + dout.nbytes + scalars
    own_backward -= 2 * (qkv + dout.nbytes + scalars)
    plan = plan_ring(
        pattern,
        (length,) * dist.get_world_size(),
        batch=1,
        dtype=dtype,
        is_causal=is_causal,
        transport=transport,
        **sizes,
    )
    cost = plan.ranks[dist.get_rank()]
    return [[forward, cost.memory_forward, own_forward], [backward, cost.memory_backward, own_backward]]


def _peaks(call, leaves: list[torch.Tensor], dout: torch.Tensor) -> tuple[int, int]:
    """Bytes at the highest point of a forward, and of a backward, with their arguments."""
    torch.autograd.grad(call(*leaves), leaves, dout)  # what is made once, such as tables, is not of this call
    out, forward = _with_peak(partial(call, *leaves))
    _, backward = _with_peak(partial(torch.autograd.grad, out, leaves, dout))
    arguments = sum(x.nbytes for x in leaves)
    kept = 2 * dout.nbytes + 4 * out.shape[1] * out.shape[2]  # dout, out and lse
    return arguments + forward, arguments + kept + backward


def _with_peak(run) -> tuple:
    """What a call returns, and how many bytes more than before were allocated at its highest point."""
    if device().type == "cuda":
        before = begin_peak(device())
        found = run()
        torch.cuda.synchronize()
        return found, torch.cuda.max_memory_allocated() - before
    with torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as trace:  # no import of the compiler
        found = run()
    events = [event for event in trace.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return found, max(accumulate(event.nbytes() for event in events))


def measured(**work) -> list[dict]:
    """What the benchmark reports."""
    return benchmarks.measure(benchmarks.Work(**work))
