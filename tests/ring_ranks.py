"""What the tests of the ring run on ranks, along sequences and on grids: in processes, by `run`, and in threads.

`run` calls functions of this file, and of ring_costs, ring_headers and ring_graphs.
"""

import io
import pkgutil
import re
import shutil
import tempfile
import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, pairwise, product
from math import prod
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import oracle
import torch
import torch.distributed as dist
from cases import (
    BRANCHES,
    LARGE_RULES,
    ORDERS,
    SCALE,
    drawn,
    drawn_dlse,
    drawn_joint,
    expected_on_grid,
    extra_of,
    masks_of,
    neighbourhoods,
    points_of,
    shape_of,
)
from interpreted import confine
from torch.utils.checkpoint import checkpoint

from hilbert_lib import Neighbourhood, PointNeighbourhood, neighbourhood_attention, point_order
from hilbert_lib.attention import merge, operators
from hilbert_lib.attention.api import attend, dilated_attention
from hilbert_lib.attention.backends import flex
from hilbert_lib.attention.backends.registry import BACKENDS, backends_for
from hilbert_lib.attention.request import WORKING_DTYPE, Request, Tensors
from hilbert_lib.machine import kernel_mode
from hilbert_lib.ordering import Ordering, OrderingSpec
from hilbert_lib.patterns.dilated import DilatedPattern
from hilbert_lib.patterns.neighbourhood import HeadNeighbourhoods
from hilbert_lib.patterns.union import Union
from hilbert_lib.ring import (
    PointShard,
    Rectangles,
    RingNeighbourhoodAttention,
    Runs,
    ring_neighbourhood_attention,
    spread,
)
from hilbert_lib.ring import points as points_module
from hilbert_lib.ring.agreement import Agreement
from hilbert_lib.ring.attention import ring_attend, ring_dilated_attention
from hilbert_lib.ring.module import RingDilatedAttention, gather, shard
from hilbert_lib.ring.plan import plan
from hilbert_lib.ring.plan.balance import shard_lengths_for
from hilbert_lib.ring.rank import copies, exchange, halo, local

SPECS = {
    "none": None,
    "residue": OrderingSpec("residue", rate=3),
    "random": OrderingSpec("random", seed=1),
    "hilbert": OrderingSpec("hilbert"),
    "chunked": OrderingSpec("hilbert", chunk=8),
    **{kind: OrderingSpec(kind) for kind in ("linear", "morton", "snake", "tile")},
}
NAMES = ("out", "lse", "dq", "dk", "dv")
NAMES_ON_GRIDS = (*NAMES, "dextra_k", "dextra_v", "dbias")
OF_ALL_RANKS = NAMES_ON_GRIDS[5:]


def run(order: dict) -> list:
    """Call functions of this module, given as [name, arguments], one after the other in one start of the ranks."""
    if kernel_mode() == "interpreted":
        from hastened import hasten  # with all of Triton

        hasten()
        confine()
    named = ((name if ":" in name else f"{__name__}:{name}", arguments) for name, arguments in order["calls"])
    return [pkgutil.resolve_name(name)(**arguments) for name, arguments in named]


def calls_of_the_documents(calls: list[str]) -> list[float]:
    """How far each call of the table in docs/names.md is from the oracle, on this rank's part of the output."""
    segment_length, length = 16, 32
    pattern = DilatedPattern((segment_length, length), (1, 2), mixing="head_groups")
    named = {"pattern": pattern, "segment_length": segment_length, "OrderingSpec": OrderingSpec}
    q, k, v = torch.randn(3, 1, length, 2, 16, generator=torch.Generator().manual_seed(0)).unbind()
    expected, _ = oracle.attention(q, k, v, pattern)
    differences = []
    for call in calls:
        module = eval(call, {**named, "RingDilatedAttention": RingDilatedAttention})
        own_q, own_k, own_v = (shard(x) for x in (q, k, v))
        if module.kv_ordering:
            order = module.kv_ordering.ordering(own_k.shape[1])
            assert order != Ordering.linear(own_k.shape[1])
            own_k, own_v = order.apply(own_k, dim=1), order.apply(own_v, dim=1)
        out = module(own_q, own_k, own_v)
        differences.append((out - shard(expected.to(out.dtype))).abs().max().item())
    return differences


def run_on_fewer(order: dict) -> dict[str, list]:
    """`run` for each number of ranks in order["calls"] that counts this one in, all in one start; the last are all."""
    found = {}
    for ranks, calls in order["calls"].items():
        if dist.get_rank() < int(ranks):
            _meet(ranks, int(ranks))
            found[ranks] = run({"calls": calls})
    return found


def _meet(where: str, ranks: int, *, slow: bool = False, backend: str | None = "gloo") -> None:
    rank = dist.get_rank()
    store, _, _ = next(dist.rendezvous("env://", rank, ranks))
    store = dist.PrefixStore(where, store)
    dist.destroy_process_group()
    dist.init_process_group(backend, store=_Slow(store) if slow else store, rank=rank, world_size=ranks)


class _Slow(dist.Store):
    # Reads addresses late: by then this rank is connected to some of the others and not yet to all of them.
    def __init__(self, store: dist.Store):
        super().__init__()
        self._store = store

    def get(self, key: str) -> bytes:
        time.sleep(0.3)
        return self._store.get(key)

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def wait(self, keys: list[str], *timeout) -> None:
        self._store.wait(keys, *timeout)


def leave_while_one_connects() -> int:
    """The ranks of a group that all leave as soon as they have it, of which rank 0 is slow to connect."""
    _meet("slow", dist.get_world_size(), slow=dist.get_rank() == 0)
    _meet("after", dist.get_world_size())
    return dist.get_world_size()


def group_is_gone() -> bool:
    """Whether nothing keeps a group that is destroyed after attention, whose threads would outlive the interpreter."""
    q, k, v, dout = inputs(8)
    out = ring_dilated_attention(q.requires_grad_(), k, v, DilatedPattern(*BRANCHES["longer"]))
    out.backward(dout)
    group = weakref.ref(dist.group.WORLD)
    _meet("next", dist.get_world_size())
    return group() is None and out.grad_fn is not None  # though its results live


def in_a_group_of_every_backend() -> bool:
    """Whether a group that was made without naming a backend computes the bits of one over gloo."""
    q, k, v, dout = inputs(8)
    call = partial(ring_dilated_attention, pattern=DilatedPattern(*BRANCHES["longer"]))
    expected = results(call, (q, k, v), dout)
    _meet("any backend", dist.get_world_size(), backend=None)
    found = results(call, (q, k, v), dout)
    _meet("gloo again", dist.get_world_size())
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, _gradient: torch.Tensor) -> None:
        return None


class WithGradient(torch.autograd.Function):
    """(x, gradient) -> a loss whose gradient in x is this one."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.gradient = gradient
        return x.new_zeros(())

    @staticmethod
    def backward(ctx, _one: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.gradient, None


def one_rank_has_no_gradient() -> bool:
    """Whether a rank whose result reaches no loss still gives the others theirs, as one whose gradient is 0."""
    first, call = dist.get_rank() == 0, partial(ring_dilated_attention, pattern=DilatedPattern(*BRANCHES["longer"]))
    found = []
    for leave in (NoGradient.apply, lambda out: out * 0.0):
        leaves = [x.requires_grad_() for x in inputs(8)[:3]]
        out = call(*leaves)
        found.append(torch.autograd.grad((leave(out) if first else out).sum(), leaves))
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def one_rank_differentiates_lse(transport: str) -> bool:
    """Whether a loss of one rank's lse has the right gradients on all ranks, beside losses of out on the others."""
    rank, pattern = dist.get_rank(), DilatedPattern(*BRANCHES["longer"])
    q, k, v, dout = (x.double() for x in inputs(8 * dist.get_world_size()))
    rows = slice(8 * rank, 8 * rank + 8)
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = oracle.attention(*whole, pattern)
    loss = WithGradient.apply(lse[:, :, :8], torch.ones_like(lse[:, :, :8])) + (out * dout)[:, 8:].sum()
    right = [x[:, rows] for x in torch.autograd.grad(loss, whole)]
    own = [x[:, rows].clone().requires_grad_() for x in (q, k, v)]
    out, lse = ring_dilated_attention(*own, pattern, transport=transport, return_lse=True)
    loss = (out * dout[:, rows]).sum() if rank else WithGradient.apply(lse, torch.ones_like(lse))
    found = torch.autograd.grad(loss, own)
    return all(torch.allclose(x, y, rtol=0.0, atol=1e-13) for x, y in zip(found, right, strict=True))


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def compare(
    branches: str | list[str], lengths: list[int], heads: int, transport: str, *, kv_heads: int | None = None,
    batch: int = 2, head_dim: int = 8, offsets: str = "head", mixing: str = "softmax", padding: str = "none",
    dtype: str = "float32", ordering: str = "none", padded: bool = False, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, backend: str = "auto", by_kernel: bool = False,
    with_dlse: bool = False, **planning,
) -> dict:  # fmt: skip
    """For output, lse and gradients: squared error of this rank's rows and of one process's, against float64.

    Several names of branches are a union. with_dlse: the gradients are of lse too.

    With by_kernel rows are copied and summed by the kernels of a GPU,
    interpreted where there is none.
    """
    start = sum(lengths[: dist.get_rank()])
    rows = slice(start, start + lengths[dist.get_rank()])
    shapes = [(batch, sum(lengths), n, head_dim) for n in (heads, kv_heads or heads, kv_heads or heads, heads)]
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    mask = (torch.rand(shapes[0][:2], generator=generator) < 0.3).to(device()) if padded else None
    q, k, v, dout = (x.to(getattr(torch, dtype)).to(device()) for x in drawn)
    rules = {"offsets": offsets, "mixing": mixing, "padding": padding}
    if isinstance(branches, str):
        pattern, on_one, on_ranks = (
            DilatedPattern(*BRANCHES[branches], **rules),
            dilated_attention,
            ring_dilated_attention,
        )
    else:
        pattern = Union(tuple(DilatedPattern(*BRANCHES[each], **rules) for each in branches))
        on_one, on_ranks = attend, ring_attend
    options = {"is_causal": is_causal, "dropout_p": dropout_p, "scale": scale}
    dlse = dout.double().sum(-1).transpose(1, 2) if with_dlse else None

    whole = partial(on_one, pattern=pattern, key_padding_mask=mask, **options)

    def on_one_process() -> tuple[list, list]:
        doubles = [x.double() for x in (q, k, v)], dout.double()
        exact = results(partial(whole, backend="reference"), *doubles, dlse)
        return exact, results(partial(whole, backend="eager" if dropout_p else "auto"), (q, k, v), dout, dlse)

    exact, one = by_the_first(on_one_process)
    spec = SPECS[ordering]
    order = spec.ordering(rows.stop - start) if spec and rows.stop > start else None
    own = {"key_padding_mask": None if mask is None else mask[:, rows], "kv_ordering": spec}
    own |= {"transport": transport, "backend": backend}
    call = partial(on_ranks, pattern=pattern, **own, **options, **planning)
    shards = [x[:, rows] for x in (q, k, v)]
    if order:
        shards[1:] = [order.apply(x, dim=1) for x in shards[1:]]
    with ExitStack() as stack:
        if transport == "auto":
            stack.enter_context(choosing_by_bytes())
        if by_kernel:
            stack.enter_context(by_kernels())
        if backend == "flex" and device().type == "cpu":
            stack.enter_context(_flex_on_the_cpu())
        mine = results(call, shards, dout[:, rows], dlse if dlse is None else dlse[:, :, rows])
    if order:
        mine[3:] = [order.undo(x, dim=1) for x in mine[3:]]
    return errors_of_rows(mine, one, exact, rows)


def by_the_first(make: Callable):
    """What the first rank makes, on all ranks where these share a processor's cores; on GPUs each makes it."""
    if dist.get_backend() != "gloo":
        return make()
    found = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return found[0]


def errors_of_rows(
    mine: list, one: list, exact: list, rows: slice | torch.Tensor, key_rows: torch.Tensor | None = None
) -> dict[str, tuple[float, float]]:
    """By name the squared error of this rank's rows, and that of one process's, against float64.

    key_rows: those of k and v, where they are others.
    """
    errors = {}
    for name, own, single, truth in zip(NAMES_ON_GRIDS, mine, one, exact, strict=False):
        if own is None:
            continue
        assert own.dtype == single.dtype, name
        part = (slice(None), slice(None), rows) if name == "lse" else (slice(None), rows)
        if key_rows is not None and name in ("dk", "dv"):
            part = (slice(None), key_rows)
        if name in OF_ALL_RANKS:  # a sum over the ranks, of whose error each tells its share
            total = own.double().to(device())
            dist.all_reduce(total)
            share = dist.get_world_size() ** -0.5
            own, single, truth = (x.cpu().double() * share for x in (total, single, truth))
            part = (slice(None),)
        assert own.shape == truth[part].shape, name
        errors[name] = squared_error(own, truth[part]), squared_error(single[part], truth[part])
    return errors


@contextmanager
def by_kernels():
    """Rows are copied, merged and summed by the kernels of a GPU, interpreted where there is none."""
    with ExitStack() as stack:
        for module in (merge, local, copies):
            stack.enter_context(patch.object(module, "kernel_serves", lambda x: True))
        yield


@contextmanager
def choosing_by_bytes():
    """ "auto" goes by bytes: by time, as few rows as tests have would always be gathered, by one transport."""

    def most_carried(_sizes, shares) -> int:
        return max(map(sum, zip(*(share.carried[0] for share in shares), strict=True)))

    with patch.object(plan, "seconds", most_carried):
        yield


@contextmanager
def _flex_on_the_cpu():
    """The oracle, which is differentiable, in the place of FlexAttention, which has no backward on the CPU."""

    def attend(given: Tensors, call: Request):
        q, k, v, *_ = given
        out, lse = oracle.attention(q, k, v, call.pattern, is_causal=call.is_causal, scale=call.scale)
        return out.to(q.dtype), lse.to(WORKING_DTYPE[q.dtype])

    serving = replace(BACKENDS["flex"], limits=lambda q, call: "", here=lambda q, call: "")
    with patch.object(flex, "attend", attend), patch.dict(BACKENDS, {"flex": serving}):
        yield


def squared_error(x: torch.Tensor, truth: torch.Tensor) -> float:
    assert torch.equal(x.isinf(), truth.isinf())
    assert not x.isnan().any()
    return (x.double() - truth)[truth.isfinite()].square().sum().item()


def results(attention, tensors, dout: torch.Tensor, dlse: torch.Tensor | None = None) -> list[torch.Tensor]:
    """out, lse, dq, dk and dv."""
    torch.manual_seed(5)
    leaves = [x.detach().requires_grad_() for x in tensors]
    out, lse = attention(*leaves, return_lse=True)
    if dlse is None:  # out of a call for it alone, whose ranks send no gradients of lse
        torch.manual_seed(5)
        out = attention(*leaves)
    # Not grad(out, leaves, dout), for which torch imports sympy: 0.6 s of every rank.
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss_of(out, lse, dout, dlse), leaves)]


def loss_of(out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None) -> torch.Tensor:
    """A loss whose gradients are dout and dlse. dlse is NaN in rows without keys, where it is ignored."""
    loss = (out * dout).sum()
    if dlse is None:
        return loss
    return loss + WithGradient.apply(lse, dlse.to(lse).masked_fill(lse == -torch.inf, torch.nan))


def inputs(length: int, heads: int = 4, head_dim: int = 8, seed: int = 0, dtype=torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(2, length, heads, head_dim, generator=generator) for _ in range(4)]
    return [x.to(dtype).to(device()) for x in drawn]


def repeats(transport: str, lengths: list[int]) -> bool:
    q, k, v, dout = inputs(lengths[dist.get_rank()])
    call = partial(ring_dilated_attention, pattern=DilatedPattern(*BRANCHES["longer"]), transport=transport)
    first, second = (results(call, (q, k, v), dout) for _ in range(2))
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def one_rank_is_plain(backend: str) -> bool:
    """Whether a group of one rank computes the bits of the plain function, dropout and ordering included."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]  # all ranks take part in each
    group = groups[dist.get_rank()]
    q, k, v, dout = inputs(24)
    pattern, spec = DilatedPattern(*BRANCHES["uneven"]), SPECS["random"]
    options = {"pattern": pattern, "dropout_p": 0.2, "is_causal": True, "backend": backend}
    own = {"group": group, "weights": [3], "memory_limit": 2**30, "kv_ordering": spec}
    ring = results(partial(ring_dilated_attention, **own, **options), (q, k, v), dout)
    plain = results(partial(dilated_attention, kv_ordering=spec.ordering(24), **options), (q, k, v), dout)
    return all(torch.equal(a, b) for a, b in zip(ring, plain, strict=True))


def in_parts_of_the_world(size: int) -> float:
    """Largest error where a 2-D mesh makes several rings of `size` ranks, each with a sequence of its own."""
    mesh = dist.init_device_mesh(device().type, (dist.get_world_size() // size, size), mesh_dim_names=("data", "seq"))
    group = mesh["seq"]
    q, k, v, dout = inputs(26, seed=mesh.get_local_rank("data"))
    call = partial(dilated_attention, pattern=DilatedPattern(*BRANCHES["longer"]), is_causal=True)
    whole = results(call, (q, k, v), dout)
    own = [shard(x, group=group) for x in (q, k, v, dout)]
    ring = partial(ring_dilated_attention, pattern=call.keywords["pattern"], is_causal=True, group=group)
    mine = results(ring, own[:3], own[3])
    dims = (1, 2, 1, 1, 1)
    together = [gather(x, dim, group) for x, dim in zip(mine, dims, strict=True)]
    return max((a - b).abs().nan_to_num(0.0).max().item() for a, b in zip(together, whole, strict=True))


class Layer(torch.nn.Module):
    """A module with projections around the ring."""

    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(8, 8)
        self.attention = RingDilatedAttention(DilatedPattern(*BRANCHES["aligned"]), transport="ring", dropout=0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(self.project(x), x, torch.sin(x), is_causal=True).cos()


def through(how: str) -> float:
    """Largest difference that compiling a module or checkpointing it makes to the output and the gradient."""
    torch.manual_seed(0)
    layer = Layer().to(device())
    x = inputs(16)[0].requires_grad_()
    other = (
        torch.compile(layer, backend="aot_eager")
        if how == "compile"
        else partial(checkpoint, layer, use_reentrant=False)
    )

    def run(module) -> list[torch.Tensor]:
        torch.manual_seed(1)
        out = module(x)
        torch.manual_seed(2)  # a forward that is repeated in the backward drops what it dropped
        return [out, *torch.autograd.grad(out.sum(), [x, *layer.parameters()])]

    traced, enter = [], exchange.Beside.__enter__

    def note(self) -> None:
        traced.append(torch.compiler.is_compiling())
        enter(self)

    with patch.object(exchange.Beside, "__enter__", note):
        plain, changed = run(layer), run(other)
    assert set(traced) == {False}, "torch.compile cannot trace the streams that the ring has on a GPU"
    return max((a - b).abs().max().item() for a, b in zip(plain, changed, strict=True))


@contextmanager
def noting(places: list[tuple], is_noted=lambda: True):
    """Notes calls of functions, given as (place, name, event), in the list that it gives."""
    events = []

    def noted(event: str, function):
        return lambda *args, **options: (events.append(event) if is_noted() else None, function(*args, **options))[1]

    with ExitStack() as stack:
        for place, name, event in places:
            stack.enter_context(patch.object(place, name, noted(event, getattr(place, name))))
        yield events


def outside_the_side_stream() -> list[list[str]]:
    """What a forward, and a backward, does on the stream that it is called on, apart from what runs beside that."""
    *leaves, dout = inputs(16)
    leaves = [x.requires_grad_() for x in leaves]
    beside = []
    patched = [(operators, "attention"), (operators, "attention_backward"), (local, "merge_rows"), (local, "add_rows")]
    with (
        noting([(place, name, name) for place, name in patched], lambda: not beside) as events,
        patch.object(exchange.Beside, "__enter__", lambda self: beside.append(1)),
        patch.object(exchange.Beside, "__exit__", lambda self, *error: beside.clear()),
    ):
        out = ring_dilated_attention(*leaves, DilatedPattern((8, 32), (1, 2)))
        forward = events[:]
        events.clear()
        torch.autograd.grad(out, leaves, dout)
    return [forward, events]


def nothing_to_compute() -> list[list]:
    """Sizes of out and lse, and the sum of the gradients, where no rank has rows, and where there is no sequence."""
    found = []
    for batch, rows in ((2, 0), (0, 8)):
        x = torch.ones(batch, rows, 2, 4, device=device(), requires_grad=True)
        out, lse = ring_dilated_attention(x, x, x, DilatedPattern((4, 16), (1, 2)), return_lse=True)
        (grad,) = torch.autograd.grad(out.sum(), x)
        found.append([list(out.shape), list(lse.shape), grad.sum().item()])
    return found


def said_by(call, *args, **options) -> str:
    """The error of a call."""
    try:
        call(*args, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nobody complained"


def parts_asked_about(transport: str) -> dict[str, bool]:
    """Of a backend whose refusal hangs on keys, asked for by name: what is true by promise."""
    rows = (20, 28)[dist.get_rank()]
    pattern, leaves = DilatedPattern((8, 24, 64), (1, 2, 4)), [x[:, :rows] for x in inputs(28)[:3]]
    call = partial(ring_dilated_attention, *leaves, pattern, transport=transport, is_causal=True, backend="eager")
    asked, run, forward = set(), set(), operators.attention

    def part(q, k, request) -> tuple:
        return tuple(q.shape), tuple(k.shape), str(request.pattern), request.is_causal

    def noted(given, request, backend):
        run.add(part(given.q, given.k, request))
        return forward(given, request, backend)

    def in_place(of_keys):
        spread._refusal_of_parts.cache_clear()
        return patch.dict(BACKENDS, eager=replace(BACKENDS["eager"], of_keys=of_keys))

    def asking(q, k, request) -> str:
        asked.add(part(q, k, request))
        return ""

    with in_place(asking), patch.object(operators, "attention", noted):
        call()
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, run)
    fewest = min(shape[1] for shape, *_ in asked)
    with in_place(lambda q, k, request: "so few queries" if q.shape[1] == fewest else ""):
        said = said_by(call)
    return {
        "it is asked about what the ranks compute, and about nothing else": asked == set.union(*of_ranks),
        "all ranks hear what a part is refused for": "backend='eager' cannot serve a part of rank" in said,
        "and why": said.endswith(": so few queries"),
    }


def second_derivative_raises() -> bool:
    q, k, v, _ = inputs(8)
    q.requires_grad_()
    out = ring_dilated_attention(q, k, v, DilatedPattern((16,), (2,)))
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    return "differentiated once" in said_by(torch.autograd.grad, dq.sum(), q)


# Of a grid that is spread over the ranks.

NEAR = Neighbourhood((8, 6), (3, 5))
EXCHANGE = "send", "compute"


def shards_of(shape: tuple, parts: list | None = None, cuts: list | None = None, order: str = "", lengths: list = ()):
    if parts:
        return Rectangles(tuple(parts), cuts and tuple(cut and tuple(cut) for cut in cuts))
    return Runs(ORDERS[order](shape), tuple(lengths))


def compare_on_grid(
    rules: str, heads: str, shards: dict, *, more: str = "nothing", dtype: str = "float32", backend: str = "auto",
    head_dim: int = 8, by_kernel: bool = False, with_dlse: bool = False,
) -> dict:  # fmt: skip
    """For output, lse and gradients: squared error of this rank's rows, and of one process's, against float64.

    with_dlse: the gradients are of lse too.
    With by_kernel rows are copied and summed by the kernels of a GPU, interpreted where there is none.
    """
    dtype, rules = getattr(torch, dtype), LARGE_RULES.get(rules, rules)
    expected = by_the_first(partial(expected_on_grid, rules, heads, more, dtype, head_dim, None, with_dlse))
    near, given, dout, masks, *truth = expected
    dlse = drawn_dlse(truth[1]) if with_dlse else None
    truth = [*truth[:2], *truth[2]]
    shape, is_union = shape_of(rules), isinstance(near, Union)
    spread = shards_of(shape, **shards)
    rows = spread.cells(shape, dist.get_rank())
    scale = SCALE * head_dim**-0.5

    def run(call, own) -> list[torch.Tensor]:
        leaves = [(x[:, own] if n < 3 else x).to(device()).requires_grad_() for n, x in enumerate(given)]
        options = {"scale": scale, "backend": backend, "return_lse": True}
        if masks[0] is not None:
            options["key_padding_mask"] = masks[0][:, own].to(device())
        if "extra" in more:
            options |= {"extra_k": leaves[3], "extra_v": leaves[4]}
        if "bias" in more:
            options["bias"] = leaves[5]
        if masks[1] is not None:
            options["extra_padding_mask"] = masks[1].to(device())
        out, lse = call(*leaves[:3], near, **options)
        loss = loss_of(out, lse, dout[:, own].to(device()), dlse if dlse is None else dlse[:, :, own])
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)  # there may be no extra keys
        return [x if x is None else x.cpu() for x in (out.detach(), lse.detach(), *grads)]

    one = by_the_first(partial(run, attend if is_union else neighbourhood_attention, slice(None)))
    with by_kernels() if by_kernel else nullcontext():
        mine = run(partial(ring_attend if is_union else ring_neighbourhood_attention, shards=spread), rows)
    return errors_of_rows(mine, one, truth, rows)


def compare_joint(
    rules: str, shards: dict, *, heads: list = (2, 4, 2), dtype: str = "float64", backend: str = "auto",
    padded: bool = True,
) -> dict:  # fmt: skip
    """`compare_on_grid` with extra queries beside the grid."""
    dtype, near, shape = getattr(torch, dtype), neighbourhoods(rules, "one"), shape_of(rules)
    spread, (rank, ranks) = shards_of(shape, **shards), (dist.get_rank(), dist.get_world_size())
    rows, cells = spread.cells(shape, rank), prod(shape)
    given, other = (drawn_joint(cells, heads, dtype=dtype, seed=n) for n in (0, 1))
    generator = torch.Generator().manual_seed(2)
    hidden, extra_hidden = torch.rand(heads[0], cells, generator=generator) < 0.4, torch.zeros(heads[0], 3) > 0
    extra_hidden[:, 1] = True
    masks = {}
    if padded:
        masks = {"key_padding_mask": hidden.to(device()), "extra_padding_mask": extra_hidden.to(device())}
    douts, share = (other["q"], other["extra_q"]), (rank + 1) / (ranks * (ranks + 1) / 2)

    def run(call, tensors, own, of_extra, **options):
        leaves = {}
        for name, x in tensors.items():
            leaves[name] = (x if name.startswith("extra") else x[:, own]).to(device()).requires_grad_()
        out, lse, extra_out, extra_lse = call(**leaves, **options)
        finite = torch.where(extra_lse == -torch.inf, 0.0, extra_lse).sum()
        loss = (out * douts[0][:, own].to(out)).sum() + of_extra * ((extra_out * douts[1].to(out)).sum() + finite)
        grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        return {"out": out, "lse": lse.transpose(1, 2), "extra_out": extra_out, "extra_lse": extra_lse} | grads

    whole, options = slice(None), {"backend": backend, "return_lse": True}
    exact_tensors = {name: x.double() for name, x in given.items()}
    exact = run(partial(oracle.joint_attention, pattern=near), exact_tensors, whole, 1.0, **masks)
    one = run(partial(neighbourhood_attention, neighbourhood=near), given, whole, 1.0, **options, **masks)
    if padded:
        masks["key_padding_mask"] = masks["key_padding_mask"][:, rows]
    call = partial(ring_neighbourhood_attention, neighbourhood=near, shards=spread)
    errors = {}
    for name, x in run(call, given, rows, share, **options, **masks).items():
        x, truth, single = (y.detach().double().to(device()) for y in (x, exact[name], one[name]))
        if name in ("extra_q", "extra_k", "extra_v"):
            dist.all_reduce(x)
        if not name.startswith("extra"):
            truth, single = truth[:, rows], single[:, rows]
        assert x.shape == truth.shape, name
        errors[name] = squared_error(x, truth), squared_error(single, truth)
    return errors


def grid_inputs(rows: int | None = None, **options) -> list[torch.Tensor]:
    rows = 48 // dist.get_world_size() if rows is None else rows
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randn(1, rows, 2, 4, generator=generator).to(device()).requires_grad_(**options) for _ in range(3)]


def disagree_on_grid(**asked) -> list[str]:
    """What a rank says where the last one asks for something else."""
    q, k, v = grid_inputs(requires_grad=False)
    options = {}
    if dist.get_rank() == dist.get_world_size() - 1:
        made = {
            "neighbourhood": lambda side: Neighbourhood((8, 6), side),
            "shards": lambda parts: Rectangles(tuple(parts)),
            "key_padding_mask": lambda _: torch.zeros(q.shape[:2], dtype=torch.bool, device=device()),
            "requires_grad": lambda _: q.requires_grad_(),
            "extra_q": lambda _: torch.zeros(1, 3, 2, 4, device=device()),
            "bias": lambda _: torch.zeros(2, 5, 9, device=device()),
        }
        options = {name: made[name](value) if name in made else value for name, value in asked.items()}
        options.pop("requires_grad", None)
    near = options.pop("neighbourhood", NEAR)
    said = said_by(ring_neighbourhood_attention, q, k, v, near, **options)
    ring_neighbourhood_attention(*grid_inputs(), NEAR)  # and all agree again
    return [said]


def promises_on_grid() -> dict:
    """Of a call over all ranks, which share a grid in strips: what is true by promise."""
    found, rank = {}, dist.get_rank()
    q, k, v = grid_inputs()
    module = RingNeighbourhoodAttention(NEAR)
    out, lse = module(q, k, v, return_lse=True)
    again = ring_neighbourhood_attention(q, k, v, NEAR, validate=False)
    found["the module, without validation, gives the same bits"] = torch.equal(out, again) and lse.requires_grad
    grads = [torch.autograd.grad(x.sum(), (q, k, v), retain_graph=True) for x in (out, again)]
    found["gradients are the same bits again"] = all(map(torch.equal, *grads))
    leave = NoGradient.apply if rank == 0 else torch.clone
    mute = [torch.autograd.grad(x.sum(), (q, k, v)) for x in (leave(out), again * (rank > 0))]
    found["a rank that reaches no loss is as one of gradient 0"] = all(map(torch.equal, *mute))
    (dq,) = torch.autograd.grad(module(q, k, v).sum(), q, create_graph=True)
    found["no second derivative"] = "differentiated once" in said_by(dq.sum().backward)
    order = Ordering.from_curve("snake", 48, grid=(8, 6))
    runs = Runs(order, shard_lengths_for(48, dist.get_world_size()))
    x = grid_inputs(len(order.perm) // 2)
    both = [ring_neighbourhood_attention(*x, NEAR, **how) for how in ({"ordering": order}, {"shards": runs})]
    found["an ordering is split as a sequence is"] = torch.equal(*both)
    wrapped = torch.compile(lambda *x: module(*x).cos(), backend="aot_eager")
    found["compiling changes nothing"] = torch.equal(wrapped(q, k, v), module(q, k, v).cos())
    nothing = ring_neighbourhood_attention(*(x[:0] for x in (q, k, v)), NEAR)
    found["a batch of none gives none"] = list(nothing.shape) == [0, 24, 2, 4]
    places = [(operators, "attention", "compute"), (Agreement, "lengths", "agree"), (halo, "exchange", "send")]
    with noting(places) as events:
        module(q, k, v)
    found["the interior begins before all agree"] = events == ["compute", "agree", "send", "compute"]
    backends = backends_for(HeadNeighbourhoods)
    eager = replace(backends["eager"], limits=lambda q, asked: "no border" if rank and asked.part.in_float else "")
    with patch.dict(backends, eager=eager):
        said = said_by(ring_neighbourhood_attention, q, k, v, NEAR, backend="eager")
    found["all hear what one rank's part is refused for"] = "no border" in said
    groups = [dist.new_group([each]) for each in range(dist.get_world_size())]
    alone = grid_inputs(48)
    one = ring_neighbourhood_attention(*alone, NEAR, ordering=order, group=groups[rank])
    found["one rank is the plain function"] = torch.equal(one, neighbourhood_attention(*alone, NEAR, ordering=order))
    return found


def promises_of_a_union() -> dict:
    """Of `ring_attend` with two neighbourhoods: what is true by promise."""
    found, rank = {}, dist.get_rank()
    both = Union((NEAR, Neighbourhood((8, 6), 3, dilation=(1, 2))))
    q, k, v = grid_inputs()
    places = [(operators, "attention", "compute"), (Agreement, "lengths", "agree"), (halo, "exchange", "send")]
    with noting(places) as events:
        out = ring_attend(q, k, v, both)
    found["one agreement, as the first begins"] = events == ["compute", "agree", *EXCHANGE, "compute", *EXCHANGE]
    again = ring_attend(q, k, v, both, validate=False)
    found["without validation it gives the same bits"] = torch.equal(out, again)
    grads = [torch.autograd.grad(x.sum(), (q, k, v), retain_graph=True) for x in (out, again)]
    found["gradients are the same bits again"] = all(map(torch.equal, *grads))
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    found["no second derivative"] = "ring_attend can be differentiated once" in said_by(dq.sum().backward)
    one = ring_attend(q, k, v, Union((NEAR,)))
    found["of one it is this one"] = torch.equal(one, ring_neighbourhood_attention(q, k, v, NEAR))
    nothing = ring_attend(*(x[:0] for x in (q, k, v)), both)
    found["a batch of none gives none"] = list(nothing.shape) == [0, 24, 2, 4]
    said = said_by(ring_attend, q, k, v, both if rank else NEAR)
    found["who asks for another is named"] = "on rank 0" in said and "Union(" in said
    groups, alone = [dist.new_group([each]) for each in range(dist.get_world_size())], grid_inputs(48)
    whole = ring_attend(*alone, both, group=groups[rank])
    found["one rank is attend"] = torch.equal(whole, attend(*alone, both))
    return found


# Of points that are spread over the ranks.


def rows_of(
    whole: PointNeighbourhood, lengths: list[int], order: str = "curve", *, of_keys: bool = False
) -> torch.Tensor:
    """This rank's run of some points, or of their keys, in the order of the curve or at random."""
    cells = whole.key_coordinates, whole.key_batch
    places = point_order(*(cells if of_keys else (whole.coordinates, whole.batch)))
    if order == "random":
        places = torch.randperm(len(places), generator=torch.Generator().manual_seed(1))
    return places.split(lengths)[dist.get_rank()]


def shard_of_points(whole: PointNeighbourhood, rows: torch.Tensor, key_rows: torch.Tensor | None = None) -> PointShard:
    """This rank's rows of some points. key_rows: of their keys, where these are others."""
    options = {"dilation": whole.dilation}
    if key_rows is not None:
        options["keys"] = whole.key_coordinates[key_rows].to(device())
        options["key_batch"] = None if whole.key_batch is None else whole.key_batch[key_rows].to(device())
    batch = None if whole.batch is None else whole.batch[rows].to(device())
    return PointShard(whole.coordinates[rows].to(device()), whole.window, batch, **options)


def compare_on_points(
    kind: str, lengths: list[int], *, heads: list = (2, 2), order: str = "curve", more: str = "nothing",
    dtype: str = "float64", backend: str = "auto", by_kernel: bool = False, with_dlse: bool = False,
    head_dim: int = 8, key_lengths: list[int] | None = None,
) -> dict:  # fmt: skip
    """For output, lse and gradients: squared error of this rank's rows, and of one process's, against float64.

    key_lengths: keys of each rank, where these are others.

    With by_kernel rows are copied and summed by the kernels of a GPU, interpreted where there is none.
    """
    dtype, whole, extra = getattr(torch, dtype), points_of(kind), 3 if "extra" in more else 0
    rows = rows_of(whole, lengths, order)
    key_rows = None if key_lengths is None else rows_of(whole, key_lengths, order, of_keys=True)
    own_keys = rows if key_rows is None else key_rows
    *given, dout = drawn(whole.lists.queries, *heads, head_dim, batch=2, keys=whole.lists.keys, dtype=dtype)
    given += extra_of(extra, heads[1], head_dim, dtype)
    masks = masks_of(whole, extra) if "padding" in more else {}
    dlse = dout.double().sum(-1).transpose(1, 2) if with_dlse else None

    def run(call, tensors, own, own_keys, pattern, **masks) -> list[torch.Tensor]:
        parts = [own, own_keys, own_keys, *[slice(None)] * extra]
        leaves = [x[:, part].detach().requires_grad_() for x, part in zip(tensors, parts, strict=False)]
        out, lse = call(*leaves[:3], pattern, scale=0.4, **oracle.named(leaves[3:]), **masks)
        own_dlse = dlse if dlse is None else dlse[:, :, own].to(out.device)
        loss = loss_of(out, lse, dout[:, own].to(out), own_dlse)
        return [x.cpu() for x in (out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves))]

    def on_one_process() -> tuple[list, list]:
        every = slice(None), slice(None)
        exact = run(oracle.attention, [x.double() for x in given], *every, whole, **masks)
        there = {name: mask.to(device()) for name, mask in masks.items()}
        one = partial(attend, backend=backend, return_lse=True)
        return exact, run(one, [x.to(device()) for x in given], *every, whole.to(device()), **there)

    exact, one = by_the_first(on_one_process)
    points = shard_of_points(whole, rows, key_rows)
    reached = oracle.points_seen(whole)[rows].any(0)
    reached[own_keys] = False
    assert points.travelling.by_ranks
    assert sum(points.travelling.received) == reached.sum(), "a row would travel that no query sees, or one would stay"
    if masks:
        masks["key_padding_mask"] = masks["key_padding_mask"][:, own_keys]
        masks = {name: mask.to(device()) for name, mask in masks.items()}
    call = partial(ring_attend, backend=backend, return_lse=True)
    with by_kernels() if by_kernel else nullcontext():
        mine = run(call, [x.to(device()) for x in given], rows, own_keys, points, **masks)
    return errors_of_rows(mine, one, exact, rows, key_rows)


def joint_on_points(kind: str, lengths: list[int], key_lengths: list[int] | None = None) -> dict[str, float]:
    """The largest differences of a call with extra queries from that over all points on one process."""
    whole, share = points_of(kind), (dist.get_rank() + 1) / (dist.get_world_size() * (dist.get_world_size() + 1) / 2)
    rows = rows_of(whole, lengths)
    key_rows = None if key_lengths is None else rows_of(whole, key_lengths, of_keys=True)
    own_keys = rows if key_rows is None else key_rows
    sizes = {"batch": 2, "keys": whole.lists.keys, "dtype": torch.float64}
    given = [*drawn(whole.lists.queries, 2, 1, 8, **sizes)[:3], *extra_of(3, 1, 8, torch.float64)]
    given.append(drawn(5, 2, 1, 8, batch=2, dtype=torch.float64)[0])

    def run(call, own, own_keys, of_extra: float, pattern) -> dict[str, torch.Tensor]:
        parts = [own, own_keys, own_keys, *[slice(None)] * 3]
        leaves = [x[:, part].to(device()).requires_grad_() for x, part in zip(given, parts, strict=True)]
        named = dict(zip(("extra_k", "extra_v", "extra_q"), leaves[3:], strict=True))
        out, extra_out = call(*leaves[:3], pattern, **named)
        grads = torch.autograd.grad(out.sin().sum() + of_extra * extra_out.cos().sum(), leaves)
        return {"out": out, "extra_out": extra_out} | dict(zip(("q", "k", "v", *named), grads, strict=True))

    right = run(attend, slice(None), slice(None), 1.0, whole.to(device()))
    found = run(ring_attend, rows, own_keys, share, shard_of_points(whole, rows, key_rows))
    differences = {}
    for name, x in found.items():
        x = x.detach()
        if name in ("extra_k", "extra_v", "extra_q"):
            dist.all_reduce(x)
        part = own_keys if name in ("k", "v") else rows
        truth = right[name] if name.startswith("extra") else right[name][:, part.to(device())]
        differences[name] = (x - truth).abs().max().item() if x.numel() else 0.0
    return differences


def promises_on_points() -> dict:
    """Of points that two ranks share: what is true by promise."""
    found, rank, whole = {}, dist.get_rank(), points_of("clouds")
    rows = rows_of(whole, [50, 40], "random")
    points = shard_of_points(whole, rows)
    x = [each[:, rows].to(device()).requires_grad_() for each in drawn(90, 2, 1, 8)[:3]]
    out = ring_attend(*x, points)
    again = ring_neighbourhood_attention(*x, points, validate=False)
    found["the other door, without validation, gives the same bits"] = torch.equal(out, again)
    grads = [torch.autograd.grad(each.sum(), x, retain_graph=True) for each in (out, again)]
    found["gradients are the same bits again"] = all(map(torch.equal, *grads))
    leave = NoGradient.apply if rank == 0 else torch.clone
    mute = [torch.autograd.grad(each.sum(), x) for each in (leave(out), again * (rank > 0))]
    found["a rank that reaches no loss is as one of gradient 0"] = all(map(torch.equal, *mute))
    (dq,) = torch.autograd.grad(ring_attend(*x, points).sum(), x[0], create_graph=True)
    found["no second derivative"] = "ring_attend can be differentiated once" in said_by(dq.sum().backward)
    near = points_of("odd")
    own = rows_of(near, [50, 40])
    places = [(operators, "attention", "compute"), (Agreement, "lengths", "agree"), (halo, "exchange", "send")]
    runs = shard_of_points(near, own)
    with noting(places) as events:
        ring_attend(*(each.detach()[:, : len(own)] for each in x), runs)
    found["the interior begins before all agree"] = events == ["compute", "agree", "send", "compute"]
    found["the border is what sees others"] = 0 < runs.counts[rank].border_queries < len(own)
    other = PointShard(points.coordinates, 5, points.batch)
    said = said_by(ring_attend, *x, points if rank else other)
    found["who has other points is named"] = "points must be the same on all ranks" in said and "window=(5, 5)" in said
    coordinates = points.coordinates if rank else points.coordinates.double()
    said = said_by(PointShard, coordinates, 3, points.batch)
    found["all hear of floats on one rank"] = "must be int32 or int64, got torch.float64: floor them" in said
    said = said_by(PointShard, points.coordinates, 3 + 2 * rank, points.batch)
    found["all hear of another window"] = "window must be the same on all ranks" in said
    said = said_by(PointShard, torch.tensor([[4, 4], [5, 5 + rank]], device=device()), 3)
    twice = "coordinates of all ranks must be distinct cells of a cloud, got [4, 4] twice: were these several clouds?"
    found["all hear of a cell on two ranks"] = f"{twice} pass batch=" in said
    said = said_by(PointShard, points.coordinates, 3, keys=None if rank else points.coordinates)
    found["all hear of keys on one rank"] = "keys must be the same on all ranks, got a tensor on rank 0" in said
    twice = torch.tensor([[4, 4], [5, 5 + rank]], device=device())
    said = said_by(PointShard, twice, 3, keys=twice)
    found["all hear of a key on two ranks"] = "keys of all ranks must be distinct cells of a cloud, got [4, 4]" in said
    apart = PointShard(twice, 3, keys=twice[rank:])
    said = said_by(ring_attend, *(torch.zeros(1, 2, 1, 8, device=device()) for _ in "qkv"), apart)
    found["keys of another number are named"] = "PointShard(2 + 2 points, window=(3, 3), keys=2 + 1" in said
    said = said_by(PointShard, torch.tensor([[2**30 * rank]], device=device()), 3)
    found["all hear of cells too far apart"] = "must span fewer than" in said
    said = said_by(PointShard, twice, 3, keys=twice + 2**30)
    found["keys far from queries are named"] = "coordinates and keys together must span fewer than" in said
    groups = [dist.new_group([each]) for each in range(dist.get_world_size())]
    said = said_by(ring_attend, *x, points, group=groups[rank])
    found["a group of other ranks is refused"] = "group must be the 2 ranks of PointShard(50 + 40 points" in said
    alone = PointShard(points.coordinates, 3, points.batch, group=groups[rank])
    plain = PointNeighbourhood(points.coordinates, 3, points.batch)
    one = ring_attend(*x, alone, group=groups[rank])
    found["one rank is attend"] = torch.equal(one, attend(*x, plain)) and alone.turned is alone.lists
    empty = PointShard(torch.zeros(0, 2, dtype=torch.int32, device=device()), 3)
    none = [each[:, :0] for each in x]
    found["no points give none"] = ring_attend(*none, empty).shape == none[0].shape
    refused = {"shards": Rectangles((2, 1)), "ordering": Ordering.linear(90), "transport": "ring", "is_causal": True}
    for name, value in refused.items():
        said = said_by(ring_attend, *x, points, **{name: value})
        found[f"{name} is refused by name"] = f"{name} must be left out" in said
    said = said_by(attend, *x, points)
    found["attend names the ring"] = "those of other ranks, which `ring_attend` brings here, got shape" in said
    said = said_by(ring_attend, *x, plain)
    found["points without ranks are refused"] = "must be a PointShard of each rank's cells" in said
    return found


def random_halos(seeds: int) -> list[int]:
    """Seeds of random points whose pairs on this rank are not those of the whole, or of which a row travels in vain."""
    wrong, rank = [], dist.get_rank()
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)

        def between(least: int, most: int, size: tuple = (), generator=generator):
            return torch.randint(least, most + 1, size, generator=generator)

        axes = int(between(1, 3))
        side = (100, 15, 7)[axes - 1]
        cells = torch.cartesian_prod(*[torch.arange(side)] * axes).view(-1, axes) - int(between(0, 200))
        cells = cells[torch.randperm(len(cells), generator=generator)[: int(between(1, 150))]]
        batch = between(-2, 2, (len(cells),)) * 2**40 if seed % 2 else None
        window, dilation = tuple(between(1, 6, (axes,)).tolist()), tuple(between(1, 3, (axes,)).tolist())
        options = {"dilation": dilation}
        if seed % 4 == 3:  # keys of their own; queries coincide
            options["keys"] = cells[: int(between(0, len(cells)))]
            options["key_batch"] = None if batch is None else batch[: len(options["keys"])]
            cells = cells[torch.randint(len(cells), (len(cells),), generator=generator)]
        whole = PointNeighbourhood(cells.int() if seed % 3 else cells, window, batch, **options)
        order = "random" if seed % 5 == 0 else "curve"

        def cut(count: int, between=between) -> list[int]:
            ends = between(0, count, (dist.get_world_size() - 1,)).sort().values.tolist()
            return [stop - start for start, stop in pairwise([0, *ends, count])]

        rows = rows_of(whole, cut(len(cells)), order)
        key_rows = rows_of(whole, cut(len(options["keys"])), order, of_keys=True) if "keys" in options else None
        own_keys = rows if key_rows is None else key_rows
        points = shard_of_points(whole, rows, key_rows)
        seen = oracle.points_seen(whole)[rows]
        reached = seen.any(0)
        reached[own_keys] = False
        if (
            points.pairs != seen.sum()
            or sum(points.travelling.received) != reached.sum()
            or points.lengths[rank] != len(rows)
            or points.key_lengths[rank] != len(own_keys)
        ):
            wrong.append(seed)
    return wrong


def page_of_points() -> list:
    """What the page's code for a large cloud returns on this rank, and what rank 0 prints."""
    page = (Path(__file__).parents[1] / "docs/several_gpus.md").read_text()
    ((_, code),) = re.findall(r"```python\n# (large_cloud).py\n(.*?)```", page, re.S)
    exec(code, functions := {})
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    path = Path(folder[0], "cells.pt")
    if dist.get_rank() == 0:
        functions["store"](torch.cartesian_prod(*[torch.arange(6)] * 3), path)
    dist.barrier()
    with redirect_stdout(io.StringIO()) as printed:
        shape = functions["attend_in_cloud"]({"path": path})
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return [shape, printed.getvalue()]


def a_row_is_dropped() -> float:
    """The error of the output where a halo lacks one row, which a query sees."""
    whole = points_of("odd")
    rows = rows_of(whole, [50, 40])
    seen = points_module._seen

    def without_one(points, candidates):
        is_seen = seen(points, candidates)
        is_seen[is_seen.nonzero()[0]] = False
        return is_seen

    with patch.object(points_module, "_seen", without_one):
        points = shard_of_points(whole, rows)
    q, k, v, _ = drawn(90, 2, 2, 8, dtype=torch.float64)
    right = attend(q, k, v, whole)[:, rows]
    out = ring_attend(*(x[:, rows].to(device()) for x in (q, k, v)), points).cpu()
    return (out - right).abs().max().item()


# Ranks as threads of one process: what the ring asks of `torch.distributed` while rows travel, and nothing else.


@dataclass(frozen=True)
class Group:
    """The process group as one of the ranks sees it."""

    own: int
    ranks: int

    def rank(self) -> int:
        return self.own

    def size(self) -> int:
        return self.ranks


class _Box:
    """Rows from one rank to another: what is sent as the n-th is what was asked for as the n-th."""

    def __init__(self):
        self._sent, self._asked, self._rows = count(), count(), defaultdict(Future)

    def send(self, rows: torch.Tensor) -> None:
        self._rows[next(self._sent)].set_result(rows.clone())

    def receive(self, into: torch.Tensor) -> SimpleNamespace:
        from own_processes import PATIENCE  # ranks that are processes need not load it

        rows = self._rows[next(self._asked)]
        return SimpleNamespace(wait=lambda: into.copy_(rows.result(PATIENCE)))


class _Post:
    """What of `torch.distributed` the exchange calls."""

    isend, irecv = staticmethod(_Box.send), staticmethod(_Box.receive)

    def __init__(self, ranks: int):
        pairs = list(product(range(ranks), repeat=2))
        self._collective, self._single = ({pair: _Box() for pair in pairs} for _ in range(2))

    def all_to_all_single(self, arrived, rows, received, sent, *, group, async_op):
        for rank, some in enumerate(rows.split(sent)):
            self._collective[group.own, rank].send(some)
        works = [self._collective[rank, group.own].receive(x) for rank, x in enumerate(arrived.split(received))]
        return SimpleNamespace(wait=lambda: [work.wait() for work in works])

    def P2POp(self, operation, tensor, *, group, group_peer):  # as torch names it
        between = (group.own, group_peer) if operation is _Box.send else (group_peer, group.own)
        return partial(operation, self._single[between], tensor)

    def batch_isend_irecv(self, operations):
        return [work for operation in operations if (work := operation())]


def run_threads(attend: Callable[[Group], object], ranks: int) -> list:
    """What a function returns on each rank; of a group it may ask what `Group` knows."""
    with patch.object(exchange, "dist", _Post(ranks)), ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(attend, (Group(rank, ranks) for rank in range(ranks))))
