"""FlexAttention, compiled: masks of blocks (`flex_masks`) say what a pattern lets attend.

FlexAttention differentiates its own forward. The `backward` that every backend has therefore runs the forward once
more, and uses out and lse only where they hold more than the call, as in a ring.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial

import torch
from torch import Tensor

from hilbert_lib.attention.backends.backend import Backend, gpu_refusal, half_limits
from hilbert_lib.attention.backends.flex_masks import FLEX_BLOCK, mask_of
from hilbert_lib.attention.grid_parts import has_all_keys
from hilbert_lib.attention.request import WORKING_DTYPE, Request, Tensors
from hilbert_lib.internals import buffers_kept, flex_tiles_within, let_run_again
from hilbert_lib.machine import kernel_mode
from hilbert_lib.ordering import Ordering, Permuted
from hilbert_lib.patterns.dilated import DilatedPattern
from hilbert_lib.patterns.neighbourhood import HeadNeighbourhoods
from hilbert_lib.patterns.pattern import Pattern

COMPILATIONS = 64  # one for each pattern and shape; torch's own limit of 8 ends a sweep with an error


def backward(
    dout: Tensor, given: Tensors, out: Tensor, lse: Tensor, request: Request, dlse: Tensor | None = None
) -> Tensors:
    """Gradients of q, k, v and of the extra keys; on CUDA alone."""
    # The operator that calls this runs below autograd, which has to record the forward here.
    with torch.inference_mode(False):
        leaves = [x.detach().requires_grad_() for x in given if x is not None]
        results = attend(Tensors(*leaves), request)
        if request.is_part:
            with torch.no_grad():
                gradients = gradients_of_part(dout, out, lse, *results, dlse)
        elif dlse is not None:
            gradients = dout, dlse
        else:
            results, gradients = results[:1], (dout,)
        grads = torch.autograd.grad(results, leaves, gradients, allow_unused=True)
    return Tensors(*(x.new_zeros(x.shape) if grad is None else grad for x, grad in zip(leaves, grads, strict=True)))


def gradients_of_part(
    dout: Tensor, out: Tensor, lse: Tensor, own_out: Tensor, own_lse: Tensor, dlse: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The gradients of a part's own out and lse, from those of the merged out and lse."""
    # out = sum of w own_out over the parts, w = exp(own_lse - lse). So own_out has the gradient w dout, and own_lse the
    # gradient w (rowsum(dout * (own_out - out)) + dlse).
    nothing = own_lse == -torch.inf  # -inf minus -inf is NaN
    weights = (own_lse - lse).exp().masked_fill(nothing, 0.0)
    weighted = weights.transpose(1, 2)[..., None] * dout
    towards = (weighted * (own_out.to(lse.dtype) - out)).sum(-1).transpose(1, 2)
    if dlse is not None:
        towards = towards + weights * dlse
    return weighted.to(own_out.dtype), towards


def attend(
    given: Tensors, request: Request, block_size: int = FLEX_BLOCK, kernel_options: dict | None = None
) -> tuple[Tensor, Tensor | None]:
    """Output like q, and lse (batch, heads, seq). On CUDA it is compiled and differentiable.

    On the CPU it runs in eager mode: memory for length squared, no gradient. block_size: tokens of a block of the mask,
    each way. kernel_options: FlexAttention's own, on CUDA; by default those of the pattern. With others lse is None:
    FlashAttention-4 has no gradient beside it.
    """
    # Imported where it runs: from torch 2.14 on it is what loads sympy, which takes longer than this library.
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    q, k, *_ = given
    mask = mask_of(given, request, block_size)
    run = compiled_flex_attention if q.is_cuda else flex_attention
    returns = AuxRequest(lse=True) if kernel_options is None else None
    with _tiles_within(block_size) if q.is_cuda else warnings.catch_warnings():
        if not q.is_cuda:  # the docstring says that it is not compiled
            warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        results = run(
            *(x.transpose(1, 2) for x in _laid_out(given, mask.orders)),
            score_mod=mask.score_mod,
            block_mask=mask.blocks,
            scale=request.scale,
            enable_gqa=q.shape[2] != k.shape[2],
            return_aux=returns,
            kernel_options=(kernel_options or mask.kernel_options) if q.is_cuda else None,
        )
    out, lse = (results[0], results[1].lse.to(WORKING_DTYPE[q.dtype])) if returns else (results, None)
    return _in_order_of_q(out.transpose(1, 2), lse, mask.orders)


def _laid_out(given: Tensors, orders: tuple[Ordering, Ordering] | None) -> Iterator[Tensor]:
    # q, k and v as the mask has their rows; extra keys come after the others. A generator: nothing but the call holds
    # the copies, which are as large as q, k and v.
    q, k, v, extra_k, extra_v, *_ = given
    q_order, kv_order = orders or (None, None)
    for x, extra, order in ((q, None, q_order), (k, extra_k, kv_order), (v, extra_v, kv_order)):
        if order is not None:
            yield Permuted.apply(x, order.perm, order.inverse)
        elif extra is not None and extra.shape[1]:
            yield torch.cat((x, extra), 1)
        else:
            yield x


def _in_order_of_q(
    out: Tensor, lse: Tensor | None, orders: tuple[Ordering, Ordering] | None
) -> tuple[Tensor, Tensor | None]:
    if orders is None:
        return out.contiguous(), lse
    order, _ = orders
    lse = None if lse is None else lse.index_select(2, order.inverse)
    return Permuted.apply(out, order.inverse, order.perm), lse


def compiled_flex_attention(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor | tuple:
    """torch's `flex_attention` of q, k, v (batch, heads, seq, head_dim) on CUDA, compiled for the shape and options."""
    with torch.compiler.config.patch(recompile_limit=COMPILATIONS):
        return run_to_keep(_compiled_flex(), q, k, v, **options)


def run_to_keep(run: Callable, *arguments, **options) -> Tensor | tuple:
    """A compiled function's tensor, or tuple that begins with one. Its backward keeps its buffers and may run again."""
    # The backward is compiled here, where these settings hold, and not by autograd's thread when it first runs. The
    # tag keeps it apart from code that does take buffers over: to inductor's cache they are one. Autograd's cache
    # cannot keep code that holds tensors, like a mask's, and would warn of that; a kept warning keeps the tensors.
    kept = buffers_kept(force_non_lazy_backward_lowering=True, enable_autograd_cache=False)
    tag = torch.compiler.config.patch(cache_key_tag=f"{torch.compiler.config.cache_key_tag}, buffers kept")
    with kept, tag:
        results = run(*arguments, **options)
    given = [x.grad_fn for x in arguments if isinstance(x, Tensor)]
    node = (results if isinstance(results, Tensor) else results[0]).grad_fn
    while node is not None and node not in given:
        if node.name() == "CompiledFunctionBackward":
            let_run_again(node)
            break
        node = node.next_functions[0][0] if node.next_functions else None  # a view of what the code returned
    return results


@cache
def _compiled_flex() -> Callable:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def _tiles_within(block_size: int) -> AbstractContextManager:
    # On some GPUs inductor's tiles are 128 rows, which a smaller block cannot hold: it then finds no kernel at all. The
    # choice holds for one thread: `run_to_keep` compiles the backward here too.
    if block_size >= FLEX_BLOCK:
        return nullcontext()
    return flex_tiles_within(block_size)


# FlexAttention's lists of blocks, in bytes for each head and pair of blocks: while they are sorted, and kept.
FLEX_SORTED, FLEX_KEPT = 59, 16
# What the first call of a shape takes on an H200 is 0 to 92 MiB; this is the middle. 60 are as large as L2: torch's
# compiler clears it between runs of a small kernel, of which it keeps the faster version, unless its cache on disk
# knows that. 32 are cuBLAS's, which multiplies for the lists, unless the process has multiplied before.
FLEX_FIRST = 46 * 2**20


def _workspace(given: tuple, request: Request, direction: str, device: torch.device, returned: int) -> dict[str, int]:
    # On CUDA: of a forward that is the first of its mask, and of a backward after it, which runs the forward once more.
    tensors = given[0] if direction == "forward" else given[1]
    q, lse = tensors.q, 4 * tensors.q[..., 0].numel()
    copies, lists, keys = _copies_and_lists(tensors, request)
    if direction == "forward":
        pairs = lists * -(-q.shape[1] // FLEX_BLOCK) * -(-keys // FLEX_BLOCK)
        most = max(FLEX_SORTED * pairs, FLEX_KEPT * pairs + copies + q.nbytes + 2 * lse + FLEX_FIRST)
        return {"temporary": most - returned}
    if isinstance(request.pattern, DilatedPattern):
        # The copies again for their gradients; out and dout in residue order, out in the sequence's.
        return {"temporary": 2 * copies + 3 * q.nbytes + 4 * lse - returned}
    # The output of its own forward twice: as FlexAttention makes it and as we return it.
    return {"temporary": 2 * q.nbytes + copies * (2 if q.shape[0] > 1 else 1) + 3 * lse}


def _copies_and_lists(tensors: Tensors, request: Request) -> tuple[int, int, int]:
    # Bytes of copies of q, k and v; lists of blocks, one for each head or one for all; and the keys of a list.
    q, k, _, extra_k, *_ = tensors
    heads = q.shape[2]
    if isinstance(request.pattern, DilatedPattern):  # in residue order
        return q.nbytes + 2 * k.nbytes, heads, q.shape[1]
    joined = 2 * (k.nbytes + extra_k.nbytes)
    lists = heads if len(request.heads_by_window) > 1 else 1
    return joined if extra_k.numel() else 0, lists, k.shape[1] + extra_k.shape[1]


def _here(q: Tensor, request: Request) -> str:
    if not q.is_cuda:
        return f"needs a CUDA device, got {q.device.type}: elsewhere it is not compiled and has no backward"
    return gpu_refusal(q) if kernel_mode() == "compiled" else "needs triton, and not its interpreter"


def _head_dim_refusal(q: Tensor) -> str:
    return f"needs a head_dim of at least 16, got {q.shape[-1]}" if q.shape[-1] < 16 else ""


def _limits_of_sequences(q: Tensor, request: Request) -> str:
    if refusal := _head_dim_refusal(q):
        return refusal
    if request.cu_seqlens is not None:
        return "no cu_seqlens: its mask of blocks is of one length, which the host would have to know"
    return half_limits(q, request)


def _limits(q: Tensor, request: Request) -> str:
    if q.dtype == torch.float64:
        return "serves float16, bfloat16 and float32, got float64"
    return _head_dim_refusal(q)


def _limits_of_grids(q: Tensor, request: Request) -> str:
    part = request.part
    if part and (request.slots is not None or part.in_float or not has_all_keys(part, request.pattern.shape)):
        return "computes no part of a grid but a query_box"
    return _limits(q, request)


def _limits_of_any(q: Tensor, request: Request) -> str:
    # The mask is of pairs of positions alone, and asks `attends`.
    pattern = request.pattern
    if type(pattern).attends is Pattern.attends:
        return f"asks a pattern which pairs attend, and {pattern.noun} has no attends"
    if "extra_k" in pattern.options:
        return "serves no extra keys for patterns of this kind"
    asked = {
        "is_causal": request.is_causal,
        "dropout_p": request.dropout_p > 0.0,
        "query_start": request.query_start is not None,
        "cu_seqlens": request.cu_seqlens is not None,
    }
    for name, is_asked in asked.items():
        if is_asked:
            return f"no {name} for patterns of this kind"
    return _limits(q, request)


_flex = partial(Backend, name="flex", colour="#E69F00", functions=lambda device: (attend, backward), here=_here)

BACKENDS = (
    _flex(
        serves=DilatedPattern,
        note="compiled FlexAttention; its backward runs the forward once more",
        limits=_limits_of_sequences,
        # As tried at 66ec7ef: tensors of FlexAttention's stay in the graph's memory. What holds them is not known.
        caveat="torch refused it under torch.compile(mode='reduce-overhead') when that was tried",
        workspace=_workspace,
    ),
    _flex(
        serves=HeadNeighbourhoods,
        note="compiled FlexAttention; its backward runs the forward once more",
        limits=_limits_of_grids,
        reads_orderings=True,
        workspace=_workspace,
        options=("part", "has_bias"),
    ),
    _flex(
        serves=Pattern,
        note="compiled FlexAttention with a mask of all pairs; its backward runs the forward once more",
        limits=_limits_of_any,
    ),
)
