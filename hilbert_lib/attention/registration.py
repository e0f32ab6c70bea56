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
    function_of: Callable[[tuple], str],
    inputs: dict[str, str],
    request: str,
    forward: Callable,
    backward: Callable,
    fakes: tuple[Callable, Callable],
) -> None:
    """Make `torch.ops.hilbert_lib.<name>` and `<name>_backward`; each checks nothing.

    Args:
        name: of the operator.
        function_of: from the arguments of a request, the public function that errors name.
        inputs: the schema of each tensor that has a gradient, and the name of that gradient. The gradient of None has
            no elements.
        request: the schema of all other arguments.
        forward: (*inputs, *request) -> (out, lse).
        backward: (dout, *inputs, out, lse, dlse, *request) -> gradients; dlse may be None.
        fakes: both on tensors without data.
    """
    schema = ", ".join(inputs)
    grads = ", ".join(f"Tensor {x}" for x in inputs.values())
    LIBRARY.define(f"{name}({schema}, {request}) -> (Tensor out, Tensor lse)")
    results = "Tensor out, Tensor lse, Tensor? dlse"
    LIBRARY.define(f"{name}_backward(Tensor dout, {schema}, {results}, {request}) -> ({grads})")
    operator, gradient = (getattr(torch.ops.hilbert_lib, full_name) for full_name in (name, f"{name}_backward"))
    masks = [n for n, field in enumerate(request.split(", ")) if field.startswith("Tensor?")]
    count = len(inputs)
    backward_count = count + 4  # dout, out, lse and dlse too
    passes = Passes(
        lambda tensors, request: run_below_autograd(operator, *tensors, *request),
        lambda dout, tensors, out, lse, dlse, request: gradient(dout, *tensors, out, lse, dlse, *request),
        partial(_without_masks, masks),
        partial(_with_masks, masks),
    )

    def differentiable(*args) -> tuple[Tensor, Tensor]:
        return Differentiable.apply(*args[:count], passes, args[count:])

    def once(*args) -> tuple[Tensor, ...]:
        tensors, rest = args[:backward_count], args[backward_count:]
        return Once.apply(*tensors, lambda *tensors: run_below_autograd(gradient, *tensors, *rest), function_of(rest))

    both = (name, forward, differentiable, count), (f"{name}_backward", backward, once, backward_count)
    for (full_name, run, by_autograd, tensor_count), fake in zip(both, fakes, strict=True):
        LIBRARY.impl(full_name, run, "CompositeExplicitAutograd")
        LIBRARY.impl(full_name, _refusing_derivatives(function_of, by_autograd, tensor_count), "Autograd")
        LIBRARY.impl(full_name, _refusing_vmap(function_of, tensor_count), "FuncTorchBatched")
        torch.library.register_fake(f"hilbert_lib::{full_name}", fake, lib=LIBRARY)


def _without_masks(masks: list[int], request: tuple) -> tuple[list, list]:
    # masks: the places of tensors in a request.
    return [request[n] for n in masks], [None if n in masks else x for n, x in enumerate(request)]


def _with_masks(masks: list[int], tensors: tuple, rest: list) -> list:
    request = [*rest]
    for n, x in zip(masks, tensors, strict=True):
        request[n] = x
    return request


def _refusing_derivatives(function_of: Callable, run: Callable, tensor_count: int) -> Callable:
    def apply(*args):
        if reason := unserved_derivative(function_of(args[tensor_count:]), args[:tensor_count]):
            raise RuntimeError(reason)
        return run(*args)

    return apply


def _refusing_vmap(function_of: Callable, tensor_count: int) -> Callable:
    def refuse(*args) -> None:
        raise RuntimeError(no_rule_for_vmap(function_of(args[tensor_count:])))

    return refuse
