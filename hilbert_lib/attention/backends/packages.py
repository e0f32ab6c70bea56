"""Other packages' dense kernels as `kernel.Kernel`, and their backends.

All take (batch, rows, heads, head_dim) with any strides but a last one of 1.
"""

import warnings
from functools import cache

import torch
from torch import Tensor

from hilbert_lib.attention.backends import backend as shared
from hilbert_lib.attention.backends.backend import SPREADS, Backend, half
from hilbert_lib.attention.backends.dense import Within32Bits, by_head, sdpa_here, sdpa_limits, sums_overflow
from hilbert_lib.attention.backends.kernel import Grads, Problem
from hilbert_lib.attention.backends.strided import over_views
from hilbert_lib.attention.call import Call


def _rows_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """(batch, heads, rows, head_dim) <-> (batch, rows, heads, head_dim), as views."""
    return tuple(x.transpose(1, 2) for x in tensors)


class FlashAttn2:
    """flash-attn."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
        from flash_attn.flash_attn_interface import _flash_attn_forward

        options = FlashAttn2._options(problem)
        out, lse, *_ = _flash_attn_forward(*_rows_first(q, k, v), return_softmax=False, **options)
        return out.transpose(1, 2), lse

    @staticmethod
    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, problem: Problem) -> Grads:
        from flash_attn.flash_attn_interface import _flash_attn_backward

        if sums_overflow(q):
            return by_head(FlashAttn2.backward, problem, dout, q, k, v, out, lse)
        dout, q, k, v, out = _rows_first(dout, q, k, v, out)
        grads = [x.new_empty(x.shape) for x in (q, k, v)]
        options = FlashAttn2._options(problem) | {"deterministic": torch.are_deterministic_algorithms_enabled()}
        _flash_attn_backward(dout, q, k, v, out, lse.contiguous(), *grads, **options)
        return _rows_first(*grads)

    @staticmethod
    def _options(problem: Problem) -> dict:
        options = {"softmax_scale": problem.scale, "causal": problem.is_causal, "dropout_p": 0.0, "softcap": 0.0}
        return {**options, "window_size_left": -1, "window_size_right": -1, "alibi_slopes": None}


class FlashAttn3:
    """FlashAttention-3."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
        from flash_attn_interface import _flash_attn_forward

        q, k, v = _rows_first(q, k, v)
        out, lse, *_ = _flash_attn_forward(q, k, v, softmax_scale=problem.scale, causal=problem.is_causal)
        return out.transpose(1, 2), lse

    @staticmethod
    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, problem: Problem) -> Grads:
        from flash_attn_interface import _flash_attn_backward

        dout, q, k, v, out = _rows_first(dout, q, k, v, out)
        grads = [x.new_empty(x.shape) for x in (q, k, v)]
        # By place: releases name some of these differently. The six would be lengths of packed sequences.
        given = dout, q, k, v, out, lse.contiguous(), *[None] * 6, *grads, problem.scale, problem.is_causal
        _flash_attn_backward(*given, deterministic=torch.are_deterministic_algorithms_enabled())
        return _rows_first(*grads)


@cache
def _without_its_warning() -> None:
    # At each compilation FlashAttention-4 warns of an argument of its own, which no caller can change. The filter is
    # set once for the process: each change of filters makes Python repeat the warnings that it shows once.
    warnings.filterwarnings("ignore", message="Argument aux_data .* cannot be converted to a JitArgument")


class FlashAttn4:
    """FlashAttention-4, written in CuTe: a kernel is compiled when it is first used."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
        from flash_attn.cute.interface import _flash_attn_fwd

        _without_its_warning()
        options = {"softmax_scale": problem.scale, "causal": problem.is_causal}
        out, lse, *_ = _flash_attn_fwd(*_rows_first(q, k, v), return_lse=True, **options)
        return out.transpose(1, 2), lse

    @staticmethod
    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, problem: Problem) -> Grads:
        from flash_attn.cute.interface import _flash_attn_bwd

        _without_its_warning()
        dout, q, k, v, out = _rows_first(dout, q, k, v, out)
        options = {"softmax_scale": problem.scale, "causal": problem.is_causal}
        options["deterministic"] = torch.are_deterministic_algorithms_enabled()
        grads = _flash_attn_bwd(q, k, v, out, dout, lse.contiguous(), **options)
        return _rows_first(*grads[:3])


class Xformers:
    """xformers: it takes the fastest of its own kernels that load. Its lse can be padded with rows."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
        from xformers.ops import fmha

        mask = fmha.attn_bias.LowerTriangularMask() if problem.is_causal else None
        out, lse = fmha.memory_efficient_attention_forward_requires_grad(
            *_rows_first(q, k, v), attn_bias=mask, scale=problem.scale
        )
        return out.transpose(1, 2), lse[..., : q.shape[2]]

    @staticmethod
    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, problem: Problem) -> Grads:
        from xformers.ops import fmha

        mask = fmha.attn_bias.LowerTriangularMask() if problem.is_causal else None
        dout, q, k, v, out = _rows_first(dout, q, k, v, out)
        # Dense: torch's memory-efficient kernel may run beneath, which reads a strided out wrongly (dense.Efficient).
        grads = fmha.memory_efficient_attention_backward(
            dout, out.contiguous(), lse.contiguous(), q, k, v, attn_bias=mask, scale=problem.scale
        )
        return _rows_first(*grads)


def _xformers_here(q: Tensor, call: Call) -> str:
    if q.is_cuda and q.dtype == torch.float32 and shared.capability(q.device) > shared.HOPPER:
        return "no float32 above compute capability 9.0"
    return sdpa_here(q, call) if q.is_cuda else f"needs a CUDA device, got {q.device.type}"


# Their workspace is taken to be that of the kernels of torch that they resemble (`dense.BACKENDS`).
BACKENDS = (
    # Of FlashAttention-4, head_dims up to 128 are built for all of its architectures.
    half("flash-attn-4", name="flash_attn_4", package="flash_attn_4", colour="#009E73", largest_head_dim=128,
         majors=range(9, 13), **over_views(FlashAttn4, {2: (4, 4, 8)})),
    half("FlashAttention-3", name="flash_attn_3", package="flash_attn_3", colour="#332288", majors=range(9, 10),
         **over_views(FlashAttn3, {2: (4, 4, 8)})),
    half("flash-attn", name="flash_attn_2", package="flash_attn_2", colour="#F0E442",
         **over_views(FlashAttn2, {2: (4, 8, 4)})),
    Backend(
        name="xformers",
        note="xformers over strided views",
        colour="#44AA99",
        limits=sdpa_limits,
        here=_xformers_here,
        package="xformers",
        caveat=SPREADS,
        **over_views(Within32Bits(Xformers), {2: (4, 8, 8), 4: (4, 12, 12)}),
    ),
)  # fmt: skip
