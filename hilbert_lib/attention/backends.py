"""The implementations that exist, whether each can serve a call, and how one is chosen."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hilbert_lib.attention import reference, strided
from hilbert_lib.attention.call import Call
from hilbert_lib.attention.dense import CpuFlash, CuDnn, Eager, Efficient, Flash, Kernel
from hilbert_lib.environment import kernel_mode

Forward = Callable[[Tensor, Tensor, Tensor, Call], tuple[Tensor, Tensor]]
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Call], tuple[Tensor, Tensor, Tensor]]


TRITON_SHARED_BYTES = 163 * 1024  # what an A100 gives a block: its tile shapes are compiled for that and for more


@dataclass(frozen=True)
class Backend:
    """One implementation of dilated attention.

    Attributes:
        name: as `backend=` takes it.
        note: what a user should know of it, in a line.
        refusal: gives the reason why it cannot serve a call, or "" where it can.
        functions: gives forward and backward for tensors on a device.
        reads_orderings: whether it reads k and v through `Call.inverse`; for others they are gathered once.
    """

    name: str
    note: str
    refusal: Callable[[Tensor, Call], str]
    functions: Callable[[torch.device], tuple[Forward, Backward]]
    reads_orderings: bool = False


@dataclass(frozen=True)
class Explanation:
    """Which backend serves a call, and why the others were passed over. `print` shows it as a table.

    Attributes:
        chosen: the backend's name; "" where none can serve.
        reasons: for every backend by name, "chosen" and its note, or why it was passed over.
    """

    chosen: str
    reasons: dict[str, str]

    def __str__(self) -> str:
        width = max(map(len, self.reasons))
        return "\n".join(f"{name.ljust(width)}  {reason}" for name, reason in self.reasons.items())


def _serves_all(q: Tensor, call: Call) -> str:
    return ""


def _dense_refusal(q: Tensor, call: Call) -> str:
    # What no operator under torch's scaled_dot_product_attention says of strided segments with the merged lse.
    if call.dropout_p > 0.0:
        return "no dropout: its generator is not keyed by position"
    if call.key_padding_mask is not None:
        return "no key_padding_mask: rows without keys are not defined there"
    if call.query_start is not None:
        return "no query_start: its causal mask starts at the first query"
    return ""


def _sdpa_refusal(q: Tensor, call: Call) -> str:
    if q.device.type not in ("cpu", "cuda"):
        return f"no lse on device {q.device.type}: serves cpu and cuda"
    if q.is_cuda and q.dtype == torch.float64:
        return "no float64 on cuda"
    if q.is_cuda and q.shape[-1] * q.element_size() % 16:
        return f"head_dim * {q.element_size()} bytes must be a multiple of 16 on cuda, got head_dim {q.shape[-1]}"
    return _dense_refusal(q, call)


def _cuda_absence(device: torch.device) -> str:
    if device.type != "cuda":
        return f"needs a CUDA device, got {device.type}"
    return "" if torch.cuda.get_device_capability(device) >= (8, 0) else "needs compute capability 8.0 or later"


def _cuda_refusal(q: Tensor, call: Call, *, largest_head_dim: int) -> str:
    if absence := _cuda_absence(q.device):
        return absence
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"serves float16 and bfloat16, got {str(q.dtype).removeprefix('torch.')}"
    if q.shape[-1] % 8 or q.shape[-1] > largest_head_dim:
        return f"head_dim must be a multiple of 8 up to {largest_head_dim}, got {q.shape[-1]}"
    return _dense_refusal(q, call)


def _over_views(kernel: Kernel) -> Callable[[torch.device], tuple[Forward, Backward]]:
    pair = partial(strided.forward, kernel=kernel), partial(strided.backward, kernel=kernel)
    return lambda device: pair


def _sdpa_functions(device: torch.device) -> tuple[Forward, Backward]:
    return _over_views(Efficient if device.type == "cuda" else CpuFlash)(device)


def _triton_refusal(q: Tensor, call: Call) -> str:
    if q.dtype == torch.float64:
        return "serves float16, bfloat16 and float32, got float64"
    return _triton_absence(q.device)


def _triton_absence(device: torch.device) -> str:
    mode = kernel_mode()
    if mode == "absent":
        return "no GPU, or triton is not installed; without a GPU, TRITON_INTERPRET=1 has its kernels interpreted"
    if mode == "compiled" and device.type != "cuda":
        return f"needs a CUDA device, got {device.type}"
    if device.type == "cuda":
        room = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
        if room < TRITON_SHARED_BYTES:
            return f"its tiles need {TRITON_SHARED_BYTES} bytes of shared memory, this GPU has {room}"
    return ""


# torch.compile cannot trace questions to the machine: it takes their answers as constants (said as in ordering.py).
_cuda_absence._dynamo_marked_constant = _triton_absence._dynamo_marked_constant = True


def _triton_functions(device: torch.device) -> tuple[Forward, Backward]:
    from hilbert_lib.attention.triton import launch  # triton is imported only where a kernel is used

    return launch.forward, launch.backward


def _reference_functions(device: torch.device) -> tuple[Forward, Backward]:
    return reference.forward, reference.backward


_SPREADS = "a NaN in a masked key reaches other rows of its segment"
_CUDNN_SERVES = partial(_cuda_refusal, largest_head_dim=128)
_FLASH_SERVES = partial(_cuda_refusal, largest_head_dim=256)

BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("triton", "one fused pass over all branches", _triton_refusal, _triton_functions, reads_orderings=True),
        Backend("cudnn", f"cuDNN over strided views; {_SPREADS}", _CUDNN_SERVES, _over_views(CuDnn)),
        Backend("flash", f"FlashAttention-2 over strided views; {_SPREADS}", _FLASH_SERVES, _over_views(Flash)),
        Backend("sdpa", f"torch's fused kernel over strided views; {_SPREADS}", _sdpa_refusal, _sdpa_functions),
        Backend("eager", f"matrix products over strided views; {_SPREADS}", _serves_all, _over_views(Eager)),
        Backend("reference", "dense masks: memory grows with length squared", _serves_all, _reference_functions),
    )
}


# The order in which "auto" tries them. In float32 the fused kernels use no matrix instructions, and compile for long.
AUTOMATIC_HALF_ON_CUDA = ("triton", "cudnn", "flash", "sdpa", "eager")
AUTOMATIC = ("sdpa", "eager")


def _automatic(q: Tensor) -> tuple[str, ...]:
    return AUTOMATIC_HALF_ON_CUDA if q.is_cuda and q.element_size() == 2 else AUTOMATIC


def choose(q: Tensor, call: Call, name: str) -> str:
    """The name of the backend that serves a validated call, or "" where none can; arguments as for `explain`."""
    asked = _automatic(q) if name == "auto" else (name,)
    return next((candidate for candidate in asked if not BACKENDS[candidate].refusal(q, call)), "")


def explain(q: Tensor, call: Call, name: str) -> Explanation:
    """The backend for a validated call, and why not the others.

    Args:
        q: queries, (batch, queries, heads, head_dim).
        call: the rest of the request.
        name: a backend's name, or "auto" for the first that can serve.
    """
    refusals = {backend.name: backend.refusal(q, call) for backend in BACKENDS.values()}
    chosen, automatic = choose(q, call, name), _automatic(q)
    reasons = {}
    for candidate, refusal in refusals.items():
        if candidate == chosen:
            reasons[candidate] = f"chosen: {BACKENDS[candidate].note}"
        elif refusal:
            reasons[candidate] = f"cannot serve: {refusal}"
        else:
            passed_over = f"after {chosen!r}" if candidate in automatic else "when asked for by name"
            reasons[candidate] = f"not asked for: {name!r} was" if name != "auto" else f"can serve, {passed_over}"
    return Explanation(chosen, reasons)
