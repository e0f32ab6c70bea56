"""Other packages' dense kernels as `kernel.Kernel`, and their backends. A package is imported when its kernel runs."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module

import torch
from torch import Tensor

from hilbert_lib.attention.backends import backend as shared
from hilbert_lib.attention.backends.backend import SPREADS, Backend, half
from hilbert_lib.attention.backends.dense import Within32Bits, by_head, sdpa_here, sdpa_limits, sums_overflow
from hilbert_lib.attention.backends.kernel import Grads, Problem
from hilbert_lib.attention.backends.presence import MODULES
from hilbert_lib.attention.backends.strided import over_views
from hilbert_lib.attention.request import Request


def _rows_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """(batch, heads, rows, head_dim) <-> (batch, rows, heads, head_dim), as views."""
    return tuple(x.transpose(1, 2) for x in tensors)


@dataclass(frozen=True)
class RowsFirst:
    """A kernel from functions of (batch, rows, heads, head_dim), with any strides but a last one of 1."""

    run: Callable  # q, k, v, problem -> out, lse (perhaps padded with rows), and more
    differentiate: Callable  # dout, q, k, v, out, lse, problem -> dq, dk, dv, and more

    def forward(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self.run(*_rows_first(q, k, v), problem)
        return out.transpose(1, 2), lse[..., : q.shape[2]]

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, problem: Problem
    ) -> Grads:
        grads = self.differentiate(*_rows_first(dout, q, k, v, out), lse.contiguous(), problem)
        return _rows_first(*grads[:3])


def _flash_2_options(problem: Problem) -> dict:
    options = {"softmax_scale": problem.scale, "causal": problem.is_causal, "dropout_p": 0.0, "softcap": 0.0}
    return {**options, "window_size_left": -1, "window_size_right": -1, "alibi_slopes": None}


def _flash_2(q, k, v, problem):
    run = import_module(MODULES["flash_attn_2"])._flash_attn_forward
    return run(q, k, v, return_softmax=False, **_flash_2_options(problem))


def _flash_2_backward(dout, q, k, v, out, lse, problem):
    if sums_overflow(q.transpose(1, 2)):
        return _rows_first(*by_head(FLASH_ATTN_2.backward, problem, *_rows_first(dout, q, k, v, out), lse))
    grads = [x.new_empty(x.shape) for x in (q, k, v)]
    options = _flash_2_options(problem) | {"deterministic": torch.are_deterministic_algorithms_enabled()}
    import_module(MODULES["flash_attn_2"])._flash_attn_backward(dout, q, k, v, out, lse, *grads, **options)
    return grads


def _flash_3(q, k, v, problem):
    run = import_module(MODULES["flash_attn_3"])._flash_attn_forward
    return run(q, k, v, softmax_scale=problem.scale, causal=problem.is_causal)


def _flash_3_backward(dout, q, k, v, out, lse, problem):
    grads = [x.new_empty(x.shape) for x in (q, k, v)]
    # By place: releases name some of these differently. The six would be lengths of packed sequences.
    arguments = dout, q, k, v, out, lse, *[None] * 6, *grads, problem.scale, problem.is_causal
    run = import_module(MODULES["flash_attn_3"])._flash_attn_backward
    run(*arguments, deterministic=torch.are_deterministic_algorithms_enabled())
    return grads


@cache
def _without_its_warning() -> None:
    # At each compilation FlashAttention-4 warns of an argument of its own, which no caller can change. The filter is
    # set once for the process: each change of filters makes Python repeat the warnings that it shows once.
    warnings.filterwarnings("ignore", message="Argument aux_data .* cannot be converted to a JitArgument")


def _flash_4_module():
    _without_its_warning()
    return import_module(MODULES["flash_attn_4"])


def _flash_4(q, k, v, problem):
    options = {"softmax_scale": problem.scale, "causal": problem.is_causal}
    return _flash_4_module()._flash_attn_fwd(q, k, v, return_lse=True, **options)


def _flash_4_backward(dout, q, k, v, out, lse, problem):
    options = {"softmax_scale": problem.scale, "causal": problem.is_causal}
    options["deterministic"] = torch.are_deterministic_algorithms_enabled()
    return _flash_4_module()._flash_attn_bwd(q, k, v, out, dout, lse, **options)


def _xformers(q, k, v, problem):
    fmha = import_module(MODULES["xformers"]).fmha  # takes the fastest of its own kernels that load
    mask = fmha.attn_bias.LowerTriangularMask() if problem.is_causal else None
    return fmha.memory_efficient_attention_forward_requires_grad(q, k, v, attn_bias=mask, scale=problem.scale)


def _xformers_backward(dout, q, k, v, out, lse, problem):
    fmha = import_module(MODULES["xformers"]).fmha
    mask = fmha.attn_bias.LowerTriangularMask() if problem.is_causal else None
    # Dense: torch's memory-efficient kernel may run beneath, which reads a strided out wrongly (dense.Efficient).
    arguments = dout, out.contiguous(), lse, q, k, v
    return fmha.memory_efficient_attention_backward(*arguments, attn_bias=mask, scale=problem.scale)


FLASH_ATTN_2 = RowsFirst(_flash_2, _flash_2_backward)
FLASH_ATTN_3 = RowsFirst(_flash_3, _flash_3_backward)
FLASH_ATTN_4 = RowsFirst(_flash_4, _flash_4_backward)  # in CuTe: a kernel is compiled when it is first used
XFORMERS = RowsFirst(_xformers, _xformers_backward)


def _xformers_here(q: Tensor, call: Request) -> str:
    if q.is_cuda and q.dtype == torch.float32 and shared.capability(q.device) > shared.HOPPER:
        return "no float32 above compute capability 9.0"
    return sdpa_here(q, call) if q.is_cuda else f"needs a CUDA device, got {q.device.type}"


# Their workspace is taken to be that of the kernels of torch that they resemble (`dense.BACKENDS`).
BACKENDS = (
    # Of FlashAttention-4, head_dims up to 128 are built for all of its architectures.
    half("flash-attn-4", name="flash_attn_4", package="flash_attn_4", colour="#009E73", largest_head_dim=128,
         majors=range(9, 13), **over_views(FLASH_ATTN_4, {2: (4, 4, 8)})),
    half("FlashAttention-3", name="flash_attn_3", package="flash_attn_3", colour="#332288", majors=range(9, 10),
         **over_views(FLASH_ATTN_3, {2: (4, 4, 8)})),
    half("flash-attn", name="flash_attn_2", package="flash_attn_2", colour="#F0E442",
         **over_views(FLASH_ATTN_2, {2: (4, 8, 4)})),
    Backend(
        name="xformers",
        note="xformers over strided views",
        colour="#44AA99",
        limits=sdpa_limits,
        here=_xformers_here,
        package="xformers",
        caveat=SPREADS,
        **over_views(Within32Bits(XFORMERS), {2: (4, 8, 8), 4: (4, 12, 12)}),
    ),
)  # fmt: skip
