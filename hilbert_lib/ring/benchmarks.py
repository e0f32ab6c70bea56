"""What one rank measures of the ring: targets of `workers.run_ranks`, whose results JSON can hold.

run_ranks("hilbert_lib.ring.benchmarks:measure", 4, {"tokens": 2**17, "heads": 16, "head_dim": 64,
          "segment_lengths": [2048, 2**19], "dilation_rates": [1, 256], "sides": ["ring", "gathered"]})
"""

import statistics
import time
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from hilbert_lib.attention.api import dilated_attention
from hilbert_lib.pattern import DilatedPattern
from hilbert_lib.ring.attention import ring_dilated_attention
from hilbert_lib.ring.plan import RingPlan, plan_ring

Pass = Callable[[], object]
TRANSPORTS = ("auto", "ring", "all_gather", "all_to_all")
GATHERED, DENSE_RING = "gathered", "dense_ring"
WARM_UP = 3


def measure(order: dict) -> list[dict]:
    """Times forward and backward of one sequence on this rank, side by side.

    Args:
        order: tokens (of a rank), heads, head_dim, segment_lengths, dilation_rates and sides; by default kv_heads =
            heads, is_causal = False, dtype = "bfloat16", backend = "auto", validate = False and repetitions = 10. Sides
            are the transports; "gathered", where every rank gathers all k and v once and attends to them; and
            "dense_ring", which passes all of them round the ring and computes dense attention, another function.

    Returns:
        For each side: its name, planned bytes sent, forward_ms and backward_ms (median of the slowest rank's times),
        tokens_per_s (of this rank, forward and backward), bytes_per_s (sent, over the pass), peak_bytes on this rank's
        GPU (None without one), and hidden_forward and hidden_backward, the shares of the exchange's kernels' time in
        which other kernels ran (None where nothing is exchanged, or without a GPU).
    """
    return [_side(name, order) for name in order["sides"]]


def _side(name: str, order: dict) -> dict:
    q, k, v, dout = _inputs(order)
    plan = _plan(name, order)
    if name == GATHERED:
        forward, backward = _gathered(q, k, v, dout, plan)
    else:
        forward, backward = _ring(q, k, v, dout, plan, name, order)
    if q.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    forward_ms, backward_ms = _times(forward, backward, q.device, order.get("repetitions", 10))
    peak_bytes = torch.cuda.max_memory_allocated() if q.is_cuda else None
    # A backward runs once for each forward, in this order.
    hidden_forward, hidden_backward = _hidden_share(forward, q.device), _hidden_share(backward, q.device)
    cost = plan.ranks[dist.get_rank()]
    sent = cost.sent_forward, cost.sent_backward
    if name == GATHERED:
        rows, ranks = k.numel() * 2, dist.get_world_size() - 1
        sent = rows * k.element_size() * ranks, rows * 4 * ranks  # gradients are summed in float32
    return {
        "side": name,
        "sent_forward": sent[0],
        "sent_backward": sent[1],
        "forward_ms": forward_ms,
        "backward_ms": backward_ms,
        "tokens_per_s": q.shape[1] / (forward_ms + backward_ms) * 1e3,
        "bytes_per_s": sum(sent) / (forward_ms + backward_ms) * 1e3,
        "peak_bytes": peak_bytes,
        "hidden_forward": hidden_forward,
        "hidden_backward": hidden_backward,
    }


def _inputs(order: dict) -> list[Tensor]:
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    heads, kv_heads = order["heads"], order.get("kv_heads", order["heads"])
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    dtype = getattr(torch, order.get("dtype", "bfloat16"))
    shapes = [(1, order["tokens"], n, order["head_dim"]) for n in (heads, kv_heads, kv_heads, heads)]
    q, k, v, dout = (torch.randn(shape, generator=generator, dtype=dtype, device=device) for shape in shapes)
    return [*(x.requires_grad_() for x in (q, k, v)), dout]


def _plan(name: str, order: dict) -> RingPlan:
    lengths = (order["tokens"],) * dist.get_world_size()
    pattern = DilatedPattern(tuple(order["segment_lengths"]), tuple(order["dilation_rates"]))
    return plan_ring(
        DilatedPattern((sum(lengths),), (1,)) if name == DENSE_RING else pattern,
        lengths,
        batch=1,
        heads=order["heads"],
        kv_heads=order.get("kv_heads", order["heads"]),
        head_dim=order["head_dim"],
        dtype=getattr(torch, order.get("dtype", "bfloat16")),
        is_causal=order.get("is_causal", False),
        transport=name if name in TRANSPORTS else "ring",
    )


def _ring(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, plan: RingPlan, name: str, order: dict) -> tuple[Pass, Pass]:
    options = {
        "transport": name if name in TRANSPORTS else "ring",
        "is_causal": plan.is_causal,
        "backend": order.get("backend", "auto"),
        "validate": order.get("validate", False),
    }
    ring_dilated_attention(q, k, v, plan.pattern, **options | {"validate": True})
    graph: list[Tensor] = []

    def forward() -> None:
        graph[:] = [ring_dilated_attention(q, k, v, plan.pattern, **options)]

    return forward, lambda: torch.autograd.grad(graph[0], (q, k, v), dout)


def _gathered(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, plan: RingPlan) -> tuple[Pass, Pass]:
    start, ranks = plan.starts[dist.get_rank()], dist.get_world_size()
    graph: list[Tensor] = []

    def forward() -> None:
        parts = [[torch.empty_like(x) for _ in range(ranks)] for x in (k, v)]
        for gathered, x in zip(parts, (k, v), strict=True):
            dist.all_gather(gathered, x.detach())
        both = [torch.cat(some, 1).requires_grad_() for some in parts]
        graph[:] = [
            dilated_attention(q, *both, plan.pattern, is_causal=plan.is_causal, query_start=start),
            *both,
        ]

    def backward() -> None:
        out, *both = graph
        _, *grads = torch.autograd.grad(out, (q, *both), dout)
        for grad in grads:
            parts = [part.float().contiguous() for part in grad.chunk(ranks, 1)]
            dist.reduce_scatter(torch.empty_like(parts[0]), parts)

    return forward, backward


def _times(forward: Pass, backward: Pass, device: torch.device, repetitions: int) -> list[float]:
    """Median times in ms of the slowest rank of each repetition."""
    samples = []
    for _ in range(WARM_UP + repetitions):
        times = []
        for run in (forward, backward):
            _wait(device)
            dist.barrier()
            started = time.perf_counter()
            run()
            _wait(device)
            times.append((time.perf_counter() - started) * 1e3)
        samples.append(times)
    slowest = torch.tensor(samples[WARM_UP:], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return [statistics.median(column) for column in slowest.T.tolist()]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _hidden_share(run: Pass, device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        run()
        _wait(device)
    kernels: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels["nccl" in event.name].append((event.time_range.start, event.time_range.end))
    return covered(kernels[True], by=kernels[False]) if kernels[True] else None


def covered(intervals: Iterable[tuple[float, float]], by: Iterable[tuple[float, float]]) -> float:
    """The share of some intervals' union that other intervals cover.

    >>> covered([(0, 4), (6, 8)], by=[(1, 2), (3, 7)])
    0.5
    """
    points = sorted(
        [
            (time, kind, step)
            for kind, some in enumerate((intervals, by))
            for a, b in some
            for time, step in ((a, 1), (b, -1))
        ]
    )
    open_now, whole, both, before = [0, 0], 0.0, 0.0, None
    for moment, kind, step in points:
        if before is not None and open_now[0]:
            whole += moment - before
            both += (moment - before) if open_now[1] else 0.0
        open_now[kind] += step
        before = moment
    return both / whole if whole else 0.0
