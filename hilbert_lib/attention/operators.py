"""Attention as two torch operators, forward and backward, that serve every pattern and every backend.

`torch.ops.hilbert_lib.attention` and `torch.ops.hilbert_lib.attention_backward` take the tensors, the pattern as words
and integers, the fields of a `Request` and a backend's name one by one, as torch.compile, export and checkpointing need
them, and are one node each to all of these. They check nothing: `api.py` does.
"""

import operator
from dataclasses import fields, replace
from functools import lru_cache, partial
from math import prod

import torch
from torch import Tensor

from hilbert_lib.attention.autograd import (
    empty_gradients,
    empty_results,
    run_backward,
    run_forward,
    served_by,
    unwatched_backward,
    unwatched_forward,
)
from hilbert_lib.attention.documents import rows_of
from hilbert_lib.attention.flop_count import count_flop
from hilbert_lib.attention.registration import register
from hilbert_lib.attention.request import GridPart, Request, Tensors, tensors_of
from hilbert_lib.attention.starts import has_starts
from hilbert_lib.attention.transforms import refuse_onnx
from hilbert_lib.internals import is_watched, made_outside_modes
from hilbert_lib.ordering import KINDS, CheckedPermutation, Ordering
from hilbert_lib.patterns.all_pairs import AllPairs
from hilbert_lib.patterns.dilated import DilatedPattern
from hilbert_lib.patterns.neighbourhood import HeadNeighbourhoods
from hilbert_lib.patterns.packed_lists import both_ways
from hilbert_lib.patterns.pattern import KINDS as PATTERNS
from hilbert_lib.patterns.pattern import Pattern, from_specification
from hilbert_lib.patterns.union import Union

_OPERATORS = torch.ops.hilbert_lib
_INPUTS = len(Tensors._fields)
ORDERINGS = (*KINDS, "residue", "random", "linear", "permutation")
# The schema of a request: the pattern, then the other fields one by one. Lists are optional, since a program of
# AOTInductor gives None for an empty one (torch 2.13).
_TYPES = {bool: "bool", float: "float", int | None: "SymInt?", Tensor | None: "Tensor?"}
_TYPES |= {Pattern: "str words, SymInt[]?", Ordering | None: "int[]?", GridPart | None: "SymInt[]?"}
_TYPES[tuple[Tensor, ...]] = "Tensor[]?"
_FIELDS = [field.name for field in fields(Request)]
_OWN = ["Tensor? permutation", "str backend"]  # permutation: the values of an ordering of one's own
_REQUEST = ", ".join([*(f"{_TYPES[field.type]} {field.name}" for field in fields(Request)), *_OWN])


def attention(inputs: Tensors, request: Request, backend: str) -> tuple[Tensor, Tensor]:
    """Output and lse of attention by one backend, both contiguous; differentiable once.

    Outside compile, tracing and torch modes it skips torch's dispatcher.
    """
    if torch.compiler.is_compiling() or is_watched((*inputs, *tensors_of(request))):  # it traces no attrgetter
        return _OPERATORS.attention(*inputs, *_arguments(request), backend)
    return unwatched_forward(inputs, request, served_by(backend, request.pattern, inputs.q), dispatched_backward)


def attention_backward(
    dout: Tensor,
    inputs: Tensors,
    out: Tensor,
    lse: Tensor,
    request: Request,
    backend: str,
    dlse: Tensor | None = None,
) -> Tensors:
    """Gradients of `attention` from the merged out and lse, which may hold more than this call.

    dlse: the gradient of the merged lse, if it has one.
    """
    if is_watched((dout, *inputs, out, lse, dlse, *tensors_of(request))):
        return Tensors(*dispatched_backward(dout, inputs, out, lse, dlse, request, backend))
    served = served_by(backend, request.pattern, dout)
    return Tensors(*unwatched_backward(dout, inputs, out, lse, dlse, request, served))


def dispatched_backward(
    dout: Tensor, inputs: Tensors, out: Tensor, lse: Tensor, dlse: Tensor | None, request: Request, backend: str
) -> tuple[Tensor, ...]:
    """Gradients of `attention` through torch's dispatcher."""
    return _OPERATORS.attention_backward(dout, *inputs, out, lse, dlse, *_arguments(request), backend)


def _arguments(request: Request) -> tuple:
    # A request as plain numbers, words and tensors; `_request` makes a Request of them again.
    words, numbers = request.pattern.specification
    return (
        words,
        numbers,
        request.is_causal,
        request.scale,
        request.dropout_p,
        request.seed,
        request.key_padding_mask,
        request.query_start,
        request.inverse,
        request.is_part,
        request.cu_seqlens,
        request.max_seqlen,
        _numbers_of_ordering(request.ordering),
        request.extra_padding_mask,
        _numbers_of_part(request.part),
        request.slots,
        request.query_starts,
        request.key_start,
        list(request.lists),
        request.has_bias,
        request.bias_gradient,
        _permutation(request.ordering),
    )


def _permutation(ordering: Ordering | None) -> Tensor | None:
    # The values of an ordering of one's own, as the mode that runs takes them.
    if ordering is None or ordering.table is None:
        return None
    if torch.compiler.is_compiling():
        return ordering.table.perm
    return made_outside_modes(lambda: (ordering.table.perm,))[0]


def _request(words: str, numbers: list[int] | None, *rest) -> Request:
    *values, permutation = rest
    options = dict(zip(_FIELDS[1:], values, strict=True))
    ordering = tuple(options["ordering"] or ())
    options["ordering"] = _ordering(ordering) if permutation is None else _own_ordering(ordering, permutation)
    options["lists"] = tuple(options["lists"] or ())
    options["part"] = _part(tuple(map(int, options["part"] or ())))
    return Request(from_specification(words, tuple(map(int, numbers or ()))), **options)


def _numbers_of_ordering(ordering: Ordering | None) -> list[int]:
    # An ordering as numbers, -1 for None. torch.compile may have made symbols of them.
    if ordering is None:
        return []
    optional = ordering.length, ordering.chunk, ordering.rate, ordering.seed, *(ordering.grid or ())
    return [ORDERINGS.index(ordering.kind), *(-1 if n is None else operator.index(n) for n in optional)]


@lru_cache(maxsize=256)
def _ordering(numbers: tuple[int, ...]) -> Ordering | None:
    if not numbers:
        return None
    kind, length, *optional = numbers
    chunk, rate, seed = (None if n < 0 else n for n in optional[:3])
    return Ordering(ORDERINGS[kind], length, tuple(optional[3:]) or None, chunk, rate, seed)


def _own_ordering(numbers: tuple[int, ...], permutation: Tensor) -> Ordering:
    _, length, _, _, seed = numbers
    return Ordering("permutation", length, seed=seed, table=CheckedPermutation(permutation))


def _numbers_of_part(part: GridPart | None) -> list[int]:
    # The ends of all ranges, then whether sums are returned in float32.
    if part is None:
        return []
    *boxes, in_float = part
    return [end for box in boxes for line in box for end in (line.start, line.stop)] + [int(in_float)]


@lru_cache(maxsize=256)
def _part(numbers: tuple[int, ...]) -> GridPart | None:
    if not numbers:
        return None
    *ends, in_float = numbers
    lines = [range(*ends[n : n + 2]) for n in range(0, len(ends), 2)]
    axes = len(lines) // 3  # none of points
    rows, queries, keys = (tuple(lines[n * axes : (n + 1) * axes]) for n in range(3))
    return GridPart(rows, queries, keys, bool(in_float))


def _fake_forward(q: Tensor, *_rest) -> tuple[Tensor, Tensor]:
    refuse_onnx("attention")
    return empty_results(q)


def _fake_backward(dout: Tensor, *args) -> tuple[Tensor, ...]:
    return empty_gradients(dout, args[:_INPUTS], args[_INPUTS + 3 + _PART])


def _function_of_request(arguments: tuple) -> str:
    # The function that users call with a pattern, from the arguments of a request: its words are the first.
    return PATTERNS[arguments[0].partition(" ")[0]].function


def _forward_operator(*args) -> tuple[Tensor, Tensor]:
    inputs, request = Tensors(*args[:_INPUTS]), _request(*args[_INPUTS:-1])
    return run_forward(inputs, request, served_by(args[-1], request.pattern, inputs.q))


def _backward_operator(dout: Tensor, *args) -> tuple[Tensor, ...]:
    inputs, (out, lse, dlse) = Tensors(*args[:_INPUTS]), args[_INPUTS : _INPUTS + 3]
    request = _request(*args[_INPUTS + 3 : -1])
    return run_backward(dout, inputs, out, lse, dlse, request, served_by(args[-1], request.pattern, dout))


_PART = _FIELDS.index("part") + 1  # among the arguments of a request, of which the pattern is two

register(
    "attention",
    function_of=_function_of_request,
    inputs={"Tensor q": "dq", "Tensor k": "dk", "Tensor v": "dv"}
    | {"Tensor? extra_k": "dextra_k", "Tensor? extra_v": "dextra_v", "Tensor? bias": "dbias"},
    request=_REQUEST,
    forward=_forward_operator,
    backward=_backward_operator,
    fakes=(_fake_forward, _fake_backward),
)


def _pair_elements(shapes: tuple, arguments: tuple) -> int:
    request = _request(*arguments[:-1])
    return pair_count(request, shapes) * shapes[0][3]


def pair_count(request: Request, shapes: tuple) -> int:
    """Pairs of a query and a key that attend in one call, over all batches and query heads.

    Where sequences begin at rows that the device alone knows, it is the most that may attend.
    shapes: of q, k, v and of extra_k, extra_v and bias, which are None where there are none.
    """
    if isinstance(request.pattern, Union):
        total = 0
        for number, pattern in enumerate(request.pattern.patterns):
            part_shapes = shapes if number == 0 else (*shapes[:3], None, None)  # extra keys are seen once
            total += pair_count(replace(request, pattern=pattern), part_shapes)
        return total
    if request.lists:
        return _listed_pairs(request, shapes)
    if has_starts(request):
        return _most_pairs(request, shapes)
    if isinstance(request.pattern, DilatedPattern):
        return _sequence_pairs(request, shapes)
    if isinstance(request.pattern, HeadNeighbourhoods):
        return _grid_pairs(request, shapes)
    (batch, queries, heads, _), (_, keys, kv_heads, _) = map(tuple, shapes[:2])
    count = partial(request.pattern.pairs_of, heads=heads, kv_heads=kv_heads, is_causal=request.is_causal)
    if request.cu_seqlens is not None:
        lengths = (rows.stop - rows.start for rows in rows_of(request.cu_seqlens, keys))
        return sum(count(range(length), length) for length in lengths)
    first = int(request.first_query)
    extra = shapes[3][1] if isinstance(request.pattern, AllPairs) and shapes[3] else 0
    return batch * count(range(first, first + int(queries)), int(keys) + int(extra))


def _listed_pairs(request: Request, shapes: tuple) -> int:
    (batch, queries, heads, _), keys, extra = shapes[0], shapes[1][1], shapes[3][1] if shapes[3] else 0
    lists, _ = both_ways(request.lists, queries, keys)
    return batch * heads * (lists.pairs + queries * extra)


def _most_pairs(request: Request, shapes: tuple) -> int:
    # Each query with as many keys as any position sees; or all pairs of sequences that begin at row 0.
    (batch, queries, heads, _), (_, keys, kv_heads, _) = map(tuple, shapes[:2])
    extra, pattern, most_keys = shapes[3][1] if shapes[3] else 0, request.pattern, [keys] * kv_heads
    if isinstance(pattern, DilatedPattern):
        most_keys = [pattern.most_keys(keys, head, kv_heads) for head in range(kv_heads)]
    elif isinstance(pattern, HeadNeighbourhoods):
        most_keys = [near.axes[0].window for near in pattern.by_head]
    most = batch * queries * (heads // kv_heads * sum(most_keys) + heads * extra)
    if request.query_start is None and request.query_starts is None:
        most = min(most, pair_count(replace(request, key_start=None), shapes))
    return most


def _sequence_pairs(request: Request, shapes: tuple) -> int:
    (batch, queries, heads, _), (_, length, kv_heads, _) = map(tuple, shapes[:2])
    if request.query_start is None and queries != length:  # a ring's block: all its queries see all its keys
        return batch * heads * queries * length
    positions = range(int(request.first_query), int(request.first_query) + int(queries))
    sizes = {"heads": int(heads), "kv_heads": int(kv_heads), "is_causal": request.is_causal}
    if request.cu_seqlens is not None:
        lengths = (rows.stop - rows.start for rows in rows_of(request.cu_seqlens, length))
        return sum(request.pattern.pairs(document_length, **sizes) for document_length in lengths)
    return batch * request.pattern.pairs(int(length), **sizes, at=positions)


def _grid_pairs(request: Request, shapes: tuple) -> int:
    (batch, seq, heads, _), extra = shapes[0], shapes[3][1] if shapes[3] else 0
    windows, part = request.neighbourhoods, request.part
    pairs = sum(near.pairs for near in windows)
    if request.slots is not None:  # of some cells: each is counted with the mean of all
        pairs = pairs * seq // windows[0].length
    elif part:
        ends = [slice(line.start, line.stop) for line in part.queries]
        pairs = sum(prod(axis.pairs(span) for axis, span in zip(near.axes, ends, strict=True)) for near in windows)
        seq = prod(map(len, part.queries))
    return batch * (pairs * (heads // len(windows)) + heads * seq * extra)


count_flop(_OPERATORS.attention, _OPERATORS.attention_backward, _INPUTS, _pair_elements)
