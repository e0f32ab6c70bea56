"""Calls whose kernels do not compile, on a driver that starts nothing and a compiler that fails when it is told to.

Prints what each call raises or warns of, and how often the compiler was asked. A process of its own, as
`first_call.py`: tensors are on the CPU, where the fused backends come first by a rule of this script.
"""

import json
import warnings

import torch
import triton
from kept_starts import Compiled, Given

from hilbert_lib import DilatedPattern, Neighbourhood, dilated_attention, explain_backend, neighbourhood_attention
from hilbert_lib.attention import choice, failures
from hilbert_lib.attention.backends import fused, fused_grid
from hilbert_lib.attention.backends.registry import backends_for
from hilbert_lib.attention.rules import Rule
from hilbert_lib.attention.triton import start as starting
from hilbert_lib.attention.triton.hopper import grid_launch
from hilbert_lib.patterns.neighbourhood import HeadNeighbourhoods

FAILING: list[str] = []  # kernels, by the module that holds each
asked: list[str] = []  # the compiler was, for these
kernels = set()


class Refused(Exception):
    """What a compiler raises."""


def compile_or_fail(src, *args, **options):
    kernel = f"{src.fn.fn.__module__}.{src.fn.__name__}".removeprefix("hilbert_lib.attention.triton.")
    asked.append(kernel)
    kernels.add(src.fn)
    if kernel in FAILING:
        raise Refused("at 3:4:\n    no such name\n    ^\nno 'tile.view' in this release")
    return Compiled(src, *args, **options)


def call(function, pattern, backend: str, gradient: bool) -> dict:
    """What a call, and with gradient its backward, raises and warns of; how far its output is from the reference."""
    asked.clear()
    q, k, v = (torch.randn(1, 64, 2, 64, generator=GENERATOR).bfloat16() for _ in range(3))
    for x in (q, k, v):
        x.requires_grad_(gradient)
    raised = cause = ""
    out = q
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            out = function(q, k, v, pattern, backend=backend)
            if gradient:
                out.sum().backward()
        except Exception as error:
            raised, cause = f"{type(error).__name__}: {error}", type(error.__cause__).__name__
    exact = function(q, k, v, pattern, backend="reference")
    explained = explain_backend(q, k, v, pattern, backend=backend)
    return {
        "raised": raised,
        "cause": cause,
        "warned": [f"{each.category.__name__}: {each.message}" for each in warned],
        "files": [each.filename.rpartition("/")[2] for each in warned],
        "asked": sorted(set(asked)),
        "error": (out - exact).abs().max().item(),
        "chosen": explained.chosen,
        "reasons": explained.reasons,
    }


def tried(function, pattern, backend: str, failing: str, gradient: bool) -> list[dict]:
    """Two calls by "auto", and two by the name of the backend that has the kernel which does not compile."""
    FAILING[:] = [failing]
    found = []
    for name in ("auto", backend):
        failures.forget()
        starting.forget()
        for each in kernels:
            each.device_caches.clear()  # where Triton keeps what failed
        found += [call(function, pattern, name, gradient) for _ in range(2)]
    return found


GENERATOR = torch.Generator("cpu").manual_seed(0)
ALONG = dilated_attention, DilatedPattern((16, 64), (1, 2))
GRID = neighbourhood_attention, Neighbourhood((8, 8), 3), "hopper"
CASES = {
    ("sequence", "forward"): (*ALONG, "triton", "forward.forward_kernel", False),
    ("sequence", "backward"): (*ALONG, "triton", "backward.backward_kernel", True),
    ("sequence on hopper", "forward"): (*ALONG, "hopper", "hopper.forward.forward_kernel", False),
    ("sequence on hopper", "backward"): (*ALONG, "hopper", "hopper.backward.backward_kernel", True),
    ("grid", "forward"): (*GRID, "hopper.grid_forward.forward_kernel", False),
    ("grid", "backward"): (*GRID, "hopper.grid_backward.backward_kernel", True),
}

if __name__ == "__main__":
    triton.runtime.driver.set_active(Given())
    triton.compiler.compile = compile_or_fail
    torch.cuda.set_device = lambda _: None
    fused.absence = fused_grid.absence = lambda _device: ""
    on_hopper = [backends_for(kind)["hopper"] for kind in (DilatedPattern, HeadNeighbourhoods)]
    for each in on_hopper:
        object.__setattr__(each, "here", lambda q, request: "")
    grid_launch.multiprocessors = lambda _device: 132
    choice.grid_rule = lambda *_: Rule(("hopper", "triton", "eager"), "of this script")
    told = {}
    for (name, direction), case in CASES.items():
        first = case[2]
        choice._known_rule = lambda *_, first=first: Rule((first, "sdpa", "reference"), "of this script")
        told[f"{name} {direction}"] = tried(*case)
    print(json.dumps(told))
