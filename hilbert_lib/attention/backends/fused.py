"""The fused kernels as a backend: what they serve and the memory that they take. triton is imported when one runs."""

import importlib.util

import torch
from torch import Tensor

from hilbert_lib.attention.backends.backend import Backend, Backward, Forward, of_sequences
from hilbert_lib.attention.failures import not_compiled
from hilbert_lib.attention.request import Request
from hilbert_lib.attention.triton import limits, schedule
from hilbert_lib.internals import compile_time_constant
from hilbert_lib.machine import get_gpu_info, kernel_mode


@compile_time_constant
def absence(device: torch.device) -> str:
    """Why the fused kernels do not run on a device, or ""."""
    if kernel_mode() == "absent":
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        return "no GPU; with TRITON_INTERPRET=1 its kernels are interpreted"
    if kernel_mode() == "compiled" and device.type != "cuda":
        return f"needs a CUDA device, got {device.type}"
    if device.type == "cuda" and (room := get_gpu_info(device).shared_memory_bytes) < limits.SHARED_BYTES:
        return f"its tiles need {limits.SHARED_BYTES} bytes of shared memory, this GPU has {room}"
    return ""


def _limits(q: Tensor, call: Request) -> str:
    return kernel_limits(q, call.first_query + q.shape[1], call.scale)


def kernel_limits(q: Tensor, positions: int, scale: float) -> str:
    """What of a call no kernel of ours serves, along a sequence or on a grid."""
    if q.dtype == torch.float64:
        return "serves float16, bfloat16 and float32, got float64"
    if positions > limits.POSITIONS:
        return f"serves up to {limits.POSITIONS:,} positions, got {positions:,}"
    if scale < limits.SMALLEST_SCALE:
        return f"serves a scale of at least {limits.SMALLEST_SCALE:.1e}, got {scale}"
    return ""


def _functions(device: torch.device) -> tuple[Forward, Backward]:
    try:  # every call comes here: a context would take a microsecond
        from hilbert_lib.attention.triton import launch  # triton is imported only where a kernel is used
    except (ImportError, AttributeError) as error:
        raise not_compiled("the module of dilated kernels", error) from error

    return of_sequences(launch.forward, launch.backward)


def _workspace(given: tuple, call: Request, direction: str, device: torch.device, returned: int) -> dict[str, int]:
    # As `launch.py`, `hopper/launch.py` and `decode.py` make them; interpreted kernels are taken for compiled ones.
    from hilbert_lib.attention.triton import arguments, decode  # triton is imported only where a kernel is used

    q, k, *_ = given[0] if direction == "forward" else given[1]
    batch, rows, heads, head_dim = q.shape
    lse, in_float = 4 * batch * rows * heads, 4 * q.numel()

    def passes(kernel: str) -> tuple[schedule.Pass, ...]:
        configs = arguments.CONFIGS[kernel].items()
        config = next(c for (size, largest), c in configs if size == q.element_size() and head_dim <= largest)
        return schedule.passes(call.pattern, k.shape[1], config.block_m if kernel != "dkv" else config.block_n)

    if direction == "forward":
        if decode.serves(q, k, call):
            return {"parts of the keys, float32": _parts(q, k, call) * (in_float + lse)}
        if len(passes("forward")) == 1 or _is_hopper_call(q, k, call, device):
            return {}
        return {"partial out, float32": in_float, "partial lse": lse}
    workspace = {"delta": lse}
    hopper = call.query_start is None and _is_hopper_call(q, k, call, device)
    if hopper and not torch.are_deterministic_algorithms_enabled():
        return workspace | {"sums of dq, float32": in_float}
    if len(passes("dq")) > 1:
        workspace["partial dq, float32"] = in_float
    if len(passes("dkv")) > 1 and not hopper:
        workspace["partial dk and dv, float32"] = 2 * 4 * k.numel()
    return workspace


def _parts(q: Tensor, k: Tensor, call: Request) -> int:
    from hilbert_lib.attention.triton import decode
    from hilbert_lib.attention.triton.geometry import block_d

    batch, rows, heads, head_dim = q.shape
    kv_heads, first = k.shape[2], call.first_query
    keys = min(k.shape[1], first + rows) if call.is_causal else k.shape[1]
    block = min(128, decode.TILE_BYTES // (block_d(head_dim) * k.element_size()))
    least = decode.KEYS_PER_ROW * rows * heads // kv_heads
    return decode.split(call.pattern, keys, first, rows, batch, kv_heads, least, block)[2]


def _is_hopper_call(q: Tensor, k: Tensor, call: Request, device: torch.device) -> bool:
    # Whether the warp-specialised kernels serve, as `triton/hopper/launch.py` decides it for dense tensors.
    from hilbert_lib.attention.triton.hopper import launch

    hopper = not torch.cuda.is_available() or torch.cuda.get_device_capability(device) == (9, 0)
    return device.type == "cuda" and hopper and launch.serves(q, k.shape[1], call)


BACKENDS = (
    Backend(
        name="triton",
        note="one fused pass over all branches",
        colour="#D55E00",
        functions=_functions,
        limits=_limits,
        here=lambda q, call: absence(q.device),
        reads_orderings=True,
        reads_documents=True,
        workspace=_workspace,
    ),
)
