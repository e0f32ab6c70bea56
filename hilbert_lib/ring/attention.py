"""Dilated attention of a sequence that is spread over ranks, as users call it."""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from hilbert_lib.attention import operators
from hilbert_lib.attention.api import _needs_gradient, _validated, dilated_attention
from hilbert_lib.attention.backends.registry import BACKENDS
from hilbert_lib.attention.call import Call
from hilbert_lib.checks import boolean
from hilbert_lib.ordering import Ordering, OrderingSpec
from hilbert_lib.pattern import DilatedPattern
from hilbert_lib.ring.agreement import Agreement, resolved
from hilbert_lib.ring.plan.balance import check_weights
from hilbert_lib.ring.plan.plan import check_memory_limit, check_transport, plan_ring
from hilbert_lib.ring.rank import passes
from hilbert_lib.ring.rank.blocks import Request
from hilbert_lib.ring.rank.layout import Layout, layout_of
from hilbert_lib.ring.rank.passes import Job

_agreed: "WeakKeyDictionary[ProcessGroup, tuple[int, ...]]" = WeakKeyDictionary()  # lengths of the last validated call
_untraced: Callable | None = None  # `_attend`, which torch.compile leaves alone


def ring_dilated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: DilatedPattern,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    transport: str = "auto",
    weights: Sequence[float] | None = None,
    memory_limit: int | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    key_padding_mask: Tensor | None = None,
    kv_ordering: OrderingSpec | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    validate: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact `dilated_attention` of a sequence whose contiguous shards, in rank order, lie on the ranks of a group.

    Only dilated rows travel, only between ranks that share a segment (`plan_ring` says which). All ranks call it, and
    where gradients are asked for all run the backward. On one rank it is `dilated_attention`.

    Over NCCL the exchange runs beside attention where the group's streams have a high priority, as those of `run_ranks`
    do: set TORCH_NCCL_HIGH_PRIORITY=1 before a group is made.

    Args:
        q: (batch, rows, heads, head_dim), this rank's shard; rows may differ from rank to rank, and be 0.
        k, v: (batch, rows, kv_heads, head_dim), of the same positions.
        pattern: which keys a query sees, of the whole sequence.
        group: the ranks, as a process group or a 1-D DeviceMesh; by default all.
        transport: "ring", "all_gather", "all_to_all", or "auto", as `plan_ring` takes it.
        weights, memory_limit: likewise. A plan that was made with them is what runs where they are given here too. One
            rank runs `dilated_attention`, whatever the limit.
        is_causal, scale, return_lse: as in `dilated_attention`.
        dropout_p: likewise; the mask is that of one rank with the first rank's seed, however many there are.
        key_padding_mask: (batch, rows) bool, True = no weight, of this shard in sequence order.
        kv_ordering: the recipe in which each shard of k and v is stored, for the shard's own length.
        backend: as in `dilated_attention`.
        validate: whether ranks tell each other what they ask for before they send anything, so that those who disagree
            all raise. The shard's own attention is under way meanwhile, unless its length is new or there is dropout;
            where another shard's length is new, it begins again. False leaves that out after a group's first call:
            shards must then be as long as when they last did so, or, where those were equal in length, all of another
            length.

    Returns:
        out like q; with return_lse also lse (batch, heads, rows), detached. Both of this rank's queries.

    Raises:
        TypeError, ValueError: as `dilated_attention` and `plan_ring`. With validate, on every rank if on any, and where
            ranks ask for different things, naming these.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> q = k = v = torch.ones(1, 8, 2, 4)
    >>> ring_dilated_attention(q, k, v, DilatedPattern((4, 8), (1, 2))).shape
    torch.Size([1, 8, 2, 4])
    >>> dist.destroy_process_group()
    """
    attend = _uncompiled() if "torch._dynamo" in sys.modules else _attend
    options = {
        "is_causal": is_causal,
        "scale": scale,
        "dropout_p": dropout_p,
        "key_padding_mask": key_padding_mask,
        "kv_ordering": kv_ordering,
        "backend": backend,
        "return_lse": return_lse,
    }
    ring = {"transport": transport, "weights": weights, "memory_limit": memory_limit, "validate": validate}
    return attend(q, k, v, pattern, options, group, ring)


# Read by torch.compile, which cannot trace collectives that are waited for later: it breaks the graph here.
ring_dilated_attention._torchdynamo_disable = True


def _uncompiled() -> Callable:
    # Having broken the graph at the call, torch.compile would go on with what is called, and trace streams. Only where
    # it is loaded: this imports it, and with it triton. Made once: 0.1 ms (of functools' caches torch.compile warns).
    global _untraced
    if _untraced is None:
        _untraced = torch.compiler.disable(_attend)
    return _untraced


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: DilatedPattern,
    options: dict,
    group: ProcessGroup | DeviceMesh | None,
    ring: dict,
) -> Tensor | tuple[Tensor, Tensor]:
    # `ring_dilated_attention`, its options apart: those that one process has too, and those of a ring.
    group = resolved(group)
    kv_ordering, backend = options["kv_ordering"], options["backend"]
    if group.size() == 1:
        _planning(**ring, ranks=1)
        return dilated_attention(q, k, v, pattern, **options | {"kv_ordering": _ordering(kv_ordering, k)})
    validate = ring["validate"] or group not in _agreed
    request, refusal = {}, None
    try:
        planning = _planning(**ring, ranks=group.size())
        q, k, v, call = _checked(q, k, v, pattern, **options)
        if validate:
            request = _request(q, k, v, call, planning, kv_ordering, backend)
    except (TypeError, ValueError) as error:
        if not validate:
            raise
        refusal = error
    lengths, confirm = _agreed.get(group), _nothing
    if validate:
        agreement = Agreement(request, 0 if refusal else q.shape[1], refusal, group)
        # Mostly all is as in the call before: then the shard's own attention does not wait for the others' word. With
        # dropout it does, whose seed is sent first, and so does a rank without rows, which has nothing to compute.
        if lengths and not refusal and lengths[group.rank()] == q.shape[1] and q.numel() and call.dropout_p == 0.0:
            confirm = partial(_confirm, agreement, group, lengths)
        else:
            lengths = _agreed[group] = agreement.lengths()
    if lengths[group.rank()] != q.shape[1]:
        if len(set(lengths)) > 1:  # what the others have now, this rank cannot know
            raise ValueError(
                f"validate must be True where shards of unequal length change: this rank's had {lengths[group.rank()]} "
                f"rows in the last validated call, and has {q.shape[1]}"
            )
        lengths = (q.shape[1],) * group.size()
    if not q.shape[0] or not sum(lengths):
        out, lse = operators.forward(q, k, v, call, "reference")  # nothing to compute, and nothing to send
    else:
        asked, found = (q, k, v, call, group, planning, kv_ordering, backend), None
        with suppress(_OtherLengths):
            found = _ring(*asked, lengths, confirm)
        if found is None:  # now that what was computed in vain is freed, which the exception had held
            found = _ring(*asked, _agreed[group], _nothing)
        out, lse = found
    return (out, lse) if options["return_lse"] else out


class _OtherLengths(Exception):
    """Shards are not as long as in the call before; `_agreed` has their lengths."""


def _nothing() -> None:
    pass


def _confirm(agreement: Agreement, group: ProcessGroup, lengths: tuple[int, ...]) -> None:
    # Before anything is sent: all ranks ask for the same, and shards are as long as was expected.
    _agreed[group] = agreement.lengths()
    if _agreed[group] != lengths:
        raise _OtherLengths


def _ring(q, k, v, call, group, planning, kv_ordering, backend, lengths, confirm) -> tuple[Tensor, Tensor]:
    try:
        job = _job(q, k, _needs_gradient(q, k, v), call, lengths, group, planning, kv_ordering, backend)
        return _Ring.apply(q, k, v, job, confirm)
    except Exception:
        confirm()  # others may wait to tell that this rank asks for something else, which may be why it failed
        raise


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, job: Job, confirm: Callable[[], None]) -> tuple[Tensor, Tensor]:
        out, lse, kept = passes.forward(q, k, v, job, confirm)
        # The mask and the seed too, so that autograd sees it if they are changed before the backward.
        ctx.save_for_backward(q, k, v, out, lse, job.key_padding_mask, job.request.seed, *kept.values())
        ctx.job, ctx.kept = job, tuple(kept)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)  # a gradient of lse would be filled with zeros, and dropped
        return out, lse

    @staticmethod
    def backward(ctx, dout: Tensor | None, _dlse: None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, _mask, _seed, *kept = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout  # the others need this rank all the same
        return *_Once.apply(dout, q, k, v, out, lse, ctx.job, dict(zip(ctx.kept, kept, strict=True))), None, None


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *args) -> tuple[Tensor, Tensor, Tensor]:
        return passes.backward(*args)

    @staticmethod
    def backward(ctx, *_grads: Tensor) -> None:
        raise RuntimeError("ring_dilated_attention can be differentiated once; it has no second derivative")


def checked_spec(spec: object) -> OrderingSpec | None:
    """The argument kv_ordering of a ring; TypeError unless it is an OrderingSpec or None.

    >>> checked_spec(None)
    """
    if spec is not None and not isinstance(spec, OrderingSpec):
        raise TypeError(f"kv_ordering must be an OrderingSpec or None, got {type(spec).__name__}")
    return spec


def _ordering(spec: OrderingSpec | None, k: Tensor) -> Ordering | None:
    spec = checked_spec(spec)
    has_rows = isinstance(k, Tensor) and k.dim() > 1 and k.shape[1]  # what k must be is checked elsewhere
    return spec.ordering(k.shape[1]) if spec is not None and has_rows else None


def _planning(transport, weights, memory_limit, validate, ranks: int) -> dict:
    # What a plan depends on beside the call itself.
    boolean("validate", validate)
    return {
        "transport": check_transport(transport),
        "weights": check_weights(weights, ranks),
        "memory_limit": check_memory_limit(memory_limit),
    }


def _checked(
    q, k, v, pattern, is_causal, scale, dropout_p, key_padding_mask, kv_ordering, backend, return_lse
) -> tuple[Tensor, Tensor, Tensor, Call]:
    ordering = _ordering(kv_ordering, k)
    q, k, v, call = _validated(
        q, k, v, pattern, is_causal, scale, dropout_p, key_padding_mask, None, ordering, backend, return_lse
    )
    if backend != "auto" and (reason := BACKENDS[backend].refusal(q, call)):
        raise ValueError(f"backend={backend!r} {reason}")
    return q, k, v, call


def _request(q, k, v, call: Call, planning: dict, kv_ordering, backend) -> dict[str, str]:
    # What all ranks must agree on, in words.
    def described(x: Tensor) -> str:
        batch, _, heads, head_dim = x.shape
        return f"{x.dtype} of batch {batch}, heads {heads}, head_dim {head_dim} on {x.device.type}"

    return {
        "q": described(q),
        "k": described(k),
        "pattern": repr(call.pattern),
        **{name: repr(value) for name, value in planning.items()},
        "is_causal": repr(call.is_causal),
        "scale": repr(call.scale),
        "dropout_p": repr(call.dropout_p),
        "key_padding_mask": "none" if call.key_padding_mask is None else "one",
        "kv_ordering": repr(kv_ordering),
        "backend": repr(backend),
        "requires_grad": repr(_needs_gradient(q, k, v)),
    }


def _job(
    q: Tensor,
    k: Tensor,
    gradient: bool,
    call: Call,
    lengths: tuple[int, ...],
    group: ProcessGroup,
    planning: dict,
    kv_ordering: OrderingSpec | None,
    backend: str,
) -> Job:
    layout = _layout(
        group.rank(),
        q.device,
        by_offset=call.key_padding_mask is not None,
        pattern=call.pattern,
        shard_lengths=lengths,
        batch=q.shape[0],
        heads=q.shape[2],
        kv_heads=k.shape[2],
        head_dim=q.shape[3],
        dtype=q.dtype,
        is_causal=call.is_causal,
        padded=call.key_padding_mask is not None,
        **planning,
    )
    seed = None
    if call.dropout_p > 0.0:
        seed = torch.randint(-(2**63), 2**63 - 1, (1,), device=q.device)
        dist.broadcast(seed, group=group, group_src=0)
    request = Request(call.scale, call.dropout_p, seed, backend, gradient)
    return Job(layout, request, ref(group), call.is_causal, _ordering(kv_ordering, k), call.key_padding_mask)


@lru_cache(maxsize=64)
def _layout(rank: int, device: torch.device, by_offset: bool, **asked) -> Layout:
    # The rest is what `plan_ring` is asked.
    plan = plan_ring(**asked)
    with torch.device("cpu"):  # where it is computed, whatever torch's default device is
        return layout_of(plan, rank, device, by_offset=by_offset)
