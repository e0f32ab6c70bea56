"""The warp-specialised kernels of Hopper: which calls they serve, and their launches."""

from functools import lru_cache

from torch import Tensor

from hilbert_lib.attention.failures import importing
from hilbert_lib.attention.request import Request
from hilbert_lib.attention.triton import schedule
from hilbert_lib.attention.triton.arguments import Config, launch_arguments
from hilbert_lib.attention.triton.hopper import division
from hilbert_lib.attention.triton.start import Start
from hilbert_lib.machine import get_gpu_info
from hilbert_lib.patterns.dilated import DilatedPattern

# By head_dim: the fastest of those tried on an H200 (reports/HISTORY.md). What they reach is recorded in reports/h200.
HOPPER_FORWARD = {
    64: Config(128, 128, 4, 2, maxnreg=80, together=2 * schedule.TILES_TOGETHER),
    128: Config(128, 128, 4, 2),
}
HOPPER_BACKWARD = {64: Config(64, 128, 4, 3), 128: Config(64, 128, 4, 2)}


def serves(q: Tensor, keys: int, call: Request) -> bool:
    """Whether the warp-specialised kernels can serve some branch of a call, on a GPU that runs them.

    The plain kernels serve every call, and the other branches.
    """
    return (
        q.element_size() == 2
        and q.shape[-1] <= 128
        and q.shape[-1] % 8 == 0
        and call.inverse is None
        and call.key_padding_mask is None
        and call.cu_seqlens is None
        and call.dropout_p == 0.0
        and any(division.is_reached(w, r, keys) for w, r in call.pattern.branches)
    )


def runs(tensors: tuple[Tensor, ...], keys: int, call: Request) -> bool:
    """Whether the warp-specialised kernels run for a call with these tensors: q is the first."""
    q = tensors[0]
    return (
        q.is_cuda
        and get_gpu_info(q.device).capability == (9, 0)
        and serves(q, keys, call)
        # The copy engine takes no tensor that is expanded.
        and not any(0 in x.stride() for x in tensors)
    )


def columns_of(q: Tensor) -> int:
    """Columns of a tile."""
    return 64 if q.shape[-1] <= 64 else 128


@lru_cache(maxsize=1024)
def masked(
    pattern: DilatedPattern, passes: tuple[schedule.Pass, ...], keys: int, is_causal: bool, block_n: int
) -> tuple[bool, ...]:
    """Of each pass, whether a tile of block_n keys may be cut off, by causality or by the end of a segment."""
    branches = [[pattern.branches[i] for i in one.branches] for one in passes]
    return tuple(
        is_causal or any(min(w, keys) % (r * block_n) or keys % min(w, keys) for w, r in some) for some in branches
    )


def forward(
    q: Tensor, k: Tensor, v: Tensor, call: Request, one: schedule.Pass, out: Tensor, lse: Tensor, flag: Tensor | None,
    *, first: bool,
) -> Start:  # fmt: skip
    """The start of a launch that writes out and lse; unless it is the first, it goes on from them.

    flag is the kernel's, or None where no tile can be cut off.
    """
    # Imported only where it runs: the interpreter knows no Gluon.
    with importing("the module of the warp-specialised forward"):
        from hilbert_lib.attention.triton.hopper import forward as kernels
        from hilbert_lib.attention.triton.hopper import tiles

    columns = columns_of(q)
    config = HOPPER_FORWARD[columns]
    rates = [call.pattern.dilation_rates[i] for i in one.branches]
    descriptors = [tiles.descriptor(x, r, config.block_n, columns) for r in rates for x in (k, v)]
    descriptors += [None] * (2 * division.BRANCHES - len(descriptors))
    grid, shared = launch_arguments(q, k, v, call, one, config, rows="queries", first=first, last=True)
    named = _named(kernels.forward_kernel, shared, columns, config, len(rates))
    named |= {"MASKED": flag is not None, "maxnreg": config.maxnreg}
    return Start(kernels.forward_kernel, grid, (q, out, lse, q if flag is None else flag, *descriptors), named)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, dk: Tensor, dv: Tensor, call: Request,
    one: schedule.Pass, sums: Tensor | None, *, first: bool,
) -> Start:  # fmt: skip
    """The start of a launch that writes dk and dv; unless it is the first, it adds to them.

    It adds dq, without its scale, to sums in an order that varies. Without sums the bits are always the same.
    """
    with importing("the module of the warp-specialised backward"):
        from hilbert_lib.attention.triton.hopper import backward as kernels
        from hilbert_lib.attention.triton.hopper import tiles

    columns = columns_of(q)
    config = HOPPER_BACKWARD[columns]
    rates = [call.pattern.dilation_rates[i] for i in one.branches]
    part = (config.block_m, columns // 2)  # of one group of warps
    descriptors = []
    for r in rates:
        descriptors += [tiles.descriptor(x, r, config.block_m, columns) for x in (q, dout)]
        descriptors.append(descriptors[-1] if sums is None else tiles.descriptor(sums, r, *part))
    descriptors += [None] * (3 * division.BRANCHES - len(descriptors))
    grid, shared = launch_arguments(q, k, v, call, one, config, rows="keys", first=first, last=True)
    tables = schedule.tables(call.pattern, one, k.shape[1], k.shape[2], config.block_n, config.together, q.device)
    named = _named(kernels.backward_kernel, shared, columns, config, len(rates))
    named |= {"CUT": tables.cut, "WITH_DQ": sums is not None}
    return Start(kernels.backward_kernel, grid, (k, v, lse, delta, dk, dv, *descriptors), named)


def _named(kernel, shared: dict, columns: int, config: Config, branches: int) -> dict:
    # Those shared arguments that this kernel takes, and what both kernels take besides; four warps a group.
    names = set(kernel.arg_names)
    own = {"BLOCK_D": columns, "STAGES": config.num_stages, "N_BRANCHES": branches, "num_warps": 4}
    return {name: value for name, value in shared.items() if name in names} | own
