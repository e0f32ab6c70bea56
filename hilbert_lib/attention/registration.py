"""A function and its gradient as two torch operators, one node each to compile, export and checkpointing."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from hilbert_lib.attention.autograd import Differentiable, Once, Passes
from hilbert_lib.attention.transforms import no_rule_for_vmap, unserved_derivative
from hilbert_lib.internals import run_below_autograd

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
) -> None:
    """Make `torch.ops.hilbert_lib.<name>` and `<name>_backward`; each checks nothing.

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
    operator, gradient = (getattr(torch.ops.hilbert_lib, each) for each in (name, f"{name}_backward"))
    masks = [n for n, each in enumerate(request.split(", ")) if each.startswith("Tensor")]
    count = len(inputs)
    passes = Passes(
        lambda given, request: run_below_autograd(operator, *given, *request),
        lambda dout, given, out, lse, request: gradient(dout, *given, out, lse, *request),
        partial(_without_masks, masks),
        partial(_with_masks, masks),
    )

    def differentiable(*args) -> tuple[Tensor, Tensor]:
        return Differentiable.apply(*args[:count], passes, args[count:])

    def once(*args) -> tuple[Tensor, ...]:
        tensors, rest = args[: count + 3], args[count + 3 :]
        return Once.apply(*tensors, lambda *given: run_below_autograd(gradient, *given, *rest), said(rest))

    both = (name, forward, differentiable, count), (f"{name}_backward", backward, once, count + 3)
    for (own, run, by_autograd, tensors), fake in zip(both, fakes, strict=True):
        LIBRARY.impl(own, run, "CompositeExplicitAutograd")
        LIBRARY.impl(own, _refusing_derivatives(said, by_autograd, tensors), "Autograd")
        LIBRARY.impl(own, _refusing_vmap(said, tensors), "FuncTorchBatched")
        torch.library.register_fake(f"hilbert_lib::{own}", fake, lib=LIBRARY)


def _without_masks(masks: list[int], request: tuple) -> tuple[list, list]:
    # masks: the places of tensors in a request.
    return [request[n] for n in masks], [None if n in masks else x for n, x in enumerate(request)]


def _with_masks(masks: list[int], tensors: tuple, rest: list) -> list:
    request = [*rest]
    for n, x in zip(masks, tensors, strict=True):
        request[n] = x
    return request


def _refusing_derivatives(said: Callable, run: Callable, tensors: int) -> Callable:
    def apply(*args):
        if reason := unserved_derivative(said(args[tensors:]), args[:tensors]):
            raise RuntimeError(reason)
        return run(*args)

    return apply


def _refusing_vmap(said: Callable, tensors: int) -> Callable:
    def refuse(*args) -> None:
        raise RuntimeError(no_rule_for_vmap(said(args[tensors:])))

    return refuse
