"""Neighbourhood attention as two torch operators, forward and backward, that serve every backend."""

import operator
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from hilbert_lib.attention.call import working_dtype
from hilbert_lib.attention.failures import remembering
from hilbert_lib.attention.flop_count import count_flop
from hilbert_lib.attention.grids.registry import BACKENDS
from hilbert_lib.attention.grids.request import Part, Request, Tensors
from hilbert_lib.attention.registration import as_given, as_kernels_load, register
from hilbert_lib.grid import Neighbourhood
from hilbert_lib.ordering import KINDS, Ordering

FUNCTION = "neighbourhood_attention"
_INPUTS = 5
ORDERINGS = (*KINDS, "residue", "random", "linear")
_REQUEST = (
    "int[] shape, int[] windows, int[] dilation, int[] stride, bool[] is_causal, str edge, float scale, "
    "int[] ordering, Tensor? key_padding_mask, Tensor? extra_padding_mask, int[] part, Tensor? slots, str backend"
)


def forward(given: Tensors, request: Request, backend: str) -> tuple[Tensor, Tensor]:
    """Output and lse of neighbourhood attention by one backend, contiguous; differentiable once, through out."""
    return _forward(*given, *_fields(request), backend)


def backward(dout: Tensor, given: Tensors, out: Tensor, lse: Tensor, request: Request, backend: str) -> Tensors:
    """Gradients of `forward`, from the merged out and lse."""
    return Tensors(*_backward(dout, *given, out, lse, *_fields(request), backend))


def _fields(request: Request) -> tuple:
    # What `_request` makes a Request of again.
    near = request.neighbourhoods[0]
    windows = [side for each in request.neighbourhoods for side in each.window]
    rules = near.shape, windows, near.dilation, near.stride, near.is_causal, ",".join(near.edge)
    masks = request.key_padding_mask, request.extra_padding_mask
    *boxes, in_float = request.part or (False,)
    ends = [end for box in boxes for line in box for end in (line.start, line.stop)] + [int(in_float)] * bool(boxes)
    return *rules, request.scale, _numbers(request.ordering), *masks, ends, request.slots


def _numbers(ordering: Ordering | None) -> list[int]:
    # An ordering as numbers, -1 for what it has not; torch.compile may have made symbols of them.
    if ordering is None:
        return []
    own = ordering.length, ordering.chunk, ordering.rate, ordering.seed, *(ordering.grid or ())
    return [ORDERINGS.index(ordering.kind), *(-1 if n is None else operator.index(n) for n in own)]


@lru_cache(maxsize=256)
def _ordering(numbers: tuple[int, ...]) -> Ordering | None:
    if not numbers:
        return None
    kind, length, *own = numbers
    chunk, rate, seed = (None if n < 0 else n for n in own[:3])
    return Ordering(ORDERINGS[kind], length, tuple(own[3:]) or None, chunk, rate, seed)


@lru_cache(maxsize=256)
def _neighbourhoods(shape, windows, dilation, stride, is_causal, edge) -> tuple[Neighbourhood, ...]:
    axes = len(shape)
    each = [windows[n : n + axes] for n in range(0, len(windows), axes)]
    rules = {"dilation": dilation, "stride": stride, "is_causal": is_causal, "edge": tuple(edge.split(","))}
    return tuple(Neighbourhood(shape, window, **rules) for window in each)


def _request(*fields) -> Request:
    *rules, edge, scale, order, key_padding_mask, extra_padding_mask, ends, slots = fields
    near = _neighbourhoods(*map(tuple, rules), edge)
    masks = key_padding_mask, extra_padding_mask
    return Request(near, scale, _ordering(tuple(order)), *masks, _part(tuple(ends)), slots)


@lru_cache(maxsize=256)
def _part(ends: tuple[int, ...]) -> Part | None:
    *ends, in_float = ends or (0,)
    lines = [range(*ends[n : n + 2]) for n in range(0, len(ends), 2)]
    axes = len(lines) // 3
    return Part(*(tuple(lines[n : n + axes]) for n in range(0, len(lines), axes)), bool(in_float)) if lines else None


def _run_forward(*args) -> tuple[Tensor, Tensor]:
    given, request, backend = Tensors(*args[:_INPUTS]), args[_INPUTS:-1], args[-1]
    if not given.q.numel():
        out, lse = _fake_forward(*args)
        return out.zero_(), lse.fill_(-torch.inf)
    run, _ = BACKENDS[backend].functions(given.q.device)
    with torch.cuda.device_of(given.q), as_given(given.q.device):
        out, lse = run(Tensors(*map(as_kernels_load, given)), _request(*request))
    return out, lse.contiguous()


def _run_backward(dout: Tensor, *args) -> tuple[Tensor, ...]:
    given, (out, lse), request, backend = args[:_INPUTS], args[_INPUTS : _INPUTS + 2], args[_INPUTS + 2 : -1], args[-1]
    if not given[0].numel():
        return tuple(x.zero_() for x in _fake_backward(dout, *args))
    _, run = BACKENDS[backend].functions(dout.device)
    dout, *given = map(as_kernels_load, (dout, *given))
    with torch.cuda.device_of(dout), as_given(dout.device):
        return tuple(x.contiguous() for x in run(dout, Tensors(*given), out, lse, _request(*request)))


def _fake_forward(q: Tensor, *rest) -> tuple[Tensor, Tensor]:
    batch, seq, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(batch, heads, seq, dtype=working_dtype(q.dtype))


def _fake_backward(dout: Tensor, *args) -> tuple[Tensor, ...]:
    grads = [x.new_empty(x.shape) for x in args[:_INPUTS]]
    in_float = args[-3] and args[-3][-1]
    sums = [x.to(working_dtype(x.dtype)) for x in grads] if in_float else grads
    return grads[0], *sums[1:3], *grads[3:]


_forward, _backward, _ = register(
    FUNCTION,
    inputs={"q": "dq", "k": "dk", "v": "dv", "extra_k": "dextra_k", "extra_v": "dextra_v"},
    request=_REQUEST,
    forward=remembering(FUNCTION, _run_forward),
    backward=remembering(FUNCTION, _run_backward),
    fakes=(_fake_forward, _fake_backward),
)


def _pair_elements(shapes: tuple, request: tuple) -> int:
    (batch, seq, heads, head_dim), extra = shapes[0], shapes[3][1]
    found = _request(*request[:-1])
    each, part = found.neighbourhoods, found.part
    if found.slots is not None:  # some cells, counted as all on average
        pairs = sum(near.pairs for near in each) * seq // each[0].length
    elif part:
        ends = [slice(line.start, line.stop) for line in part.queries]
        pairs = sum(prod(axis.pairs(own) for axis, own in zip(near.axes, ends, strict=True)) for near in each)
        seq = prod(map(len, part.queries))
    else:
        pairs = sum(near.pairs for near in each)
    return batch * (pairs * (heads // len(each)) + heads * seq * extra) * head_dim


_OPERATORS = torch.ops.hilbert_lib
count_flop(_OPERATORS.neighbourhood_attention, _OPERATORS.neighbourhood_attention_backward, _INPUTS, _pair_elements)
