"""The implementations that exist, and whether each can serve a call."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from hilbert_lib.attention.backends import flex, packages, reference, strided
from hilbert_lib.attention.backends.dense import CpuFlash, CuDnn, Eager, Efficient, Flash, Kernel, Within32Bits
from hilbert_lib.attention.call import Call
from hilbert_lib.attention.triton import limits
from hilbert_lib.environment import kernel_mode
from hilbert_lib.machine import get_gpu_info

Forward = Callable[[Tensor, Tensor, Tensor, Call], tuple[Tensor, Tensor]]
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Call], tuple[Tensor, Tensor, Tensor]]

AMPERE, HOPPER = (8, 0), (9, 0)  # compute capabilities
FROM_AMPERE = range(8, 1000)  # majors


def _serves_all(q: Tensor, call: Call) -> str:
    return ""


@dataclass(frozen=True)
class Backend:
    """One implementation of dilated attention.

    Attributes:
        name: as `backend=` takes it.
        note: what it is, in a line.
        refusal: gives the reason why it cannot serve a call, or "" where it can.
        functions: gives forward and backward for tensors on a device.
        reads_orderings: whether it reads k and v through `Call.inverse`; for others they are gathered once.
        caveat: what it lacks that the reference has, or "".
        package: key of `packages.absence` and `packages.state`, or "" for what torch or this library brings.
        limits: gives the reason why it cannot serve a call on any GPU, or "", where there is none to ask.
    """

    name: str
    note: str
    refusal: Callable[[Tensor, Call], str]
    functions: Callable[[torch.device], tuple[Forward, Backward]]
    reads_orderings: bool = False
    caveat: str = ""
    package: str = ""
    limits: Callable[[Tensor, Call], str] = _serves_all


def _dense_refusal(q: Tensor, call: Call) -> str:
    # What no operator under torch's scaled_dot_product_attention says of strided segments with the merged lse.
    if call.dropout_p > 0.0:
        return "no dropout: its generator is not keyed by position"
    if call.key_padding_mask is not None:
        return "no key_padding_mask: rows without keys are not defined there"
    if call.query_start is not None:
        return "no query_start: its causal mask starts at the first query"
    if q.device.type != "cpu" and (most := max(q.shape[0], q.shape[2])) > strided.MOST_SEQUENCES:
        return f"serves up to {strided.MOST_SEQUENCES:,} sequences and heads, got {most:,}"
    return ""


def _sdpa_refusal(q: Tensor, call: Call) -> str:
    if q.device.type not in ("cpu", "cuda"):
        return f"no lse on device {q.device.type}: serves cpu and cuda"
    if q.is_cuda and q.dtype == torch.bfloat16 and _capability(q.device) < AMPERE:
        return "no bfloat16 below compute capability 8.0"
    return _sdpa_limits(q, call) if q.is_cuda else _dense_refusal(q, call)


def _sdpa_limits(q: Tensor, call: Call) -> str:
    if q.dtype == torch.float64:
        return "no float64 on cuda"
    if q.shape[-1] * q.element_size() % 16:
        return f"head_dim * {q.element_size()} bytes must be a multiple of 16 on cuda, got head_dim {q.shape[-1]}"
    return _dense_refusal(q, call)


def _half_refusal(
    q: Tensor, call: Call, *, largest_head_dim: int, majors: range = FROM_AMPERE, package: str = ""
) -> str:
    # Of the dense kernels in half precision: torch's own, and those of a package.
    if package and (absent := _package_absence(package)):
        return absent
    if not q.is_cuda:
        return f"needs a CUDA device, got {q.device.type}"
    if _capability(q.device)[0] not in majors:
        allowed = "8.0 or later" if majors == FROM_AMPERE else ", ".join(f"{major}.x" for major in majors)
        return f"needs compute capability {allowed}"
    return _half_limits(q, call, largest_head_dim) or (package and _package_breakage(package))


def _flash_refusal(q: Tensor, call: Call) -> str:
    if refused := _half_refusal(q, call, largest_head_dim=256):
        return refused
    # torch's FlashAttention-2 has no backward for these there; its own chooser, which is passed by here, knows that. A
    # forward alone is refused with it: a call does not say whether it will be differentiated.
    major, minor = _capability(q.device)
    if 192 < q.shape[-1] <= 224 and (major == 12 or (major == 8 and minor >= 6)):
        return f"has no backward for head_dim 193 to 224 on compute capability {major}.{minor}, got {q.shape[-1]}"
    return ""


def _cudnn_refusal(q: Tensor, call: Call) -> str:
    if refused := _half_refusal(q, call, largest_head_dim=128):
        return refused
    # torch's own chooser, which is passed by here, keeps cuDNN from such calls; the operators themselves say nothing.
    # Refused with warn_only, too, which cannot be asked for under torch.compile.
    if torch.are_deterministic_algorithms_enabled():
        return "sums gradients in an order that varies, and torch.use_deterministic_algorithms asks for one"
    return ""


def _half_limits(q: Tensor, call: Call, largest_head_dim: int) -> str:
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"serves float16 and bfloat16, got {_name(q.dtype)}"
    if q.shape[-1] % 8 or q.shape[-1] > largest_head_dim:
        return f"head_dim must be a multiple of 8 up to {largest_head_dim}, got {q.shape[-1]}"
    return _dense_refusal(q, call)


def _xformers_refusal(q: Tensor, call: Call) -> str:
    if absent := _package_absence("xformers"):
        return absent
    if not q.is_cuda:
        return f"needs a CUDA device, got {q.device.type}"
    if q.dtype == torch.float64:
        return "serves float16, bfloat16 and float32, got float64"
    if q.dtype == torch.float32 and _capability(q.device) > HOPPER:
        return "no float32 above compute capability 9.0"
    return _sdpa_refusal(q, call) or _package_breakage("xformers")


def _flex_refusal(q: Tensor, call: Call) -> str:
    if not q.is_cuda:
        return f"needs a CUDA device, got {q.device.type}: elsewhere it is not compiled and has no backward"
    if _kernel_mode() != "compiled":
        return "needs triton, and not its interpreter"
    return _flex_limits(q, call) or _half_refusal(q, call, largest_head_dim=256)


def _flex_limits(q: Tensor, call: Call) -> str:
    if q.shape[-1] < 16:
        return f"needs a head_dim of at least 16, got {q.shape[-1]}"
    return _half_limits(q, call, largest_head_dim=256)


def _over_views(kernel: Kernel) -> Callable[[torch.device], tuple[Forward, Backward]]:
    pair = partial(strided.forward, kernel=kernel), partial(strided.backward, kernel=kernel)
    return lambda device: pair


def _sdpa_functions(device: torch.device) -> tuple[Forward, Backward]:
    return _over_views(Within32Bits(Efficient) if device.type == "cuda" else CpuFlash)(device)


def _triton_refusal(q: Tensor, call: Call) -> str:
    return _triton_limits(q, call) or _triton_absence(q.device)


def _triton_limits(q: Tensor, call: Call) -> str:
    if q.dtype == torch.float64:
        return "serves float16, bfloat16 and float32, got float64"
    if (last := call.first_query + q.shape[1]) > limits.POSITIONS:
        return f"serves up to {limits.POSITIONS:,} positions, got {last:,}"
    if call.scale < limits.SMALLEST_SCALE:
        return f"serves a scale of at least {limits.SMALLEST_SCALE:.1e}, got {call.scale}"
    return ""


def _triton_absence(device: torch.device) -> str:
    mode = kernel_mode()
    if mode == "absent":
        return "no GPU, or triton is not installed; without a GPU, TRITON_INTERPRET=1 has its kernels interpreted"
    if mode == "compiled" and device.type != "cuda":
        return f"needs a CUDA device, got {device.type}"
    if device.type == "cuda":
        room = get_gpu_info(device).shared_memory_bytes
        if room < limits.SHARED_BYTES:
            return f"its tiles need {limits.SHARED_BYTES} bytes of shared memory, this GPU has {room}"
    return ""


def _capability(device: torch.device) -> tuple[int, int]:
    return get_gpu_info(device).capability


def _package_absence(package: str) -> str:
    return packages.absence(package)


def _package_breakage(package: str) -> str:
    return packages.breakage(package)


def _kernel_mode() -> str:
    return kernel_mode()


# torch.compile cannot trace questions to the machine: it takes their answers as constants (said as in ordering.py).
for _question in (_capability, _package_absence, _package_breakage, _kernel_mode, _triton_absence):
    _question._dynamo_marked_constant = True


def _triton_functions(device: torch.device) -> tuple[Forward, Backward]:
    from hilbert_lib.attention.triton import launch  # triton is imported only where a kernel is used

    return launch.forward, launch.backward


def _reference_functions(device: torch.device) -> tuple[Forward, Backward]:
    return reference.forward, reference.backward


def _flex_functions(device: torch.device) -> tuple[Forward, Backward]:
    return flex.forward, flex.backward


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _half(
    name: str, note: str, kernel: Kernel, largest_head_dim: int = 256, majors: range = FROM_AMPERE, package: str = ""
) -> Backend:
    serves = partial(_half_refusal, largest_head_dim=largest_head_dim, majors=majors, package=package)
    limits = partial(_half_limits, largest_head_dim=largest_head_dim)
    note = f"{note} over strided views"
    return Backend(name, note, serves, _over_views(kernel), caveat=_SPREADS, package=package, limits=limits)


_SPREADS = "a NaN in a masked key reaches other rows of its segment"

BACKENDS = {
    backend.name: backend
    for backend in (
        Backend(
            "triton",
            "one fused pass over all branches",
            _triton_refusal,
            _triton_functions,
            reads_orderings=True,
            limits=_triton_limits,
        ),
        replace(_half("cudnn", "cuDNN", CuDnn, largest_head_dim=128), refusal=_cudnn_refusal),
        replace(_half("flash", "torch's FlashAttention-2", Flash), refusal=_flash_refusal),
        # Of FlashAttention-4, head_dims up to 128 are built for all of its architectures.
        _half("flash_attn_4", "flash-attn-4", packages.FlashAttn4, 128, range(9, 13), "flash_attn_4"),
        _half("flash_attn_3", "FlashAttention-3", packages.FlashAttn3, 256, range(9, 10), "flash_attn_3"),
        _half("flash_attn_2", "flash-attn", packages.FlashAttn2, package="flash_attn_2"),
        Backend(
            "xformers",
            "xformers over strided views",
            _xformers_refusal,
            _over_views(Within32Bits(packages.Xformers)),
            caveat=_SPREADS,
            package="xformers",
            limits=_sdpa_limits,
        ),
        Backend(
            "flex",
            "compiled FlexAttention; its backward runs the forward once more",
            _flex_refusal,
            _flex_functions,
            # As tried at 66ec7ef: tensors of FlexAttention's stay in the graph's memory. What holds them is not known.
            caveat="torch refused it under torch.compile(mode='reduce-overhead') when that was tried",
            limits=_flex_limits,
        ),
        Backend(
            "sdpa",
            "torch's fused kernel over strided views",
            _sdpa_refusal,
            _sdpa_functions,
            caveat=_SPREADS,
            limits=_sdpa_limits,
        ),
        Backend("eager", "matrix products over strided views", _serves_all, _over_views(Eager), caveat=_SPREADS),
        Backend("reference", "dense masks: memory grows with length squared", _serves_all, _reference_functions),
    )
}
WITHOUT_BUILD = {
    "flash_attn_1": "no build of FlashAttention 1 exists for a current torch; on Turing and Volta sdpa serves instead"
}
