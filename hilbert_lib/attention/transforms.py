"""Transforms of torch that attention has no rule for, each refused in words that name it."""

import sys
from collections.abc import Callable, Iterable
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from hilbert_lib.internals import (
    is_batched,
    is_compiler_loaded,
    is_forward_ad_active,
    is_functorch_active,
    while_jit_traces,
)

_PLAIN = (Tensor, nn.Parameter)
_untraced: dict[Callable, Callable] = {}  # what torch.compile leaves alone
_TRACED = "is not traced by torch.jit.trace, nor by an export to ONNX that uses it: use torch.export"


def refuse_tracers(*tensors: object, name: str = "attention") -> None:
    """Raise TypeError while torch.jit.trace runs, which makes tensors of all sizes, or for what torch.fx traces by."""
    if torch.jit.is_tracing():
        raise TypeError(f"{name} {_TRACED}")
    for x in tensors:
        if isinstance(x, torch.fx.Proxy):
            raise TypeError(
                f"{name} is not traced by torch.fx.symbolic_trace, whose tensors have no shapes: use torch.export or "
                "make_fx of torch.fx.experimental.proxy_tensor, or make its module a leaf of the tracer"
            )


def refuse_onnx(name: str) -> None:
    """Raise TypeError in an export to ONNX by torch.export."""
    if torch.onnx.is_in_onnx_export():
        raise TypeError(f"{name} is not exported to ONNX, which has no operator for it: use torch.export")


def is_dtensor(x: object) -> bool:
    """Whether x is a DTensor; torch.distributed is not loaded for the answer."""
    # Most are plain, and torch.compile would look at every loaded module for the answer below: a fifth of its time.
    if not isinstance(x, Tensor) or type(x) in _PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def uncompiled(function: Callable) -> Callable:
    """The function, inside which torch.compile does not go on after a break of the graph: it would trace streams."""
    # Only where it is loaded: this imports it, and with it triton. Made once: it takes 0.1 ms (and torch.compile warns
    # of functools' caches).
    if not is_compiler_loaded():
        return function
    if function not in _untraced:
        _untraced[function] = torch.compiler.disable(function)
    return _untraced[function]


def unserved_derivative(name: str, tensors: Iterable[Tensor | None]) -> str | None:
    """The reason why a function of that name cannot be differentiated as it is called now; None if it can.

    Args:
        name: of the function, as errors say it.
        tensors: those that it is differentiable in.
    """
    if is_functorch_active():
        return (
            f"{name} has no rule for torch.func's grad, vjp, jvp, jacrev and the like: differentiate it by "
            "backward() or torch.autograd.grad"
        )
    if not is_forward_ad_active():
        return None
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        return (
            f"{name} has no rule for forward-mode differentiation (torch.autograd.forward_ad): differentiate it by "
            "backward() or torch.autograd.grad"
        )
    return None


def no_rule_for_vmap(name: str) -> str:
    """The reason why a function of that name cannot be mapped."""
    return f"{name} has no rule for torch.func.vmap: put what it maps over into the batch"


def refuse_vmap(name: str, x: Tensor) -> None:
    """Raise RuntimeError for a tensor over which torch.func.vmap maps, for a function that reads its values."""
    if is_batched(x):
        raise RuntimeError(no_rule_for_vmap(name))


def _refuse_jit_trace(layer: nn.Module, *args: object, **kwargs: object) -> None:
    # An export to ONNX by torch.jit.trace gives every argument by its place, which `forward` could not refuse in words
    # of its own.
    raise TypeError(f"{type(layer).__name__} {_TRACED}")


@while_jit_traces(_refuse_jit_trace)
class Layer(nn.Module):
    """A module that torch.jit neither traces nor scripts, and says so."""

    shown: ClassVar[tuple[str, ...]] = ()  # attributes that its representation names

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in self.shown)

    def __prepare_scriptable__(self) -> None:
        raise TypeError(f"{type(self).__name__} is not scripted by torch.jit.script: use torch.export or torch.compile")
