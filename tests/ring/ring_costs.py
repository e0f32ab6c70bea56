"""What ranks send, hold and take, in the tests of the ring."""

from contextlib import contextmanager, nullcontext
from dataclasses import is_dataclass
from functools import partial
from itertools import accumulate
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist
from cases import BRANCHES, RULES, drawn, expected_on_grid, points_of
from ring_ranks import SPECS, by_kernels, choosing_by_bytes, device, inputs, noting, rows_of, shard_of_points, shards_of
from torch.utils._python_dispatch import TorchDispatchMode

from hilbert_lib import Neighbourhood, PointNeighbourhood, graph_cache
from hilbert_lib.attention import operators
from hilbert_lib.attention.backends.registry import BACKENDS
from hilbert_lib.attention.request import Tensors
from hilbert_lib.attention.triton import copies as copies_by_kernel
from hilbert_lib.attention.triton import rows as rows_by_kernel
from hilbert_lib.lab.sweeps.over_ranks import OverRanks
from hilbert_lib.lab.sweeps.ring import measure
from hilbert_lib.lab.sweeps.ring_trace import counted
from hilbert_lib.limits.memory import begin_peak
from hilbert_lib.patterns.dilated import DilatedPattern
from hilbert_lib.ring import plan_halo, ring_neighbourhood_attention, spread
from hilbert_lib.ring.attention import ring_attend, ring_dilated_attention
from hilbert_lib.ring.plan.plan import plan_ring
from hilbert_lib.ring.rank import blocks, exchange, halo, local, passes


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
    sizes = {"batch": 2, "heads": 4, "kv_heads": 4, "head_dim": 8, "dtype": dtype, "padded": padded}
    with choosing_by_bytes() if transport == "auto" else nullcontext():
        cost = plan_ring(pattern, lengths, is_causal=is_causal, transport=transport, **sizes, **planning).ranks[rank]
        return counted_and_planned(partial(ring_dilated_attention, *leaves, pattern, **call), leaves, dout, cost)[:2]


def counted_and_planned(call, leaves: list, dout: torch.Tensor, cost) -> list[list[int]]:
    """Bytes sent and received forward, and backward, both ways; and how many collectives there were."""
    with counted() as forward:
        out = call()
    with counted() as backward:
        torch.autograd.grad(out, leaves, dout)
    found = [forward["sent"], forward["received"], backward["sent"], backward["received"]]
    planned = [cost.sent_forward, cost.received_forward, cost.sent_backward, cost.received_backward]
    return [found, planned, [forward["calls"], backward["calls"]]]


BY_INDEX = ("index", "index_put_", "index_select", "index_copy_", "index_add_", "index_fill_", "cat", "stack")


class _ByIndex(TorchDispatchMode):
    """Counts the operators of torch that copy by index, or join what was copied."""

    def __enter__(self):
        self.found = []
        return super().__enter__()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator.overloadpacket.__name__
        self.found += [name] if name in BY_INDEX else []
        return operator(*args, **(kwargs or {}))


def launches(what: str, **options) -> list[list[str]]:
    """Of a forward, and of a backward: the starts of kernels for rows, and torch's own operators by index.

    Attention is a stand-in, which starts nothing.
    """
    x = [torch.randn(1, 24, 4, 8, device=device()) for _ in range(4)]
    if what.endswith("grid"):
        near = Neighbourhood((12, 2 * dist.get_world_size()), (5, 3))
        options |= {"key_padding_mask": x[0][:, :, 0, 0] > 0} if what == "padded grid" else {}
        call = partial(ring_neighbourhood_attention, neighbourhood=near, **options)
    else:
        pattern = DilatedPattern((8, 24 * dist.get_world_size()), (1, 3))
        call = partial(ring_dilated_attention, pattern=pattern, transport=what, **options)

    def forward(given, call, name):
        q = given.q
        return torch.zeros_like(q), q.new_zeros(q.transpose(1, 2).shape[:3])

    def backward(dout, given, out, lse, call, name, dlse=None):
        return Tensors(*(None if x is None else torch.zeros_like(x) for x in given.with_rows))

    found = []
    start_rows = (copies_by_kernel, "start", "start"), (rows_by_kernel, "start", "start")
    with patch.multiple(operators, attention=forward, attention_backward=backward), by_kernels():
        for _ in range(2):  # what the first call makes once is not of a call
            leaves = [each.clone().requires_grad_() for each in x[:3]]
            found.clear()
            with noting(start_rows) as started, _ByIndex() as by_torch:
                out = call(*leaves)
            found.append([*started, *by_torch.found])
            with noting(start_rows) as started, _ByIndex() as by_torch:
                torch.autograd.grad(out, leaves, x[3])
            found.append([*started, *by_torch.found])
    return found


def made_by_two_calls(what: str, **options) -> list[list[str]]:
    """What a first forward and backward makes of lengths, pattern and group, and sends; and a second one's, elsewhere
    in memory."""
    x = [torch.randn(2, 24, 4, 8, device=device()) for _ in range(4)]
    spec = SPECS[options.pop("ordering", "none")]
    if what == "grid":
        options["ordering"] = spec.ordering(48)
        call = partial(ring_neighbourhood_attention, neighbourhood=Neighbourhood((12, 4), (5, 3)), **options)
    else:
        options |= {"kv_ordering": spec, "transport": what}
        call = partial(ring_dilated_attention, pattern=DilatedPattern((8, 17, 48), (1, 2, 3)), **options)
    places = [(graph_cache, "made_to_share", "table"), (DilatedPattern, "__post_init__", "pattern")]
    places += [(spread, "plan_ring", "plan"), (spread, "plan_halo", "plan")]
    places += [(spread, "shard_lengths_for", "plan")]
    places += [(passes, "Shard", "table"), (passes, "name_table", "table"), (blocks, "name_table", "table")]
    places += [(place, "exchange", "message") for place in (exchange, passes, halo)]
    found = []
    with noting(places) as events:
        for _ in range(2):
            leaves = [each.clone().requires_grad_() for each in x[:3]]
            torch.autograd.grad((call(*leaves) * x[3]).sum(), leaves)
            found.append(events[:])
            events.clear()
    return found


def peak_memory(
    branches: list, tokens: int, transport: str, *, is_causal=False, ordering: str = "none", padded=False
) -> list[list[int]]:
    """Bytes at the highest point of a forward, and of a backward: as allocated by torch, and as planned.

    Without a GPU stand-ins allocate what its kernels do, and compute nothing.
    """
    length, sizes = tokens // dist.get_world_size(), {"heads": 8, "kv_heads": 4, "head_dim": 64}
    shapes = [(1, length, n, 64) for n in (8, 4, 4, 8)]
    *leaves, dout = (torch.zeros(shape, dtype=torch.bfloat16, device=device()) for shape in shapes)
    leaves = [x.requires_grad_() for x in leaves]
    asked = {"is_causal": is_causal, "transport": transport}
    mask = torch.zeros(1, length, dtype=torch.bool, device=device()) if padded else None
    call = partial(ring_dilated_attention, pattern=DilatedPattern(*branches), key_padding_mask=mask, **asked)
    call.keywords["kv_ordering"] = SPECS[ordering]
    layout_of = Mock(side_effect=spread.sequence_layout)
    with nullcontext() if device().type == "cuda" else _stand_ins(), patch.object(spread, "sequence_layout", layout_of):
        torch.autograd.grad(call(*leaves), leaves, dout)  # what is made once, such as tables, is not of this call
        out, forward = with_peak(partial(call, *leaves))
        _, backward = with_peak(partial(torch.autograd.grad, out, leaves, dout))
    layout = spread.sequence_layout(*layout_of.call_args.args)
    held = sum(x.nbytes for x in leaves) + _bytes_of(layout)
    if ordering != "none":  # perm and inverse, and the slots of touched rows, int64; slots, int32
        held += length * (8 + 8 + 4) + 8 * layout.touched.shape[1]
    forward, backward = forward + held, backward + held + 2 * dout.nbytes + 4 * length * 8  # dout, out and lse
    how = asked | sizes | {"batch": 1, "dtype": torch.bfloat16, "ordered": ordering != "none", "padded": padded}
    cost = plan_ring(call.keywords["pattern"], (length,) * dist.get_world_size(), **how).ranks[dist.get_rank()]
    return [[forward, cost.memory_forward], [backward, cost.memory_backward]]


def _bytes_of(layout: object) -> int:
    """Of a layout's index tensors."""
    if isinstance(layout, torch.Tensor):
        return layout.nbytes
    inside = layout.values() if isinstance(layout, dict) else layout
    if is_dataclass(layout):
        inside = vars(layout).values()
    is_nested = isinstance(inside, type({}.values()) | tuple)
    return sum(map(_bytes_of, inside)) if is_nested else 0


@contextmanager
def _stand_ins():
    """Kernels that allocate what the fused ones do on a GPU, and merges in place."""

    def choose(q, k, call, _backend, *, through_table, **_):
        own = BACKENDS["hopper"]
        return "triton" if through_table or own.limits(q, call) or own.of_keys(q, k, call) else "hopper"

    def workspace(given, call, direction, name):
        q, k, v = (torch.empty(x.shape, dtype=x.dtype, device="meta") for x in given[:3])
        meta = (Tensors(q, k, v),) if direction == "forward" else (q, Tensors(q, k, v), q, q)
        sizes = BACKENDS[name].workspace(meta, call, direction, torch.device("cuda"), 0)
        return torch.empty(sum(sizes.values()), dtype=torch.uint8)

    def forward(given, call, name):
        q = given.q
        _held = workspace(given, call, "forward", name)
        return q.new_empty(q.shape), q.new_empty(q.transpose(1, 2).shape[:3], dtype=torch.float32)

    def backward(dout, given, out, lse, call, name, dlse=None):
        _held = workspace(given, call, "backward", name)
        return tuple(x.new_empty(x.shape) for x in given[:3])

    nothing = {"merge_rows": lambda *_: None, "add_rows": lambda *_: None}
    no_sums = {"merge_rows": lambda *_: None, "add_block": lambda *_: None}
    with (
        patch.multiple(operators, attention=forward, attention_backward=backward),
        patch.multiple(blocks, choose=choose, **no_sums),
        patch.multiple(passes, **nothing),
        patch.multiple(local, **nothing),
    ):
        yield


def with_peak(run) -> tuple:
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
    return measure(OverRanks.of(work))


def count_bytes_on_grid(rules: str, heads: str, shards: dict, *, padded: bool = False) -> list:
    """Bytes sent and received forward, and backward: as counted where torch is called, and as planned; and how many
    collectives there were."""
    near, (q, k, v, *_), dout, (hidden, _), *_ = expected_on_grid(
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


def count_bytes_on_points(
    kind: str, lengths: list[int], *, padded: bool = False, key_lengths: list[int] | None = None
) -> list:
    """`count_bytes_on_grid` of points."""
    whole, sizes = points_of(kind), {"heads": 4, "kv_heads": 2, "head_dim": 8}
    rows, rank = rows_of(whole, lengths), dist.get_rank()
    key_rows = None if key_lengths is None else rows_of(whole, key_lengths, of_keys=True)
    own_keys = rows if key_rows is None else key_rows
    points = shard_of_points(whole, rows, key_rows)
    tensors = drawn(whole.lists.queries, *sizes.values(), batch=2, keys=whole.lists.keys, dtype=torch.bfloat16)
    parts = rows, own_keys, own_keys, rows
    *leaves, dout = (x[:, part].to(device()) for x, part in zip(tensors, parts, strict=True))
    leaves = [x.requires_grad_() for x in leaves]
    mask = torch.arange(2 * len(own_keys), device=device()).view(2, -1) % 3 == 0 if padded else None
    cost = points.plan(batch=2, dtype=torch.bfloat16, padded=padded, **sizes).ranks[rank]
    return counted_and_planned(partial(ring_attend, *leaves, points, key_padding_mask=mask), leaves, dout, cost)


def peak_memory_on_points(lengths: list[int], key_lengths: list[int] | None = None) -> list[list[int]]:
    """`peak_memory_on_grid` of points. key_lengths: of keys, coarser ones."""
    cells = torch.cartesian_prod(torch.arange(96), torch.arange(64))
    whole, key_rows = PointNeighbourhood(cells, 9), None
    if key_lengths:
        whole = PointNeighbourhood(cells // 2, 5, keys=(cells // 2).unique(dim=0))
        key_rows = rows_of(whole, key_lengths, of_keys=True)
    points = shard_of_points(whole, rows_of(whole, lengths), key_rows)
    counts = points.counts[dist.get_rank()]
    return _peak_of_halo(points, ring_attend, counts.points, points.plan, counts.list_bytes, counts.keys)


def peak_memory_on_grid(shards: dict) -> list[list[int]]:
    """Bytes at the highest point of a forward, and of a backward: as allocated by torch, and as planned."""
    near = Neighbourhood((128, 64), 9)
    spread = shards_of(near.shape, **shards)
    call = partial(ring_neighbourhood_attention, shards=spread)
    return _peak_of_halo(near, call, spread.count(near.shape, dist.get_rank()), partial(plan_halo, near, spread))


def _peak_of_halo(
    pattern, attend, rows: int, plan, list_bytes: int = 0, key_rows: int | None = None
) -> list[list[int]]:
    # Stand-ins allocate what kernels return, and compute nothing.
    sizes, rank = {"heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": torch.bfloat16}, dist.get_rank()
    key_rows = rows if key_rows is None else key_rows
    shapes = [(1, count, n, 64) for count, n in ((rows, 4), (key_rows, 2), (key_rows, 2), (rows, 4))]
    *leaves, dout = (torch.zeros(shape, dtype=torch.bfloat16, device=device()) for shape in shapes)
    leaves = [x.requires_grad_() for x in leaves]

    def forward(given, request, name):
        return torch.empty_like(given.q), given.q.new_empty(given.q.transpose(1, 2).shape[:3], dtype=torch.float32)

    def backward(dout, given, out, lse, request, name, dlse):
        _delta = torch.empty_like(lse)
        wide = torch.float32 if request.part.in_float else None
        return Tensors(
            *(torch.empty_like(x, dtype=wide if n in (1, 2) else None) for n, x in enumerate(given.with_rows))
        )

    call = partial(attend, *leaves, pattern)
    with patch.multiple(operators, attention=forward, attention_backward=backward):
        torch.autograd.grad(call(), leaves, dout)  # what is made once is not of this call
        out, forward = with_peak(call)
        received = out.grad_fn.saved_tensors[8].nbytes
        _, backward = with_peak(partial(torch.autograd.grad, out, leaves, dout))
    held = sum(x.nbytes for x in leaves) + list_bytes
    lse = 4 * rows * 4
    cost = plan(batch=1, **sizes).ranks[rank]
    return [
        [forward + held, cost.memory_forward],
        [backward + held + 2 * dout.nbytes + lse + received, cost.memory_backward],
    ]
