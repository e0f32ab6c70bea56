"""What ranks run in the tests of the ring: module-level functions, called on every rank by `run`."""

import math
import sys
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from cases import BRANCHES
from torch.utils.checkpoint import checkpoint

from hilbert_lib.attention.api import dilated_attention
from hilbert_lib.ordering import Ordering, OrderingSpec
from hilbert_lib.pattern import DilatedPattern
from hilbert_lib.ring import benchmarks
from hilbert_lib.ring.attention import RingDilatedAttention, ring_dilated_attention
from hilbert_lib.ring.plan import plan_ring
from hilbert_lib.ring.shards import gather, shard

SPECS = {
    "none": None,
    "residue": OrderingSpec("residue", rate=3),
    "random": OrderingSpec("random", seed=1),
    "hilbert": OrderingSpec("hilbert"),
}
NAMES = ("out", "lse", "dq", "dk", "dv")


def run(order: dict) -> list:
    """Call functions of this module, given as [name, arguments], one after the other in one start of the ranks."""
    return [getattr(sys.modules[__name__], name)(**arguments) for name, arguments in order["calls"]]


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def compare(
    branches: str,
    lengths: list[int],
    heads: int,
    transport: str,
    *,
    batch: int = 2,
    kv_heads: int | None = None,
    head_dim: int = 8,
    offsets: str = "head",
    mixing: str = "softmax",
    dtype: str = "float32",
    ordering: str = "none",
    padded: bool = False,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    backend: str = "auto",
) -> dict:
    """For output, lse and gradients: squared error of this rank's rows and of one process's, against float64."""
    start = sum(lengths[: dist.get_rank()])
    rows = slice(start, start + lengths[dist.get_rank()])
    shapes = [(batch, sum(lengths), n, head_dim) for n in (heads, kv_heads or heads, kv_heads or heads, heads)]
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    mask = (torch.rand(shapes[0][:2], generator=generator) < 0.3).to(device()) if padded else None
    q, k, v, dout = (x.to(getattr(torch, dtype)).to(device()) for x in drawn)
    pattern = DilatedPattern(*BRANCHES[branches], offsets=offsets, mixing=mixing)
    options = {"is_causal": is_causal, "dropout_p": dropout_p}

    whole = partial(dilated_attention, pattern=pattern, key_padding_mask=mask, **options)
    exact = results(partial(whole, backend="reference"), [x.double() for x in (q, k, v)], dout.double())
    one = results(partial(whole, backend="eager" if dropout_p else "auto"), (q, k, v), dout)
    spec = SPECS[ordering]
    order = spec.ordering(rows.stop - start) if spec and rows.stop > start else Ordering.linear(1)
    stored = order.apply if spec and rows.stop > start else _as_it_is
    undo = order.undo if spec and rows.stop > start else _as_it_is
    call = partial(
        ring_dilated_attention,
        pattern=pattern,
        key_padding_mask=None if mask is None else mask[:, rows],
        kv_ordering=spec,
        transport=transport,
        backend=backend,
        **options,
    )
    mine = results(call, (q[:, rows], stored(k[:, rows], dim=1), stored(v[:, rows], dim=1)), dout[:, rows])
    mine[3:] = [undo(x, dim=1) for x in mine[3:]]
    found = {}
    for name, own, single, truth in zip(NAMES, mine, one, exact, strict=True):
        part = (slice(None), slice(None), rows) if name == "lse" else (slice(None), rows)
        assert (own.dtype, own.shape) == (single.dtype, truth[part].shape), name
        found[name] = _squared_error(own, truth[part]), _squared_error(single[part], truth[part])
    return found


def _as_it_is(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x


def _squared_error(x: torch.Tensor, truth: torch.Tensor) -> float:
    assert torch.equal(x.isinf(), truth.isinf())
    assert not x.isnan().any()
    return (x.double() - truth)[truth.isfinite()].square().sum().item()


def results(attention, tensors, dout: torch.Tensor) -> list[torch.Tensor]:
    """out, lse, dq, dk and dv."""
    torch.manual_seed(5)
    leaves = [x.detach().requires_grad_() for x in tensors]
    out, lse = attention(*leaves, return_lse=True)
    return [out.detach(), lse, *torch.autograd.grad(out, leaves, dout)]


def _inputs(length: int, heads: int = 4, head_dim: int = 8, seed: int = 0, dtype=torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(2, length, heads, head_dim, generator=generator) for _ in range(4)]
    return [x.to(dtype).to(device()) for x in drawn]


def count_bytes(branches: str, lengths: list[int], transport: str, *, is_causal: bool, dtype: str) -> list[list[int]]:
    """Bytes sent and received forward, and backward: as counted where torch is called, and as planned."""
    dtype = getattr(torch, dtype)
    pattern, rank = DilatedPattern(*BRANCHES[branches]), dist.get_rank()
    *leaves, dout = _inputs(lengths[rank], dtype=dtype)
    leaves = [x.requires_grad_() for x in leaves]
    with counted() as forward:
        out = ring_dilated_attention(*leaves, pattern, transport=transport, is_causal=is_causal)
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


def disagree(**differing) -> str:
    """What ranks say when the last one calls with other arguments than the rest."""
    q, k, v, _ = _inputs(8)
    options = {"pattern": DilatedPattern((16,), (2,))}
    if dist.get_rank() == dist.get_world_size() - 1:
        options |= {name: SPECS[value] if name == "kv_ordering" else value for name, value in differing.items()}
        options["pattern"] = (
            DilatedPattern(*BRANCHES[options["pattern"]]) if "pattern" in differing else options["pattern"]
        )
        q = q.requires_grad_() if options.pop("requires_grad", False) else q
    try:
        ring_dilated_attention(q, k, v, **options)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nobody complained"


def repeats(transport: str, lengths: list[int]) -> bool:
    """Whether two runs give the same bits."""
    q, k, v, dout = _inputs(lengths[dist.get_rank()])
    call = partial(ring_dilated_attention, pattern=DilatedPattern(*BRANCHES["longer"]), transport=transport)
    first, second = (results(call, (q, k, v), dout) for _ in range(2))
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def one_rank_is_plain() -> bool:
    """Whether a group of one rank computes the bits of the plain function, dropout and ordering included."""
    group = next(one for rank in range(dist.get_world_size()) if (one := _alone(rank)) is not None)
    q, k, v, dout = _inputs(24)
    pattern, spec = DilatedPattern(*BRANCHES["uneven"]), SPECS["random"]
    options = {"pattern": pattern, "dropout_p": 0.2, "is_causal": True}
    ring = results(partial(ring_dilated_attention, group=group, kv_ordering=spec, **options), (q, k, v), dout)
    plain = results(partial(dilated_attention, kv_ordering=spec.ordering(24), **options), (q, k, v), dout)
    return all(torch.equal(a, b) for a, b in zip(ring, plain, strict=True))


def _alone(rank: int):
    group = dist.new_group([rank])
    return group if rank == dist.get_rank() else None


def in_parts_of_the_world(size: int) -> float:
    """Largest error where a 2-D mesh makes several rings of `size` ranks, each with a sequence of its own."""
    mesh = dist.init_device_mesh(device().type, (dist.get_world_size() // size, size), mesh_dim_names=("data", "seq"))
    group = mesh["seq"]
    q, k, v, dout = _inputs(26, seed=mesh.get_local_rank("data"))
    call = partial(dilated_attention, pattern=DilatedPattern(*BRANCHES["longer"]), is_causal=True)
    whole = results(call, (q, k, v), dout)
    own = [shard(x, group=group) for x in (q, k, v, dout)]
    ring = partial(ring_dilated_attention, pattern=call.keywords["pattern"], is_causal=True, group=group)
    mine = results(ring, own[:3], own[3])
    dims = (1, 2, 1, 1, 1)
    together = [gather(x, dim, group) for x, dim in zip(mine, dims, strict=True)]
    return max((a - b).abs().nan_to_num(0.0).max().item() for a, b in zip(together, whole, strict=True))


def without_validation(lengths: list[int]) -> list[int]:
    """How many headers are sent: of a validated call, and of one that is not, whose result is the same."""
    q, k, v, _ = _inputs(lengths[dist.get_rank()])
    gathers, all_gather = [], dist.all_gather
    dist.all_gather = lambda *args, **options: (gathers.append(1), all_gather(*args, **options))
    try:
        call = partial(ring_dilated_attention, q, k, v, DilatedPattern(*BRANCHES["longer"]))
        first, before = call(), len(gathers)
        assert torch.equal(call(validate=False), first)
        return [before, len(gathers) - before]
    finally:
        dist.all_gather = all_gather


class Layer(torch.nn.Module):
    """A module with projections around the ring."""

    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(8, 8)
        self.attention = RingDilatedAttention(DilatedPattern(*BRANCHES["aligned"]), transport="ring")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(self.project(x), x, torch.sin(x), is_causal=True).cos()


def through(how: str) -> float:
    """Largest difference that compiling a module or checkpointing it makes to the output and the gradient."""
    torch.manual_seed(0)
    layer = Layer().to(device())
    x = _inputs(16)[0].requires_grad_()
    other = (
        torch.compile(layer, backend="aot_eager")
        if how == "compile"
        else partial(checkpoint, layer, use_reentrant=False)
    )
    plain, changed = ((out, *torch.autograd.grad(out.sum(), [x, *layer.parameters()])) for out in (layer(x), other(x)))
    return max((a - b).abs().max().item() for a, b in zip(plain, changed, strict=True))


def second_derivative() -> str:
    """What asking for it raises."""
    q, k, v, _ = _inputs(8)
    q.requires_grad_()
    (dq,) = torch.autograd.grad(
        ring_dilated_attention(q, k, v, DilatedPattern((16,), (2,))).sum(), q, create_graph=True
    )
    try:
        torch.autograd.grad(dq.sum(), q)
    except RuntimeError as error:
        return str(error)
    return "nobody complained"


def measured(**work) -> list[dict]:
    """What the benchmark reports."""
    return benchmarks.measure(benchmarks.Work(**work))
