"""The plain kernels for grids as a backend; triton is imported when one runs."""

import torch

from hilbert_lib.attention.backends.backend import Backend, Backward, Forward
from hilbert_lib.attention.backends.fused import absence, kernel_limits
from hilbert_lib.attention.grids.request import Request


def _functions(device: torch.device) -> tuple[Forward, Backward]:
    from hilbert_lib.attention.triton import grid_launch  # triton is imported only where a kernel is used

    return grid_launch.forward, grid_launch.backward


def _workspace(given: tuple, request: Request, direction: str, device: torch.device, returned: int) -> dict[str, int]:
    # As `grid_launch.py` makes it; interpreted kernels are taken for compiled ones.
    return {} if direction == "forward" else {"delta": given[-1].nbytes}


BACKEND = Backend(
    name="triton",
    note="kernels that walk over rectangles of keys",
    colour="#D55E00",
    functions=_functions,
    limits=lambda q, request: kernel_limits(q, q.shape[1], request.scale),
    here=lambda q, request: absence(q.device),
    reads_orderings=True,
    workspace=_workspace,
    options=("part",),
)
