"""The fused kernels for sequences as backends: what they serve and the memory that they take.

"hopper" is the warp-specialised kernels, and "triton" the plain ones of the same pattern. triton is imported when one
runs.
"""

import importlib.util
from types import ModuleType

import torch
from torch import Tensor

from hilbert_lib.attention.backends import reference
from hilbert_lib.attention.backends.backend import Backend, Backward, Forward, gpu_refusal
from hilbert_lib.attention.failures import not_compiled
from hilbert_lib.attention.request import Request, Tensors
from hilbert_lib.attention.starts import STARTS, has_starts
from hilbert_lib.attention.triton import limits, schedule
from hilbert_lib.attention.triton.hopper.division import NARROW
from hilbert_lib.internals import compile_time_constant
from hilbert_lib.machine import get_gpu_info, kernel_mode


@compile_time_constant
def absence(device: torch.device) -> str:
    """The reason why fused kernels do not run on a device, or ""."""
    if kernel_mode() == "absent":
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        return "no GPU; with TRITON_INTERPRET=1 its kernels are interpreted"
    if kernel_mode() == "compiled" and device.type != "cuda":
        return f"needs a CUDA device, got {device.type}"
    if device.type == "cuda" and (room := get_gpu_info(device).shared_memory_bytes) < limits.SHARED_BYTES:
        return f"its tiles need {limits.SHARED_BYTES} bytes of shared memory, this GPU has {room}"
    return ""


def hopper_here(q: Tensor, call: Request) -> str:
    """The reason why the warp-specialised kernels, for sequences or grids, do not run here, or ""."""
    refused = gpu_refusal(q, range(9, 10))
    return refused or ("" if kernel_mode() == "compiled" else "needs compiled kernels, and not triton's interpreter")


def _limits(q: Tensor, call: Request) -> str:
    return kernel_limits(q, call.first_query + q.shape[1], call.scale)


def _hopper_limits(q: Tensor, call: Request) -> str:
    from hilbert_lib.attention.triton.hopper import launch

    return launch.refusal(q, call) or _limits(q, call)


def _hopper_of_keys(q: Tensor, k: Tensor, call: Request) -> str:
    from hilbert_lib.attention.triton.hopper import launch

    return launch.refusal_of_keys(q, k, call) or kernel_limits(q, k.shape[1], call.scale)


def kernel_limits(q: Tensor, positions: int, scale: float) -> str:
    """The part of a call that no kernel of ours serves, along a sequence or on a grid."""
    if q.dtype == torch.float64:
        return "serves float16, bfloat16 and float32, got float64"
    if positions > limits.POSITIONS:
        return f"serves up to {limits.POSITIONS:,} positions, got {positions:,}"
    if scale < limits.SMALLEST_SCALE:
        return f"serves a scale of at least {limits.SMALLEST_SCALE:.1e}, got {scale}"
    return ""


def _of_keys(q: Tensor, k: Tensor, call: Request) -> str:
    from hilbert_lib.attention.triton import decode  # triton is imported only where a kernel is used

    return decode.refusal_of_starts(q, k, call) if has_starts(call) else ""


def _functions(device: torch.device) -> tuple[Forward, Backward]:
    return _launch().forward, _backward


def _backward(
    dout: Tensor, inputs: Tensors, out: Tensor, lse: Tensor, call: Request, dlse: Tensor | None = None
) -> tuple[Tensor, ...]:
    if has_starts(call):
        return reference.backward_by_rows(dout, inputs, out, lse, call, dlse)
    return _launch().backward(dout, inputs, out, lse, call, dlse)


def _hopper_functions(device: torch.device) -> tuple[Forward, Backward]:
    launch = _launch()
    return launch.forward_on_hopper, launch.backward_on_hopper


def _launch() -> ModuleType:
    try:  # every call comes here: a context would take a microsecond
        from hilbert_lib.attention.triton import launch  # triton is imported only where a kernel is used
    except (ImportError, AttributeError) as error:
        raise not_compiled("the module of dilated kernels", error) from error

    return launch


def _workspace(
    given: tuple, call: Request, direction: str, device: torch.device, returned: int
) -> dict[str, int] | None:
    # As `launch.py` and `decode.py` make them; interpreted kernels are taken for compiled ones.
    from hilbert_lib.attention.triton import decode  # triton is imported only where a kernel is used

    if has_starts(call) and direction == "backward":
        return None
    q, k, *_ = given[0] if direction == "forward" else given[1]
    batch, rows, heads, _ = q.shape
    lse, in_float = 4 * batch * rows * heads, 4 * q.numel()
    if direction == "forward":
        if decode.serves(q, k, call):
            return _of_parts(q, k, call)
        if _is_one_pass("forward", q, k, call, device):
            return {}
        return {"partial out, float32": in_float, "partial lse": lse}
    if _launch().is_short(q, k, call):
        return {}
    workspace = {"delta": lse}
    if not _is_one_pass("dq", q, k, call, device):
        workspace["partial dq, float32"] = in_float
    if not _is_one_pass("dkv", q, k, call, device):
        workspace["partial dk and dv, float32"] = 2 * 4 * k.numel()
    return workspace


def _hopper_workspace(
    given: tuple, call: Request, direction: str, device: torch.device, returned: int
) -> dict[str, int]:
    # As `launch.py` makes it, but for copies of tensors that the copy engine cannot read.
    from hilbert_lib.attention.triton import decode
    from hilbert_lib.attention.triton.hopper import launch, segments

    if direction == "forward":
        q, k, *_ = given[0]
        return _of_parts(q, k, call) if q.shape[1] != k.shape[1] and decode.serves(q, k, call) else {}
    q, k, *_ = given[1]
    if call.query_start is not None:
        return _workspace(given, call, direction, device, returned)
    batch, rows, heads, _ = q.shape
    workspace = {"delta": 4 * batch * rows * heads}
    if segments.on_a_line(Tensors(*given[1]), call) or segments.beside_another(Tensors(*given[1]), call):
        return workspace
    if q.shape[-1] <= NARROW and not torch.are_deterministic_algorithms_enabled():
        workspace["sums of dq, float32"] = 4 * q.numel()
    elif not launch.has_dq(q, k, call) and not _is_one_pass("dq", q, k, call, device):
        workspace["partial dq, float32"] = 4 * q.numel()
    return workspace


def _is_one_pass(kernel: str, q: Tensor, k: Tensor, call: Request, device: torch.device) -> bool:
    # Whether a plain kernel serves all branches in one pass.
    from hilbert_lib.attention.triton import arguments

    if _launch().is_short(q, k, call):
        return True
    config = arguments.compiled_config(kernel, q, device)
    block = config.block_m if kernel != "dkv" else config.block_n
    return len(schedule.passes(call.pattern, k.shape[1], block)) == 1


def _of_parts(q: Tensor, k: Tensor, call: Request) -> dict[str, int]:
    # What `decode` makes, of each part of the keys.
    batch, rows, heads, _ = q.shape
    return {"parts of the keys, float32": _parts(q, k, call) * 4 * (q.numel() + batch * rows * heads)}


def _parts(q: Tensor, k: Tensor, call: Request) -> int:
    from hilbert_lib.attention.triton import decode
    from hilbert_lib.attention.triton.geometry import block_d

    batch, rows, heads, head_dim = q.shape
    kv_heads, first, keys = k.shape[2], call.first_query, k.shape[1]
    if has_starts(call):
        first = None
    elif call.is_causal:
        keys = min(keys, first + rows)
    block = min(128, decode.TILE_BYTES // (block_d(head_dim) * k.element_size()))
    least = decode.KEYS_PER_ROW * rows * heads // kv_heads
    return decode.split(call.pattern, keys, first, rows, batch, kv_heads, least, block)[2]


BACKENDS = (
    Backend(
        name="hopper",
        note="warp-specialised kernels that fuse branches, and those for grids, for short segments of one branch or of "
        "one of two; plain kernels compute a branch whose rows TMA, the GPU's unit for copies, cannot load, the "
        "forward of few queries, and the backward of a call with a query_start, or of packed documents of wide heads",
        colour="#D55E00",
        caveat="a NaN may reach gradients of the segments, or packed documents, beside its own",
        functions=_hopper_functions,
        limits=_hopper_limits,
        of_keys=_hopper_of_keys,
        here=hopper_here,
        reads_documents=True,
        workspace=_hopper_workspace,
    ),
    Backend(
        name="triton",
        note="one fused pass over all branches; beside tensors of starts the backward is by matrix products",
        colour="#661100",
        functions=_functions,
        limits=_limits,
        of_keys=_of_keys,
        here=lambda q, call: absence(q.device),
        reads_orderings=True,
        reads_documents=True,
        workspace=_workspace,
        options=STARTS,
    ),
)
