"""The dense kernels that torch has, as `kernel.Kernel`, and their backends.

torch's public `scaled_dot_product_attention` returns no lse, so the operators beneath it are called. They take no
masks, no dropout and no causal shift: `Eager` does, on every device.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hilbert_lib.attention.backends import backend as shared
from hilbert_lib.attention.backends import gathered, reference, strided
from hilbert_lib.attention.backends.backend import SPREADS, Backend, dense_refusal, gpu_refusal, half
from hilbert_lib.attention.backends.kernel import Eager, Grads, Kernel, Problem
from hilbert_lib.attention.backends.strided import over_views
from hilbert_lib.attention.request import Request, Tensors
from hilbert_lib.attention.starts import STARTS, has_starts
from hilbert_lib.internals import dense_operators

REACH = 2**31  # elements that signed 32-bit arithmetic tells apart


class CpuFlash:
    """torch's flash kernel for the CPU. Of masks it takes what is added to the scores, and no others."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
        added = problem.added
        # torch lays out the output as q, and writes as if its last stride were 1. Where rows of q overlap it is not.
        if 1 in q.stride()[:-1]:
            q = q.clone(memory_format=torch.contiguous_format)
        out, lse = dense_operators.flash_attention_for_cpu(
            q, k, v, 0.0, problem.is_causal, attn_mask=added, scale=problem.scale
        )
        # Where all scores are -inf it gives 0 and 0. A single key of score 0 has lse 0 as well, and its v may be 0.
        if lse.is_meta or torch.count_nonzero(lse) == lse.numel():
            return out, lse
        nothing = lse.eq(0) & out.eq(0).all(-1)
        if added is not None:  # most rows without keys are told by the mask alone
            hidden = (added == -torch.inf).all(-1)
            lse.masked_fill_(hidden, -torch.inf)
            nothing &= ~hidden
        for rows in nothing.any(0).any(0).nonzero()[:, 0].split(256):  # few, mostly none
            causal_mask = torch.arange(k.shape[2], device=k.device) <= rows[:, None] if problem.is_causal else None
            added_rows = None if added is None else added[:, :, rows]
            scores = Eager._scores(
                q[:, :, rows], k, Problem(problem.scale, False, allowed=causal_mask, added=added_rows)
            )
            nothing[:, :, rows] &= scores.amax(-1) == -torch.inf
        return out, lse.masked_fill_(nothing, -torch.inf)

    @staticmethod
    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, problem: Problem) -> Grads:
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # exp(-inf - lse) is then 0
        return dense_operators.flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, problem.is_causal, attn_mask=problem.added, scale=problem.scale
        )


class Efficient:
    """torch's memory-efficient kernel on CUDA. Its lse is padded to a multiple of 32 rows."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
        out, lse, _, _ = dense_operators.efficient_attention(
            q, k, v, None, True, 0.0, problem.is_causal, scale=problem.scale
        )
        return out, lse[..., : q.shape[2]]

    @staticmethod
    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, problem: Problem) -> Grads:
        rows = lse.shape[-1]
        # +inf in the padding, as the forward leaves it: rows past the end then have probability exp(-inf) = 0.
        padded = lse.new_full((*lse.shape[:2], -(-rows // 32) * 32), torch.inf)
        padded[..., :rows] = lse
        # In half precision torch 2.11 computes rowsum(dout * out) before the kernel and reads it in the wrong places
        # unless out is dense in the order (batch, rows, heads): dq and dk were off by the size of themselves.
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
        nothing = lse.new_zeros((), dtype=torch.int64)  # no dropout: seed and offset are not read
        needed = [True, True, True, False]  # dq, dk and dv
        arguments = dout, q, k, v, None, out, padded, nothing, nothing, 0.0, needed, problem.is_causal
        return dense_operators.efficient_attention_backward(*arguments, scale=problem.scale)[:3]


class WithoutLse:
    """torch's `scaled_dot_product_attention`, which returns no lse: that and the gradients are made by products.

    It stands for operators beneath it that a release of torch lacks.
    """

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
        options = {"attn_mask": problem.added, "is_causal": problem.is_causal, "scale": problem.scale}
        out = scaled_dot_product_attention(q, k, v, **options)
        lse = Eager._scores(q, k, problem).logsumexp(-1)
        return out.masked_fill((lse == -torch.inf)[..., None], 0.0), lse

    @staticmethod
    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, problem: Problem) -> Grads:
        return Eager.backward(dout, q, k, v, out, lse, problem)


@dataclass(frozen=True)
class Within32Bits:
    """A kernel that multiplies rows and heads by their strides in 32 bits, such as torch's memory-efficient one.

    Where that overflows, it runs on a copy of each head in turn. xformers may run the same kernel.
    """

    kernel: type[Kernel]

    def forward(self, *arguments: Tensor | Problem) -> tuple[Tensor, Tensor]:
        return self._run(self.kernel.forward, *arguments)

    def backward(self, *arguments: Tensor | Problem) -> Grads:
        return self._run(self.kernel.backward, *arguments)

    def _run(self, run: Callable, *arguments: Tensor | Problem) -> tuple[Tensor, ...]:
        *tensors, problem = arguments
        # In a backward the first four are dout, q, k and v.
        return by_head(run, problem, *tensors) if _overflows(*tensors[:4]) else run(*arguments)


def _overflows(*tensors: Tensor) -> bool:
    # Whether offsets pass 32 bits, by the tensors' own strides or by those of results, dense as (batch, rows, heads).
    for x in tensors:
        _, heads, rows, head_dim = x.shape
        if max((heads - 1) * x.stride(1), (rows - 1) * max(x.stride(2), heads * head_dim)) >= REACH:
            return True
    return False


def sums_overflow(q: Tensor) -> bool:
    """Whether FlashAttention-2's backward must be given one head of q (batch, heads, rows, head_dim) at a time.

    It numbers each sequence's float32 sums of dq, of whole tiles of rows and rounded head_dims, in 32 bits.
    """
    _, heads, rows, head_dim = q.shape
    return heads > 1 and -(-rows // 128) * 128 * heads * -(-head_dim // 64) * 64 >= REACH


def by_head(run: Callable, problem: Problem, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The results of a kernel's forward or backward (`run`), called on a copy of each head in turn."""
    heads = range(tensors[0].shape[1])
    results = [run(*(x[:, h : h + 1].contiguous() for x in tensors), problem) for h in heads]
    return tuple(torch.cat(parts, 1) for parts in zip(*results, strict=True))


class Flash:
    """torch's FlashAttention-2 on CUDA."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
        return dense_operators.flash_attention(q, k, v, 0.0, problem.is_causal, scale=problem.scale)[:2]

    @staticmethod
    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, problem: Problem) -> Grads:
        if sums_overflow(q):
            return by_head(Flash.backward, problem, dout, q, k, v, out, lse)
        nothing = lse.new_zeros((), dtype=torch.int64)
        lengths = None, None, q.shape[2], k.shape[2]
        arguments = dout, q, k, v, out, lse.contiguous(), *lengths, 0.0, problem.is_causal, nothing, nothing
        return dense_operators.flash_attention_backward(*arguments, scale=problem.scale)


class CuDnn:
    """cuDNN's attention. Its lse has a last dimension of 1. One query or one key a segment is left to Eager."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
        if 1 in (q.shape[2], k.shape[2]):  # of keys alone, in a block of a ring
            return Eager.forward(q, k, v, problem)
        out, lse, *_ = dense_operators.cudnn_attention(
            q, k, v, None, True, 0.0, problem.is_causal, False, scale=problem.scale
        )
        return out, lse.view(*q.shape[:3])

    @staticmethod
    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, problem: Problem) -> Grads:
        if 1 in (q.shape[2], k.shape[2]):
            return Eager.backward(dout, q, k, v, out, lse, problem)
        # torch finds cuDNN's plan by the strides of q, k and v alone: one that was made for other strides of out or
        # dout reads those in the wrong places. So they have q's.
        if not q.stride() == out.stride() == dout.stride():
            q, out, dout = (x.contiguous() for x in (q, out, dout))
        nothing = lse.new_empty((), dtype=torch.int64)  # no dropout: seed and offset are not read
        lengths = None, None, q.shape[2], k.shape[2]
        arguments = dout, q, k, v, out, lse.contiguous()[..., None], nothing, nothing, None, *lengths, 0.0
        return dense_operators.cudnn_attention_backward(*arguments, problem.is_causal, scale=problem.scale)


def sdpa_limits(q: Tensor, call: Request) -> str:
    if q.device.type != "cpu" and q.dtype == torch.float64:
        return "no float64 on cuda"
    if q.device.type != "cpu" and q.shape[-1] * q.element_size() % 16:
        return f"head_dim * {q.element_size()} bytes must be a multiple of 16 on cuda, got head_dim {q.shape[-1]}"
    return dense_refusal(q, call)


def sdpa_here(q: Tensor, call: Request) -> str:
    if q.device.type not in ("cpu", "cuda"):
        return f"no lse on device {q.device.type}: serves cpu and cuda"
    if q.is_cuda and q.dtype == torch.bfloat16 and shared.capability(q.device) < shared.AMPERE:
        return "no bfloat16 below compute capability 8.0"
    return ""


def _absence(name: str) -> str:
    # Why the kernel of an operator and its backward cannot be called, or "".
    if getattr(dense_operators, name) and getattr(dense_operators, f"{name}_backward"):
        return ""
    return f"torch {torch.__version__} has no operator _scaled_dot_product_{name} with a backward"


def _flash_here(q: Tensor, call: Request) -> str:
    if refused := gpu_refusal(q) or _absence("flash_attention"):
        return refused
    # torch's FlashAttention-2 has no backward for these there; its own chooser, which is passed by here, knows that. A
    # forward alone is refused with it: a call does not say whether it will be differentiated.
    major, minor = shared.capability(q.device)
    if 192 < q.shape[-1] <= 224 and (major == 12 or (major == 8 and minor >= 6)):
        return f"has no backward for head_dim 193 to 224 on compute capability {major}.{minor}, got {q.shape[-1]}"
    return ""


def _cudnn_here(q: Tensor, call: Request) -> str:
    # torch's own chooser, which is passed by here, keeps cuDNN from such calls; the operators themselves say nothing.
    # Refused with warn_only, too, which cannot be asked for under torch.compile.
    if torch.are_deterministic_algorithms_enabled():
        return "sums gradients in an order that varies, and torch.use_deterministic_algorithms asks for one"
    return gpu_refusal(q) or _absence("cudnn_attention")


def _eager_forward(inputs: Tensors, call: Request, *, is_on_cpu: bool) -> tuple[Tensor, Tensor]:
    run = partial(strided.forward, kernel=Eager)
    if has_starts(call):  # views have one beginning for all sequences
        return gathered.results(inputs, call, run if is_on_cpu else None)
    return run(inputs, call)


def _eager_backward(
    dout: Tensor, inputs: Tensors, out: Tensor, lse: Tensor, call: Request, dlse: Tensor | None = None
) -> tuple[Tensor, ...]:
    if has_starts(call):
        return reference.backward_by_rows(dout, inputs, out, lse, call, dlse)
    return strided.backward(dout, inputs, out, lse, call, Eager, dlse)


# By whether a CPU computes, whose host may read where sequences begin.
_EAGER = {is_on_cpu: (partial(_eager_forward, is_on_cpu=is_on_cpu), _eager_backward) for is_on_cpu in (False, True)}
# The workspaces are bytes by size of an element: `strided.over_views` says of what. tests/limits/test_estimate.py holds
# them against what a GPU allocates.
ON_CPU = WithoutLse if _absence("flash_attention_for_cpu") else CpuFlash
_ON_CUDA = WithoutLse if _absence("efficient_attention") else Within32Bits(Efficient)
HALF = (
    half("cuDNN", name="cudnn", colour="#0072B2", largest_head_dim=128, here=_cudnn_here,
         **over_views(CuDnn, {2: (4, 4, 4)})),
    half("torch's FlashAttention-2", name="flash", colour="#56B4E9", here=_flash_here,
         **over_views(Flash, {2: (4, 8, 4)})),
)  # fmt: skip
BACKENDS = (
    Backend(
        name="sdpa",
        note="torch's fused kernel over strided views",
        colour="#882255",
        limits=sdpa_limits,
        here=sdpa_here,
        caveat=SPREADS,
        **over_views(ON_CPU, {2: (4, 8, 8), 4: (4, 12, 12)}, on_cuda=_ON_CUDA),
    ),
    Backend(
        name="eager",
        note="matrix products over strided views",
        colour="#999999",
        caveat=SPREADS,
        functions=lambda device: _EAGER[device.type == "cpu"],
        options=STARTS,
    ),
)
