"""The plain kernels for grids as a backend; triton is imported when one runs."""

import torch
from torch import Tensor

from hilbert_lib.attention.backends.backend import Backend, Backward, Forward
from hilbert_lib.attention.backends.fused import absence
from hilbert_lib.attention.grids.request import Request
from hilbert_lib.attention.triton import limits


def _limits(q: Tensor, request: Request) -> str:
    if q.dtype == torch.float64:
        return "serves float16, bfloat16 and float32, got float64"
    if q.shape[1] > limits.POSITIONS:
        return f"serves up to {limits.POSITIONS:,} cells, got {q.shape[1]:,}"
    if request.scale < limits.SMALLEST_SCALE:
        return f"serves a scale of at least {limits.SMALLEST_SCALE:.1e}, got {request.scale}"
    return ""


def _functions(device: torch.device) -> tuple[Forward, Backward]:
    from hilbert_lib.attention.triton import grid_launch  # triton is imported only where a kernel is used

    return grid_launch.forward, grid_launch.backward


BACKEND = Backend(
    name="triton",
    note="kernels that walk over rectangles of keys",
    colour="#D55E00",
    functions=_functions,
    limits=_limits,
    here=lambda q, request: absence(q.device),
    reads_orderings=True,
)
