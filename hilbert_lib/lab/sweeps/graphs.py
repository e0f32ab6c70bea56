"""What a CUDA graph is worth: the modules called and replayed, where launches dominate.

All times are from an idle device to the finished result: what the host spends on launches counts.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import cache, partial
from itertools import product

import pandas as pd
import torch
from torch import Tensor

from hilbert_lib import checks
from hilbert_lib.attention.modules import DilatedAttention, MultiheadDilatedAttention
from hilbert_lib.lab.pairs import Results, Side, relative_difference
from hilbert_lib.lab.tables import of_sweep, ratio_table
from hilbert_lib.lab.workload import Workload
from hilbert_lib.pattern import DilatedPattern


def captured(run: Callable[[], Results], pool: tuple[int, int] | None = None) -> tuple[torch.cuda.CUDAGraph, Results]:
    """A CUDA graph of a call, and the tensors into which every replay writes its results.

    Args:
        run: the call, without arguments; it reads the same tensors each time and does not wait for the device.
        pool: handle of the memory pool to take, by default one of its own.

    Returns:
        The graph and the results.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles, and fills the caches: a graph cannot
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        results = run()
    return graph, results


def graph_gains(
    lengths: Sequence[int],
    *,
    pattern: DilatedPattern,
    heads: int,
    head_dim: int,
    device: torch.device,
    dtype: str = "bfloat16",
) -> Iterator[tuple[Side, Side]]:
    """Eager calls of the two modules beside replays of their CUDA graphs, forward, and forward with backward.

    A replay's time holds the copy of its inputs into the graph's.

    Args:
        lengths: tokens.
        pattern: which keys a query sees.
        heads, head_dim: of q, k and v; the size of a token is their product.
        device: a CUDA device.
        dtype: name of a torch dtype.

    Yields:
        (eager, replay) for `paired.run_sides`. The error is against the same module in float64.

    Raises:
        ValueError: if device is no CUDA device.
    """
    require_cuda(device)
    for length, kind, direction in product(lengths, ("attention", "multihead"), ("forward", "training")):
        branches = " ".join(f"{w}:{r}" for w, r in pattern.branches)
        sizes = {"length": length, "branches": branches, "heads": heads, "head_dim": head_dim, "dtype": dtype}
        parameters = {"sweep": "graphs", "module": kind, "direction": direction, **sizes}
        prepared = cache(partial(_module_and_inputs, kind, length, pattern, heads, head_dim, device, dtype))
        yield _eager_and_replay(prepared, parameters, device)


def _eager_and_replay(
    prepared: Callable[[], tuple[torch.nn.Module, list[Tensor]]], parameters: dict, device: torch.device
) -> tuple[Side, Side]:
    def call() -> Results:
        return _called(*prepared(), parameters["direction"])

    @cache
    def graph() -> tuple[torch.cuda.CUDAGraph, Results]:
        with torch.cuda.device(device):  # a graph is of the current one's stream
            return captured(call)

    fresh = cache(lambda: [x.detach().clone() for x in prepared()[1]])

    def replay() -> Results:
        (replayed, results), values = graph(), fresh()
        torch.cuda.synchronize(device)
        with torch.no_grad():
            for x, value in zip(prepared()[1], values, strict=True):
                x.copy_(value)
        replayed.replay()
        return results

    @cache
    def exact() -> Results:
        module, inputs = prepared()
        wide = deepcopy(module).double()
        getattr(wide, "attention", wide).backend = "eager"
        return _called(wide, [x.detach().double().requires_grad_() for x in inputs], parameters["direction"])

    def error(results: Results) -> float:
        return relative_difference(results, exact())

    eager = partial(from_idle, call, device)
    return Side("eager", parameters, eager, error), Side("replay", parameters, replay, error)


def _module_and_inputs(
    kind: str, length: int, pattern: DilatedPattern, heads: int, head_dim: int, device: torch.device, dtype: str
) -> tuple[torch.nn.Module, list[Tensor]]:
    work = Workload(pattern, length, heads, head_dim, device, dtype=dtype)
    if kind == "attention":
        return DilatedAttention(pattern), list(work.leaves)
    to = {"device": device, "dtype": getattr(torch, dtype)}
    module = MultiheadDilatedAttention(heads * head_dim, heads, pattern, batch_first=True, **to)
    return module, [work.tensors[0].flatten(2).requires_grad_()]


def _called(module: torch.nn.Module, inputs: list[Tensor], direction: str) -> Results:
    # The output; with "training" also the gradients of half its squared norm: the output is its own gradient.
    with torch.set_grad_enabled(direction == "training"):
        result = module(*inputs)
        out = result[0] if isinstance(result, tuple) else result
        if direction == "forward":
            return (out,)
        return out.detach(), *torch.autograd.grad(out, [*inputs, *module.parameters()], out.detach())


def from_idle(call: Callable[[], Results], device: torch.device) -> Results:
    """A call that begins when the device has done all before it: its launches cannot hide behind earlier work."""
    torch.cuda.synchronize(device)
    return call()


def pair_table(records: list[dict], sweep: str) -> pd.DataFrame:
    """`paired.ratio_table` with the two medians, a_ms and b_ms.

    Args:
        records: that were timed.
        sweep: the value of the parameter of that name.
    """
    table = ratio_table(records, sweep)
    timed = of_sweep(records, sweep)
    return table.assign(**{f"{side}_ms": [record[side]["median_ms"] for record in timed] for side in "ab"})


def require_cuda(device: torch.device) -> None:
    """Raise ValueError unless a device is a CUDA device: graphs and the allocator's counters exist nowhere else."""
    if checks.device(device).type != "cuda":
        raise ValueError(f"device must be a CUDA device, got {device}")
