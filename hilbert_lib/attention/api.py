"""Dilated attention as users call it: checks the arguments, chooses a backend, runs it."""

import math
import warnings
from dataclasses import replace

import torch
from torch import Tensor

from hilbert_lib.attention import operators
from hilbert_lib.attention.backends.registry import BACKENDS
from hilbert_lib.attention.call import Call, working_dtype
from hilbert_lib.attention.choice import choose, explain, is_undone
from hilbert_lib.attention.documents import check_documents
from hilbert_lib.attention.failures import first_that_compiles
from hilbert_lib.attention.transforms import refuse_tracers
from hilbert_lib.checks import boolean, dense_tensor, integer, number, positive, suggesting, unscripted
from hilbert_lib.ordering import Ordering, in_sequence
from hilbert_lib.pattern import DilatedPattern, check_pattern

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LARGEST_HEAD_DIM = 256
# Kernels multiply it by log2 e.
LARGEST_SCALES = {dtype: torch.finfo(dtype).max / math.log2(math.e) for dtype in (torch.float32, torch.float64)}


@unscripted
@suggesting
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
    query_start: int | None = None,
    kv_ordering: Ordering | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact dilated attention (LongNet, arXiv 2307.02486): one softmax over the keys of all branches of a pattern.

    Differentiable once in q, k and v, by autograd and not by torch.func. A query without keys, or whose scores are all
    -inf, has output 0 and lse -inf; one without keys also has gradient 0. (Of scores of -inf "sdpa" and "flash" on CUDA
    say lse 0 and NaN.)

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
        query_start: q's row t is position query_start + t, while k and v cover positions 0 to keys - 1 (decoding);
            by default all cover the same positions. Of a cache that is not full, give the rows that are, or fill the
            rest with zeros: some backends multiply a NaN in it by a weight of 0.
        kv_ordering: the `Ordering` in which k and v are stored; q and the output are always in sequence order. On a GPU
            "auto" copies k and v in sequence order first where that costs less than to read through a table.
        cu_seqlens: (documents + 1,) int32 on the device of q: documents lie one after the other in a batch of 1, and
            document i is rows cu_seqlens[i] to cu_seqlens[i + 1] - 1. Each is attended to by itself, its segments and
            lengths counted from its first row; it may be empty. The first value is 0 and the last q's length. Not with
            key_padding_mask, query_start or kv_ordering. Backend "triton", which "auto" then takes first, serves all in
            one call, and on a GPU without a wait: wrong values stop the GPU. Others loop, and wait for the lengths.
        max_seqlen: at least the length of every document, if it is known; by default it is not.
        backend: a name that `explain_backend` lists, or "auto" for the fastest that can serve.
        return_lse: whether to return the lse as well.

    Returns:
        out (batch, queries, heads, head_dim) in q's dtype; with return_lse also lse (batch, heads, queries),
        float32 (float64 for float64), detached. Of standard normal q and k, lse is off by at most 4e-15 in float64 and
        2e-6 in other dtypes, measured on CPUs and an H100. In float16 and bfloat16 on a CPU, "sdpa", which "auto"
        takes first, is off by up to 1.2e-4: torch's kernel has a fast exponential there. A branch's weight is then off
        by up to 6e-5, which is below the rounding of out.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is allowed; also where an explicit backend
            cannot serve the call.

    >>> q = k = v = torch.ones(1, 8, 2, 4)
    >>> dilated_attention(q, k, v, DilatedPattern((4, 8), (1, 2))).shape
    torch.Size([1, 8, 2, 4])
    """
    if query_start is None:
        _warn_of_heads_first(k)
    options = {"is_causal": is_causal, "scale": scale, "dropout_p": dropout_p, "key_padding_mask": key_padding_mask}
    options |= {"query_start": query_start, "kv_ordering": kv_ordering, "backend": backend, "return_lse": return_lse}
    options |= {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
    return attend(q, k, v, pattern, **options)


def attend(
    q, k, v, pattern, *, kv_ordering=None, backend="auto", return_lse=False, **options
) -> Tensor | tuple[Tensor, Tensor]:
    """`dilated_attention` without a warning, for callers that made the layout of q, k and v themselves."""
    q, k, v, call = validated(
        q, k, v, pattern, kv_ordering=kv_ordering, backend=backend, return_lse=return_lse, **options
    )
    if call.dropout_p > 0.0:
        call = replace(call, seed=torch.randint(-(2**63), 2**63 - 1, (1,), device=q.device))

    def run(chosen: str) -> tuple[Tensor, Tensor]:
        if kv_ordering is None:
            return operators.forward(q, k, v, call, chosen)
        if is_undone(backend, chosen, q.device, call, q.shape[1]):
            return operators.forward(q, in_sequence(k, kv_ordering), in_sequence(v, kv_ordering), call, chosen)
        return operators.forward(q, k, v, replace(call, inverse=kv_ordering.slots(k.device)), chosen)

    out, lse = first_that_compiles(lambda: _chosen(q, k, v, call, backend), run, backend, level=4)
    return (out, lse) if return_lse else out


def _chosen(q: Tensor, k: Tensor, v: Tensor, call: Call, backend: str) -> str:
    # The backend that serves a call; ValueError where none can.
    gradient = needs_gradient(q, k, v)
    chosen = choose(q, call, backend, gradient=gradient)
    if not chosen:
        reasons = explain(q, call, backend, gradient=gradient).reasons
        told = reasons.get(backend) or ", ".join(f"{name} {reason}" for name, reason in reasons.items())
        raise ValueError(f"backend={backend!r} {told}; see explain_backend")
    return chosen


def validated(
    q, k, v, pattern, is_causal=False, scale=None, dropout_p=0.0, key_padding_mask=None, query_start=None,
    kv_ordering=None, backend="auto", return_lse=False, cu_seqlens=None, max_seqlen=None,
) -> tuple[Tensor, Tensor, Tensor, Call]:  # fmt: skip
    """The arguments of `dilated_attention`, checked: q, k and v as autocast casts them, and the rest as a `Call`."""
    q, k, v = check_tensors(q, k, v)
    check_pattern(pattern)
    pattern.check_heads(k.shape[2])
    boolean("is_causal", is_causal)
    boolean("return_lse", return_lse)
    scale = check_scale(q.shape[3] ** -0.5 if scale is None else scale, q.dtype)
    dropout_p = check_dropout("dropout_p", dropout_p)
    others = {"key_padding_mask": key_padding_mask, "query_start": query_start, "kv_ordering": kv_ordering}
    max_seqlen = check_documents(q, cu_seqlens, max_seqlen, **others)
    query_start = _checked_query_start(q, k, query_start)
    check_mask("key_padding_mask", key_padding_mask, k)
    if kv_ordering is not None:
        if not isinstance(kv_ordering, Ordering):
            allowed = "an Ordering such as Ordering.from_curve('hilbert', length), or None"
            raise TypeError(f"kv_ordering must be {allowed}; got {kv_ordering!r}")
        if kv_ordering.length != k.shape[1]:
            raise ValueError(f"kv_ordering must have the length of k ({k.shape[1]}), got {kv_ordering.length}")
    check_backend(backend)
    if query_start == 0 and q.shape[1] == k.shape[1]:
        query_start = None  # the same question, which every backend answers
    packed = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
    return q, k, v, Call(pattern, is_causal, scale, dropout_p, None, key_padding_mask, query_start, **packed)


def needs_gradient(*tensors: Tensor) -> bool:
    """Whether a backward may follow."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which attention takes a tensor: under autocast as `scaled_dot_product_attention`, which is not cast
    from float64."""
    is_cast = x.is_floating_point() and x.dtype != torch.float64 and _casts(x.device.type)
    return torch.get_autocast_dtype(x.device.type) if is_cast else x.dtype


def as_cast(x: Tensor) -> Tensor:
    """The tensor in that dtype."""
    dtype = autocast_dtype(x)
    return x if x.dtype == dtype else x.to(dtype)


def _casts(device_type: str) -> bool:
    return _has_autocast(device_type) and torch.is_autocast_enabled(device_type)


def _has_autocast(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type)


_has_autocast._dynamo_marked_constant = True  # torch.compile cannot trace it in torch 2.11 (said as in ordering.py)


def _warn_of_heads_first(k: Tensor) -> None:
    # Once, and before anything is refused: another argument's error would hide what is wrong.
    global _warned
    if _warned or torch.compiler.is_compiling() or not isinstance(k, Tensor) or k.is_nested or k.dim() != 4:
        return
    _, rows, heads, _ = k.shape
    if heads > rows > 0:
        _warned = True
        warnings.warn(
            f"k has {heads} heads and {rows} rows: dilated_attention takes (batch, seq, heads, head_dim). If heads "
            "come first, as in scaled_dot_product_attention, give x.transpose(1, 2)",
            stacklevel=4,
        )


_warned = False


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as autocast casts them, if their shapes, dtypes and devices fit together."""
    refuse_tracers(q, k, v)
    for name, x in {"q": q, "k": k, "v": v}.items():
        dense_tensor(name, x)
        if x.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions (batch, seq, heads, head_dim), got shape {tuple(x.shape)}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on the device of q ({q.device}), got {x.device}")
    given = q, k, v
    if _casts(q.device.type):  # asked once: three times took 2 us
        q, k, v = map(as_cast, given)
    for name, x, own in zip("qkv", (q, k, v), given, strict=True):
        if x.dtype not in DTYPES:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise TypeError(f"{name} must be {allowed}; got {own.dtype}")
        if x.dtype != q.dtype:
            raise TypeError(
                f"{name} must have the dtype of q ({dtype_in_words(given[0], q)}), got {dtype_in_words(own, x)}"
            )
    batch, _, heads, head_dim = q.shape
    if not 1 <= head_dim <= LARGEST_HEAD_DIM:
        raise ValueError(f"q must have a head_dim from 1 to {LARGEST_HEAD_DIM}, got {head_dim}")
    if v.shape != k.shape:
        raise ValueError(f"v must have the shape of k {tuple(k.shape)}, got {tuple(v.shape)}")
    if k.shape[0] != batch or k.shape[3] != head_dim:
        raise ValueError(f"k must have q's batch {batch} and head_dim {head_dim}, got shape {tuple(k.shape)}")
    if heads < 1:
        raise ValueError(f"q must have at least one head, got shape {tuple(q.shape)}")
    if k.shape[2] < 1 or heads % k.shape[2]:
        raise ValueError(f"k must have a number of heads, at least 1, that divides q's {heads}, got {k.shape[2]}")
    return q, k, v


def dtype_in_words(given: Tensor, cast: Tensor) -> str:
    """A tensor's dtype as it was given, and what autocast makes of it."""
    return str(given.dtype) if given.dtype == cast.dtype else f"{given.dtype}, which autocast makes {cast.dtype}"


def check_scale(scale: object, dtype: torch.dtype = torch.float64) -> float:
    """The argument as a float, if it is above 0 and finite in the working dtype of tensors of a dtype."""
    return positive("scale", scale, most=LARGEST_SCALES[working_dtype(dtype)])


def check_dropout(name: str, share: object) -> float:
    """The argument of that name as a float, if it is in [0, 1)."""
    dropped = number(name, share)
    if not 0.0 <= dropped < 1.0:
        raise ValueError(f"{name} must be in [0, 1), got {dropped}")
    return dropped


def check_dtype(dtype: object) -> torch.dtype:
    """The argument, if attention takes tensors of it."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}; got {dtype!r}")
    return dtype


def check_backend(backend: object) -> str:
    """The argument, if it is "auto" or the name of a backend."""
    if not isinstance(backend, str):
        raise TypeError(f"backend must be a string, got {type(backend).__name__}")
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"backend must be one of auto, {', '.join(BACKENDS)}; got {backend!r}")
    return backend


def _checked_query_start(q: Tensor, k: Tensor, query_start: object) -> int | None:
    queries, keys = q.shape[1], k.shape[1]
    if query_start is None:
        if queries != keys:
            raise ValueError(f"k must have the length of q ({queries}) unless query_start is given, got {keys}")
        return None
    if queries > keys:
        raise ValueError(f"q must have no more rows than k ({keys}) where query_start is given, got {queries}")
    return integer("query_start", query_start, least=0, most=keys - queries)


def check_mask(name: str, mask: Tensor | None, k: Tensor) -> None:
    """Raise TypeError or ValueError unless the argument is None, or says which rows of k have no weight."""
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"{name} must be a bool tensor or None, got {got}")
    dense_tensor(name, mask)
    if mask.shape != k.shape[:2]:
        raise ValueError(f"{name} must be (batch, keys) = {tuple(k.shape[:2])}, got {tuple(mask.shape)}")
    if mask.device != k.device:
        raise ValueError(f"{name} must be on the device of k ({k.device}), got {mask.device}")
