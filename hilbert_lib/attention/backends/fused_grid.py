"""The fused kernels for grids as backends; triton is imported when one runs."""

from functools import partial
from math import prod

import torch
from torch import Tensor

from hilbert_lib.attention.backends import reference
from hilbert_lib.attention.backends.backend import Backend, Backward, Forward
from hilbert_lib.attention.backends.fused import absence, hopper_here, kernel_limits
from hilbert_lib.attention.failures import not_compiled
from hilbert_lib.attention.request import BIAS, Request, Tensors
from hilbert_lib.attention.starts import STARTS, has_starts
from hilbert_lib.attention.triton.limits import MOST_SEQUENCES, parts_of_extra_keys
from hilbert_lib.attention.triton.shifts import cells_of, shape_of_sums
from hilbert_lib.patterns.neighbourhood import HeadNeighbourhoods

ENTRIES = 2**31 - 1  # of a table of bias that one head has: kernels number them in int32


def _plain_functions(device: torch.device) -> tuple[Forward, Backward]:
    try:
        from hilbert_lib.attention.triton import grid_launch  # triton is imported only where a kernel is used
    except (ImportError, AttributeError) as error:
        raise not_compiled("the module of kernels by rectangles", error) from error

    return grid_launch.forward, partial(_plain_backward, grid_launch.backward)


def _plain_backward(
    backward: Backward, dout: Tensor, inputs: Tensors, out: Tensor, lse: Tensor, request: Request,
    dlse: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    run = reference.backward_by_rows if has_starts(request) else backward
    return run(dout, inputs, out, lse, request, dlse=dlse)


def _plain_of_keys(q: Tensor, k: Tensor, request: Request) -> str:
    from hilbert_lib.attention.triton import decode  # triton is imported only where a kernel is used

    refused = decode.refusal_of_starts(q, k, request) if has_starts(request) else ""
    return refused or _of_keys(q, k, request)


def _workspace(
    arguments: tuple, request: Request, direction: str, device: torch.device, returned: int
) -> dict[str, int] | None:
    # The scratch of both `grid_launch.py`. Interpreted kernels count as compiled ones.
    if has_starts(request):  # the backward's is found on meta tensors, and the forward's parts are few
        return {} if direction == "forward" else None
    if direction == "forward":
        return {}
    scratch = {"delta": arguments[-1].nbytes} | _parts(Tensors(*arguments[1]))
    if request.has_bias:
        dout = arguments[0]  # of q's dtype and shape
        batch, _, heads, _ = dout.shape
        scratch["sums of the gradient of bias"] = 4 * prod(shape_of_sums(request, batch, heads, cells_of(dout)))
    return scratch


def _parts(inputs: Tensors) -> dict[str, int]:
    # Of the gradients of extra keys.
    extra_k, parts = inputs.extra_k, parts_of_extra_keys(inputs.q.shape[1], inputs.extra_k.shape)
    if parts <= 1:  # none, or one, which the kernel writes as it is returned
        return {}
    return {"parts of the gradients of extra keys, float32": 4 * 2 * parts * extra_k.numel()}


def _hopper_workspace(
    arguments: tuple, request: Request, direction: str, device: torch.device, returned: int
) -> dict[str, int]:
    # As `hopper/grid_launch.py` makes it, but for copies of tensors that the copy engine cannot read.
    scratch = {}
    if direction == "backward":
        scratch = {"delta": arguments[-1].nbytes} | _parts(Tensors(*arguments[1]))
    if request.has_bias:
        from hilbert_lib.attention.triton.hopper.grid_launch import padded_sides

        tensors = arguments[0] if direction == "forward" else arguments[1]
        table = 4 * prod(padded_sides(request, tensors.q.shape[2]))
        scratch["padded tables of bias"] = table if direction == "forward" else 2 * table
        if direction == "backward":
            scratch["sums of the gradient of bias"] = 2 * table
            scratch["bounds of the gradient of bias"] = 4 * 3 * tensors.q.shape[2]
    return scratch


def _hopper_functions(device: torch.device) -> tuple[Forward, Backward]:
    from hilbert_lib.attention.triton.hopper import grid_launch

    return grid_launch.forward, grid_launch.backward


def _limits(q: Tensor, request: Request) -> str:
    # The most programs along the second and the third axis of a launch.
    for name, count in (("heads", q.shape[2]), ("sequences", q.shape[0])):
        if count > MOST_SEQUENCES:
            return f"serves up to {MOST_SEQUENCES:,} {name}, got {count:,}"
    if request.has_bias and (entries := prod(request.pattern.bias_sides)) > ENTRIES:
        return f"serves a bias of up to {ENTRIES:,} entries a head, got {entries:,}"
    return kernel_limits(q, q.shape[1], request.scale)


def _of_keys(q: Tensor, k: Tensor, request: Request) -> str:
    # Of some cells of a grid q is shorter.
    return kernel_limits(q, k.shape[1], request.scale)


def _hopper_limits(q: Tensor, request: Request) -> str:
    from hilbert_lib.attention.triton.hopper import grid_launch

    return grid_launch.refusal(q, request) or _limits(q, request)


BACKENDS = (
    Backend(
        serves=HeadNeighbourhoods,
        name="hopper",
        note="warp-specialised kernels that read keys in boxes; a tensor that they cannot read so is copied once",
        colour="#0072B2",
        functions=_hopper_functions,
        limits=_hopper_limits,
        of_keys=_of_keys,
        here=hopper_here,
        caveat="a NaN in a key reaches gradients of queries that do not see it, in its boxes",
        workspace=_hopper_workspace,
        options=("part", *BIAS),
    ),
    Backend(
        serves=HeadNeighbourhoods,
        name="triton",
        note="kernels that walk over rectangles of keys; beside tensors of starts the backward is by matrix products",
        colour="#D55E00",
        functions=_plain_functions,
        limits=_limits,
        of_keys=_plain_of_keys,
        here=lambda q, request: absence(q.device),
        reads_orderings=True,
        workspace=_workspace,
        options=("part", *BIAS, *STARTS),
    ),
)
