"""A dense attention kernel under one signature, and the plainest one."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hilbert_lib.attention.request import WORKING_DTYPE

Grads = tuple[Tensor, Tensor, Tensor]  # dq, dk, dv


@dataclass(frozen=True, eq=False)
class Problem:
    """One dense attention, apart from q, k and v."""

    scale: float  # factor of the scores
    is_causal: bool  # row i of q sees only rows 0 to i + causal_shift of k
    causal_shift: int = 0
    allowed: Tensor | None = None  # bool that broadcasts to (batch, heads, rows of q, rows of k); False = no weight
    dropout_factor: Tensor | None = None  # 0 or 1 / (1 - dropout_p), likewise


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
        dtype = WORKING_DTYPE[q.dtype]
        dout, delta = dout.to(dtype), (dout.to(dtype) * out.to(dtype)).sum(-1, keepdim=True)
        probabilities = Eager._probabilities(Eager._scores(q, k, problem), lse, problem)
        dprobabilities = dout @ v.to(dtype).transpose(-1, -2)
        dropped = probabilities
        if problem.dropout_factor is not None:
            dprobabilities, dropped = dprobabilities * problem.dropout_factor, probabilities * problem.dropout_factor
        dscores = probabilities * (dprobabilities - delta) * problem.scale
        return dscores @ k.to(dtype), dscores.transpose(-1, -2) @ q.to(dtype), dropped.transpose(-1, -2) @ dout

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
        return scores

    @staticmethod
    def _probabilities(scores: Tensor, lse: Tensor, problem: Problem) -> Tensor:
        return torch.where(scores == -torch.inf, 0.0, (scores - lse[..., None]).exp())
