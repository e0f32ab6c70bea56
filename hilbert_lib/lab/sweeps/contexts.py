"""The sweeps of notebook 10 by length of context: a model's training step in several ways, and decoding from a cache.

A step is forward and backward of a causal model of bytes on one sequence. All ways get the same bytes.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from hilbert_lib.attention.api import attend
from hilbert_lib.lab.baselines import BASELINES
from hilbert_lib.lab.models import ByteModel, Projected
from hilbert_lib.lab.pairs import Results, Side, relative_difference
from hilbert_lib.lab.samples import text_tokens
from hilbert_lib.lab.sweeps.learning import DENSE, DILATED, WINDOWS, attention_of
from hilbert_lib.lab.workload import Workload
from hilbert_lib.patterns.dilated import DilatedPattern
from hilbert_lib.patterns.neighbourhood import Neighbourhood

STEP, DECODING = "context", "decoding"
TORCHSCALE = "dilated, torchscale's way"
DENSE_BACKENDS = (
    "cudnn",
    "flash",
    "sdpa",
)  # the first that serves is timed: a dense step takes seconds at a million tokens
DECODED = (DILATED, DENSE, WINDOWS)

Attend = Callable[[Tensor, Tensor, Tensor, Workload], Tensor]


def ways_of(
    length: int, pattern: DilatedPattern, window: int, heads: int, head_dim: int, *, device: torch.device, dtype: str
) -> dict[str, tuple[Workload, Attend]]:
    """Ways to attend along a sequence by name: the work of one layer, and the output of (q, k, v, work).

    `DILATED` and `TORCHSCALE` compute one function. Dense attention is by the first of `DENSE_BACKENDS` that serves.
    """
    sizes = {"heads": heads, "head_dim": head_dim, "device": device, "dtype": dtype}
    dilated = Workload(pattern, length, is_causal=True, **sizes)
    dense = Workload(DilatedPattern((length,), (1,)), length, is_causal=True, **sizes)
    line = Neighbourhood((length,), min(window, length), is_causal=True, edge="clip")
    ways = {
        DILATED: (dilated, _by("auto")),
        TORCHSCALE: (dilated, _torchscale),
        WINDOWS: (Workload(line, length, **sizes), _by("auto")),
    }
    serving = next(name for name in DENSE_BACKENDS if not dense.refusal(name, gradient=True))
    return ways | {f"{DENSE}, {serving}": (dense, _by(serving))}


def context_cases(
    lengths: Sequence[int],
    pattern: DilatedPattern,
    *,
    window: int,
    heads: int,
    head_dim: int,
    layers: int,
    device: torch.device,
    dtype: str,
) -> Iterator[tuple[Side, ...]]:
    """One training step by each way at each length, for `run_sides`: ours beside torchscale's way, the others alone.

    The error is that of one layer's attention of the work against float64.
    """
    for length in lengths:
        ways = ways_of(length, pattern, window, heads, head_dim, device=device, dtype=dtype)
        sides = {name: _step_side(name, work, run, layers) for name, (work, run) in ways.items()}
        yield sides.pop(TORCHSCALE), sides.pop(DILATED)
        yield from ((side,) for side in sides.values())


def counted_steps(
    lengths: Sequence[int], pattern: DilatedPattern, *, window: int, heads: int, head_dim: int
) -> list[dict]:
    """The pairs of query and key of one layer, for each way and length: name, length and pairs of one head a token."""
    rows = []
    for length in lengths:
        ways = ways_of(length, pattern, window, heads, head_dim, device=torch.device("cpu"), dtype="float32")
        for name in (DILATED, WINDOWS, f"{DENSE}, sdpa"):
            work, _ = ways[name]
            rows.append({"name": name.split(",")[0], "length": length, "pairs": work.useful.pairs / (heads * length)})
    return rows


def decoding_cases(
    lengths: Sequence[int],
    pattern: DilatedPattern,
    *,
    window: int,
    heads: int,
    head_dim: int,
    layers: int,
    device: torch.device,
    dtype: str,
) -> Iterator[tuple[Side, ...]]:
    """The step of one token after length - 1 others in the cache, by each of `DECODED`, for `run_sides`.

    The error is the difference of its logits from those of one call of all tokens, in the model's own dtype.
    """
    for length in lengths:
        for name in DECODED:
            yield (_decoding_side(name, length, pattern, window, heads, head_dim, layers, device, dtype),)


def _step_side(name: str, work: Workload, run: Attend, layers: int) -> Side:
    made: list[ByteModel] = []  # when it is first run: only one model of a sweep is in memory

    def step() -> Results:
        if not made:
            torch.manual_seed(0)
            width = work.heads * work.head_dim
            attentions = [Projected(width, work.heads, lambda q, k, v: run(q, k, v, work)) for _ in range(layers)]
            made.append(ByteModel(width, attentions).to(work.device, getattr(torch, work.dtype)))
        (model,) = made
        tokens = text_tokens(work.length + 1).to(work.device)
        logits = model(tokens[None, :-1])[0]
        loss = cross_entropy(logits.float(), tokens[1:])
        weights = dict(model.named_parameters())
        gradients = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
        return loss.detach(), gradients["blocks.0.attention.in_proj.weight"]

    def error(_: Results) -> float:
        with torch.no_grad():
            out = run(*work.tensors[:3], work)
        return work.error((out,))

    parameters = {"sweep": STEP, "layers": layers, **work.parameters}
    return Side(name, parameters, step, error)


def _decoding_side(
    name: str,
    length: int,
    pattern: DilatedPattern,
    window: int,
    heads: int,
    head_dim: int,
    layers: int,
    device: torch.device,
    dtype: str,
) -> Side:
    width = heads * head_dim
    made: list = []

    @torch.no_grad()
    def step() -> Results:
        if not made:
            torch.manual_seed(0)
            how = {"length": length, "pattern": pattern, "window": window}
            attentions = [attention_of(name, width, heads, **how) for _ in range(layers)]
            model = ByteModel(width, attentions).to(device, getattr(torch, dtype)).eval()
            caches, tokens = model.make_caches(length), text_tokens(length).to(device)[None]
            model(tokens[:, :-1], caches)
            made.append((model, caches, tokens))
        ((model, caches, tokens),) = made
        for cache in caches:
            cache.lengths.fill_(length - 1)  # each call decodes the same token
        return (model(tokens[:, -1:], caches),)

    @torch.no_grad()
    def error(results: Results) -> float:
        ((model, _, tokens),) = made
        return relative_difference(results, (model(tokens)[:, -1:],))

    branches = " ".join(f"{w}:{r}" for w, r in pattern.branches)
    sizes = {"length": length, "heads": heads, "head_dim": head_dim, "layers": layers, "dtype": dtype}
    return Side(name, {"sweep": DECODING, "branches": branches, "window": window, **sizes}, step, error)


def _by(backend: str) -> Attend:
    def attended(q: Tensor, k: Tensor, v: Tensor, work: Workload) -> Tensor:
        return attend(q, k, v, work.pattern, is_causal=work.is_causal, backend=backend)

    return attended


def _torchscale(q: Tensor, k: Tensor, v: Tensor, work: Workload) -> Tensor:
    return BASELINES["torchscale"].run(q, k, v, work.call)
