"""What ranks run in the tests of attention on a grid that is spread over them."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
from grid_cases import ORDERS, RULES, SCALE, expected, shape_of
from halo_cases import LARGE_RULES
from ring_costs import counted_and_planned, with_peak
from ring_ranks import NoGradient, by_kernels, device, noting, said_by, squared_error

from hilbert_lib import Neighbourhood, Ordering, Union, attend, neighbourhood_attention, ring_attend
from hilbert_lib.attention import operators
from hilbert_lib.attention.backends.registry import backends_for
from hilbert_lib.attention.request import Tensors
from hilbert_lib.patterns.neighbourhood import HeadNeighbourhoods
from hilbert_lib.ring import Rectangles, RingNeighbourhoodAttention, Runs, plan_halo, ring_neighbourhood_attention
from hilbert_lib.ring.agreement import Agreement
from hilbert_lib.ring.plan.balance import shard_lengths_for
from hilbert_lib.ring.rank import halo

NAMES = ("out", "lse", "dq", "dk", "dv", "dextra_k", "dextra_v")


def shards_of(shape: tuple, parts: list | None = None, cuts: list | None = None, order: str = "", lengths: list = ()):
    if parts:
        return Rectangles(tuple(parts), cuts and tuple(cut and tuple(cut) for cut in cuts))
    return Runs(ORDERS[order](shape), tuple(lengths))


def compare(
    rules: str, heads: str, shards: dict, *, more: str = "nothing", dtype: str = "float32", backend: str = "auto",
    head_dim: int = 8, by_kernel: bool = False,
) -> dict:  # fmt: skip
    """For output, lse and gradients: squared error of this rank's rows, and of one process's, against float64.

    With by_kernel rows are copied and summed by the kernels of a GPU, interpreted where there is none.
    """
    dtype, rules = getattr(torch, dtype), LARGE_RULES.get(rules, rules)
    near, given, dout, masks, *truth = expected(rules, heads, more, dtype, head_dim)
    truth = [truth[0], truth[1].transpose(1, 2), *truth[2]]
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
        if masks[1] is not None:
            options["extra_padding_mask"] = masks[1].to(device())
        out, lse = call(*leaves[:3], near, **options)
        wanted = leaves if "extra" in more else leaves[:3]
        grads = torch.autograd.grad((out * dout[:, own].to(device())).sum(), wanted)
        return [x.cpu() for x in (out.detach(), lse.transpose(1, 2), *grads)]

    one = run(attend if is_union else neighbourhood_attention, slice(None))
    with by_kernels() if by_kernel else nullcontext():
        mine = run(partial(ring_attend if is_union else ring_neighbourhood_attention, shards=spread), rows)
    found = {}
    for name, own, single, right in zip(NAMES, mine, one, truth, strict=False):
        assert own.dtype == single.dtype, name
        if "extra" in name:  # each rank has a share
            own = own.double().to(device())
            dist.all_reduce(own)
            own, part = own.cpu() / dist.get_world_size() ** 0.5, slice(None)
            right, single = (x.double() / dist.get_world_size() ** 0.5 for x in (right, single))
        else:
            part = rows
        assert own.shape == right[:, part].shape, name
        found[name] = squared_error(own, right[:, part]), squared_error(single[:, part], right[:, part])
    return found


def count_bytes(rules: str, heads: str, shards: dict, *, padded: bool = False) -> list:
    """Bytes sent and received forward, and backward: as counted where torch is called, and as planned; and how many
    collectives there were."""
    near, (q, k, v, *_), dout, (hidden, _), *_ = expected(
        rules, heads, "padding" if padded else "nothing", torch.bfloat16, 8
    )
    spread, rank = shards_of(RULES[rules][0], **shards), dist.get_rank()
    rows = spread.cells(RULES[rules][0], rank)
    leaves = [x[:, rows].to(device()).requires_grad_() for x in (q, k, v)]
    mask = hidden[:, rows].to(device()) if padded else None
    call = partial(ring_neighbourhood_attention, *leaves, near, shards=spread, key_padding_mask=mask)
    sizes = {"batch": len(q), "heads": q.shape[2], "kv_heads": k.shape[2], "head_dim": 8, "dtype": q.dtype}
    cost = plan_halo(near, spread, padded=padded, **sizes).ranks[rank]
    return counted_and_planned(call, leaves, dout[:, rows].to(device()), cost)


NEAR = Neighbourhood((8, 6), (3, 5))
EXCHANGE = "send", "compute"


def inputs(rows: int | None = None, **options) -> list[torch.Tensor]:
    rows = 48 // dist.get_world_size() if rows is None else rows
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randn(1, rows, 2, 4, generator=generator).to(device()).requires_grad_(**options) for _ in range(3)]


def disagree(**asked) -> list[str]:
    """What a rank says where the last one asks for something else."""
    q, k, v = inputs(requires_grad=False)
    options = {}
    if dist.get_rank() == dist.get_world_size() - 1:
        made = {
            "neighbourhood": lambda side: Neighbourhood((8, 6), side),
            "shards": lambda parts: Rectangles(tuple(parts)),
            "key_padding_mask": lambda _: torch.zeros(q.shape[:2], dtype=torch.bool, device=device()),
            "requires_grad": lambda _: q.requires_grad_(),
        }
        options = {name: made[name](value) if name in made else value for name, value in asked.items()}
        options.pop("requires_grad", None)
    near = options.pop("neighbourhood", NEAR)
    said = said_by(ring_neighbourhood_attention, q, k, v, near, **options)
    ring_neighbourhood_attention(*inputs(), NEAR)  # and all agree again
    return [said]


def promises() -> dict:
    """Of a call over all ranks, which share a grid in strips: what is true by promise."""
    found, rank = {}, dist.get_rank()
    q, k, v = inputs()
    module = RingNeighbourhoodAttention(NEAR)
    out, lse = module(q, k, v, return_lse=True)
    again = ring_neighbourhood_attention(q, k, v, NEAR, validate=False)
    found["the module, without validation, gives the same bits"] = torch.equal(out, again) and not lse.requires_grad
    grads = [torch.autograd.grad(x.sum(), (q, k, v), retain_graph=True) for x in (out, again)]
    found["gradients are the same bits again"] = all(map(torch.equal, *grads))
    leave = NoGradient.apply if rank == 0 else torch.clone
    mute = [torch.autograd.grad(x.sum(), (q, k, v)) for x in (leave(out), again * (rank > 0))]
    found["a rank that reaches no loss is as one of gradient 0"] = all(map(torch.equal, *mute))
    (dq,) = torch.autograd.grad(module(q, k, v).sum(), q, create_graph=True)
    found["no second derivative"] = "differentiated once" in said_by(dq.sum().backward)
    order = Ordering.from_curve("snake", 48, grid=(8, 6))
    runs = Runs(order, shard_lengths_for(48, dist.get_world_size()))
    x = inputs(len(order.perm) // 2)
    both = [ring_neighbourhood_attention(*x, NEAR, **how) for how in ({"ordering": order}, {"shards": runs})]
    found["an ordering is split as a sequence is"] = torch.equal(*both)
    wrapped = torch.compile(lambda *x: module(*x).cos(), backend="aot_eager")
    found["compiling changes nothing"] = torch.equal(wrapped(q, k, v), module(q, k, v).cos())
    nothing = ring_neighbourhood_attention(*(x[:0] for x in (q, k, v)), NEAR)
    found["a batch of none gives none"] = list(nothing.shape) == [0, 24, 2, 4]
    places = [(operators, "forward", "compute"), (Agreement, "lengths", "agree"), (halo, "exchange", "send")]
    with noting(places) as events:
        module(q, k, v)
    found["the interior begins before all agree"] = events == ["compute", "agree", "send", "compute"]
    backends = backends_for(HeadNeighbourhoods)
    eager = replace(backends["eager"], limits=lambda q, asked: "no border" if rank and asked.part.in_float else "")
    with patch.dict(backends, eager=eager):
        said = said_by(ring_neighbourhood_attention, q, k, v, NEAR, backend="eager")
    found["all hear what one rank's part is refused for"] = "no border" in said
    groups = [dist.new_group([each]) for each in range(dist.get_world_size())]
    alone = inputs(48)
    one = ring_neighbourhood_attention(*alone, NEAR, ordering=order, group=groups[rank])
    found["one rank is the plain function"] = torch.equal(one, neighbourhood_attention(*alone, NEAR, ordering=order))
    return found


def promises_of_a_union() -> dict:
    """Of `ring_attend` with two neighbourhoods: what is true by promise."""
    found, rank = {}, dist.get_rank()
    both = Union((NEAR, Neighbourhood((8, 6), 3, dilation=(1, 2))))
    q, k, v = inputs()
    places = [(operators, "forward", "compute"), (Agreement, "lengths", "agree"), (halo, "exchange", "send")]
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
    groups, alone = [dist.new_group([each]) for each in range(dist.get_world_size())], inputs(48)
    whole = ring_attend(*alone, both, group=groups[rank])
    found["one rank is attend"] = torch.equal(whole, attend(*alone, both))
    return found


def peak_memory(shards: dict) -> list[list[int]]:
    """Bytes at the highest point of a forward, and of a backward: as allocated by torch, and as planned.

    Stand-ins allocate what kernels return, and compute nothing.
    """
    near, sizes = Neighbourhood((128, 64), 9), {"heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": torch.bfloat16}
    spread, rank = shards_of(near.shape, **shards), dist.get_rank()
    rows = spread.count(near.shape, rank)
    *leaves, dout = (torch.zeros(1, rows, n, 64, dtype=torch.bfloat16, device=device()) for n in (4, 2, 2, 4))
    leaves = [x.requires_grad_() for x in leaves]

    def forward(given, request, name):
        return torch.empty_like(given.q), given.q.new_empty(given.q.transpose(1, 2).shape[:3], dtype=torch.float32)

    def backward(dout, given, out, lse, request, name):
        _delta = torch.empty_like(lse)
        wide = torch.float32 if request.part.in_float else None
        return Tensors(*(torch.empty_like(x, dtype=wide if n in (1, 2) else None) for n, x in enumerate(given)))

    call = partial(ring_neighbourhood_attention, *leaves, near, shards=spread)
    with patch.multiple(operators, forward=forward, backward=backward):
        torch.autograd.grad(call(), leaves, dout)  # what is made once is not of this call
        out, forward = with_peak(call)
        received = out.grad_fn.saved_tensors[7].nbytes
        _, backward = with_peak(partial(torch.autograd.grad, out, leaves, dout))
    held = sum(x.nbytes for x in leaves)
    lse = 4 * rows * 4
    cost = plan_halo(near, spread, batch=1, **sizes).ranks[rank]
    return [
        [forward + held, cost.memory_forward],
        [backward + held + 2 * dout.nbytes + lse + received, cost.memory_backward],
    ]
