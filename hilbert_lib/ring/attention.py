"""Dilated attention of a sequence that is spread over ranks, as users call it."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from hilbert_lib.attention import operators
from hilbert_lib.attention.api import computed
from hilbert_lib.attention.backends.registry import BACKENDS
from hilbert_lib.attention.request import Request, Tensors
from hilbert_lib.attention.transforms import refuse_tracers, unserved_derivative
from hilbert_lib.attention.validation import needs_gradient, validated
from hilbert_lib.checks import boolean, suggesting, unscripted
from hilbert_lib.graph_cache import cached_for_graphs
from hilbert_lib.internals import is_compiler_loaded, untraced
from hilbert_lib.ordering import Ordering, OrderingSpec
from hilbert_lib.patterns.dilated import DilatedPattern, check_dilated
from hilbert_lib.ring.agreement import Agreement, in_words, resolved
from hilbert_lib.ring.plan.plan import check_planning, plan_ring
from hilbert_lib.ring.rank import passes
from hilbert_lib.ring.rank.blocks import Job
from hilbert_lib.ring.rank.layout import Layout, layout_of

_agreed: "WeakKeyDictionary[ProcessGroup, tuple[int, ...]]" = WeakKeyDictionary()  # lengths of the last validated call
_untraced: dict[Callable, Callable] = {}  # what torch.compile leaves alone


@untraced  # torch.compile cannot trace collectives that are waited for later
@unscripted
@suggesting
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

    Only dilated rows travel, only between ranks that share a segment (`plan_ring` shows which). All ranks must call it,
    and where gradients are needed all must run the backward. On one rank it is `dilated_attention`.

    A CUDA graph captures a call of a kind that has run; ranks then compare their arguments at the capture alone.

    Over NCCL the exchange runs beside attention if the group's streams have a high priority: set
    TORCH_NCCL_HIGH_PRIORITY=1 before the group is made. `run_ranks` does.

    Args:
        q: (batch, rows, heads, head_dim), this rank's shard; rows may differ between ranks, and be 0.
        k, v: (batch, rows, kv_heads, head_dim), of the same positions.
        pattern: which keys a query sees, over the whole sequence.
        group: the ranks, as a process group or a 1-D DeviceMesh; by default all.
        transport: "ring", "all_gather", "all_to_all" or "auto", as for `plan_ring`.
        weights, memory_limit: as for `plan_ring`. To run a plan that was made with them, give them here too. One rank
            runs `dilated_attention` under any limit.
        is_causal, scale, return_lse: as for `dilated_attention`.
        dropout_p: likewise; the mask is that of a single rank with the first rank's seed.
        key_padding_mask: (batch, rows) bool, True = no weight, for this shard in sequence order.
        kv_ordering: the recipe in which each shard of k and v is stored, for the shard's own length.
        backend: as for `dilated_attention`.
        validate: whether ranks compare their arguments before they send anything: if these differ, all raise. The
            shard's own attention runs meanwhile, unless its length is new or there is dropout; if another shard's
            length is new, it begins again. False omits the comparison after a group's first call. Shards must then be
            as long as in the last validated call or, if they were equally long, all of one other length.

    Returns:
        out like q, for this rank's queries; with return_lse also lse (batch, heads, rows), detached.

    Raises:
        TypeError, ValueError: as `dilated_attention` and `plan_ring`. With validate, an error on one rank is raised on
            all, and mismatched arguments are named.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> q = k = v = torch.ones(1, 8, 2, 4)
    >>> ring_dilated_attention(q, k, v, DilatedPattern((4, 8), (1, 2))).shape
    torch.Size([1, 8, 2, 4])
    >>> dist.destroy_process_group()
    """
    attend = uncompiled(_attend)
    options = {"is_causal": is_causal, "scale": scale, "dropout_p": dropout_p, "return_lse": return_lse}
    options |= {"key_padding_mask": key_padding_mask, "kv_ordering": kv_ordering, "backend": backend}
    return attend(q, k, v, pattern, options, group, (transport, weights, memory_limit), validate)


def uncompiled(function: Callable) -> Callable:
    """The function, inside which torch.compile does not go on after a break of the graph: it would trace streams."""
    # Only where it is loaded: this imports it, and with it triton. Made once: it takes 0.1 ms (and torch.compile warns
    # of functools' caches).
    if not is_compiler_loaded():
        return function
    if function not in _untraced:
        _untraced[function] = torch.compiler.disable(function)
    return _untraced[function]


class _Asked(NamedTuple):
    """What one rank asks for, checked."""

    q: Tensor
    k: Tensor
    v: Tensor
    call: Request
    kv_ordering: OrderingSpec | None
    backend: str
    gradient: bool
    planning: dict  # transport, weights and memory_limit of `plan_ring`
    group: ProcessGroup


def _attend(q, k, v, pattern, options, group, planning, validate) -> Tensor | tuple[Tensor, Tensor]:
    """The call: `options` are those of `dilated_attention`, `planning` those of `plan_ring`."""
    group = resolved(group)
    if group.size() == 1:
        boolean("validate", validate)
        check_planning(*planning, ranks=1)
        options = options | {"kv_ordering": _ordering(options["kv_ordering"], k)}
        return computed(q, k, v, check_dilated(pattern), **options)
    check = partial(_checked, q, k, v, pattern, options, group, planning, validate)
    asked, lengths, agreement = _agree(check, group, validate)
    if agreement:
        out, lse = _begin_early(asked, lengths, agreement)
    elif asked.q.shape[0] and sum(lengths):
        out, lse = _run(asked, lengths)
    else:  # nothing to compute, and nothing to send
        out, lse = operators.forward(Tensors(asked.q, asked.k, asked.v), asked.call, "reference")
    return (out, lse) if options["return_lse"] else out


def _agree(
    check: Callable[[], _Asked], group: ProcessGroup, validate: bool
) -> tuple[_Asked, tuple[int, ...], Agreement | None]:
    """What this rank asks for, and the lengths of all shards: as the ranks agree, or, with the agreement that is still
    under way, as they agreed last."""
    agreed = _agreed.get(group)
    if agreed is not None and not validate:
        asked = check()
        return asked, _lengths_now(agreed, asked.q.shape[1], group.rank()), None
    asked, refusal, request, rows = None, None, {}, 0
    try:
        asked = check()
        request, rows = _request(asked), asked.q.shape[1]
    except (TypeError, ValueError) as error:
        refusal = error
    agreement = Agreement(request, rows, refusal, group)
    # Mostly all is as in the last call: then the shard's own attention need not wait for the other ranks. It waits with
    # dropout, whose seed is sent first, and on a rank without rows, which has nothing to compute.
    if asked and agreed and agreed[group.rank()] == rows and asked.q.numel() and asked.call.dropout_p == 0.0:
        return asked, agreed, agreement
    _agreed[group] = agreement.lengths()
    return asked, _agreed[group], None


def _lengths_now(agreed: tuple[int, ...], rows: int, rank: int) -> tuple[int, ...]:
    # Without validation.
    if agreed[rank] == rows:
        return agreed
    if len(set(agreed)) > 1:  # this rank cannot know how many rows the others have now
        raise ValueError(
            f"validate must be True where shards of unequal length change: this rank's had {agreed[rank]} rows in the "
            f"last validated call, and has {rows}"
        )
    return (rows,) * len(agreed)


def _begin_early(asked: _Asked, lengths: tuple[int, ...], agreement: Agreement) -> tuple[Tensor, Tensor]:
    """The ring under the lengths last agreed upon: the shard's own attention begins while the agreement is under way,
    and begins again if it brings other lengths. Nothing is sent before."""

    def confirm() -> None:
        _agreed[asked.group] = agreement.lengths()
        if _agreed[asked.group] != lengths:
            raise _OtherLengths

    with suppress(_OtherLengths):
        try:
            return _run(asked, lengths, confirm)
        except Exception:
            confirm()  # other ranks may wait for this one's request, which may differ and be why it failed
            raise
    # After the exception is gone, and with it what was computed in vain.
    return _run(asked, _agreed[asked.group])


class _OtherLengths(Exception):
    """Shards are not as long as in the last call; `_agreed` has their lengths."""


def _run(asked: _Asked, lengths: tuple[int, ...], confirm: Callable[[], None] = lambda: None) -> tuple[Tensor, Tensor]:
    # Output and lse; `confirm` is called before anything of the exchange is sent.
    q, k, call, group = asked.q, asked.k, asked.call, asked.group
    sizes = {"batch": q.shape[0], "heads": q.shape[2], "kv_heads": k.shape[2], "head_dim": q.shape[3]}
    kind = {"dtype": q.dtype, "is_causal": call.is_causal, "padded": call.key_padding_mask is not None}
    kind["ordered"] = asked.kv_ordering is not None
    options = tuple((sizes | kind | asked.planning).items())
    layout = _layout(call.pattern, lengths, options, group.rank(), q.device)
    if call.dropout_p > 0.0:
        seed = torch.randint(-(2**63), 2**63 - 1, (1,), device=q.device)
        dist.broadcast(seed, group=group, group_src=0)
        call = replace(call, seed=seed)
    job = Job(layout, call, asked.backend, asked.gradient, _ordering(asked.kv_ordering, k), ref(group))
    return _Ring.apply(q, k, asked.v, job, confirm)


@cached_for_graphs(maxsize=64)
def _layout(
    pattern: DilatedPattern, lengths: tuple[int, ...], options: tuple, rank: int, device: torch.device
) -> Layout:
    plan = plan_ring(pattern, lengths, **dict(options))
    with torch.device("cpu"):  # where it is computed, whatever torch's default device is
        return layout_of(plan, rank, device)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, job: Job, confirm: Callable[[], None]) -> tuple[Tensor, Tensor]:
        out, lse, kept = passes.forward(q, k, v, job, confirm)
        # The mask and the seed too, so that autograd sees it if they are changed before the backward.
        ctx.save_for_backward(q, k, v, out, lse, job.call.key_padding_mask, job.call.seed, *kept.values())
        ctx.job, ctx.kept = job, tuple(kept)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)  # a gradient of lse would be filled with zeros, and dropped
        return out, lse

    @staticmethod
    def backward(ctx, dout: Tensor | None, _dlse: None) -> tuple[Tensor | None, ...]:
        if reason := unserved_derivative("ring_dilated_attention", (dout,)):
            raise RuntimeError(reason)
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


def _checked(q, k, v, pattern, options: dict, group: ProcessGroup, planning: tuple, validate: bool) -> _Asked:
    boolean("validate", validate)
    planning = check_planning(*planning, ranks=group.size())
    if reason := unserved_derivative("ring_dilated_attention", (q, k, v)):
        raise TypeError(reason)
    spec, backend = options["kv_ordering"], options["backend"]
    given, call = validated(q, k, v, check_dilated(pattern), **options | {"kv_ordering": _ordering(spec, k)})
    q, k, v, *_ = given
    if backend != "auto" and (reason := BACKENDS[backend].refusal(q, call)):
        raise ValueError(f"backend={backend!r} {reason}")
    return _Asked(q, k, v, call, spec, backend, needs_gradient(q, k, v), planning, group)


def checked_spec(spec: object) -> OrderingSpec | None:
    """The argument kv_ordering of a ring, if it is an OrderingSpec or None."""
    if spec is not None and not isinstance(spec, OrderingSpec):
        raise TypeError(f"kv_ordering must be an OrderingSpec or None, got {type(spec).__name__}")
    return spec


def _ordering(spec: OrderingSpec | None, k: Tensor) -> Ordering | None:
    refuse_tracers(k)  # as the first who reads a size
    spec = checked_spec(spec)
    has_rows = isinstance(k, Tensor) and not k.is_nested and k.dim() > 1 and k.shape[1]  # k itself is checked elsewhere
    return spec.ordering(k.shape[1]) if spec is not None and has_rows else None


def _request(asked: _Asked) -> dict[str, str]:
    # What all ranks must agree on, in words.
    options = vars(asked.call) | asked.planning
    options |= {"kv_ordering": asked.kv_ordering, "backend": asked.backend, "requires_grad": asked.gradient}
    return in_words(asked.q, asked.k, options)
