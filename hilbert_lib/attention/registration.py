"""A function and its gradient as two torch operators, one node each to compile, export and checkpointing."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from hilbert_lib.attention.transforms import no_rule_for_vmap, unserved_derivative
from hilbert_lib.internals import is_below_autograd, is_watched, run_below_autograd

LIBRARY = torch.library.Library("hilbert_lib", "FRAGMENT")


def register(
    name: str,
    *,
    said: Callable[[tuple], str],
    inputs: dict[str, str],
    request: str,
    forward: Callable,
    backward: Callable,
    fakes: tuple[Callable, Callable],
) -> tuple[Callable, Callable, type[torch.autograd.Function]]:
    """Make `torch.ops.hilbert_lib.<name>` and `<name>_backward`; each checks nothing.

    Returns functions that do as these two do, with less of the host where nobody watches; and what autograd runs.

    Args:
        name: of the operator. said: of the arguments of a request, the function that errors name.
        inputs: the tensors that have gradients, as the schema says them, and what those gradients are called. The
            gradient of one that is not given has no elements.
        request: the schema of all else that is asked for.
        forward: (*inputs, *request) -> (out, lse).
        backward: (dout, *inputs, out, lse, *request) -> gradients.
        fakes: both on tensors without data.
    """
    given = ", ".join(inputs)
    grads = ", ".join(f"Tensor {x}" for x in inputs.values())
    LIBRARY.define(f"{name}({given}, {request}) -> (Tensor out, Tensor lse)")
    LIBRARY.define(f"{name}_backward(Tensor dout, {given}, Tensor out, Tensor lse, {request}) -> ({grads})")
    masks = [n for n, each in enumerate(request.split(", ")) if each.startswith("Tensor")]
    calls = []
    once = _once(said)
    differentiable = _differentiable(calls, len(inputs), masks)
    both = (name, forward, differentiable, len(inputs)), (f"{name}_backward", backward, once, len(inputs) + 3)
    for (own, run, function, count), fake in zip(both, fakes, strict=True):
        LIBRARY.impl(own, run, "CompositeExplicitAutograd")
        LIBRARY.impl(own, _by_backward_alone(said, own, function, count), "Autograd")
        LIBRARY.impl(own, _refusing_vmap(said, count), "FuncTorchBatched")
        torch.library.register_fake(f"hilbert_lib::{own}", fake, lib=LIBRARY)
        calls.append(_directly(own, run, function, count))
    return *calls, differentiable


def _directly(own: str, run: Callable, function: type[torch.autograd.Function], tensors: int) -> Callable:
    # An operator or, where nobody watches, what its dispatch leads to.
    operator = getattr(torch.ops.hilbert_lib, own)

    def call(*args):
        if is_watched(args):
            return operator(*args)
        needed = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in args[:tensors])
        if needed and not is_below_autograd():
            return function.apply(*args[:tensors], run, args[tensors:])
        return run(*args)

    return call


# Kernels for autograd of our own: with this many arguments torch.library.register_autograd takes as long for its
# bookkeeping in every forward as all the rest of a call. A request is one argument: autograd looks at each.
def _differentiable(calls: list[Callable], inputs: int, masks: list[int]) -> type[torch.autograd.Function]:
    # calls: later the forward and the backward. masks: the places of tensors in a request. run: what computes.
    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *args) -> tuple[Tensor, Tensor]:
            *given, run, request = args
            out, lse = run(*given, *request)
            # All tensors are saved, so that autograd sees it if the mask is changed before the backward.
            ctx.save_for_backward(*given, out, lse, *(request[n] for n in masks))
            ctx.request = [None if n in masks else x for n, x in enumerate(request)]
            ctx.mark_non_differentiable(lse)
            ctx.set_materialize_grads(False)  # autograd would fill a gradient of lse with zeros in every backward
            return out, lse

        @staticmethod
        def backward(ctx, dout: Tensor | None, _dlse: None) -> tuple[Tensor | None, ...]:
            if dout is None:
                return (None,) * (inputs + 2)
            saved, request = ctx.saved_tensors, [*ctx.request]
            for n, x in zip(masks, saved[inputs + 2 :], strict=True):
                request[n] = x
            grads = calls[1](dout, *saved[: inputs + 2], *request)
            grads = (None if x is None else grad for x, grad in zip(saved[:inputs], grads, strict=True))
            return *grads, None, None

    return Differentiable


def _once(said: Callable[[tuple], str]) -> type[torch.autograd.Function]:
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *args) -> tuple[Tensor, ...]:
            *given, run, request = args
            ctx.said = said(request)
            return run(*given, *request)

        @staticmethod
        def backward(ctx, *_grads: Tensor) -> None:
            raise RuntimeError(f"{ctx.said} can be differentiated once; its second derivative is not implemented")

    return Once


def _by_backward_alone(said: Callable, own: str, function: type[torch.autograd.Function], tensors: int) -> Callable:
    operator = getattr(torch.ops.hilbert_lib, own)

    def apply(*args):
        if reason := unserved_derivative(said(args[tensors:]), args[:tensors]):
            raise RuntimeError(reason)
        return function.apply(*args[:tensors], partial(run_below_autograd, operator), args[tensors:])

    return apply


def _refusing_vmap(said: Callable, tensors: int) -> Callable:
    def refuse(*args) -> None:
        raise RuntimeError(no_rule_for_vmap(said(args[tensors:])))

    return refuse


def as_kernels_load(x: Tensor) -> Tensor:
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


def as_given(device: torch.device) -> AbstractContextManager:
    """Autocast has had its say about q, k and v; inside, it would round the scores."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
