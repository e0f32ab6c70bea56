"""Dilated attention as two torch operators, forward and backward, that serve every backend.

`torch.ops.hilbert_lib.dilated_attention` and `torch.ops.hilbert_lib.dilated_attention_backward` take the fields of a
`Call` and a backend's name one by one, as torch.compile, export and checkpointing need them, and are one node each to
all of these. They check nothing: `api.py` does.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from functools import lru_cache

import torch
from torch import Tensor

from hilbert_lib.attention.backends.registry import BACKENDS
from hilbert_lib.attention.call import Call, working_dtype
from hilbert_lib.attention.flop_count import count_flop
from hilbert_lib.pattern import DilatedPattern

# The schema of a request: the pattern's fields, then those of a call, one by one.
_TYPES = {bool: "bool", float: "float", int | None: "SymInt?", Tensor | None: "Tensor?"}
_PATTERN = "int[] segment_lengths, int[] dilation_rates, str offsets, str mixing"
_OPTIONS = {field.name: _TYPES[field.type] for field in fields(Call) if field.name != "pattern"}
_REQUEST = ", ".join([_PATTERN, *(f"{kind} {name}" for name, kind in _OPTIONS.items()), "str backend"])
_LIBRARY = torch.library.Library("hilbert_lib", "FRAGMENT")
_LIBRARY.define(f"dilated_attention(Tensor q, Tensor k, Tensor v, {_REQUEST}) -> (Tensor out, Tensor lse)")
_LIBRARY.define(
    f"dilated_attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_REQUEST}) -> "
    "(Tensor dq, Tensor dk, Tensor dv)"
)


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call, backend: str) -> tuple[Tensor, Tensor]:
    """Output and lse of dilated attention by one backend, both contiguous; differentiable once, through out."""
    return torch.ops.hilbert_lib.dilated_attention(q, k, v, *_fields(call), backend)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v of `forward` from the merged out and lse, which may hold more than this call."""
    return torch.ops.hilbert_lib.dilated_attention_backward(dout, q, k, v, out, lse, *_fields(call), backend)


def _fields(call: Call) -> tuple:
    # What `_call` makes a Call of again.
    pattern = call.pattern
    given = pattern.segment_lengths, pattern.dilation_rates, pattern.offsets, pattern.mixing
    return *given, *(getattr(call, name) for name in _OPTIONS)


@lru_cache(maxsize=256)
def _pattern(segment_lengths: tuple[int, ...], dilation_rates: tuple[int, ...], *rules: str) -> DilatedPattern:
    return DilatedPattern(segment_lengths, dilation_rates, *rules)


def _call(segment_lengths: list[int], dilation_rates: list[int], offsets: str, mixing: str, *rest) -> Call:
    return Call(_pattern(tuple(segment_lengths), tuple(dilation_rates), offsets, mixing), *rest)


def _run_forward(q: Tensor, k: Tensor, v: Tensor, *request) -> tuple[Tensor, Tensor]:
    if not (q.numel() and k.numel()):  # dense operators do not take empty tensors
        out, lse = _fake_forward(q, k, v, *request)
        return out.zero_(), lse.fill_(-torch.inf)
    run, _ = BACKENDS[request[-1]].functions(q.device)
    with torch.cuda.device_of(q), _as_given(q.device):
        out, lse = run(*map(_as_kernels_load, (q, k, v)), _call(*request[:-1]))
    return out, lse.contiguous()  # one layout for all backends, which the fake one has too


def _run_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *request
) -> tuple[Tensor, Tensor, Tensor]:
    if not (q.numel() and k.numel()):
        return tuple(x.new_zeros(x.shape) for x in (q, k, v))
    _, run = BACKENDS[request[-1]].functions(q.device)
    with torch.cuda.device_of(q), _as_given(q.device):
        return run(*map(_as_kernels_load, (dout, q, k, v)), out, lse, _call(*request[:-1]))


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *request) -> tuple[Tensor, Tensor]:
    batch, queries, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(batch, heads, queries, dtype=working_dtype(q.dtype))


def _fake_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *request
) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


# Kernels for autograd of our own: with this many arguments torch.library.register_autograd takes as long for its
# bookkeeping in every forward as all the rest of a call.
class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, *request) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = torch.ops.hilbert_lib.dilated_attention(q, k, v, *request)
        # All tensors are saved, so that autograd sees it if the mask is changed before the backward.
        ctx.save_for_backward(q, k, v, out, lse, *(x if isinstance(x, Tensor) else None for x in request))
        ctx.request = [None if isinstance(x, Tensor) else x for x in request]
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)  # autograd would fill a gradient of lse with zeros in every backward
        return out, lse

    @staticmethod
    def backward(ctx, dout: Tensor | None, _dlse: None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        if dout is None:
            return None, None, None, *[None] * len(ctx.request)
        request = [x if tensor is None else tensor for x, tensor in zip(ctx.request, tensors, strict=True)]
        grads = torch.ops.hilbert_lib.dilated_attention_backward(dout, q, k, v, out, lse, *request)
        return *grads, *[None] * len(request)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *args) -> tuple[Tensor, Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.hilbert_lib.dilated_attention_backward(*args)

    @staticmethod
    def backward(ctx, *_grads: Tensor) -> None:
        raise RuntimeError("dilated_attention can be differentiated once; its second derivative is not implemented")


def _differentiable(function: type[torch.autograd.Function]) -> Callable:
    def apply(*args):
        if torch._C._are_functorch_transforms_active():
            raise RuntimeError(
                "dilated_attention has no rule for torch.func's grad, vjp, jvp, jacrev and the like: differentiate it "
                "by backward() or torch.autograd.grad"
            )
        return function.apply(*args)

    return apply


def _refuse_vmap(*_args) -> None:
    raise RuntimeError("dilated_attention has no rule for torch.func.vmap: put what it maps over into the batch")


def _as_kernels_load(x: Tensor) -> Tensor:
    """The tensor itself, or one copy where its last stride is not 1 or, on CUDA, its rows begin off a 16-byte address.

    cuDNN reads such rows wrongly and says nothing; the other kernels fail.
    """
    if x.is_contiguous() and x.data_ptr() % 16 == 0:  # most are, and the rest takes longer to ask
        return x
    size = x.element_size()
    dense = x.shape[-1] == 1 or x.stride(-1) == 1
    steps = [stride * size for stride, count in zip(x.stride()[:-1], x.shape, strict=False) if count > 1]
    aligned = not x.is_cuda or x.shape[-1] * size % 16 or not any(n % 16 for n in (x.data_ptr(), *steps))
    # `contiguous` would return a dense tensor as it is, wherever it begins.
    return x if dense and aligned else x.clone(memory_format=torch.contiguous_format)


def _as_given(device: torch.device) -> AbstractContextManager:
    # Autocast has had its say about q, k and v; inside, it would round the scores.
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


for _name, _run, _fake, _function in (
    ("dilated_attention", _run_forward, _fake_forward, _Differentiable),
    ("dilated_attention_backward", _run_backward, _fake_backward, _Once),
):
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    _LIBRARY.impl(_name, _differentiable(_function), "Autograd")
    _LIBRARY.impl(_name, _refuse_vmap, "FuncTorchBatched")
    torch.library.register_fake(f"hilbert_lib::{_name}", _fake, lib=_LIBRARY)

count_flop(torch.ops.hilbert_lib.dilated_attention, torch.ops.hilbert_lib.dilated_attention_backward, _call)
