"""The public function on grids: validation, choice of the backend, and the same words for both as along a sequence."""

from torch import Tensor

from hilbert_lib.attention.api import as_cast, check_mask, check_scale, check_tensors, dtype_in_words
from hilbert_lib.attention.choice import Explanation, explained, first_that_serves
from hilbert_lib.attention.failures import compiling, first_that_compiles
from hilbert_lib.attention.grids import operators
from hilbert_lib.attention.grids.registry import BACKENDS
from hilbert_lib.attention.grids.request import Request, Tensors
from hilbert_lib.attention.rules import Rule
from hilbert_lib.checks import boolean, dense_tensor, one_of, suggesting, unscripted
from hilbert_lib.grid import Neighbourhood
from hilbert_lib.ordering import Ordering

MEASURED = "256 x 256 and 30 x 48 x 80 cells on an H100, reports/HISTORY.md"
BY_ROW = Rule(("hopper", "triton", "flex", "eager"), f"boxes on an H100 (notebook 08); others {MEASURED}")
ON_GPU, COMPACT = Rule(("triton", "flex", "eager"), MEASURED), Rule(("flex", "triton", "eager"), MEASURED)
ON_CPU = Rule(("eager",), "the only one for a CPU that is not interpreted")
CURVES = ("hilbert", "morton", "tile")  # orders whose blocks are compact
ROWS = ("linear", "raster")  # orders that leave tokens row by row


@unscripted
@suggesting
def neighbourhood_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    neighbourhood: Neighbourhood | tuple[Neighbourhood, ...],
    *,
    ordering: Ordering | None = None,
    scale: float | None = None,
    extra_k: Tensor | None = None,
    extra_v: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    extra_padding_mask: Tensor | None = None,
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of each cell of a grid of 1 to 3 axes over a window around it (Hassani et al., arXiv 2204.07143).

    Differentiable once in q, k, v and the extra keys, by autograd and not by torch.func. A query without keys has
    output 0 and lse -inf. An ordering changes where tokens lie, and never which keys a query sees. What a backend
    cannot read as it lies in memory is copied once.

    Args:
        q: (batch, seq, heads, head_dim), head_dim 1 to 256, one row for each cell of the grid.
        k, v: (batch, seq, kv_heads, head_dim); kv_heads divides heads.
        neighbourhood: which cells a query sees; or a tuple of one for each KV head, which differ in window alone.
        ordering: in which order q, k, v, the masks, out and lse are stored; None, the default, row by row.
        scale: factor of the scores, finite and above 0; by default head_dim ** -0.5.
        extra_k, extra_v: (batch, extra, kv_heads, head_dim), keys that every query sees besides: text, registers.
        key_padding_mask: (batch, seq) bool, True = no weight.
        extra_padding_mask: (batch, extra) bool, True = no weight.
        backend: "auto", or one that must serve: see `explain_backend`.
        return_lse: whether to return lse too.

    Returns:
        out (batch, seq, heads, head_dim) in q's dtype; with return_lse also lse (batch, heads, seq), float32 (float64
        for float64), detached. Of standard normal q and k, lse is off by at most 4e-15 in float64 and 2e-6 in other
        dtypes, measured on CPUs and an H100.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is allowed; also where an explicit backend
            cannot serve the call.

    >>> import torch
    >>> x = torch.ones(1, 6, 1, 2)
    >>> neighbourhood_attention(x, x, x, Neighbourhood((2, 3), 2)).shape
    torch.Size([1, 6, 1, 2])
    """
    boolean("return_lse", return_lse)
    given, request = validated(
        q, k, v, neighbourhood, ordering=ordering, scale=scale, extra_k=extra_k, extra_v=extra_v, backend=backend,
        key_padding_mask=key_padding_mask, extra_padding_mask=extra_padding_mask,
    )  # fmt: skip
    out, lse = first_that_compiles(
        lambda: choose(given, request, backend),
        lambda chosen: operators.forward(given, request, chosen),
        backend,
        level=3,
    )
    return (out, lse) if return_lse else out


def choose(given: Tensors, request: Request, backend: str) -> str:
    """The backend that serves a call: the one asked for or the first by rule; ValueError if it cannot."""
    chosen = first_that_serves(given.q, request, _order(given.q, request, backend), BACKENDS)
    if not chosen:
        reasons = explain(given, request, backend).reasons
        told = reasons.get(backend) or ", ".join(f"{name} {reason}" for name, reason in reasons.items())
        raise ValueError(f"backend={backend!r} {told}; see explain_backend")
    return chosen


def explain(given: Tensors, request: Request, backend: str) -> Explanation:
    """Which backend serves a call on a grid, and why not the others."""
    chosen = first_that_serves(given.q, request, _order(given.q, request, backend), BACKENDS)
    return explained(operators.FUNCTION, given.q, request, backend, chosen, _rule(given.q, request), BACKENDS)


def _rule(q: Tensor, request: Request) -> Rule:
    if not q.is_cuda:
        return ON_CPU
    if q.element_size() != 2:
        return ON_GPU
    if request.ordering is None:
        return BY_ROW
    return COMPACT if request.ordering.kind in CURVES else ON_GPU


def _order(q: Tensor, request: Request, backend: str) -> tuple[str, ...]:
    return compiling(operators.FUNCTION, _rule(q, request).order, q) if backend == "auto" else (backend,)


def validated(
    q, k, v, neighbourhood, *, ordering=None, scale=None, extra_k=None, extra_v=None, key_padding_mask=None,
    extra_padding_mask=None, backend="auto", return_lse=False, held: tuple[int, str] | None = None,
) -> tuple[Tensors, Request]:  # fmt: skip
    """The arguments of `neighbourhood_attention`, checked: tensors as autocast casts them, and the rest.

    held: if they are not of the whole grid, of how many cells, and in words of which.
    """
    boolean("return_lse", return_lse)
    k_given = k
    q, k, v = check_tensors(q, k, v)
    near = by_kv_head(neighbourhood, k.shape[2])
    seq, whose = held or (near[0].length, f"the grid {near[0].shape}")
    if q.shape[1] != seq or k.shape[1] != seq:
        name, x = ("q", q) if q.shape[1] != seq else ("k", k)
        raise ValueError(f"{name} must have the {seq} cells of {whose}, got shape {tuple(x.shape)}")
    scale = check_scale(q.shape[3] ** -0.5 if scale is None else scale, q.dtype)
    if extra_padding_mask is not None and extra_k is None:
        raise ValueError("extra_padding_mask must be None where extra_k is None, got a mask")
    extra_k, extra_v = _checked_extra(k, dtype_in_words(k_given, k), extra_k, extra_v)
    check_mask("key_padding_mask", key_padding_mask, k)
    check_mask("extra_padding_mask", extra_padding_mask, extra_k)
    extra_padding_mask = extra_padding_mask if extra_k.shape[1] else None
    if backend != "auto":
        one_of("backend", backend, ("auto", *BACKENDS))
    if ordering is not None:
        if not isinstance(ordering, Ordering):
            raise TypeError(f"ordering must be an Ordering, or None for row by row; got {ordering!r}")
        if ordering.length != seq:
            raise ValueError(f"ordering must have the {seq} cells of the grid, got {ordering!r}")
        ordering = None if ordering.kind in ROWS else ordering
    return Tensors(q, k, v, extra_k, extra_v), Request(near, scale, ordering, key_padding_mask, extra_padding_mask)


def by_kv_head(given: Neighbourhood | tuple[Neighbourhood, ...], kv_heads: int) -> tuple[Neighbourhood, ...]:
    """The neighbourhood of each KV head, which may differ in window alone."""
    each = tuple(given) if isinstance(given, tuple | list) else (given,) * kv_heads
    for one in each:
        if not isinstance(one, Neighbourhood):
            raise TypeError(f"neighbourhood must be a Neighbourhood, or a tuple of one for each KV head; got {one!r}")
    if len(each) != kv_heads:
        raise ValueError(f"neighbourhood must hold one for each of the {kv_heads} KV heads, got {len(each)}")
    if len({(one.shape, one.dilation, one.stride, one.is_causal, one.edge) for one in each}) > 1:
        raise ValueError(f"neighbourhood must hold ones that differ in window alone, got {each}")
    return each


def _checked_extra(k: Tensor, k_dtype: str, extra_k: Tensor | None, extra_v: Tensor | None) -> tuple[Tensor, Tensor]:
    # k_dtype: in words, for errors.
    if extra_k is None and extra_v is None:
        none = k.new_empty(k.shape[0], 0, *k.shape[2:])
        return none, none
    for name, x in (("extra_k", extra_k), ("extra_v", extra_v)):
        if x is None:
            raise TypeError(f"{name} must be a tensor where the other of extra_k and extra_v is, got None")
        dense_tensor(name, x)
        if x.dim() != 4 or (x.shape[0], *x.shape[2:]) != (k.shape[0], *k.shape[2:]) or x.shape != extra_k.shape:
            allowed = f"(batch, extra, kv_heads, head_dim) with k's {k.shape[0]}, {k.shape[2]} and {k.shape[3]}"
            raise ValueError(f"{name} must be {allowed}, and extra_v like extra_k; got shape {tuple(x.shape)}")
        if x.device != k.device:
            raise ValueError(f"{name} must be on the device of k ({k.device}), got {x.device}")
    cast = [as_cast(x) for x in (extra_k, extra_v)]
    for name, given, x in (("extra_k", extra_k, cast[0]), ("extra_v", extra_v, cast[1])):
        if x.dtype != k.dtype:
            raise TypeError(f"{name} must have the dtype of k ({k_dtype}), got {dtype_in_words(given, x)}")
    return cast[0], cast[1]
