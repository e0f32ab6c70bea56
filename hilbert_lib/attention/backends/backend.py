"""What a backend is, and what backends of dense kernels refuse in common."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial

import torch
from torch import Tensor

from hilbert_lib.attention.backends import presence
from hilbert_lib.attention.call import Call
from hilbert_lib.attention.triton import limits
from hilbert_lib.machine import get_gpu_info, kernel_mode

Forward = Callable[[Tensor, Tensor, Tensor, Call], tuple[Tensor, Tensor]]
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Call], tuple[Tensor, Tensor, Tensor]]
Workspace = Callable[[tuple[Tensor, ...], Call, str, torch.device, int], dict[str, int] | None]

AMPERE, HOPPER = (8, 0), (9, 0)  # compute capabilities
FROM_AMPERE = range(8, 1000)  # majors
MOST_SEQUENCES = 2**16 - 1  # and heads: a grid of CUDA has no more blocks along its second dimension
# The options of a call that every backend answers for, by serving them or by its own refusal. One that is added to
# `Call` later is refused, unless a backend names it in `options`.
FIRST_OPTIONS = {"pattern", "is_causal", "scale", "dropout_p", "seed", "key_padding_mask", "query_start", "inverse"}
_LATER = tuple((each.name, each.default) for each in fields(Call) if each.name not in FIRST_OPTIONS | {"is_part"})
SPREADS = "a NaN in a masked key reaches other rows of its segment"


def serves_all(q: Tensor, call: Call) -> str:
    """The refusal of what serves every call."""
    return ""


@dataclass(frozen=True)
class Backend:
    """One implementation of dilated attention, with all that is its own.

    Attributes:
        name: as `backend=` takes it.
        note: what it is, in a line.
        reason: why it cannot serve a call, or "" where it can.
        functions: gives forward and backward for tensors on a device.
        reads_orderings: whether it reads k and v through `Call.inverse`; for others they are gathered once.
        caveat: what it lacks that the reference has, or "".
        package: name in `presence`, or "" for what torch or this library brings.
        limits: gives the reason why it cannot serve a call on any GPU, or "", where there is none to ask.
        workspace: bytes by name that a direction holds beside inputs and results, from the tensors given to it, the
            call, the direction, the device and the bytes of its results; None, or a function that gives None, where
            they are found by running it on meta tensors.
        colour: in figures.
        options: later ones of a call that it serves.
    """

    name: str
    note: str
    reason: Callable[[Tensor, Call], str] = serves_all
    functions: Callable[[torch.device], tuple[Forward, Backward]] = field(kw_only=True)
    reads_orderings: bool = False
    caveat: str = ""
    package: str = ""
    limits: Callable[[Tensor, Call], str] = serves_all
    workspace: Workspace | None = None
    colour: str = field(kw_only=True)
    options: tuple[str, ...] = ()

    def refusal(self, q: Tensor, call: Call) -> str:
        """Why it cannot serve a call, or "" where it can."""
        for name, default in _LATER:
            if name not in self.options and getattr(call, name) != default:
                return f"no {name}"
        return self.reason(q, call)


def dense_refusal(q: Tensor, call: Call) -> str:
    """What no operator under torch's scaled_dot_product_attention says of strided segments with the merged lse."""
    if call.dropout_p > 0.0:
        return "no dropout: its generator is not keyed by position"
    if call.key_padding_mask is not None:
        return "no key_padding_mask: rows without keys are not defined there"
    if call.query_start is not None:
        return "no query_start: its causal mask starts at the first query"
    if q.device.type != "cpu" and (most := max(q.shape[0], q.shape[2])) > MOST_SEQUENCES:
        return f"serves up to {MOST_SEQUENCES:,} sequences and heads, got {most:,}"
    return ""


def half_refusal(
    q: Tensor, call: Call, *, largest_head_dim: int = 256, majors: range = FROM_AMPERE, package: str = ""
) -> str:
    """The refusal of dense kernels in half precision: torch's own, and those of a package."""
    if package and (absent := package_absence(package)):
        return absent
    if not q.is_cuda:
        return f"needs a CUDA device, got {q.device.type}"
    if capability(q.device)[0] not in majors:
        allowed = "8.0 or later" if majors == FROM_AMPERE else ", ".join(f"{major}.x" for major in majors)
        return f"needs compute capability {allowed}"
    return half_limits(q, call, largest_head_dim) or (package and package_breakage(package))


def half_limits(q: Tensor, call: Call, largest_head_dim: int = 256) -> str:
    """What of a call no GPU serves in half precision."""
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"serves float16 and bfloat16, got {str(q.dtype).removeprefix('torch.')}"
    if q.shape[-1] % 8 or q.shape[-1] > largest_head_dim:
        return f"head_dim must be a multiple of 8 up to {largest_head_dim}, got {q.shape[-1]}"
    return dense_refusal(q, call)


def half(
    name: str, note: str, *, largest_head_dim: int = 256, majors: range = FROM_AMPERE, package: str = "", **own
) -> Backend:
    """A backend of a dense kernel in half precision; own: fields of its own."""
    reason = partial(half_refusal, largest_head_dim=largest_head_dim, majors=majors, package=package)
    shared = {"reason": reason, "limits": partial(half_limits, largest_head_dim=largest_head_dim), "caveat": SPREADS}
    return Backend(name, f"{note} over strided views", package=package, **shared | own)


# Questions to the machine.


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a GPU."""
    return get_gpu_info(device).capability


def package_absence(package: str) -> str:
    """Why a package cannot be used here, or ""."""
    return presence.absence(package)


def package_breakage(package: str) -> str:
    """Why a package does not load, or ""."""
    return presence.breakage(package)


def mode() -> str:
    """How Triton's kernels run here."""
    return kernel_mode()


def fused_absence(device: torch.device) -> str:
    """Why the fused kernels do not run on a device, or ""."""
    if kernel_mode() == "absent":
        return "no GPU, or triton is not installed; without a GPU, TRITON_INTERPRET=1 has its kernels interpreted"
    if kernel_mode() == "compiled" and device.type != "cuda":
        return f"needs a CUDA device, got {device.type}"
    if device.type == "cuda":
        room = get_gpu_info(device).shared_memory_bytes
        if room < limits.SHARED_BYTES:
            return f"its tiles need {limits.SHARED_BYTES} bytes of shared memory, this GPU has {room}"
    return ""


# torch.compile cannot trace such questions: it takes their answers as constants (said as in ordering.py).
for _question in (capability, package_absence, package_breakage, mode, fused_absence):
    _question._dynamo_marked_constant = True
