"""Attention of tokens that are spread over ranks, as users call it: `ring_attend`, and a door for each kind of pattern.

arguments -> checked -> agreement of all ranks -> rows of other ranks arrive -> out, lse
                     -> attention over own tokens, meanwhile                 ->
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from hilbert_lib.attention import operators
from hilbert_lib.attention.api import UNSERVED, check_neighbourhood, computed
from hilbert_lib.attention.autograd import needs_gradient
from hilbert_lib.attention.dtensors import LocalCall, local_call
from hilbert_lib.attention.joint import extra_attention, joint_call, joint_refusal
from hilbert_lib.attention.request import BIAS, Request, Tensors
from hilbert_lib.attention.transforms import is_dtensor, uncompiled, unserved_derivative
from hilbert_lib.attention.validation import as_cast, validated
from hilbert_lib.checks import boolean, suggesting, unscripted
from hilbert_lib.internals import untraced
from hilbert_lib.ordering import Ordering, OrderingSpec
from hilbert_lib.patterns.dilated import DilatedPattern, check_dilated
from hilbert_lib.patterns.neighbourhood import HeadNeighbourhoods, Neighbourhood
from hilbert_lib.patterns.pattern import Pattern
from hilbert_lib.patterns.union import Union
from hilbert_lib.ring.agreement import Agreement, in_words, resolved
from hilbert_lib.ring.plan.halo import Shards
from hilbert_lib.ring.points import PointShard
from hilbert_lib.ring.rank.call import RankCall, agreed_already, by_pattern
from hilbert_lib.ring.rank.joint import merged_over_ranks, without_extra_keys
from hilbert_lib.ring.spread import (
    DEFAULTS,
    GridSpread,
    PointSpread,
    SequenceSpread,
    Spread,
    check_served,
    spread_of,
)

APART = (*BIAS, "lists")  # fields of a request that have words of their own, or differ
_agreed: "WeakKeyDictionary[ProcessGroup, tuple[int, ...]]" = WeakKeyDictionary()  # lengths of the last validated call


@untraced  # torch.compile cannot trace collectives that are waited for later
@unscripted
@partial(suggesting, unserved=UNSERVED)
def ring_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: DilatedPattern | Neighbourhood | Union | PointShard | tuple[Neighbourhood, ...],
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    key_padding_mask: Tensor | None = None,
    kv_ordering: OrderingSpec | None = None,
    transport: str = "auto",
    weights: Sequence[float] | None = None,
    memory_limit: int | None = None,
    shards: Shards | None = None,
    ordering: Ordering | None = None,
    extra_q: Tensor | None = None,
    extra_k: Tensor | None = None,
    extra_v: Tensor | None = None,
    extra_padding_mask: Tensor | None = None,
    bias: Tensor | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    validate: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact `attend` of tokens that are spread over the ranks of a group: a sequence, the cells of a grid, or points.

    Only rows of k and v that other ranks' queries see travel. All ranks must call it, and where gradients are needed
    all must run the backward. On one rank it is `attend`. The patterns of a `Union` are computed one after the other,
    and merged by lse. Tensors may also be DTensors as for `attend`, whose mesh has one rank of the group.

    Args:
        q: (batch, rows, heads, head_dim), this rank's tokens; there may be none.
        k, v: (batch, rows, kv_heads, head_dim), of the same tokens.
        pattern: which keys a query sees, over all tokens: a `DilatedPattern`, a `Neighbourhood` or a tuple of one for
            each KV head, a `Union` of several, or a `PointShard` of this rank's points.
        group: the ranks, as a process group or a 1-D DeviceMesh; by default all. Of points the group that the
            `PointShard` was made with.
        scale, backend, return_lse: as for `attend`; along a sequence all ranks ask for lse, or none.
        key_padding_mask: (batch, rows) bool, True = no weight, of this rank's tokens.
        is_causal, dropout_p, kv_ordering, transport, weights: for sequences alone, as in `ring_dilated_attention`.
        memory_limit: likewise, and not for a `Union`.
        extra_q, extra_k, extra_v, extra_padding_mask: for grids and points, as in `ring_neighbourhood_attention`.
        shards, ordering, bias: for grids alone, likewise. A `Union` takes no bias.
        validate: whether ranks compare their arguments before they send anything, as in these two.

    Returns:
        out like q, for this rank's queries; with return_lse also lse (batch, heads, rows), differentiable.

    Raises:
        TypeError, ValueError: as `attend`, `plan_ring` and `plan_halo`; for a pattern that no ring serves; for
            an option that this kind does not take. With validate, an error on one rank is raised on all, and
            mismatched arguments are named.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> x = torch.ones(1, 6, 1, 2)
    >>> near_and_far = Union((Neighbourhood((2, 3), 2), Neighbourhood((2, 3), (1, 3))))
    >>> ring_attend(x, x, x, near_and_far).shape
    torch.Size([1, 6, 1, 2])
    >>> dist.destroy_process_group()
    """
    door = _Door("ring_attend", spread_of(pattern), check_served)
    return uncompiled(_attend)(
        door,
        q,
        k,
        v,
        pattern,
        group,
        validate,
        is_causal=is_causal,
        scale=scale,
        dropout_p=dropout_p,
        key_padding_mask=key_padding_mask,
        kv_ordering=kv_ordering,
        transport=transport,
        weights=weights,
        memory_limit=memory_limit,
        shards=shards,
        ordering=ordering,
        extra_q=extra_q,
        extra_k=extra_k,
        extra_v=extra_v,
        extra_padding_mask=extra_padding_mask,
        bias=bias,
        backend=backend,
        return_lse=return_lse,
    )


@untraced  # torch.compile cannot trace collectives that are waited for later
@unscripted
@partial(suggesting, unserved=UNSERVED)
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
        is_causal, scale, return_lse: as for `dilated_attention`; all ranks ask for lse, or none.
        dropout_p: likewise; the mask is that of a single rank with the first rank's seed.
        key_padding_mask: (batch, rows) bool, True = no weight, for this shard in sequence order.
        kv_ordering: the recipe in which each shard of k and v is stored, for the shard's own length.
        backend: as for `dilated_attention`. "hopper" is refused on all ranks where it does not serve some part of one;
            "auto" chooses for each part.
        validate: whether ranks compare their arguments before they send anything: if these differ, all raise. The
            shard's own attention runs meanwhile, unless its length is new or there is dropout; if another shard's
            length is new, it begins again. False omits the comparison after a group's first call. Shards must then be
            as long as in the last validated call or, if they were equally long, all of one other length.

    Returns:
        out like q, for this rank's queries; with return_lse also lse (batch, heads, rows), differentiable.

    Raises:
        TypeError, ValueError: as `dilated_attention` and `plan_ring`. With validate, an error on one rank is raised on
            all, and mismatched arguments are named.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> q = k = v = torch.ones(1, 8, 2, 4)
    >>> ring_dilated_attention(q, k, v, DilatedPattern((4, 8), (1, 2))).shape
    torch.Size([1, 8, 2, 4])
    >>> dist.destroy_process_group()
    """
    door = _Door("ring_dilated_attention", SequenceSpread, partial(check_dilated, prefix="ring_"))
    return uncompiled(_attend)(
        door,
        q,
        k,
        v,
        pattern,
        group,
        validate,
        is_causal=is_causal,
        scale=scale,
        dropout_p=dropout_p,
        key_padding_mask=key_padding_mask,
        kv_ordering=kv_ordering,
        transport=transport,
        weights=weights,
        memory_limit=memory_limit,
        backend=backend,
        return_lse=return_lse,
    )


@untraced  # torch.compile cannot trace collectives that are waited for later
@unscripted
@partial(suggesting, unserved=UNSERVED)
def ring_neighbourhood_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    neighbourhood: Neighbourhood | tuple[Neighbourhood, ...] | PointShard,
    *,
    shards: Shards | None = None,
    ordering: Ordering | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
    scale: float | None = None,
    extra_q: Tensor | None = None,
    extra_k: Tensor | None = None,
    extra_v: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    extra_padding_mask: Tensor | None = None,
    bias: Tensor | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    validate: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact `neighbourhood_attention` on a grid whose parts lie on the ranks of a group, or over points on these ranks.

    Only rows of k and v that the windows of other ranks reach travel, each once to each rank (`plan_halo` shows which),
    while queries that see own keys alone are computed. All ranks must call it, and where gradients are needed all must
    run the backward. Over NCCL set TORCH_NCCL_HIGH_PRIORITY=1 before the group is made, as `run_ranks` does. A CUDA
    graph captures a call of a kind that has run; ranks then compare their arguments at the capture alone.

    Args:
        q: (batch, rows, heads, head_dim), the cells of this rank as it stores them; there may be none.
        k, v: (batch, rows, kv_heads, head_dim), of the same cells.
        neighbourhood: which cells a query sees, on the whole grid; or a tuple, as in `neighbourhood_attention`; or a
            `PointShard` of this rank's points, which takes no shards, ordering and bias.
        shards: which cells each rank holds: `Rectangles` or `Runs`; by default `Rectangles.compact`, which are 2 x 2 of
            a square on 4 ranks.
        ordering: instead of shards: each rank holds a run of its slots, as many as `shard` gives it.
        group: the ranks, as a process group or a 1-D DeviceMesh; by default all.
        scale, backend, return_lse: as in `neighbourhood_attention`.
        extra_q: likewise, the same on all ranks. Each rank computes them over its own cells; these results travel, and
            are merged by lse. Each rank's gradients of extra_q are those of its own cells: their sum over the ranks is
            the gradient. All ranks run the backward of the extra results, or none does. The loss is the sum of the
            ranks' losses: one of extra_out that every rank computes counts once for each.
        extra_k, extra_v, extra_padding_mask, bias: likewise, the same on all ranks. Each rank's gradients of them are
            those of its own queries: sum them over the ranks. One rank adds those of the extra queries.
        key_padding_mask: (batch, rows) bool, True = no weight, of this rank's cells.
        validate: whether ranks compare their arguments before they send anything: if these differ, all raise.

    Returns:
        out like q, for this rank's queries; with return_lse also lse (batch, heads, rows), differentiable. With extra_q
        as `neighbourhood_attention`; extra_out and extra_lse are the same on all ranks.

    Raises:
        TypeError, ValueError: as `neighbourhood_attention` and `plan_halo`. With validate, an error on one rank is
            raised on all, and mismatched arguments are named.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> x = torch.ones(1, 6, 1, 2)
    >>> ring_neighbourhood_attention(x, x, x, Neighbourhood((2, 3), 2)).shape
    torch.Size([1, 6, 1, 2])
    >>> dist.destroy_process_group()
    """
    is_of_points = isinstance(neighbourhood, PointShard)
    check = check_served if is_of_points else partial(check_neighbourhood, prefix="ring_")
    door = _Door("ring_neighbourhood_attention", PointSpread if is_of_points else GridSpread, check)
    return uncompiled(_attend)(
        door,
        q,
        k,
        v,
        neighbourhood,
        group,
        validate,
        scale=scale,
        key_padding_mask=key_padding_mask,
        shards=shards,
        ordering=ordering,
        extra_q=extra_q,
        extra_k=extra_k,
        extra_v=extra_v,
        extra_padding_mask=extra_padding_mask,
        bias=bias,
        backend=backend,
        return_lse=return_lse,
    )


class _Door(NamedTuple):
    """One of the functions that users call."""

    function: str  # its name, as errors say it
    spread: type[Spread]  # of the kind of pattern that it serves
    check_pattern: Callable[[object], Pattern]


class _CheckedCall(NamedTuple):
    """A call of one rank, checked."""

    function: str
    tensors: Tensors
    request: Request
    spread: Spread
    backend: str
    group: ProcessGroup
    extra_q: Tensor | None
    of_dtensors: LocalCall | None  # where the arguments are DTensors

    def results(self, *results: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The results as the user gets them: one or several, DTensors where the arguments are."""
        if self.of_dtensors:
            results = self.of_dtensors.as_dtensors(results)
        return results if len(results) > 1 else results[0]


def _attend(door: _Door, q, k, v, pattern, group, validate, **options) -> Tensor | tuple[Tensor, ...]:
    """The call: options are those of `attend`, and of how tokens are spread."""
    options = DEFAULTS | {"ordering": None, "kv_ordering": None} | options
    group = resolved(group)
    if group.size() == 1:
        boolean("validate", validate)
        pattern, spread, options = _spread(door, pattern, options, 1)
        return computed(q, k, v, pattern, **options | spread.for_whole(k))
    check = partial(_checked, door, q, k, v, pattern, options, group, validate)
    call, lengths, agreement = _agree(door, check, group, validate)
    out, lse = _begin_early(call, lengths, agreement) if agreement else _run(call, lengths)
    if call.extra_q is None:
        return call.results(out, lse) if options["return_lse"] else call.results(out)
    holder = next((rank for rank, count in enumerate(lengths) if count), 0)  # which computes the extra keys, too
    inputs, request = call.tensors, call.request
    if group.rank() != holder:
        inputs, request = without_extra_keys(inputs, request)
    joint = extra_attention(call.extra_q, inputs, request, call.backend, return_lse=True, level=5)
    extra_out, extra_lse = merged_over_ranks(joint.out, joint.lse, group)
    return call.results(out, lse, extra_out, extra_lse) if options["return_lse"] else call.results(out, extra_out)


def _spread(door: _Door, pattern: object, options: dict, ranks: int) -> tuple[Pattern, Spread, dict]:
    """The pattern, how its tokens are spread over so many ranks, and the options of `attend`."""
    pattern = door.check_pattern(pattern)
    spread = door.spread.checked(pattern, options, ranks)
    return pattern, spread, {name: value for name, value in options.items() if name not in DEFAULTS}


def _checked(door: _Door, q, k, v, pattern, options: dict, group: ProcessGroup, validate: bool) -> _CheckedCall:
    boolean("validate", validate)
    pattern, spread, options = _spread(door, pattern, options, group.size())
    of_dtensors = None
    if any(map(is_dtensor, (q, k, v, *options.values()))):
        of_dtensors = local_call({"q": q, "k": k, "v": v}, pattern, options, dist.get_process_group_ranks(group))
        (q, k, v), pattern, options = of_dtensors.tensors, of_dtensors.pattern, of_dtensors.options
    tensors, request = validated(q, k, v, pattern, **options | spread.for_shard(k, group.rank()))
    if reason := unserved_derivative(door.function, tensors):
        raise TypeError(reason)
    backend, extra_q = options["backend"], options.get("extra_q")
    spread.check_backend(tensors, request, backend, group)
    if extra_q is not None:
        extra_q = as_cast(extra_q)
        if backend != "auto" and (refused := joint_refusal(*joint_call(extra_q, tensors, request), backend)):
            raise ValueError(f"backend={backend!r} {refused}")
    return _CheckedCall(door.function, tensors, request, spread, backend, group, extra_q, of_dtensors)


def _words(call: _CheckedCall) -> dict[str, str]:
    # The arguments that all ranks must agree on, in words.
    tensors, request = call.tensors, call.request
    options = {field.name: getattr(request, field.name) for field in fields(request) if field.name not in APART}
    pattern = options.pop("pattern").of_any_heads()
    is_on_grid = isinstance(pattern, Neighbourhood | HeadNeighbourhoods)
    options["neighbourhood" if is_on_grid else "pattern"] = pattern
    options |= call.spread.words
    options["extra_k"] = None if tensors.extra_k is None else tuple(tensors.extra_k.shape)
    options["bias"] = None if tensors.bias is None else f"{tensors.bias.dtype} of shape {tuple(tensors.bias.shape)}"
    options["extra_q"] = None if call.extra_q is None else tuple(call.extra_q.shape)
    options |= {"backend": call.backend, "requires_grad": needs_gradient(*tensors, call.extra_q)}
    return in_words(tensors.q, tensors.k, options)


def _agree(
    door: _Door, check: Callable[[], _CheckedCall], group: ProcessGroup, validate: bool
) -> tuple[_CheckedCall, tuple[int, ...], Agreement | None]:
    """This rank's call, and the lengths of all shards: as the ranks agree, or, with the agreement that is still under
    way, as this rank expects them."""
    agreed, rank = _agreed.get(group), group.rank()
    if not validate and (agreed is not None or not door.spread.lengths_vary):
        call = check()
        return call, call.spread.lengths_unvalidated(call.tensors, agreed, rank), None
    call, refusal, words, rows = None, None, {}, 0
    try:
        call = check()
        words, rows = _words(call), call.tensors.q.shape[1]
    except (TypeError, ValueError) as error:
        refusal = error
    agreement = Agreement(words, rows, refusal, group)
    if call:
        lengths = call.spread.expected_lengths(call.tensors, call.request, agreed, rank)
        if lengths is not None:  # the shard's own attention need not wait for the other ranks
            return call, lengths, agreement
    lengths = agreement.lengths()
    _remember(call, lengths)
    return call, lengths, None


def _remember(call: _CheckedCall, lengths: tuple[int, ...]) -> None:
    if call.spread.lengths_vary:
        _agreed[call.group] = lengths


def _begin_early(call: _CheckedCall, lengths: tuple[int, ...], agreement: Agreement) -> tuple[Tensor, Tensor]:
    """The call under the lengths that are expected: the shard's own attention begins while the agreement is under way,
    and begins again if it brings other lengths. Nothing is sent before."""

    def confirm() -> None:
        lengths_now = agreement.lengths()
        _remember(call, lengths_now)
        if lengths_now != lengths:
            raise _OtherLengths

    with suppress(_OtherLengths):
        try:
            return _run(call, lengths, confirm)
        except Exception:
            confirm()  # other ranks may wait for this one's request, which may differ and be why it failed
            raise
    # After the exception is gone, and with it what was computed in vain.
    return _run(call, agreement.lengths())


class _OtherLengths(Exception):
    """Shards are not as long as in the last call."""


def _run(
    call: _CheckedCall, lengths: tuple[int, ...], confirm: Callable[[], None] = agreed_already
) -> tuple[Tensor, Tensor]:
    # Output and lse; `confirm` is called before anything of the exchange is sent.
    tensors, request, spread, group = call.tensors, call.request, call.spread, call.group
    if not tensors.q.shape[0] or not sum(lengths):  # nothing to compute, and nothing to send
        confirm()
        return operators.attention(tensors, request, "eager")
    if request.dropout_p > 0.0:
        seed = torch.randint(-(2**63), 2**63 - 1, (1,), device=tensors.q.device)
        dist.broadcast(seed, group=group, group_src=0)
        request = replace(request, seed=seed)
    parts = list(by_pattern(tensors, request))
    jobs = tuple(
        spread.job(part_tensors, part, (number, len(parts)), call.backend, lengths, group)
        for number, (part_tensors, part) in enumerate(parts)
    )
    rank_call = RankCall(call.function, request, spread.passes, jobs)
    return _OnRanks.apply(*tensors, rank_call, confirm)


class _OnRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *args) -> tuple[Tensor, Tensor]:
        *tensors, rank_call, confirm = args
        out, lse, saved_by_pattern = rank_call.results(Tensors(*tensors), confirm)
        rows = [x for saved in saved_by_pattern for x in saved.values()]
        # The masks and the seed too, so that autograd sees it if they are changed before the backward.
        request = rank_call.request
        changing = request.key_padding_mask, request.extra_padding_mask, request.seed
        ctx.save_for_backward(*tensors, out, lse, *rows, *changing)
        ctx.rank_call, ctx.names = rank_call, [tuple(saved) for saved in saved_by_pattern]
        ctx.set_materialize_grads(False)  # a gradient of lse would be filled with zeros
        return out, lse

    @staticmethod
    def backward(ctx, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        if reason := unserved_derivative(ctx.rank_call.function, (dout, dlse)):
            raise RuntimeError(reason)
        saved_tensors = iter(ctx.saved_tensors)
        tensors = Tensors(*(next(saved_tensors) for _ in Tensors._fields))
        out, lse = next(saved_tensors), next(saved_tensors)
        saved_by_pattern = [{name: next(saved_tensors) for name in names} for names in ctx.names]
        dout = torch.zeros_like(out) if dout is None else dout  # the others need this rank all the same
        return *_Once.apply(dout, *tensors, out, lse, dlse, saved_by_pattern, ctx.rank_call), None, None


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, dout: Tensor, *args) -> tuple[Tensor | None, ...]:
        *tensors, out, lse, dlse, saved_by_pattern, rank_call = args
        ctx.function = rank_call.function
        return tuple(rank_call.gradients(dout, Tensors(*tensors), out, lse, dlse, saved_by_pattern))

    @staticmethod
    def backward(ctx, *_grads: Tensor) -> None:
        raise RuntimeError(f"{ctx.function} can be differentiated once; it has no second derivative")
