"""Dilated attention as two torch operators, forward and backward, that serve every backend.

`torch.ops.hilbert_lib.dilated_attention` and `torch.ops.hilbert_lib.dilated_attention_backward` take the fields of a
`Call` and a backend's name one by one, as torch.compile, export and checkpointing need them, and are one node each to
all of these. They check nothing: `api.py` does.
"""

from dataclasses import fields, replace
from functools import lru_cache

import torch
from torch import Tensor

from hilbert_lib.attention.backends.backend import Forward
from hilbert_lib.attention.backends.registry import BACKENDS
from hilbert_lib.attention.call import Call, working_dtype
from hilbert_lib.attention.choice import FUNCTION
from hilbert_lib.attention.documents import documents, rows_of
from hilbert_lib.attention.failures import remembering
from hilbert_lib.attention.flop_count import count_flop
from hilbert_lib.attention.registration import as_given, as_kernels_load, register
from hilbert_lib.attention.zero_keys import add_zero_keys
from hilbert_lib.pattern import DilatedPattern

# The schema of a request: the pattern's fields, then those of a call, one by one.
_TYPES = {bool: "bool", float: "float", int | None: "SymInt?", Tensor | None: "Tensor?", str: "str"}
_TYPES |= {tuple[int, ...]: "int[]"}
_PATTERN = {field.name: _TYPES[field.type] for field in fields(DilatedPattern)}
_OPTIONS = {field.name: _TYPES[field.type] for field in fields(Call) if field.name != "pattern"}
_REQUEST = ", ".join([*(f"{kind} {name}" for name, kind in (_PATTERN | _OPTIONS).items()), "str backend"])


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call, backend: str) -> tuple[Tensor, Tensor]:
    """Output and lse of dilated attention by one backend, both contiguous; differentiable once, through out."""
    return _forward(q, k, v, *_fields(call), backend)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v of `forward` from the merged out and lse, which may hold more than this call."""
    return _backward(dout, q, k, v, out, lse, *_fields(call), backend)


def _fields(call: Call) -> tuple:
    # What `_call` makes a Call of again.
    return *(getattr(call.pattern, name) for name in _PATTERN), *(getattr(call, name) for name in _OPTIONS)


@lru_cache(maxsize=256)
def _pattern(segment_lengths: tuple[int, ...], dilation_rates: tuple[int, ...], *rules: str) -> DilatedPattern:
    return DilatedPattern(segment_lengths, dilation_rates, *rules)


def _call(segment_lengths: list[int], dilation_rates: list[int], *rest) -> Call:
    rules, options = rest[: len(_PATTERN) - 2], rest[len(_PATTERN) - 2 :]
    return Call(_pattern(tuple(segment_lengths), tuple(dilation_rates), *rules), *options)


def _run_forward(q: Tensor, k: Tensor, v: Tensor, *request) -> tuple[Tensor, Tensor]:
    if not (q.numel() and k.numel()):  # dense operators do not take empty tensors
        out, lse = _fake_forward(q, k, v, *request)
        return out.zero_(), lse.fill_(-torch.inf)
    call, backend = _call(*request[:-1]), BACKENDS[request[-1]]
    run, _ = backend.functions(q.device)
    with torch.cuda.device_of(q), as_given(q.device):
        if call.cu_seqlens is None or backend.reads_documents:
            return _forward_of_one(run, q, k, v, call)
        out, lse = _fake_forward(q, k, v)
        for rows, own in documents(call, q):
            out[:, rows], lse[:, :, rows] = _forward_of_one(run, *(x[:, rows] for x in (q, k, v)), own)
        return out, lse


def _forward_of_one(run: Forward, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    # One document, a batch of sequences, or documents where the backend reads their lengths.
    out, lse = run(*map(as_kernels_load, (q, k, v)), call)
    lse = lse if lse.is_contiguous() else lse.contiguous()  # one layout for all backends, which the fake one has too
    add_zero_keys(out, lse, call, call.first_query, k.shape[1], k.shape[2])
    return out, lse


def _run_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *request
) -> tuple[Tensor, Tensor, Tensor]:
    if not (q.numel() and k.numel()):
        return tuple(x.new_zeros(x.shape) for x in (q, k, v))
    call, backend = _call(*request[:-1]), BACKENDS[request[-1]]
    _, run = backend.functions(q.device)
    if call.pattern.padding == "zeros":
        call = replace(call, is_part=True)  # out and lse hold zero keys too
    with torch.cuda.device_of(q), as_given(q.device):
        if call.cu_seqlens is None or backend.reads_documents:
            return run(*map(as_kernels_load, (dout, q, k, v)), out, lse, call)
        grads = _fake_backward(dout, q, k, v, out, lse)
        for rows, own in documents(call, q):
            given = (as_kernels_load(x[:, rows]) for x in (dout, q, k, v))
            some = run(*given, out[:, rows], lse[:, :, rows].contiguous(), own)
            for whole, part in zip(grads, some, strict=True):
                whole[:, rows] = part
        return grads


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *request) -> tuple[Tensor, Tensor]:
    batch, queries, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(batch, heads, queries, dtype=working_dtype(q.dtype))


def _fake_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *request
) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


_forward, _backward, _Differentiable = register(
    FUNCTION,
    inputs={"q": "dq", "k": "dk", "v": "dv"},
    request=_REQUEST,
    forward=remembering(FUNCTION, _run_forward),
    backward=remembering(FUNCTION, _run_backward),
    fakes=(_fake_forward, _fake_backward),
)


def _pair_elements(shapes: tuple, request: tuple) -> int:
    (batch, queries, heads, head_dim), (_, length, kv_heads, _), call = *map(tuple, shapes[:2]), _call(*request[:-1])
    if call.query_start is None and queries != length:  # a ring's block: all its queries see all its keys
        return batch * heads * queries * length * head_dim
    at = range(int(call.first_query), int(call.first_query) + int(queries))
    sizes = {"heads": int(heads), "kv_heads": int(kv_heads), "is_causal": call.is_causal}
    if call.cu_seqlens is not None:
        lengths = (rows.stop - rows.start for rows in rows_of(call.cu_seqlens, length))
        return sum(call.pattern.pairs(each, **sizes) for each in lengths) * head_dim
    return batch * call.pattern.pairs(int(length), **sizes, at=at) * head_dim


count_flop(torch.ops.hilbert_lib.dilated_attention, torch.ops.hilbert_lib.dilated_attention_backward, 3, _pair_elements)
