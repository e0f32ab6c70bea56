"""A function and its gradient as two torch operators, one node each to compile, export and checkpointing."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

LIBRARY = torch.library.Library("hilbert_lib", "FRAGMENT")


def register(
    name: str,
    *,
    inputs: dict[str, str],
    request: str,
    forward: Callable,
    backward: Callable,
    fakes: tuple[Callable, Callable],
) -> type[torch.autograd.Function]:
    """Make `torch.ops.hilbert_lib.<name>` and `<name>_backward`; each checks nothing. Returns what autograd runs.

    Args:
        name: of the function, as errors say it.
        inputs: the tensors that have gradients, and what those gradients are called.
        request: the schema of all else that is asked for.
        forward: (*inputs, *request) -> (out, lse).
        backward: (dout, *inputs, out, lse, *request) -> gradients.
        fakes: both on tensors without data.
    """
    given = ", ".join(f"Tensor {x}" for x in inputs)
    grads = ", ".join(f"Tensor {x}" for x in inputs.values())
    LIBRARY.define(f"{name}({given}, {request}) -> (Tensor out, Tensor lse)")
    LIBRARY.define(f"{name}_backward(Tensor dout, {given}, Tensor out, Tensor lse, {request}) -> ({grads})")
    once = _once(name)
    differentiable = _differentiable(name, len(inputs))
    both = ((name, forward, differentiable), (f"{name}_backward", backward, once))
    for (own, run, function), fake in zip(both, fakes, strict=True):
        LIBRARY.impl(own, run, "CompositeExplicitAutograd")
        LIBRARY.impl(own, _without_functorch(name, function), "Autograd")
        LIBRARY.impl(own, _refusing_vmap(name), "FuncTorchBatched")
        torch.library.register_fake(f"hilbert_lib::{own}", fake, lib=LIBRARY)
    return differentiable


# Kernels for autograd of our own: with this many arguments torch.library.register_autograd takes as long for its
# bookkeeping in every forward as all the rest of a call.
def _differentiable(name: str, inputs: int) -> type[torch.autograd.Function]:
    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *args) -> tuple[Tensor, Tensor]:
            given, request = args[:inputs], args[inputs:]
            with torch._C._AutoDispatchBelowAutograd():
                out, lse = getattr(torch.ops.hilbert_lib, name)(*args)
            # All tensors are saved, so that autograd sees it if the mask is changed before the backward.
            ctx.save_for_backward(*given, out, lse, *(x if isinstance(x, Tensor) else None for x in request))
            ctx.request = [None if isinstance(x, Tensor) else x for x in request]
            ctx.mark_non_differentiable(lse)
            ctx.set_materialize_grads(False)  # autograd would fill a gradient of lse with zeros in every backward
            return out, lse

        @staticmethod
        def backward(ctx, dout: Tensor | None, _dlse: None) -> tuple[Tensor | None, ...]:
            saved, count = ctx.saved_tensors, inputs + 2
            if dout is None:
                return *[None] * inputs, *[None] * len(ctx.request)
            request = [x if tensor is None else tensor for x, tensor in zip(ctx.request, saved[count:], strict=True)]
            grads = getattr(torch.ops.hilbert_lib, f"{name}_backward")(dout, *saved[:count], *request)
            return *grads, *[None] * len(request)

    return Differentiable


def _once(name: str) -> type[torch.autograd.Function]:
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *args) -> tuple[Tensor, ...]:
            with torch._C._AutoDispatchBelowAutograd():
                return getattr(torch.ops.hilbert_lib, f"{name}_backward")(*args)

        @staticmethod
        def backward(ctx, *_grads: Tensor) -> None:
            raise RuntimeError(f"{name} can be differentiated once; its second derivative is not implemented")

    return Once


def _without_functorch(name: str, function: type[torch.autograd.Function]) -> Callable:
    def apply(*args):
        if torch._C._are_functorch_transforms_active():
            raise RuntimeError(
                f"{name} has no rule for torch.func's grad, vjp, jvp, jacrev and the like: differentiate it by "
                "backward() or torch.autograd.grad"
            )
        return function.apply(*args)

    return apply


def _refusing_vmap(name: str) -> Callable:
    def refuse(*_args) -> None:
        raise RuntimeError(f"{name} has no rule for torch.func.vmap: put what it maps over into the batch")

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
