"""The description of a backend, and the refusals that backends of dense kernels share."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor

from hilbert_lib.attention.aligned import aligned_request, is_alignable
from hilbert_lib.attention.backends import presence
from hilbert_lib.attention.request import Request, Tensors
from hilbert_lib.attention.triton.limits import MOST_SEQUENCES
from hilbert_lib.internals import compile_time_constant
from hilbert_lib.machine import get_gpu_info
from hilbert_lib.patterns.dilated import DilatedPattern
from hilbert_lib.patterns.pattern import Pattern

Forward = Callable[[Tensors, Request], tuple[Tensor, Tensor]]  # out and lse
Backward = Callable[..., tuple[Tensor, ...]]  # of dout, ..., out, lse, ..., and dlse= where lse has a gradient
# Bytes by name that a direction holds beside inputs and results. Arguments: those of its function before the call, the
# call, the direction, the device, the bytes of its results.
Workspace = Callable[[tuple, object, str, torch.device, int], dict[str, int] | None]
Refusal = Callable[[Tensor, Request], str]  # why q and a call cannot be served, or ""
KeyRefusal = Callable[[Tensor, Tensor, Request], str]  # why so many keys and KV heads as k has cannot, or ""

AMPERE, HOPPER = (8, 0), (9, 0)  # compute capabilities
FROM_AMPERE = range(8, 1000)  # majors
# The options of a call that every backend answers for, by serving them or by its own refusal. One that is added to
# `Request` later is refused, unless a backend names it in `options`.
FIRST_OPTIONS = {"pattern", "is_causal", "scale", "dropout_p", "seed", "key_padding_mask", "query_start", "inverse"}
FIRST_OPTIONS |= {"cu_seqlens", "max_seqlen", "ordering", "extra_padding_mask", "slots"}
_LATER = tuple(
    (field.name, field.default) for field in fields(Request) if field.name not in FIRST_OPTIONS | {"is_part"}
)
NOT_SERVED = {  # what a backend says that does not serve a later option
    "part": "computes no part of a grid",
    "query_starts": "no query_start that is a tensor: it would have to read it on the device",
    "key_start": "no key_start: it would have to read it on the device",
    "lists": "reads no lists of points",
    "has_bias": "adds no bias to scores",
    "bias_gradient": "has no gradient beside a bias",
}
SPREADS = "a NaN in a masked key reaches other rows of its segment"


def serves_all(q: Tensor, call: Request) -> str:
    """The refusal of what serves every call."""
    return ""


def serves_all_keys(q: Tensor, k: Tensor, call: Request) -> str:
    """The refusal of what serves every number of keys and of KV heads."""
    return ""


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One implementation of attention over one kind of pattern, with all that is its own."""

    serves: type[Pattern] = DilatedPattern  # and kinds that derive from it
    name: str  # as `backend=` takes it
    note: str  # what it is, in a line
    colour: str  # in figures
    functions: Callable[[torch.device], tuple[Forward, Backward]]  # for tensors on a device
    limits: Refusal = serves_all  # on every GPU; q need not be on one
    of_keys: KeyRefusal = serves_all_keys  # likewise; an exported program, which serves all lengths, does not ask it
    here: Refusal = serves_all  # on this machine, in its settings
    package: str = ""  # its name in `presence`, unless torch or this library brings it
    reads_orderings: bool = False  # through `Request.inverse`; for others k and v are gathered once
    reads_documents: bool = False  # through `Request.cu_seqlens`; others are given one after the other
    reads_starts: bool = False  # at key_start; for others whole sequences are moved to row 0 where that is exact
    caveat: str = ""  # what it lacks that the reference has
    workspace: Workspace | None = None  # it, or what it returns, is None where memory is found on meta tensors
    options: tuple[str, ...] = ()  # later ones of a call that it serves
    lse_columns: int = 0  # columns that the gradient of lse adds to head_dim

    def refusal(self, q: Tensor, call: Request, k: Tensor | None = None) -> str:
        """The reason why it cannot serve a call, or "" where it can. k: may be left out where it has the shape of q."""
        refused = self.refusal_whatever_the_keys(q, call)
        if not refused and not is_exporting():
            refused = self.of_keys(q, q if k is None else k, self.as_run(call))
        return refused

    def aligns(self, call: Request) -> bool:
        """Whether sequences that are padded on the left are moved to row 0 for it."""
        return not self.reads_starts and is_alignable(call)

    def as_run(self, call: Request) -> Request:
        """The request that it is asked about: `aligned_request` where sequences are moved for it."""
        return aligned_request(call) if self.aligns(call) else call

    def refusal_whatever_the_keys(self, q: Tensor, call: Request) -> str:
        """The part of `refusal` that does not hang on how many keys and KV heads there are."""
        if self.aligns(call):
            refused = self.refusal_whatever_the_keys(q, aligned_request(call))
            is_of_mask = call.key_padding_mask is None and refused.startswith("no key_padding_mask")
            return f"no key_start unless attention is causal: {refused}" if is_of_mask else refused
        if refused := self._refusal_of_options(call):
            return refused
        if self.package and (absent := presence.absence(self.package)):
            return absent
        refused = self.here(q, call) or self.limits(q, call)
        return refused or (presence.breakage(self.package) if self.package else "")

    def lse_refusal(self, q: Tensor, call: Request) -> str:
        """The reason why it has no gradient of lse for a call that it serves, or ""."""
        if not self.lse_columns:
            return ""
        wide = q.new_empty(()).expand(*q.shape[:-1], q.shape[-1] + self.lse_columns)
        refused = self.refusal_whatever_the_keys(wide, call)
        return refused and f"has no gradient of lse: with the {self.lse_columns} columns that it takes, {refused}"

    def refusal_of_sizes(self, q: Tensor, k: Tensor, call: Request) -> str:
        """The part of `refusal` that does not depend on the machine."""
        call = self.as_run(call)
        return self._refusal_of_options(call) or self.limits(q, call) or self.of_keys(q, k, call)

    def _refusal_of_options(self, call: Request) -> str:
        for name, default in _LATER:
            if name not in self.options and getattr(call, name) is not default:
                return NOT_SERVED.get(name, f"no {name}")
        return ""


def is_exporting() -> bool:
    """Whether torch.export traces this: its program serves all lengths, so that none may decide."""
    # torch 2.11 says "exporting" to every program that torch.compile traces.
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def dense_refusal(q: Tensor, call: Request) -> str:
    """The reason why no operator of torch's scaled_dot_product_attention serves a call over strided segments, or ""."""
    if call.dropout_p > 0.0:
        return "no dropout: its generator is not keyed by position"
    if call.key_padding_mask is not None:
        return "no key_padding_mask: rows without keys are not defined there"
    if call.query_start is not None:
        return "no query_start: its causal mask starts at the first query"
    if q.device.type != "cpu" and (sequences := max(q.shape[0], q.shape[2])) > MOST_SEQUENCES:
        return f"serves up to {MOST_SEQUENCES:,} sequences and heads, got {sequences:,}"
    return ""


def gpu_refusal(q: Tensor, majors: range = FROM_AMPERE) -> str:
    """The reason why a kernel for GPUs of some compute capabilities does not run on q's device, or ""."""
    if not q.is_cuda:
        return f"needs a CUDA device, got {q.device.type}"
    if capability(q.device)[0] not in majors:
        allowed = "8.0 or later" if majors == FROM_AMPERE else ", ".join(f"{major}.x" for major in majors)
        return f"needs compute capability {allowed}"
    return ""


def half_limits(q: Tensor, call: Request, largest_head_dim: int = 256) -> str:
    """The reason why no GPU serves a call in half precision, or ""."""
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"serves float16 and bfloat16, got {str(q.dtype).removeprefix('torch.')}"
    if q.shape[-1] % 8 or q.shape[-1] > largest_head_dim:
        return f"head_dim must be a multiple of 8 up to {largest_head_dim}, got {q.shape[-1]}"
    return dense_refusal(q, call)


def half(note: str, *, largest_head_dim: int = 256, majors: range = FROM_AMPERE, **options) -> Backend:
    """A backend of a dense kernel in half precision. options: further fields of the `Backend`."""
    limits = partial(half_limits, largest_head_dim=largest_head_dim)
    shared = {"limits": limits, "here": lambda q, call: gpu_refusal(q, majors), "caveat": SPREADS}
    return Backend(note=f"{note} over strided views", **shared | options)


@compile_time_constant
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a GPU."""
    return get_gpu_info(device).capability
