"""One validated call by one backend, forward and backward, and how autograd runs it.

run_forward, run_backward     what a backend computes, in one layout, with keys of zeros, document by document
Differentiable, Once          what autograd runs: once differentiable
unwatched_forward             the three, for tensors that nobody watches: torch's dispatcher is left out
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hilbert_lib.attention import failures
from hilbert_lib.attention.aligned import aligned_backward, aligned_forward
from hilbert_lib.attention.backends.backend import Backward, Forward
from hilbert_lib.attention.backends.registry import backends_for
from hilbert_lib.attention.documents import documents
from hilbert_lib.attention.request import (
    WORKING_DTYPE,
    GridPart,
    Request,
    Tensors,
    tensors_of,
    with_tensors,
    without_tensors,
)
from hilbert_lib.attention.zero_keys import add_zero_keys
from hilbert_lib.internals import is_below_autograd, is_watched
from hilbert_lib.patterns.dilated import DilatedPattern
from hilbert_lib.patterns.pattern import Pattern


class Served(NamedTuple):
    """A backend on a device."""

    name: str
    forward: Forward
    backward: Backward
    reads_documents: bool
    aligns: Callable[[Request], bool]  # whether sequences that are padded on the left are moved to row 0 for it


def served_by(name: str, pattern: Pattern, q: Tensor) -> Served:
    """The backend of that name for a pattern and tensors like q. Raises `KernelError` where its kernels do not load."""
    backend = backends_for(pattern)[name]
    try:
        return Served(name, *backend.functions(q.device), backend.reads_documents, backend.aligns)
    except failures.KernelError as error:
        failures.remember(error, pattern.function, name, q)
        raise


class Passes(NamedTuple):
    """A forward and its backward, as autograd runs them. `request` is all that they take beside differentiable tensors.

    The request is of any form: autograd looks at each argument of its functions, and so gets it as one.
    """

    forward: Callable  # (inputs, request) -> (out, lse)
    backward: Callable  # (dout, inputs, out, lse, dlse, request) -> gradients
    apart: Callable  # request -> (its tensors, the rest): autograd then sees it if a mask changes before the backward
    together: Callable  # (tensors, rest) -> request


# Functions of autograd of our own: with this many arguments torch.library.register_autograd takes as long for its
# bookkeeping in every forward as all the rest of a call.
class Differentiable(torch.autograd.Function):
    """(*inputs, passes, request) -> (out, lse); differentiable once."""

    @staticmethod
    def forward(ctx, *args) -> tuple[Tensor, Tensor]:
        *inputs, passes, request = args
        out, lse = passes.forward(inputs, request)
        tensors, ctx.rest = passes.apart(request)
        ctx.passes, ctx.count = passes, len(inputs)
        ctx.save_for_backward(*inputs, out, lse, *tensors)
        ctx.set_materialize_grads(False)  # autograd would fill a gradient of lse with zeros in every backward
        return out, lse

    @staticmethod
    def backward(ctx, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None and dlse is None:
            return (None,) * (ctx.count + 2)
        saved, count = ctx.saved_tensors, ctx.count
        inputs, (out, lse), tensors = saved[:count], saved[count : count + 2], saved[count + 2 :]
        dout = torch.zeros_like(out) if dout is None else dout
        grads = ctx.passes.backward(dout, inputs, out, lse, dlse, ctx.passes.together(tensors, ctx.rest))
        return *(None if x is None else grad for x, grad in zip(inputs, grads, strict=True)), None, None


class Once(torch.autograd.Function):
    """(*tensors, run, function) -> gradients; `function`, as users call it, has no second derivative."""

    @staticmethod
    def forward(ctx, *args) -> tuple[Tensor, ...]:
        *tensors, run, ctx.function = args
        return run(*tensors)

    @staticmethod
    def backward(ctx, *_grads: Tensor) -> None:
        raise RuntimeError(f"{ctx.function} can be differentiated once; its second derivative is not implemented")


def unwatched_forward(inputs: Tensors, request: Request, served: Served, dispatched: Callable) -> tuple[Tensor, Tensor]:
    """Output and lse for tensors of which `is_watched` is False.

    dispatched: (dout, inputs, out, lse, dlse, request, backend) -> gradients through torch's dispatcher, where
        somebody watches the backward.
    """
    if _is_recorded(inputs):
        return Differentiable.apply(*inputs, _UNWATCHED, (request, served, dispatched))
    return run_forward(inputs, request, served)


def unwatched_backward(
    dout: Tensor, inputs: Tensors, out: Tensor, lse: Tensor, dlse: Tensor | None, request: Request, served: Served
) -> tuple:
    """The gradients for tensors of which `is_watched` is False; they have no second derivative, and say so."""
    tensors = dout, *inputs, out, lse, dlse
    if not _is_recorded(tensors):
        return run_backward(dout, inputs, out, lse, dlse, request, served)
    count = len(inputs)

    def run(dout: Tensor, *rest: Tensor | None) -> tuple[Tensor, ...]:
        return run_backward(dout, Tensors(*rest[:count]), *rest[count:], request, served)

    return Once.apply(*tensors, run, request.pattern.function)


def _backward(
    dout: Tensor, inputs: tuple, out: Tensor, lse: Tensor, dlse: Tensor | None, call: tuple
) -> tuple[Tensor, ...]:
    request, served, dispatched = call
    inputs = Tensors(*inputs)
    if is_watched((dout, *inputs, out, lse, dlse, *tensors_of(request))):
        return dispatched(dout, inputs, out, lse, dlse, request, served.name)
    return unwatched_backward(dout, inputs, out, lse, dlse, request, served)


def _forward(inputs: list, call: tuple) -> tuple[Tensor, Tensor]:
    request, served, _ = call
    return run_forward(Tensors(*inputs), request, served)


def _apart(call: tuple) -> tuple[tuple, tuple]:
    request, *rest = call
    tensors = tensors_of(request)
    if any(x is not None for x in tensors):  # autograd alone holds them then, and frees them after the backward
        request = without_tensors(request)
    return tensors, (request, *rest)


def _together(tensors: tuple, call: tuple) -> tuple:
    request, *rest = call
    return with_tensors(request, tensors), *rest


_UNWATCHED = Passes(_forward, _backward, _apart, _together)


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether a backward may follow."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _is_recorded(tensors: Iterable[Tensor | None]) -> bool:
    return needs_gradient(*tensors) and not is_below_autograd()


def run_forward(inputs: Tensors, request: Request, served: Served) -> tuple[Tensor, Tensor]:
    """Output and lse, both contiguous."""
    q = inputs.q
    if not (q.numel() and (inputs.k.numel() or request.lists)):  # dense operators do not take empty tensors
        out, lse = empty_results(inputs.q)
        return out.zero_(), lse.fill_(-torch.inf)
    try:
        with torch.cuda.device_of(q), _without_autocast(q.device):
            if request.cu_seqlens is None or served.reads_documents:
                return _forward_of_one(served, inputs, request)
            return _forward_of_each(served, inputs, request)
    except failures.KernelError as error:
        failures.remember(error, request.pattern.function, served.name, q)
        raise


def _forward_of_each(served: Served, inputs: Tensors, request: Request) -> tuple[Tensor, Tensor]:
    # Output and lse, one document after the other.
    q = inputs.q
    out, lse = empty_results(q)
    for rows, document in documents(request, q, inputs.k.shape[2]):
        document_inputs = Tensors(*(x[:, rows] for x in inputs[:3]))
        out[:, rows], lse[:, :, rows] = _forward_of_one(served, document_inputs, document)
    return out, lse


def _forward_of_one(served: Served, inputs: Tensors, request: Request) -> tuple[Tensor, Tensor]:
    # One document, a batch of sequences, or documents where the backend reads their lengths.
    if request.key_start is not None and served.aligns(request):
        out, lse = aligned_forward(partial(_forward_as_loaded, served), inputs, request)
    else:
        out, lse = _forward_as_loaded(served, inputs, request)
    lse = lse if lse.is_contiguous() else lse.contiguous()  # one layout for all backends, which the fake one has too
    if _has_zero_keys(request.pattern):
        add_zero_keys(out, lse, request, request.first_query, inputs.k.shape[1], inputs.k.shape[2])
    return out, lse


def _forward_as_loaded(served: Served, inputs: Tensors, request: Request) -> tuple[Tensor, Tensor]:
    return served.forward(_as_loaded(inputs), request)


def run_backward(
    dout: Tensor, inputs: Tensors, out: Tensor, lse: Tensor, dlse: Tensor | None, request: Request, served: Served
) -> tuple[Tensor, ...]:
    """The gradient of each tensor of `inputs`, without elements where it is None.

    dlse: the gradient of lse, or None where it has none. Its values in rows without keys are ignored.
    """
    if not (inputs.q.numel() and (inputs.k.numel() or request.lists)):
        return tuple(x.zero_() for x in empty_gradients(dout, inputs, request.part))
    if dlse is not None:
        _check_lse_gradient(inputs.q, request, served.name)
        dlse = dlse.masked_fill(lse == -torch.inf, 0.0).contiguous()
    if _has_zero_keys(request.pattern):
        request = replace(request, is_part=True)  # out and lse hold zero keys too
    try:
        with torch.cuda.device_of(dout), _without_autocast(dout.device):
            if request.cu_seqlens is None or served.reads_documents:
                return _backward_of_one(served, dout, inputs, out, lse, dlse, request)
            return _backward_of_each(served, dout, inputs, out, lse, dlse, request)
    except failures.KernelError as error:
        failures.remember(error, request.pattern.function, served.name, dout)
        raise


def _check_lse_gradient(q: Tensor, request: Request, name: str) -> None:
    # A forward does not say whether lse will be differentiated.
    if refused := backends_for(request.pattern)[name].lse_refusal(q, request):
        raise ValueError(f"backend={name!r} {refused}; with return_lse 'auto' passes over it")


def _backward_of_each(
    served: Served, dout: Tensor, inputs: Tensors, out: Tensor, lse: Tensor, dlse: Tensor | None, request: Request
) -> tuple[Tensor, ...]:
    grads = empty_gradients(dout, inputs, request.part)
    for rows, document in documents(request, inputs.q, inputs.k.shape[2]):
        document_inputs = Tensors(*(x[:, rows] for x in inputs[:3]))
        own_lse, own_dlse = (x if x is None else x[:, :, rows].contiguous() for x in (lse, dlse))
        results = out[:, rows], own_lse, own_dlse
        document_grads = _backward_of_one(served, dout[:, rows], document_inputs, *results, document)
        for grad, part in zip(grads[:3], document_grads[:3], strict=True):
            grad[:, rows] = part
    return grads


def _backward_of_one(
    served: Served, dout: Tensor, inputs: Tensors, out: Tensor, lse: Tensor, dlse: Tensor | None, request: Request
) -> tuple[Tensor, ...]:
    if request.key_start is not None and served.aligns(request):
        results = aligned_backward(partial(_backward_as_loaded, served), dout, inputs, out, lse, request, dlse)
    else:
        results = _backward_as_loaded(served, dout, inputs, out, lse, request, dlse)
    missing = (None,) * (len(inputs) - len(results))
    return tuple(_gradient(dout, *each) for each in zip((*results, *missing), inputs, strict=True))


def _backward_as_loaded(
    served: Served, dout: Tensor, inputs: Tensors, out: Tensor, lse: Tensor, request: Request,
    dlse: Tensor | None = None,
) -> Tensors:  # fmt: skip
    return served.backward(_as_kernels_load(dout), _as_loaded(inputs), out, lse, request, dlse=dlse)


def _gradient(dout: Tensor, grad: Tensor | None, x: Tensor | None) -> Tensor:
    # A backend may leave out the gradient of a tensor without elements.
    if grad is not None:
        return grad.contiguous()
    return dout.new_empty(0 if x is None else x.shape)


def _has_zero_keys(pattern: Pattern) -> bool:
    return isinstance(pattern, DilatedPattern) and pattern.padding == "zeros"


def _as_loaded(inputs: Tensors) -> Tensors:
    return Tensors(*[x if x is None else _as_kernels_load(x) for x in inputs])


def _as_kernels_load(x: Tensor) -> Tensor:
    # The tensor itself, or one copy where its last stride is not 1 or, on CUDA, its rows begin off a 16-byte address.
    # cuDNN reads such rows wrongly and says nothing; the other kernels fail.
    if x.is_contiguous() and x.data_ptr() % 16 == 0:  # most are, and the rest takes longer to ask
        return x
    size = x.element_size()
    dense = x.shape[-1] == 1 or x.stride(-1) == 1
    steps = [stride * size for stride, count in zip(x.stride()[:-1], x.shape, strict=False) if count > 1]
    aligned = not x.is_cuda or x.shape[-1] * size % 16 or not any(n % 16 for n in (x.data_ptr(), *steps))
    # `contiguous` would return a dense tensor as it is, wherever it begins.
    return x if dense and aligned else x.clone(memory_format=torch.contiguous_format)


def _without_autocast(device: torch.device) -> AbstractContextManager:
    # Autocast has had its say about q, k and v; inside, it would round the scores.
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def empty_results(q: Tensor) -> tuple[Tensor, Tensor]:
    """Output and lse without values."""
    batch, queries, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(batch, heads, queries, dtype=WORKING_DTYPE[q.dtype])


def empty_gradients(dout: Tensor, inputs: tuple, part: GridPart | list[int] | None) -> tuple[Tensor, ...]:
    """Gradients without values. part: as a request has it, or as numbers of which the last says the same."""
    grads = [dout.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs]
    if part and part[-1]:
        grads[1:3] = [x.to(WORKING_DTYPE[x.dtype]) for x in grads[1:3]]
    return tuple(grads)
