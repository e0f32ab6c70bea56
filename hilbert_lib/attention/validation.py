"""The arguments of attention, checked: tensors as autocast casts them, and all else as a `Request`."""

import math

import torch
from torch import Tensor

from hilbert_lib.attention.autograd import needs_gradient
from hilbert_lib.attention.backends.registry import backends_for
from hilbert_lib.attention.documents import check_documents
from hilbert_lib.attention.grid_parts import part_of_box
from hilbert_lib.attention.request import WORKING_DTYPE, Request, Tensors
from hilbert_lib.attention.starts import check_starts
from hilbert_lib.attention.transforms import is_dtensor, refuse_tracers
from hilbert_lib.checks import boolean, dense_tensor, number, positive, rows_of_keys
from hilbert_lib.internals import compile_time_constant
from hilbert_lib.ordering import Ordering
from hilbert_lib.patterns.neighbourhood import ON_GRIDS, ON_LINES, HeadNeighbourhoods, Neighbourhood
from hilbert_lib.patterns.pattern import ANY_PATTERN, Pattern, check_pattern
from hilbert_lib.patterns.points import ListedPairs, PointNeighbourhood
from hilbert_lib.patterns.union import Union

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LARGEST_HEAD_DIM = 256
# Kernels multiply it by log2 e.
LARGEST_SCALES = {dtype: torch.finfo(dtype).max / math.log2(math.e) for dtype in (torch.float32, torch.float64)}
ROWS = ("linear", "raster")  # orders that leave the tokens of a grid row by row
OF_POINTS = {  # hints for options that points do not take
    "ordering": ": tokens lie as the coordinates do",
    "kv_ordering": ": tokens lie as the coordinates do",
    "cu_seqlens": ": give batch= to the points",
    "query_box": ": give keys= to the points",
}
# The options that some kinds of pattern take and others do not, as they are where nobody gives them.
DEFAULTS = {
    "is_causal": False,
    "dropout_p": 0.0,
    "query_start": None,
    "key_start": None,
    "kv_ordering": None,
    "cu_seqlens": None,
    "max_seqlen": None,
    "ordering": None,
    "query_box": None,
    "extra_q": None,
    "extra_k": None,
    "extra_v": None,
    "extra_padding_mask": None,
    "bias": None,
}


def validated(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | tuple[Neighbourhood, ...],
    *,
    scale: float | None = None,
    key_padding_mask: Tensor | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    shard_cells: tuple[int, str] | None = None,
    **options,
) -> tuple[Tensors, Request]:
    """The arguments of `attend`, checked; kv_ordering is none of a `Request`'s fields, and is checked alone.

    shard_cells: where k holds a part of the grid, or of the points' keys: how many cells, and in words which.
    """
    q_given, k_given = q, k
    q, k, v = check_tensors(q, k, v)
    pattern, lists = _with_lists(as_pattern(pattern).of_heads(k.shape[2]), q, k, shard_cells)
    _ = pattern.specification  # raises for a field that operators cannot be given
    refuse_options(pattern, options)
    options = DEFAULTS | options
    boolean("is_causal", options["is_causal"])
    boolean("return_lse", return_lse)
    scale = check_scale(q.shape[3] ** -0.5 if scale is None else scale, q.dtype)
    sequence_options = {name: options[name] for name in ("query_start", "key_start", "kv_ordering")}
    max_seqlen = check_documents(
        q, options["cu_seqlens"], options["max_seqlen"], key_padding_mask=key_padding_mask, **sequence_options
    )
    part = query_start = query_starts = None
    if lists:
        pass  # q and k have the rows of their points
    elif pattern.length is None:
        query_start, query_starts = check_starts(q, k, options["query_start"], options["key_start"])
        _check_kv_ordering(options["kv_ordering"], k)
    else:
        whole = shard_cells or (pattern.length, f"the grid {pattern.shape}")
        part = part_of_box(options["query_box"], pattern.shape)
        if part is not None:
            if q.shape[1] != math.prod([line.stop - line.start for line in part.rows]):
                box = options["query_box"]
                raise ValueError(f"q must have the cells of query_box {box}, got shape {tuple(q.shape)}")
        elif options["query_start"] is None:
            _check_cells("q", q, *whole)
        _check_cells("k", k, *whole)
        if options["query_start"] is not None or options["key_start"] is not None:
            _check_starts_on_line(pattern, options)
            query_start, query_starts = check_starts(q, k, options["query_start"], options["key_start"])
        if query_start is not None and options["key_start"] is None:  # some cells of a line, which are known here
            box = [(query_start, query_start + q.shape[1])]
            query_start, part = None, part_of_box(box if q.shape[1] else None, pattern.shape)
    extra_k = extra_v = extra_padding_mask = None
    if options["extra_q"] is not None:
        _check_extra_q(q, dtype_in_words(q_given, q), options["extra_q"])
    if "extra_k" in pattern.options:
        if options["extra_padding_mask"] is not None and options["extra_k"] is None:
            raise ValueError("extra_padding_mask must be None where extra_k is None, got a mask")
        extra_k, extra_v = _checked_extra(k, dtype_in_words(k_given, k), options["extra_k"], options["extra_v"])
        check_mask("extra_padding_mask", options["extra_padding_mask"], extra_k)
        extra_padding_mask = options["extra_padding_mask"] if extra_k.shape[1] else None
    bias = options["bias"]
    if bias is not None:
        _check_bias(q, dtype_in_words(q_given, q), pattern, bias)
    check_mask("key_padding_mask", key_padding_mask, k)
    check_backend(backend, pattern)
    inputs = Tensors(q, k, v, extra_k, extra_v, bias)
    request = Request(
        pattern,
        is_causal=options["is_causal"],
        scale=scale,
        dropout_p=check_dropout("dropout_p", options["dropout_p"]),
        key_padding_mask=key_padding_mask,
        query_start=query_start,
        cu_seqlens=options["cu_seqlens"],
        max_seqlen=max_seqlen,
        ordering=_checked_ordering(options["ordering"], k.shape[1], options["query_box"] is not None),
        extra_padding_mask=extra_padding_mask,
        query_starts=query_starts,
        key_start=options["key_start"],
        part=part,
        lists=lists,
        has_bias=bias is not None,
        bias_gradient=bias is not None and needs_gradient(*inputs),
    )
    return inputs, request


def as_pattern(pattern: object, allowed: str = ANY_PATTERN) -> Pattern:
    """The argument as a pattern: a tuple or a list of neighbourhoods is one for each KV head.

    allowed: in words, for callers that do not take every pattern.
    """
    refuse_several_points("pattern", pattern)
    is_by_head = isinstance(pattern, tuple | list) and any(isinstance(item, Neighbourhood) for item in pattern)
    return HeadNeighbourhoods(tuple(pattern)) if is_by_head else check_pattern(pattern, allowed)


def refuse_several_points(name: str, pattern: object) -> None:
    """Raise TypeError for a tuple or a list of points."""
    if isinstance(pattern, tuple | list) and any(isinstance(item, PointNeighbourhood) for item in pattern):
        raise TypeError(f"{name} must be one PointNeighbourhood for all heads, got {pattern!r}")


def _with_lists(
    pattern: Pattern, q: Tensor, k: Tensor, shard_cells: tuple[int, str] | None
) -> tuple[Pattern, tuple[Tensor, ...]]:
    # The pattern as a request has it, and the arrays of its lists, which are the request's, too.
    if not isinstance(pattern, PointNeighbourhood):
        return pattern, ()
    _check_cells("q", q, pattern.lists.queries, "its points")
    _check_cells("k", k, *(shard_cells or (pattern.lists.keys, pattern.keys_in_words)))
    if pattern.device != q.device:
        raise ValueError(
            f"pattern must be on the device of q ({q.device}), got points on {pattern.device}: pattern.to(q.device)"
        )
    return ListedPairs(), pattern.list_tensors


def refuse_options(
    pattern: Pattern, options: dict, defaults: dict = DEFAULTS, also_taken: frozenset = frozenset()
) -> None:
    """Raise ValueError for an option that is given, and that the pattern's kind does not take.

    defaults: of the options that not every kind takes. also_taken: options served besides `Pattern.options`.
    """
    for name, value in options.items():
        # Only plain values are compared: tensors and arrays have no one answer.
        is_default = value is defaults[name] or (isinstance(value, int | float | str) and value == defaults[name])
        if name not in pattern.options | also_taken and not is_default:
            got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            hint = "; query_start is the word there" if name == "query_box" and pattern.length is None else ""
            if name in ON_LINES - ON_GRIDS and pattern.length is not None:
                hint = "; it has more than one axis"
            if isinstance(pattern, ListedPairs):
                hint = OF_POINTS.get(name, "")
            if name == "bias" and isinstance(pattern, Union) and all(name in part.options for part in pattern.patterns):
                hint = "; merge_attention joins calls of its parts, each with its own bias and return_lse=True"
            raise ValueError(f"{name} must be left out for a {pattern.noun}, got {got}{hint}")


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


@compile_time_constant  # torch.compile cannot trace it in torch 2.11
def _has_autocast(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type)


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as autocast casts them, if their shapes, dtypes and devices fit together."""
    refuse_tracers(q, k, v)
    for name, x in {"q": q, "k": k, "v": v}.items():
        dense_tensor(name, x)
        check_axes(name, x)
        if is_dtensor(x):
            raise TypeError(f"{name} must be a tensor of this rank, got a DTensor: x.to_local() gives its part")
        if x.device != q.device:
            raise ValueError(f"{name} must be on the device of q ({q.device}), got {x.device}")
    uncast = q, k, v
    if _casts(q.device.type):  # asked once: three times took 2 us
        q, k, v = map(as_cast, uncast)
    for name, x, before in zip("qkv", (q, k, v), uncast, strict=True):
        if x.dtype not in DTYPES:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise TypeError(f"{name} must be {allowed}; got {before.dtype}")
        if x.dtype != q.dtype:
            raise TypeError(
                f"{name} must have the dtype of q ({dtype_in_words(uncast[0], q)}), got {dtype_in_words(before, x)}"
            )
    batch, _, heads, head_dim = q.shape
    if not 1 <= head_dim <= LARGEST_HEAD_DIM:
        raise ValueError(f"q must have a head_dim from 1 to {LARGEST_HEAD_DIM}, got {head_dim}")
    if v.shape != k.shape:
        hint = ""
        if v.shape[:-1] == k.shape[:-1]:
            hint = ": another head_dim is not served; pad the narrower ones with zeros, give scale, and cut out"
        raise ValueError(f"v must have the shape of k {tuple(k.shape)}, got {tuple(v.shape)}{hint}")
    if k.shape[0] != batch or k.shape[3] != head_dim:
        raise ValueError(f"k must have q's batch {batch} and head_dim {head_dim}, got shape {tuple(k.shape)}")
    if heads < 1:
        raise ValueError(f"q must have at least one head, got shape {tuple(q.shape)}")
    if k.shape[2] < 1 or heads % k.shape[2]:
        raise ValueError(f"k must have a number of heads, at least 1, that divides q's {heads}, got {k.shape[2]}")
    return q, k, v


def check_axes(name: str, x: Tensor) -> None:
    """Raise ValueError unless a tensor has the axes of q, k and v."""
    if x.dim() != 4:
        raise ValueError(f"{name} must have 4 dimensions (batch, seq, heads, head_dim), got shape {tuple(x.shape)}")


def dtype_in_words(uncast: Tensor, cast: Tensor) -> str:
    """A tensor's dtype before autocast, and what autocast makes of it."""
    return str(uncast.dtype) if uncast.dtype == cast.dtype else f"{uncast.dtype}, which autocast makes {cast.dtype}"


def check_scale(scale: object, dtype: torch.dtype = torch.float64) -> float:
    """The argument as a float, if it is above 0 and finite in the working dtype of tensors of a dtype."""
    return positive("scale", scale, most=LARGEST_SCALES[WORKING_DTYPE[dtype]])


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


def check_backend(backend: object, pattern: Pattern | type[Pattern]) -> str:
    """The argument, if it is "auto" or the name of a backend for patterns of this kind."""
    if not isinstance(backend, str):
        raise TypeError(f"backend must be a string, got {type(backend).__name__}")
    names = backends_for(pattern)
    if backend != "auto" and backend not in names:
        raise ValueError(f"backend must be one of auto, {', '.join(names)} for a {pattern.noun}; got {backend!r}")
    return backend


def _check_kv_ordering(ordering: object, k: Tensor) -> None:
    if ordering is None:
        return
    if not isinstance(ordering, Ordering):
        allowed = "an Ordering such as Ordering.from_curve('hilbert', length), or None"
        raise TypeError(f"kv_ordering must be {allowed}; got {ordering!r}")
    if ordering.length != k.shape[1]:
        raise ValueError(f"kv_ordering must have the length of k ({k.shape[1]}), got {ordering.length}")


def _check_cells(name: str, x: Tensor, cells: int, whose: str) -> None:
    if x.shape[1] != cells:
        hint = "; if heads come first, give x.transpose(1, 2)" if x.shape[2] == cells else ""
        raise ValueError(f"{name} must have the {cells} cells of {whose}, got shape {tuple(x.shape)}{hint}")


def _check_starts_on_line(pattern: Pattern, options: dict) -> None:
    name = "query_start" if options["key_start"] is None else "key_start"
    for other in ("ordering", "query_box"):
        if options[other] is not None:
            raise ValueError(f"{other} must be None with {name}, which counts rows of a line; got {options[other]!r}")
    parts = pattern.patterns if isinstance(pattern, Union) else (pattern,)
    wraps = any(isinstance(part, HeadNeighbourhoods) and "wrap" in part.by_head[0].edge for part in parts)
    if options["key_start"] is not None and wraps:
        raise ValueError("edge must be 'shift' or 'clip' with key_start, which cuts the line short; got 'wrap'")


def _checked_ordering(ordering: object, cells: int, has_box: bool) -> Ordering | None:
    if ordering is None:
        return None
    if not isinstance(ordering, Ordering):
        raise TypeError(f"ordering must be an Ordering, or None for row by row; got {ordering!r}")
    if ordering.length != cells:
        raise ValueError(f"ordering must have the {cells} cells of the grid, got {ordering!r}")
    if has_box and ordering.kind not in ROWS:  # be it a box of all cells
        raise ValueError(f"ordering must be None with query_box, whose cells lie row by row; got {ordering!r}")
    return None if ordering.kind in ROWS else ordering


def _check_bias(q: Tensor, q_dtype: str, pattern: HeadNeighbourhoods, bias: object) -> None:
    # q_dtype: in words, for errors. Autocast leaves a bias as it is: a parameter stays float32 beside q in half
    # precision.
    refuse_tracers(bias)
    dense_tensor("bias", bias)
    shape = (q.shape[2], *pattern.bias_sides)
    if bias.shape != shape:
        allowed = f"(heads, 2 * window - 1 along each axis) = {shape}"
        raise ValueError(f"bias must be {allowed}, got shape {tuple(bias.shape)}")
    if bias.device != q.device:
        raise ValueError(f"bias must be on the device of q ({q.device}), got {bias.device}")
    working = WORKING_DTYPE[q.dtype]
    if bias.dtype not in (q.dtype, working):
        other = "" if working == q.dtype else f" or be {working}"
        raise TypeError(f"bias must have the dtype of q ({q_dtype}){other}, got {bias.dtype}")


def check_mask(name: str, mask: Tensor | None, k: Tensor) -> None:
    """Raise TypeError or ValueError unless the argument is None, or says which rows of k have no weight."""
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"{name} must be a bool tensor, True = no weight, or None; got {got}")
    rows_of_keys(name, mask, "batch, keys", k)


def _check_extra_q(q: Tensor, q_dtype: str, extra_q: Tensor) -> None:
    # q_dtype: in words, for errors.
    refuse_tracers(extra_q)
    dense_tensor("extra_q", extra_q)
    batch, _, heads, head_dim = q.shape
    if extra_q.dim() != 4 or (extra_q.shape[0], *extra_q.shape[2:]) != (batch, heads, head_dim):
        allowed = f"(batch, extra, heads, head_dim) with q's {batch}, {heads} and {head_dim}"
        raise ValueError(f"extra_q must be {allowed}, got shape {tuple(extra_q.shape)}")
    if extra_q.device != q.device:
        raise ValueError(f"extra_q must be on the device of q ({q.device}), got {extra_q.device}")
    cast = as_cast(extra_q)
    if cast.dtype != q.dtype:
        raise TypeError(f"extra_q must have the dtype of q ({q_dtype}), got {dtype_in_words(extra_q, cast)}")


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
    for name, uncast, x in (("extra_k", extra_k, cast[0]), ("extra_v", extra_v, cast[1])):
        if x.dtype != k.dtype:
            raise TypeError(f"{name} must have the dtype of k ({k_dtype}), got {dtype_in_words(uncast, x)}")
    return cast[0], cast[1]
