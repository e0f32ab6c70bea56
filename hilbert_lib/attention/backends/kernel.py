"""A dense attention kernel under one signature, the gradient of its lse, and the plainest kernel."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from hilbert_lib.attention.request import WORKING_DTYPE

Grads = tuple[Tensor, Tensor, Tensor]  # dq, dk, dv

# LSE_COLUMNS: columns that the gradient of lse adds to head_dim, a multiple of 8 for kernels on GPUs. LSE_PARTS of them
# hold the digits of dlse.
LSE_COLUMNS, LSE_PARTS = 8, 3


@dataclass(frozen=True, eq=False)
class Problem:
    """One dense attention, apart from q, k and v."""

    scale: float  # factor of the scores
    is_causal: bool  # row i of q sees only rows 0 to i + causal_shift of k
    causal_shift: int = 0
    allowed: Tensor | None = None  # bool that broadcasts to (batch, heads, rows of q, rows of k); False = no weight
    dropout_factor: Tensor | None = None  # 0 or 1 / (1 - dropout_p), likewise
    # Added to the scores: -inf = no weight, else a bias or 0. (batch or 1, heads or 1, rows of q, rows of k), in the
    # dtype of the softmax.
    added: Tensor | None = None


class Kernel(Protocol):
    """A dense kernel. Tensors are (batch, heads, rows, head_dim), lse (batch, heads, rows).

    The backward is given the *merged* out and lse of all parts. A gradient of lse is given in further columns.
    """

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]: ...

    @staticmethod
    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, problem: Problem
    ) -> Grads: ...


class Eager:
    """Matrix products and softmax in float32 (float64 for float64): any device, masks, dropout."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
        scores = Eager._scores(q, k, problem)
        lse = scores.logsumexp(-1)
        # Not exp(scores - lse): where scores are large, lse is rounded so much that these do not sum to 1.
        probabilities = torch.where(scores == -torch.inf, 0.0, scores.softmax(-1))
        if problem.dropout_factor is not None:
            probabilities = probabilities * problem.dropout_factor
        return probabilities @ v.to(scores.dtype), lse

    @staticmethod
    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, problem: Problem) -> Grads:
        return Eager.backward_with_scores(dout, q, k, v, out, lse, problem)[:3]

    @staticmethod
    def backward_with_scores(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, problem: Problem
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """dq, dk, dv, and the gradient of the scaled scores (batch, heads, rows of q, rows of k)."""
        dtype = WORKING_DTYPE[q.dtype]
        dout, delta = dout.to(dtype), (dout.to(dtype) * out.to(dtype)).sum(-1, keepdim=True)
        probabilities = Eager._probabilities(Eager._scores(q, k, problem), lse, problem)
        dprobabilities = dout @ v.to(dtype).transpose(-1, -2)
        dropped = probabilities
        if problem.dropout_factor is not None:
            dprobabilities, dropped = dprobabilities * problem.dropout_factor, probabilities * problem.dropout_factor
        dscores = probabilities * (dprobabilities - delta)
        dq, dk = dscores @ k.to(dtype), dscores.transpose(-1, -2) @ q.to(dtype)
        return dq * problem.scale, dk * problem.scale, dropped.transpose(-1, -2) @ dout, dscores

    @staticmethod
    def _scores(q: Tensor, k: Tensor, problem: Problem) -> Tensor:
        dtype = WORKING_DTYPE[q.dtype]
        scores = q.to(dtype) @ k.to(dtype).transpose(-1, -2) * problem.scale
        if problem.is_causal:
            ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
            scores = scores.masked_fill(~ones.tril(problem.causal_shift), -torch.inf)
        if problem.allowed is not None:
            # Not masked_fill: `~` would write out a mask that is expanded.
            scores = torch.where(problem.allowed, scores, -torch.inf)
        return scores if problem.added is None else scores.add_(problem.added)

    @staticmethod
    def _probabilities(scores: Tensor, lse: Tensor, problem: Problem) -> Tensor:
        return torch.where(scores == -torch.inf, 0.0, (scores - lse[..., None]).exp())


def gradients(
    kernel: Kernel, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None,
    problem: Problem,
) -> Grads:  # fmt: skip
    """A kernel's backward, with a gradient of lse (batch, heads, rows) or None."""
    if dlse is None:
        return kernel.backward(dout, q, k, v, out, lse, problem)
    head_dim = q.shape[-1]
    dout, q, k, v, out = with_lse_columns(dout, q, k, v, out, dlse)
    return tuple(grad[..., :head_dim] for grad in kernel.backward(dout, q, k, v, out, lse, problem))


def with_lse_columns(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dlse: Tensor) -> tuple[Tensor, ...]:
    """dout, q, k, v and out with LSE_COLUMNS columns more, of which a kernel's backward makes the gradient of lse."""
    # A single column may have any stride. torch would keep it for the columns beside it, which kernels take as dense.
    dout, q, k, v, out = (
        x if x.shape[-1] > 1 else x.as_strided(x.shape, (*x.stride()[:-1], 1)) for x in (dout, q, k, v, out)
    )
    q, k, v = (pad(x, (0, LSE_COLUMNS)) for x in (q, k, v))
    dout, out = (torch.cat(both, -1) for both in zip((dout, out), _columns(dlse[..., None], out.dtype), strict=True))
    return dout, q, k, v, out


def _columns(dlse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Columns of dout and of out (..., LSE_COLUMNS) that subtract dlse (..., 1) from rowsum(dout * out).

    Kernels compute this sum themselves. Beside columns of 0 in q, k and v these columns change nothing else.
    """
    # Of dout a power of two, so that half precision has the range, and of out what is left of dlse, in as many columns
    # as hold its digits.
    exponents = [math.frexp(x)[1] for x in (torch.finfo(dtype).tiny, torch.finfo(dtype).max)]
    least, most = max(exponents[0], -125), min(exponents[1] - 1, 127)  # `ldexp` has float32's range
    power = torch.ldexp(torch.ones_like(dlse), torch.frexp(dlse).exponent.clamp(least, most))
    left, parts = -dlse / power, []
    for _ in range(LSE_PARTS):
        parts.append(left.to(dtype))
        left = left - parts[-1]
    out = pad(torch.cat(parts, -1), (0, LSE_COLUMNS - LSE_PARTS))
    return power.to(dtype).expand_as(out), out
