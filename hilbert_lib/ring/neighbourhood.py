"""Neighbourhood attention on a grid that is spread over ranks, as users call it."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from hilbert_lib.attention import operators
from hilbert_lib.attention.api import check_neighbourhood, neighbourhood_attention
from hilbert_lib.attention.choice import serving
from hilbert_lib.attention.request import GridPart, Request, Tensors
from hilbert_lib.attention.transforms import unserved_derivative
from hilbert_lib.attention.validation import needs_gradient, validated
from hilbert_lib.checks import boolean, suggesting, unscripted
from hilbert_lib.graph_cache import cached_for_graphs
from hilbert_lib.internals import untraced
from hilbert_lib.ordering import Ordering
from hilbert_lib.patterns.neighbourhood import Neighbourhood
from hilbert_lib.ring.agreement import Agreement, in_words, resolved
from hilbert_lib.ring.attention import uncompiled
from hilbert_lib.ring.plan.balance import shard_lengths_for
from hilbert_lib.ring.plan.halo import Shards, check_shards, plan_halo
from hilbert_lib.ring.plan.shards import Rectangles, Runs
from hilbert_lib.ring.rank import halo
from hilbert_lib.ring.rank.halo import HaloJob, HaloLayout


@untraced  # torch.compile cannot trace collectives that are waited for later
@unscripted
@suggesting
def ring_neighbourhood_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    neighbourhood: Neighbourhood | tuple[Neighbourhood, ...],
    *,
    shards: Shards | None = None,
    ordering: Ordering | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
    scale: float | None = None,
    extra_k: Tensor | None = None,
    extra_v: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    extra_padding_mask: Tensor | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    validate: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact `neighbourhood_attention` on a grid whose parts lie on the ranks of a group.

    Only rows of k and v that the windows of other ranks reach travel, each once to each rank (`plan_halo` shows which),
    while queries that see own keys alone are computed. All ranks must call it, and where gradients are needed all must
    run the backward. Over NCCL set TORCH_NCCL_HIGH_PRIORITY=1 before the group is made, as `run_ranks` does. A CUDA
    graph captures a call of a kind that has run; ranks then compare their arguments at the capture alone.

    Args:
        q: (batch, rows, heads, head_dim), the cells of this rank as it stores them; there may be none.
        k, v: (batch, rows, kv_heads, head_dim), of the same cells.
        neighbourhood: which cells a query sees, on the whole grid; or a tuple, as in `neighbourhood_attention`.
        shards: which cells each rank holds: `Rectangles` or `Runs`; by default `Rectangles.compact`, which are 2 x 2 of
            a square on 4 ranks.
        ordering: instead of shards: each rank holds a run of its slots, as many as `shard` gives it.
        group: the ranks, as a process group or a 1-D DeviceMesh; by default all.
        scale, backend, return_lse: as in `neighbourhood_attention`.
        extra_k, extra_v, extra_padding_mask: likewise, the same on all ranks; each rank's gradients of them are those
            of its own queries.
        key_padding_mask: (batch, rows) bool, True = no weight, of this rank's cells.
        validate: whether ranks compare their arguments before they send anything: if these differ, all raise.

    Returns:
        out like q, for this rank's queries; with return_lse also lse (batch, heads, rows), detached.

    Raises:
        TypeError, ValueError: as `neighbourhood_attention` and `plan_halo`. With validate, an error on one rank is
            raised on all, and mismatched arguments are named.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> x = torch.ones(1, 6, 1, 2)
    >>> ring_neighbourhood_attention(x, x, x, Neighbourhood((2, 3), 2)).shape
    torch.Size([1, 6, 1, 2])
    >>> dist.destroy_process_group()
    """
    options = {"scale": scale, "extra_k": extra_k, "extra_v": extra_v, "key_padding_mask": key_padding_mask}
    options |= {"extra_padding_mask": extra_padding_mask, "backend": backend, "return_lse": return_lse}
    return uncompiled(_attend)(q, k, v, neighbourhood, shards, ordering, options, group, validate)


class _Asked(NamedTuple):
    """What one rank asks for, checked."""

    given: Tensors
    request: Request
    shards: Shards
    backend: str


def _attend(q, k, v, neighbourhood, shards, ordering, options, group, validate) -> Tensor | tuple[Tensor, Tensor]:
    group = resolved(group)
    if group.size() == 1:
        boolean("validate", validate)
        shards = spread(shards, ordering, neighbourhood, 1)
        order = shards.ordering if isinstance(shards, Runs) else None
        return neighbourhood_attention(q, k, v, neighbourhood, ordering=order, **options)
    asked, refusal, words, confirm = None, None, {}, lambda: None
    try:
        boolean("validate", validate)
        asked = _checked(q, k, v, neighbourhood, spread(shards, ordering, neighbourhood, group.size()), options, group)
        words = _words(asked, options["backend"]) if validate else {}
    except (TypeError, ValueError) as error:
        if not validate:
            raise
        refusal = error
    if validate:
        confirm = Agreement(words, 0, refusal, group).lengths
    if refusal:
        confirm()  # which raises it
    try:
        out, lse = _run(asked, group, confirm)
    except Exception:
        confirm()  # other ranks may wait for this one's request, which may differ and be why it failed
        raise
    return (out, lse) if options["return_lse"] else out


def spread(shards: object, ordering: object, neighbourhood: object, ranks: int | None) -> Shards:
    """How the cells are spread over so many ranks, if known, by arguments of `ring_neighbourhood_attention`."""
    if shards is not None and ordering is not None:
        raise ValueError("ordering must be None where shards are given: Runs have an ordering of their own")
    if ordering is not None:
        shards = _runs(ordering, ranks) if isinstance(ordering, Ordering) else Runs(ordering, ())  # which refuses it
    near = neighbourhood[0] if isinstance(neighbourhood, tuple | list) and neighbourhood else neighbourhood
    shape = check_neighbourhood(near).shape
    shards = Rectangles.compact(shape, ranks) if shards is None else check_shards(shards)
    shards.check(shape)
    if ranks is not None and shards.ranks != ranks:
        raise ValueError(f"shards must be those of {ranks} ranks, got {shards}")
    return shards


@lru_cache(maxsize=64)
def _runs(ordering: Ordering, ranks: int) -> Runs:
    return Runs(ordering, shard_lengths_for(ordering.length, ranks))


def _checked(q, k, v, neighbourhood, shards: Shards, options: dict, group: ProcessGroup) -> _Asked:
    near = neighbourhood[0] if isinstance(neighbourhood, tuple | list) else neighbourhood
    rank = group.rank()
    held = shards.count(near.shape, rank), f"rank {rank} in {shards}"
    given, request = validated(q, k, v, check_neighbourhood(neighbourhood), held=held, **options)
    if reason := unserved_derivative("ring_neighbourhood_attention", given):
        raise TypeError(reason)
    whole = tuple(map(range, near.shape))
    # Refuse what no rank can do.
    _backend(given, replace(request, part=GridPart(whole, whole, whole)), options["backend"])
    asked = _Asked(given, request, shards, options["backend"])
    if asked.backend != "auto" and q.shape[0]:
        _job(asked, group)  # it may refuse this rank's parts alone, which all ranks have to hear
    return asked


def _words(asked: _Asked, backend: str) -> dict[str, str]:
    # What all ranks must agree on.
    given, request = asked.given, asked.request
    options = {name: getattr(request, name) for name in ("scale", "key_padding_mask", "extra_padding_mask")}
    each = request.neighbourhoods
    options["neighbourhood"] = each if len(set(each)) > 1 else each[0]
    options |= {"shards": asked.shards, "backend": backend}
    options |= {"extra_k": tuple(given.extra_k.shape), "requires_grad": needs_gradient(*given)}
    return in_words(given.q, given.k, options)


def _run(asked: _Asked, group: ProcessGroup, confirm: Callable[[], None]) -> tuple[Tensor, Tensor]:
    if not asked.given.q.shape[0]:  # nothing to compute, and nothing to send
        confirm()
        return operators.forward(asked.given, asked.request, "eager")
    return _Halo.apply(*asked.given, _job(asked, group), confirm)


def _job(asked: _Asked, group: ProcessGroup) -> HaloJob:
    given, request = asked.given, asked.request
    batch, _, heads, head_dim = given.q.shape
    sizes = {"batch": batch, "heads": heads, "kv_heads": given.k.shape[2], "head_dim": head_dim}
    sizes = tuple((sizes | {"dtype": given.q.dtype}).items())
    layout = _layout(request.neighbourhoods, asked.shards, sizes, group.rank(), given.q.device)
    parts = (layout.interior, None), *((border.part, border.slots) for border in layout.borders)
    names = [_backend(given, replace(request, part=part, slots=slots), asked.backend) for part, slots in parts]
    return HaloJob(layout, request, names[0], tuple(names[1:]), ref(group))


def _backend(given: Tensors, request: Request, asked: str) -> str:
    return serving(given.q, request, asked, gradient=needs_gradient(*given)) if request.part else ""


@cached_for_graphs(maxsize=64)
def _layout(neighbourhoods: tuple, shards: Shards, sizes: tuple, rank: int, device: torch.device) -> HaloLayout:
    return halo.layout_of(plan_halo(neighbourhoods, shards, **dict(sizes)), rank, device)


class _Halo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *args) -> tuple[Tensor, Tensor]:
        *given, job, confirm = args
        out, lse, received, padding = halo.forward(Tensors(*given), job, confirm)
        # The masks too, so that autograd sees it if they are changed before the backward.
        masks = job.request.key_padding_mask, job.request.extra_padding_mask
        ctx.save_for_backward(*given, out, lse, received, padding, *masks)
        ctx.job = job
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)  # a gradient of lse would be filled with zeros, and dropped
        return out, lse

    @staticmethod
    def backward(ctx, dout: Tensor | None, _dlse: None) -> tuple[Tensor | None, ...]:
        if reason := unserved_derivative("ring_neighbourhood_attention", (dout,)):
            raise RuntimeError(reason)
        *given, out, lse, received, padding, _, _ = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout  # the others need this rank all the same
        return *_Once.apply(dout, *given, out, lse, ctx.job, received, padding), None, None


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, dout: Tensor, *args) -> tuple[Tensor, ...]:
        return tuple(halo.backward(dout, Tensors(*args[:5]), *args[5:]))

    @staticmethod
    def backward(ctx, *_grads: Tensor) -> None:
        raise RuntimeError("ring_neighbourhood_attention can be differentiated once; it has no second derivative")
