"""Neighbourhood attention by compiled FlexAttention: a mask of blocks, made from geometry, says who sees whom.

In full blocks no pair is asked for. Its backward runs the forward once more, as along a sequence.
"""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hilbert_lib.attention.backends.backend import Backend, gpu_refusal
from hilbert_lib.attention.backends.flex import (
    FLEX_BLOCK,
    FLEX_FIRST,
    FLEX_KEPT,
    FLEX_SORTED,
    block_list,
    compiled_flex_attention,
    gradients_of_part,
)
from hilbert_lib.attention.grid_parts import padding_of
from hilbert_lib.attention.request import WORKING_DTYPE, Request, Tensors
from hilbert_lib.graph_cache import cached_for_graphs
from hilbert_lib.internals import flex_tiles_within
from hilbert_lib.machine import kernel_mode
from hilbert_lib.ordering import Ordering
from hilbert_lib.patterns.blocks import mask_blocks
from hilbert_lib.patterns.neighbourhood import Axis, HeadNeighbourhoods, Neighbourhood
from hilbert_lib.patterns.pattern import Pattern

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def attend(
    given: Tensors, request: Request, block_size: int = FLEX_BLOCK, kernel_options: dict | None = None
) -> tuple[Tensor, Tensor | None]:
    """Output like q, and lse (batch, heads, seq). On CUDA it is compiled and differentiable.

    On the CPU it runs in eager mode: memory for length squared, no gradient. block_size: tokens of a block of the mask,
    each way. kernel_options: FlexAttention's own, on CUDA; by default those that take its kernel for many queries. With
    others lse is None: FlashAttention-4 has no gradient beside it.
    """
    q, extra = given.q, 0 if given.extra_k is None else given.extra_k.shape[1]
    k, v = (torch.cat(pair, 1) if extra else pair[0] for pair in zip(given[1:3], given[3:], strict=True))
    group = q.shape[2] // k.shape[2]
    padded = request.key_padding_mask is not None or request.extra_padding_mask is not None
    if isinstance(request.pattern, HeadNeighbourhoods):
        windows = tuple(near for near in request.neighbourhoods for _ in range(group))
        windows = windows if len(set(windows)) > 1 else windows[:1]
        mask = block_mask(windows, request.ordering, extra, padded, block_size, q.device)
    else:
        mask = pattern_mask(request.pattern, q.shape[1], k.shape[1], request.ordering, block_size, q.device)
    if padded:
        mask, attends, padding = copy(mask), mask.mask_mod, padding_of(given, request)
        mask.mask_mod = lambda b, h, query, key: attends(b, h, query, key) & ~padding[b, key]
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    run = compiled_flex_attention if q.is_cuda else flex_attention
    asked = AuxRequest(lse=True) if kernel_options is None else None
    with _tiles_within(block_size) if q.is_cuda else warnings.catch_warnings():
        if not q.is_cuda:  # the docstring says that it is not compiled
            warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        found = run(
            *(x.transpose(1, 2) for x in (q, k, v)),
            block_mask=mask,
            scale=request.scale,
            enable_gqa=group > 1,
            return_aux=asked,
            # The kernel that torch has for few queries takes no such masks.
            kernel_options=(kernel_options or {"FORCE_USE_FLEX_ATTENTION": True}) if q.is_cuda else None,
        )
    out, lse = (found[0], found[1].lse.to(WORKING_DTYPE[q.dtype])) if asked else (found, None)
    return out.transpose(1, 2).contiguous(), lse


def backward(dout: Tensor, given: Tensors, out: Tensor, lse: Tensor, request: Request) -> Tensors:
    """Gradients of q, k, v and of the extra keys; on CUDA alone."""
    # The operator that calls this runs below autograd, which has to record the forward here.
    with torch.inference_mode(False):
        leaves = [x.detach().requires_grad_() for x in given if x is not None]
        own = attend(Tensors(*leaves), request)
        if request.is_part:
            with torch.no_grad():
                towards = gradients_of_part(dout, out, lse, *own)
        else:
            own, towards = own[:1], (dout,)
        grads = torch.autograd.grad(own, leaves, towards, allow_unused=True)
    return Tensors(*(x.new_zeros(x.shape) if grad is None else grad for x, grad in zip(leaves, grads, strict=True)))


@cached_for_graphs(maxsize=32)
@torch.inference_mode(False)  # masks made in inference mode could not serve a later backward pass
def block_mask(
    windows: tuple[Neighbourhood, ...],
    ordering: Ordering | None,
    extra: int,
    padded: bool,
    block_size: int,
    device: torch.device,
) -> "BlockMask":
    """FlexAttention's mask of some heads, or of one for all, with keys that everyone sees at the end.

    padded: whether some keys may have no weight, so that no block counts as full. block_size: tokens of a block, each
    way.
    """
    seq = windows[0].length
    cells = torch.arange(seq, device=device) if ordering is None else ordering.to(device).perm
    cells = torch.unravel_index(cells, windows[0].shape)
    rules = [_rule([near.axes[n] for near in windows], cell) for n, cell in enumerate(cells)]

    def attends(b, h, query, key):
        at = key.clamp(max=seq - 1) if extra else key
        seen = rules[0](h, query, at)
        for rule in rules[1:]:
            seen = seen & rule(h, query, at)
        return seen | (key >= seq) if extra else seen

    lists = [_lists(near, ordering, extra, padded, block_size, device) for near in windows]
    stacked = [torch.stack(x)[None] for x in zip(*lists, strict=True)]
    from torch.nn.attention.flex_attention import BlockMask

    return BlockMask.from_kv_blocks(*stacked, block_size, mask_mod=attends, seq_lengths=(seq, seq + extra))


@cached_for_graphs(maxsize=32)
@torch.inference_mode(False)
def pattern_mask(
    pattern: Pattern, queries: int, keys: int, ordering: Ordering | None, block_size: int, device: torch.device
) -> "BlockMask":
    """FlexAttention's mask of a pattern that says of each pair of positions whether it attends: `Pattern.attends`.

    It is made of a table of all pairs, once.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    positions = torch.arange(max(queries, keys), device=device) if ordering is None else ordering.to(device).perm

    def attends(b, h, query, key):
        return pattern.attends(positions[query], positions[key])

    return create_block_mask(attends, None, None, queries, keys, device=str(device), BLOCK_SIZE=block_size)


def _rule(axes: list[Axis], cell: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    # Of a head and of the slots of queries and keys: whether they attend along an axis, which has a rule for each head.
    # Tables rather than numbers: a number would be compiled in, and each window then costs a compilation.
    wraps, is_dilated, ranks = axes[0].edge == "wrap", axes[0].dilation > 1, axes[0].cells // axes[0].dilation
    rank, count = axes[0].ranks(cell)
    firsts = [axis.start(cell) % count if wraps else axis.start(cell) for axis in axes]
    lasts = [rank if axis.is_causal else first + axis.window - 1 for axis, first in zip(axes, firsts, strict=True)]
    is_one = len(axes) == 1  # no axis of heads then: kernels in CuTe (torch 2.11) take no number as an index
    ends = (firsts[0], lasts[0]) if is_one else (torch.stack(firsts), torch.stack(lasts))
    rank, residue, first, last = (x.int().contiguous() for x in (rank, cell % axes[0].dilation, *ends))

    def attends(head, query, key):
        own = query if is_one else (head, query)
        begin, at = first[own], rank[key]
        at = torch.where(at < begin, at + ranks, at) if wraps else at
        seen = (begin <= at) & (at <= last[own])
        return seen & (residue[query] == residue[key]) if is_dilated else seen

    return attends


def _lists(
    near: Neighbourhood, ordering: Ordering | None, extra: int, padded: bool, size: int, device: torch.device
) -> tuple[Tensor, ...]:
    partial, full = mask_blocks(near, ordering, q_block=size, kv_block=size, device=device)
    if extra:
        own, count = near.length // size, -(-(near.length + extra) // size)  # blocks of the grid alone
        partial, full = (torch.nn.functional.pad(x, (0, count - x.shape[1])) for x in (partial, full))
        number = torch.arange(count, device=device)
        whole = (number >= -(-near.length // size)) & ((number + 1) * size <= near.length + extra)
        whole_q = torch.arange(len(partial), device=device) < near.length // size
        full = full | (whole & whole_q[:, None])
        partial = (partial | (number >= own)) & ~full
    if padded:
        partial, full = partial | full, torch.zeros_like(full)
    return *block_list(partial), *block_list(full)


def _tiles_within(block_size: int) -> AbstractContextManager:
    # On some GPUs inductor's tiles are 128 rows, which a smaller block cannot hold: it then finds no kernel at all. The
    # choice holds for one thread: `run_to_keep` compiles the backward here too.
    if block_size >= FLEX_BLOCK:
        return nullcontext()
    return flex_tiles_within(block_size)


def _refusal(q: Tensor, request: Request) -> str:
    if not q.is_cuda:
        return f"needs a CUDA device, got {q.device.type}: elsewhere it is not compiled and has no backward"
    return gpu_refusal(q) if kernel_mode() == "compiled" else "needs triton, and not its interpreter"


def _limits(q: Tensor, request: Request) -> str:
    if q.dtype == torch.float64:
        return "serves float16, bfloat16 and float32, got float64"
    return f"needs a head_dim of at least 16, got {q.shape[-1]}" if q.shape[-1] < 16 else ""


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


def _workspace(given: tuple, request: Request, direction: str, device: torch.device, returned: int) -> dict[str, int]:
    # On CUDA, of a forward that is the first of its mask, and of a backward after it, which holds the output of its own
    # forward twice: as FlexAttention makes it and as we return it. Of k and v there are copies where extra keys are
    # joined to them.
    q, k, _, extra_k, _ = given[0] if direction == "forward" else given[1]
    batch, seq, heads, _ = q.shape
    lse, joined = 4 * batch * seq * heads, 2 * (k.nbytes + extra_k.nbytes)
    copies = joined if extra_k.numel() else 0
    if direction == "backward":
        return {"temporary": 2 * q.nbytes + copies * (2 if batch > 1 else 1) + 3 * lse}
    lists = heads if len(request.heads_by_window) > 1 else 1
    pairs = lists * -(-seq // FLEX_BLOCK) * -(-(seq + extra_k.shape[1]) // FLEX_BLOCK)
    most = max(FLEX_SORTED * pairs, FLEX_KEPT * pairs + copies + q.nbytes + 2 * lse + FLEX_FIRST)
    return {"temporary": most - returned}


BACKENDS = (
    Backend(
        serves=HeadNeighbourhoods,
        name="flex",
        note="compiled FlexAttention; its backward runs the forward once more",
        colour="#E69F00",
        functions=lambda device: (attend, backward),
        limits=_limits,
        here=_refusal,
        reads_orderings=True,
        workspace=_workspace,
    ),
    Backend(
        serves=Pattern,
        name="flex",
        note="compiled FlexAttention with a mask of all pairs; its backward runs the forward once more",
        colour="#E69F00",
        functions=lambda device: (attend, backward),
        limits=_limits_of_any,
        here=_refusal,
    ),
)
