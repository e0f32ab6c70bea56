"""Attention as users call it: `attend` for every pattern, and a door for each kind."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from hilbert_lib.attention import known_calls, operators
from hilbert_lib.attention.autograd import Served, needs_gradient, served_by
from hilbert_lib.attention.choice import is_undone, serving
from hilbert_lib.attention.dtensors import local_call
from hilbert_lib.attention.failures import KernelError, first_that_compiles
from hilbert_lib.attention.joint import extra_attention
from hilbert_lib.attention.known_calls import Form, KnownCall
from hilbert_lib.attention.request import Request, Tensors
from hilbert_lib.attention.transforms import is_dtensor
from hilbert_lib.attention.validation import as_cast, as_pattern, refuse_several_points, validated
from hilbert_lib.checks import suggesting, unscripted
from hilbert_lib.ordering import Ordering, in_sequence
from hilbert_lib.patterns.dilated import DilatedPattern, check_dilated
from hilbert_lib.patterns.neighbourhood import HeadNeighbourhoods, Neighbourhood
from hilbert_lib.patterns.pattern import Pattern
from hilbert_lib.patterns.points import PointNeighbourhood

QueryBox = Sequence[tuple[int, int]]  # (start, stop) for each axis of a grid
# Arguments of other packages that no function here takes, and the reason.
NO_CAP = "no backend bounds scores by a tanh before the softmax, as Gemma2 does"
UNSERVED = {"softcap": NO_CAP, "logits_soft_cap": NO_CAP}
MOST_USUAL_HEADS = 64  # of k: those of LLaMA 65B (arXiv 2302.13971, table 2); few models have more


@unscripted
@partial(suggesting, unserved=UNSERVED)
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | tuple[Neighbourhood, ...],
    *,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    key_padding_mask: Tensor | None = None,
    query_start: int | Tensor | None = None,
    key_start: Tensor | None = None,
    kv_ordering: Ordering | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    ordering: Ordering | None = None,
    query_box: QueryBox | None = None,
    extra_q: Tensor | None = None,
    extra_k: Tensor | None = None,
    extra_v: Tensor | None = None,
    extra_padding_mask: Tensor | None = None,
    bias: Tensor | None = None,
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Exact attention: one softmax over the keys that a pattern gives each query.

    Differentiable once, by autograd and not by torch.func. A query without keys has output 0, lse -inf and gradient 0.
    Tensors may also be DTensors that are replicated or split by batch or heads; the results are DTensors, too.

    Args:
        q: (batch, queries, heads, head_dim), head_dim 1 to 256; float16, bfloat16, float32 or float64.
        k, v: (batch, keys, kv_heads, head_dim), kv_heads a divisor of heads; dtype and device of q.
        pattern: a `DilatedPattern` for sequences; a `Neighbourhood` for grids, or a tuple of one for each KV head; a
            `Union` of several; a `PointNeighbourhood` for occupied cells; or a pattern of your own.
        scale: factor of the scores, above 0; by default head_dim ** -0.5.
        key_padding_mask: (batch, keys) bool, True = no weight.
        is_causal, dropout_p, kv_ordering, cu_seqlens, max_seqlen: for sequences alone, as in `dilated_attention`.
        query_start, key_start: for sequences and grids of one axis, as in `dilated_attention`.
        ordering, query_box, extra_q, extra_k, extra_v, extra_padding_mask, bias: for grids alone, as in
            `neighbourhood_attention`. A `Union` takes no bias. Points take extra_q, extra_k, extra_v and
            extra_padding_mask of these: tokens lie as their coordinates do.
        backend: a name that `explain_backend` lists, or "auto" for the fastest that can serve.
        return_lse: whether to return the lse as well.

    Returns:
        out (batch, queries, heads, head_dim) in q's dtype. With return_lse also lse (batch, heads, queries), float32
        (float64 for float64) and differentiable; a gradient of lse in a row without keys is ignored. With extra_q
        (out, extra_out), with both (out, lse, extra_out, extra_lse).

    Raises:
        TypeError, ValueError: naming the argument, its value and what is allowed; for an option that this kind of
            pattern does not take; where an explicit backend cannot serve the call. Backends that run a dense kernel
            compute the gradient of lse in 8 further columns of head_dim. Where the kernel has no room for them
            ("cudnn" and "flash_attn_4" above head_dim 120, other FlashAttentions above 248) the backward raises. With
            return_lse "auto" passes over such a backend.

    >>> x = torch.ones(1, 6, 2, 4)
    >>> attend(x, x, x, DilatedPattern((3, 6), (1, 2)), is_causal=True).shape
    torch.Size([1, 6, 2, 4])
    >>> attend(x, x, x, Neighbourhood((2, 3), 2)).shape
    torch.Size([1, 6, 2, 4])
    """
    options = {
        "is_causal": is_causal,
        "scale": scale,
        "dropout_p": dropout_p,
        "key_padding_mask": key_padding_mask,
        "query_start": query_start,
        "key_start": key_start,
        "kv_ordering": kv_ordering,
        "cu_seqlens": cu_seqlens,
        "max_seqlen": max_seqlen,
        "ordering": ordering,
        "query_box": query_box,
        "extra_q": extra_q,
        "extra_k": extra_k,
        "extra_v": extra_v,
        "extra_padding_mask": extra_padding_mask,
        "bias": bias,
        "backend": backend,
        "return_lse": return_lse,
    }
    called = "attend" if query_start is None and query_box is None else ""
    return _looked_up(q, k, v, pattern, as_pattern, called, options)


@unscripted
@partial(suggesting, unserved=UNSERVED)
def dilated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: DilatedPattern,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    key_padding_mask: Tensor | None = None,
    query_start: int | Tensor | None = None,
    key_start: Tensor | None = None,
    kv_ordering: Ordering | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact dilated attention (LongNet, arXiv 2307.02486): one softmax over the keys of all branches of a pattern.

    Differentiable once in q, k and v, by autograd and not by torch.func. A query without keys has output 0, lse -inf
    and gradient 0. A query whose scores are all -inf has output 0 and lse -inf, but on CUDA "sdpa" returns lse 0 for
    it, and "flash" NaN in both.

    Args:
        q: (batch, queries, heads, head_dim), head_dim 1 to 256; float16, bfloat16, float32 or float64. Heads come after
            the sequence, unlike in `scaled_dot_product_attention`.
        k, v: (batch, keys, kv_heads, head_dim), kv_heads a divisor of heads; dtype and device of q. Any strides: where
            the last one is not 1, or on CUDA rows begin off a 16-byte address, forward and backward copy once each.
        pattern: which keys a query sees.
        is_causal: whether keys after the query are excluded.
        scale: factor of the scores, above 0 and at most 2.358e38, for float64 1.246e308; by default head_dim ** -0.5.
        dropout_p: share of attention probabilities dropped, in [0, 1). It repeats with `torch.manual_seed`, except
            where torch.compile recomputes on a GPU. lse is that of the undropped probabilities.
        key_padding_mask: (batch, keys) bool, True = no weight; in sequence order, also with kv_ordering.
        query_start: q's row t is row query_start + t of k, as in decoding. By default q has the rows of k. Of a cache
            that is not full, give the rows that are filled, or fill the rest with zeros: some backends multiply a NaN
            there by a weight of 0.
            A (batch,) tensor of int32 or int64 on the device of q holds one number for each sequence, for caches of
            unequal lengths and for CUDA graphs. On a GPU the host never reads its values. A row of q outside the rows
            of k has output 0 and lse -inf. "reference" and "eager" serve it, and "triton" up to 64 queries of the heads
            of a KV head; the gradients of "triton" are then by matrix products.
        key_start: (batch,) int32 or int64 on the device of q, for a batch that is padded on the left: the row of k at
            which each sequence begins; by default 0. On a GPU the host never reads its values. They are clamped to the
            rows of k. Positions, segments and keys of zeros count from that row: row n of k is position n - key_start.
            Rows of k before it have no weight; fill them with finite numbers: some backends multiply a NaN there by 0.
            Rows of q before it have output 0 and lse -inf.
            A key_padding_mask alone is not the same: it hides the padding, and the sequence lies in other segments.
            Without query_start a copy of q, k, v and out moves each sequence to row 0. Then any backend serves if
            is_causal, otherwise any that takes a key_padding_mask. With query_start the backends serve that take it as
            a tensor.
        kv_ordering: the `Ordering` in which k and v are stored; q and the output are always in sequence order. On a GPU
            "auto" first copies k and v into sequence order where that costs less than reading through a table.
        cu_seqlens: (documents + 1,) int32 on the device of q, for documents one after the other in a batch of 1:
            document i is rows cu_seqlens[i] to cu_seqlens[i + 1] - 1, and may be empty. The first value is 0 and the
            last q's length. Each document is attended to by itself; its positions and segments count from its first
            row. Not with key_padding_mask, query_start, key_start or kv_ordering. "hopper" and "triton", which "auto"
            then takes first, serve all documents in one call. On a GPU they do not wait for the values: wrong ones
            stop the GPU. By "hopper" a NaN may reach gradients of the documents beside its own, up to a head_dim of
            128. Other backends loop over documents and wait for the lengths.
        max_seqlen: an upper bound of the documents' lengths; by default none is known.
        backend: a name that `explain_backend` lists, or "auto" for the fastest that can serve. "hopper" is the
            warp-specialised kernels of this library, "triton" its plain ones, which also decode.
        return_lse: whether to return the lse as well.

    Returns:
        out (batch, queries, heads, head_dim) in q's dtype. With return_lse also lse (batch, heads, queries), float32
        (float64 for float64) and differentiable. For standard normal q and k the error of lse is at most 4e-15 in
        float64 and 2e-6 in other dtypes, measured on CPUs and an H100. One case is worse: float16 and bfloat16 on a CPU
        by "sdpa", which "auto" takes first, at most 1.2e-4, since torch's kernel has a fast exponential. A branch's
        weight is then off by at most 6e-5, which is below the rounding of out.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is allowed; also where an explicit backend
            cannot serve the call.

    >>> q = k = v = torch.ones(1, 8, 2, 4)
    >>> dilated_attention(q, k, v, DilatedPattern((4, 8), (1, 2))).shape
    torch.Size([1, 8, 2, 4])
    """
    options = {
        "is_causal": is_causal,
        "scale": scale,
        "dropout_p": dropout_p,
        "key_padding_mask": key_padding_mask,
        "query_start": query_start,
        "key_start": key_start,
        "kv_ordering": kv_ordering,
        "cu_seqlens": cu_seqlens,
        "max_seqlen": max_seqlen,
        "backend": backend,
        "return_lse": return_lse,
    }
    called = "dilated_attention" if query_start is None else ""
    return _looked_up(q, k, v, pattern, check_dilated, called, options)


@unscripted
@partial(suggesting, unserved=UNSERVED)
def neighbourhood_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    neighbourhood: Neighbourhood | tuple[Neighbourhood, ...],
    *,
    ordering: Ordering | None = None,
    query_box: QueryBox | None = None,
    query_start: int | Tensor | None = None,
    key_start: Tensor | None = None,
    scale: float | None = None,
    extra_q: Tensor | None = None,
    extra_k: Tensor | None = None,
    extra_v: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    extra_padding_mask: Tensor | None = None,
    bias: Tensor | None = None,
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Exact attention of each cell of a grid of 1 to 3 axes over a window around it (Hassani et al., arXiv 2204.07143).

    Differentiable once in q, k, v, all extra tensors and the bias, by autograd and not by torch.func. A query without
    keys has output 0 and lse -inf. An ordering changes where tokens lie, and never which keys a query sees. A tensor
    whose strides a backend cannot read is copied once.

    Args:
        q: (batch, queries, heads, head_dim), head_dim 1 to 256: one row for each cell of the grid, or of those
            that query_box or query_start names.
        k, v: (batch, seq, kv_heads, head_dim); kv_heads divides heads.
        neighbourhood: which cells a query sees; or a tuple of one for each KV head, which differ in window alone. A
            `PointNeighbourhood` stands for occupied cells alone, and takes the options that `attend` names for it.
        ordering: the order in which q, k, v, the masks, out and lse are stored; None, the default, is row by row. Not
            with query_box, query_start or key_start.
        query_box: (start, stop) for each axis: q, out and lse hold the cells of this box alone, row by row; k and v
            hold the whole grid. Results are those of the same cells in a call of all. It serves the next frames of a
            video, or the last cell of a sequence. By default all cells.
        query_start, key_start: for grids of one axis, such as the cache of a sliding window; as in `dilated_attention`.
            A row of q before its sequence does not see extra keys either. Not with query_box. key_start not with
            edge="wrap". Sequences are moved to row 0 only if stride is 1 and the window is causal or edge="clip";
            elsewhere "reference", "eager" and, for a few queries, "triton" serve key_start.
        scale: factor of the scores, finite and above 0; by default head_dim ** -0.5.
        extra_q: (batch, extra queries, heads, head_dim), queries beside the grid: text or class tokens in joint
            attention. Each sees every cell and every extra key, also where an axis is causal. "auto" chooses one
            backend for the cells and one for these queries. A backend by name must serve both, or the call raises.
            "reference" and "eager" compute all. Of another backend, kernels for grids compute the cells, and kernels
            for sequences the extra queries over all cells. The extra queries over the extra keys are computed by the
            same kernels. Where these do not serve the number of extra keys or their mask, "triton" does so on a GPU,
            and matrix products elsewhere. `explain_backend` says which. Nothing is joined to k and v, and they are read
            once: the results over cells and over extra keys are merged by lse. On GPUs "auto" takes dense kernels
            first. In half precision that is torch's flash up to 16 tiles of 128 queries over all heads and sequences,
            48 without a gradient. Outside of `torch.compile`, in half precision, it takes "triton" for a short call,
            which computes it in one launch: up to 1,024 cells, no more extra queries than cells, and 2^22 pairs of the
            two over all heads and sequences.
        extra_k, extra_v: (batch, extra keys, kv_heads, head_dim), keys beside the grid that every query sees: text or
            register tokens. Their number may differ from that of the extra queries.
        key_padding_mask: (batch, seq) bool, True = no weight, also for extra queries.
        extra_padding_mask: (batch, extra) bool, True = no weight.
        bias: (heads, 2 * w_1 - 1, ..., 2 * w_n - 1), added to the scaled scores by relative position. w_i is the window
            along axis i as given, the largest one where heads have different windows. Entry w_i - 1 is the query's own
            cell. The next entry is the cell `dilation` further on; with edge="wrap" entries count on past the border.
            Extra keys and extra queries have no bias. Its dtype is that of q, or float32 (float64 for float64).
            Autocast does not cast it. Its gradient has its dtype, and the same bits every time. "reference", "eager"
            and "triton" serve it, "hopper" too but for the gradient of large windows, and "flex" a call without
            gradients.
        backend: a name that `explain_backend` lists, or "auto" for the fastest that can serve. "lists" is the kernels
            for points, on lists of the grid, which the first call makes: keep that outside of CUDA graphs. On Hopper
            "auto" takes it first for short calls, for some unions and some dilated windows (docs/lists.md).
        return_lse: whether to return lse too.

    Returns:
        out (batch, queries, heads, head_dim) in q's dtype. With return_lse also lse (batch, heads, queries), float32
        (float64 for float64) and differentiable. With extra_q (out, extra_out), with both (out, lse, extra_out,
        extra_lse); extra_out is shaped like extra_q, extra_lse is (batch, heads, extra queries). For standard normal q
        and k the error of lse is at most 4e-15 in float64 and 2e-6 in other dtypes, measured on CPUs and an H100.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is allowed; also where an explicit backend
            cannot serve the call.

    >>> import torch
    >>> x = torch.ones(1, 6, 1, 2)
    >>> neighbourhood_attention(x, x, x, Neighbourhood((2, 3), 2)).shape
    torch.Size([1, 6, 1, 2])
    >>> neighbourhood_attention(x[:, 3:], x, x, Neighbourhood((2, 3), 2), query_box=((1, 2), (0, 3))).shape
    torch.Size([1, 3, 1, 2])
    >>> neighbourhood_attention(x, x, x, Neighbourhood((2, 3), 2), bias=torch.zeros(1, 3, 3)).shape
    torch.Size([1, 6, 1, 2])
    >>> text = torch.ones(1, 4, 1, 2)
    >>> image, text = neighbourhood_attention(
    ...     x, x, x, Neighbourhood((2, 3), 2), extra_q=text, extra_k=text, extra_v=text
    ... )
    >>> image.shape, text.shape
    (torch.Size([1, 6, 1, 2]), torch.Size([1, 4, 1, 2]))
    """
    options = {
        "ordering": ordering,
        "query_box": query_box,
        "query_start": query_start,
        "key_start": key_start,
        "scale": scale,
        "extra_q": extra_q,
        "extra_k": extra_k,
        "extra_v": extra_v,
        "key_padding_mask": key_padding_mask,
        "extra_padding_mask": extra_padding_mask,
        "bias": bias,
        "backend": backend,
        "return_lse": return_lse,
    }
    called = "neighbourhood_attention" if query_start is None and query_box is None else ""
    return _looked_up(q, k, v, neighbourhood, check_neighbourhood, called, options)


def computed(
    q, k, v, pattern, *, door=as_pattern, backend="auto", return_lse=False, kv_ordering=None, extra_q=None, **options
) -> Tensor | tuple[Tensor, ...]:
    """`attend` without a warning, for callers that made the layout of q, k and v themselves.

    door: what makes a pattern of the argument, or refuses it.
    """
    options |= {"backend": backend, "return_lse": return_lse, "kv_ordering": kv_ordering, "extra_q": extra_q}
    return _looked_up(q, k, v, pattern, door, "", options)


def _looked_up(
    q: Tensor, k: Tensor, v: Tensor, pattern: object, door: Callable, called: str, options: dict
) -> Tensor | tuple[Tensor, ...]:
    # called: the function that the user called, where it warns of heads that come first.
    form = known_calls.form_of(q, k, v, pattern, door, options)
    if form is not None and (known_call := known_calls.known(form, q, k, v)) is not None:
        try:
            return known_call.computed(q, k, v, pattern, options)
        except KernelError:
            pass  # as tensors lie in memory now, it does not compile: what follows passes it over, or says so
    return _computed_anew(q, k, v, pattern, door, called, options, form)


def _computed_anew(
    q: Tensor, k: Tensor, v: Tensor, pattern: object, door: Callable, called: str, options: dict, form: Form | None
) -> Tensor | tuple[Tensor, ...]:
    if form is None and any(map(is_dtensor, (q, k, v, *options.values()))):
        call = local_call({"q": q, "k": k, "v": v}, door(pattern), options)
        return call.as_dtensors(computed(*call.tensors, call.pattern, **call.options))
    pattern = door(pattern)
    # The cells of a grid or of points are counted: a k with heads first is refused, and no warning is needed.
    if called and pattern.length is None and not isinstance(pattern, PointNeighbourhood):
        _warn_of_heads_first(called, k)
    inputs, request = validated(q, k, v, pattern, **options)
    if request.dropout_p > 0.0:
        request = replace(request, seed=known_calls.new_seed(q.device))
    backend, return_lse = options["backend"], options["return_lse"]
    kv_ordering, extra_q = options.get("kv_ordering"), options.get("extra_q")

    def choose() -> str:
        gradient = needs_gradient(*inputs)
        how = {"gradient": gradient, "lse_gradient": gradient and return_lse, "has_ordering": kv_ordering is not None}
        return serving(inputs.q, inputs.k, request, backend, **how)

    def run(chosen: str) -> tuple[Tensor, Tensor, str, bool]:
        q = inputs.q
        undone = kv_ordering is not None and is_undone(backend, chosen, q.device, request, q.shape[1])
        stored_inputs, stored_request = _as_stored(inputs, request, kv_ordering, undone)
        return *operators.attention(stored_inputs, stored_request, chosen), chosen, undone

    out, lse, chosen, undone = first_that_compiles(choose, run, backend, level=5)
    extra = None
    if extra_q is not None:
        extra = extra_attention(as_cast(extra_q), inputs, request, backend, return_lse, level=6)
    if form is not None:
        arguments = {"q": q, "k": k, "v": v, **options}
        known_call = KnownCall.of(inputs, request, _served(chosen, inputs, request), arguments, is_undone=undone)
        if extra is not None and known_call is not None:
            served = _served(extra.backend, extra.inputs, extra.request)
            known_call.beside = KnownCall.of(extra.inputs, extra.request, served, arguments, is_beside=True)
            known_call = known_call.beside and known_call
        known_calls.remember(form, q, k, v, known_call)
    if extra is None:
        return (out, lse) if return_lse else out
    return (out, lse, extra.out, extra.lse) if return_lse else (out, extra.out)


def _served(backend: str, inputs: Tensors, request: Request) -> Served:
    return served_by(backend, request.pattern, inputs.q)


def _as_stored(
    inputs: Tensors, request: Request, kv_ordering: Ordering | None, is_undone: bool
) -> tuple[Tensors, Request]:
    # k and v in sequence order, or the request with the table by which they are read.
    if kv_ordering is None:
        return inputs, request
    q, k, v, *extra = inputs
    if is_undone:
        return Tensors(q, in_sequence(k, kv_ordering), in_sequence(v, kv_ordering), *extra), request
    return inputs, replace(request, inverse=kv_ordering.slots(k.device))


def check_neighbourhood(neighbourhood: object, prefix: str = "") -> Neighbourhood | HeadNeighbourhoods:
    """The argument as a pattern on a grid; TypeError unless it is a Neighbourhood, or a tuple of them.

    prefix: of the names of other functions, as "ring_".
    """
    if isinstance(neighbourhood, PointNeighbourhood):
        if not prefix:
            return neighbourhood
        allowed = "a Neighbourhood where ranks share it, or a PointShard of each rank's cells"
        raise TypeError(f"neighbourhood must be {allowed}; got {neighbourhood!r}")
    refuse_several_points("neighbourhood", neighbourhood)
    if isinstance(neighbourhood, tuple | list):
        return HeadNeighbourhoods(tuple(neighbourhood))
    if isinstance(neighbourhood, Neighbourhood | HeadNeighbourhoods):
        return neighbourhood
    hint = f": call {prefix}attend" if isinstance(neighbourhood, Pattern) else ""
    if isinstance(neighbourhood, DilatedPattern):
        hint = f": call {prefix}dilated_attention, or {prefix}attend"
    raise TypeError(
        f"neighbourhood must be a Neighbourhood, or a tuple of one for each KV head; got {neighbourhood!r}{hint}"
    )


def _warn_of_heads_first(function: str, k: Tensor) -> None:
    # Once, and before k is refused: another argument's error would hide what is wrong.
    # A prompt of few tokens is no mistake, nor is a large model, so the rule asks for both: more heads than k has in
    # most models, and more than a short sequence explains. Of keys with heads first, "heads" is the length and "rows"
    # the number of heads: 8 heads are seen from a length of 65 on, 16 from 128 on, 32 from 256 on.
    global _warned
    if _warned or torch.compiler.is_compiling() or not isinstance(k, Tensor) or k.is_nested or k.dim() != 4:
        return
    _, rows, heads, _ = k.shape
    if rows > 1 and heads > MOST_USUAL_HEADS and heads >= 8 * rows:
        _warned = True
        warnings.warn(
            f"k has {heads} heads and {rows} rows: {function} takes (batch, seq, heads, head_dim). If heads "
            "come first, as in scaled_dot_product_attention, give x.transpose(1, 2)",
            stacklevel=6,
        )


_warned = False
