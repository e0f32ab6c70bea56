"""Dense attention kernels under one signature, each returning the lse and taking strided views without a copy.

A kernel is a pair of functions over (batch, heads, rows, head_dim) views. `forward(q, k, v, problem)` returns out
and lse (batch, heads, rows); `backward(dout, q, k, v, out, lse, problem)` returns dq, dk, dv. The backward is given
the *merged* out and lse, so that it needs no gradient through lse.

torch's public `scaled_dot_product_attention` returns no lse, so the operators beneath it are called:
`_scaled_dot_product_flash_attention_for_cpu` on the CPU (any floating dtype), and on CUDA
`_scaled_dot_product_efficient_attention`, `_scaled_dot_product_flash_attention` and
`_scaled_dot_product_cudnn_attention`. Only `eager` takes masks, dropout and a causal shift, and it serves every
device: it computes what the operators cannot say.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hilbert_lib.attention.call import working_dtype

_aten = torch.ops.aten
REACH = 2**31  # elements that signed 32-bit arithmetic tells apart


@dataclass(frozen=True, eq=False)
class Problem:
    """One dense attention.

    Attributes:
        scale: factor of the scores.
        is_causal: whether row i of q sees only rows 0 to i + causal_shift of k.
        causal_shift: rows of k before the first row of q.
        allowed: bool that broadcasts to (batch, heads, rows of q, rows of k), False = no weight, or None.
        kept: factor on the probabilities, 0 or 1 / (1 - dropout_p), in that shape, or None.
    """

    scale: float
    is_causal: bool
    causal_shift: int = 0
    allowed: Tensor | None = None
    kept: Tensor | None = None


class Kernel(Protocol):
    """What every kernel here has."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]: ...

    @staticmethod
    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, problem: Problem
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class Eager:
    """Matrix products and softmax in float32 (float64 for float64): any device, masks, dropout."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
        scores = Eager._scores(q, k, problem)
        lse = scores.logsumexp(-1)
        probabilities = Eager._probabilities(scores, lse, problem)
        if problem.kept is not None:
            probabilities = probabilities * problem.kept
        return probabilities @ v.to(scores.dtype), lse

    @staticmethod
    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, problem: Problem
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = working_dtype(q.dtype)
        dout, delta = dout.to(dtype), (dout.to(dtype) * out.to(dtype)).sum(-1, keepdim=True)
        probabilities = Eager._probabilities(Eager._scores(q, k, problem), lse, problem)
        dprobabilities = dout @ v.to(dtype).transpose(-1, -2)
        dropped = probabilities
        if problem.kept is not None:
            dprobabilities, dropped = dprobabilities * problem.kept, probabilities * problem.kept
        dscores = probabilities * (dprobabilities - delta) * problem.scale
        return dscores @ k.to(dtype), dscores.transpose(-1, -2) @ q.to(dtype), dropped.transpose(-1, -2) @ dout

    @staticmethod
    def _scores(q: Tensor, k: Tensor, problem: Problem) -> Tensor:
        dtype = working_dtype(q.dtype)
        scores = q.to(dtype) @ k.to(dtype).transpose(-1, -2) * problem.scale
        if problem.is_causal:
            ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
            scores = scores.masked_fill(~ones.tril(problem.causal_shift), -torch.inf)
        if problem.allowed is not None:
            # Not masked_fill: `~` would write out a mask that is expanded.
            scores = torch.where(problem.allowed, scores, -torch.inf)
        return scores

    @staticmethod
    def _probabilities(scores: Tensor, lse: Tensor, problem: Problem) -> Tensor:
        return torch.where(scores == -torch.inf, 0.0, (scores - lse[..., None]).exp())


class CpuFlash:
    """torch's flash kernel for the CPU."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
        return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, problem.is_causal, scale=problem.scale)

    @staticmethod
    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, problem: Problem
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, problem.is_causal, scale=problem.scale
        )


class Efficient:
    """torch's memory-efficient kernel on CUDA. Its lse is padded to a multiple of 32 rows."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
        out, lse, _, _ = _aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, problem.is_causal, scale=problem.scale
        )
        return out, lse[..., : q.shape[2]]

    @staticmethod
    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, problem: Problem
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = lse.shape[-1]
        # +inf in the padding, as the forward leaves it: rows past the end then have probability exp(-inf) = 0.
        padded = lse.new_full((*lse.shape[:2], -(-rows // 32) * 32), torch.inf)
        padded[..., :rows] = lse
        # In half precision torch 2.11 computes rowsum(dout * out) before the kernel and reads it in the wrong places
        # unless out is dense in the order (batch, rows, heads): dq and dk were off by the size of themselves.
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
        nothing = lse.new_zeros((), dtype=torch.int64)  # no dropout: seed and offset are not read
        dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
            dout,
            q,
            k,
            v,
            None,
            out,
            padded,
            nothing,
            nothing,
            0.0,
            [True, True, True, False],
            problem.is_causal,
            scale=problem.scale,
        )
        return dq, dk, dv


@dataclass(frozen=True)
class Within32Bits:
    """A kernel that multiplies rows and heads by their strides in 32 bits: where that overflows, one head at a time.

    Each head's tensors are then copied. torch's memory-efficient kernel is such a one, and xformers may take it.
    """

    kernel: type[Kernel]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
        if _overflows(q, k, v):
            return by_head(self.kernel.forward, problem, q, k, v)
        return self.kernel.forward(q, k, v, problem)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, problem: Problem
    ) -> tuple[Tensor, Tensor, Tensor]:
        if _overflows(dout, q, k, v):
            return by_head(self.kernel.backward, problem, dout, q, k, v, out, lse)
        return self.kernel.backward(dout, q, k, v, out, lse, problem)


def _overflows(*tensors: Tensor) -> bool:
    # By their own strides, and by those of results, which are dense in the order (batch, rows, heads).
    for x in tensors:
        _, heads, rows, head_dim = x.shape
        if max((heads - 1) * x.stride(1), (rows - 1) * max(x.stride(2), heads * head_dim)) >= REACH:
            return True
    return False


def sums_overflow(q: Tensor) -> bool:
    """Whether FlashAttention-2's backward has to be given one head of q at a time.

    It finds each sequence's float32 sums of dq, of whole tiles of rows and rounded head_dims, by their number in 32
    bits.

    Args:
        q: (batch, heads, rows, head_dim).

    >>> sums_overflow(torch.empty(2, 16, 2**20, 120, device="meta"))
    True
    """
    _, heads, rows, head_dim = q.shape
    return heads > 1 and -(-rows // 128) * 128 * heads * -(-head_dim // 64) * 64 >= REACH


def by_head(run: Callable, problem: Problem, *tensors: Tensor) -> tuple[Tensor, ...]:
    """What a kernel's forward or backward returns, of copies of one head after the other.

    Args:
        run: `forward` or `backward` of a kernel.
        problem, *tensors: as it takes them.
    """
    heads = range(tensors[0].shape[1])
    results = [run(*(x[:, h : h + 1].contiguous() for x in tensors), problem) for h in heads]
    return tuple(torch.cat(parts, 1) for parts in zip(*results, strict=True))


class Flash:
    """torch's FlashAttention-2 on CUDA."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
        return _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, problem.is_causal, scale=problem.scale)[:2]

    @staticmethod
    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, problem: Problem
    ) -> tuple[Tensor, Tensor, Tensor]:
        if sums_overflow(q):
            return by_head(Flash.backward, problem, dout, q, k, v, out, lse)
        nothing = lse.new_zeros((), dtype=torch.int64)
        return _aten._scaled_dot_product_flash_attention_backward(
            dout,
            q,
            k,
            v,
            out,
            lse.contiguous(),
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            problem.is_causal,
            nothing,
            nothing,
            scale=problem.scale,
        )


class CuDnn:
    """cuDNN's attention. Its lse has a last dimension of 1. One query or one key a segment is left to Eager."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
        if 1 in (q.shape[2], k.shape[2]):  # of keys alone, in a block of a ring
            return Eager.forward(q, k, v, problem)
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, problem.is_causal, False, scale=problem.scale
        )
        return out, lse.view(*q.shape[:3])

    @staticmethod
    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, problem: Problem
    ) -> tuple[Tensor, Tensor, Tensor]:
        if 1 in (q.shape[2], k.shape[2]):
            return Eager.backward(dout, q, k, v, out, lse, problem)
        # torch finds cuDNN's plan by the strides of q, k and v alone: one that was made for other strides of out or
        # dout reads those in the wrong places. So they have q's.
        if not q.stride() == out.stride() == dout.stride():
            q, out, dout = (x.contiguous() for x in (q, out, dout))
        nothing = lse.new_zeros((), dtype=torch.int64)
        return _aten._scaled_dot_product_cudnn_attention_backward(
            dout,
            q,
            k,
            v,
            out,
            lse.contiguous()[..., None],
            nothing,
            nothing,
            None,
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            problem.is_causal,
            scale=problem.scale,
        )
