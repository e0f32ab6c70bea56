"""FlexAttention, compiled, on tokens in residue-major order: a mask of blocks says what the pattern lets attend.

FlexAttention differentiates its own forward. The `backward` that every backend has therefore runs the forward once
more, and uses out and lse only where they hold more than the call, as in a ring.
"""

from collections.abc import Callable
from functools import cache
from math import lcm
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hilbert_lib.attention.backends.backend import Backend, gpu_refusal, half_limits, of_sequences
from hilbert_lib.attention.request import WORKING_DTYPE, Request
from hilbert_lib.attention.triton.schedule import head_offsets
from hilbert_lib.graph_cache import cached_for_graphs
from hilbert_lib.internals import buffers_kept, let_run_again
from hilbert_lib.machine import kernel_mode
from hilbert_lib.ordering import Ordering, Permuted
from hilbert_lib.patterns.dilated import DilatedPattern

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

FLEX_BLOCK = 128  # rows and columns of a block of FlexAttention's mask: its own default
COMPILATIONS = 64  # one for each pattern and shape; torch's own limit of 8 ends a sweep with an error
# For rows of at most 64 elements, where counts are added to the scores. torch's own choice for Hopper, four warps for
# 128 x 128 scores, takes a forward of the reference work four times as long (notebook 06, commits 76aff87, 2ba1c29).
FLEX_NARROW = {"fwd_BLOCK_N": 64, "fwd_num_warps": 8}


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Request
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; on CUDA alone."""
    # The operator that calls this runs below autograd, which has to record the forward here.
    with torch.inference_mode(False):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        own = attend(*leaves, call)
        if not call.is_part:
            return torch.autograd.grad(own[0], leaves, dout)
        with torch.no_grad():
            grads = gradients_of_part(dout, out, lse, *own)
        return torch.autograd.grad(own, leaves, grads)


def gradients_of_part(
    dout: Tensor, out: Tensor, lse: Tensor, own_out: Tensor, own_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of a part's own out and lse, of the gradient of the merged out."""
    # out = sum of w own_out over the parts, w = exp(own_lse - lse). So own_out has the gradient w dout, and own_lse the
    # gradient w rowsum(dout * (own_out - out)).
    nothing = own_lse == -torch.inf  # -inf minus -inf is NaN
    weighted = (own_lse - lse).exp().masked_fill(nothing, 0.0).transpose(1, 2)[..., None] * dout
    towards = (weighted * (own_out.to(lse.dtype) - out)).sum(-1)
    return weighted.to(own_out.dtype), towards.transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor, call: Request) -> tuple[Tensor, Tensor]:
    """Output and lse of dilated attention; shapes as in `reference.forward`.

    On CUDA it is compiled and differentiable. On the CPU it runs in eager mode, with memory for length squared and
    without a gradient.
    """
    # Imported where it runs: from torch 2.14 on it is what loads sympy, which takes longer than this library.
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    orders = [residue_order(call.pattern, x.shape[1]).to(q.device) for x in (q, k, v)]
    # A generator: nothing but the call holds the copies, which are as large as q, k and v.
    stored = (Permuted.apply(x, order.perm, order.inverse) for x, order in zip((q, k, v), orders, strict=True))
    heads, kv_heads = q.shape[2], k.shape[2]
    count = block_mask = None
    if q.shape[1] == k.shape[1]:
        count, block_mask = _masks(call.pattern, call.is_causal, q.shape[1], heads, kv_heads, q.device)
    # Otherwise it is a block of a ring: one branch of rate 1 with one segment, where every query sees every key.

    def add_log_count(score, b, h, query, key):
        return score + count(h, query, key).log()

    once = len(call.pattern.branches) == 1 or call.pattern.mixing == "head_groups"
    run = compiled_flex_attention if q.is_cuda else flex_attention
    out, more = run(
        *(x.transpose(1, 2) for x in stored),
        score_mod=None if once else add_log_count,
        block_mask=block_mask,
        scale=call.scale,
        enable_gqa=heads != kv_heads,
        return_aux=AuxRequest(lse=True),
        kernel_options=FLEX_NARROW if q.is_cuda and q.shape[3] <= 64 and not once else None,
    )
    lse = more.lse.to(WORKING_DTYPE[q.dtype]).index_select(2, orders[0].inverse)
    return Permuted.apply(out.transpose(1, 2), orders[0].inverse, orders[0].perm), lse


def residue_order(pattern: DilatedPattern, length: int) -> Ordering:
    """The layout in which FlexAttention takes tokens: rows of one residue modulo every rate lie side by side."""
    return Ordering.residue(length, lcm(*pattern.dilation_rates))


@cached_for_graphs(maxsize=32)
@torch.inference_mode(False)  # masks made in inference mode could not serve a later backward pass
def _masks(
    pattern: DilatedPattern, is_causal: bool, length: int, heads: int, kv_heads: int, device: torch.device
) -> tuple[Callable[[Tensor, Tensor, Tensor], Tensor], "BlockMask"]:
    # A function that FlexAttention traces: through how many branches a query finds a key, of slots in `residue_order`.
    # And the mask of blocks, made without a table of length squared; in a full block every pair attends.
    position = residue_order(pattern, length).to(device).perm.int()
    # Cut to the length, which changes nothing below it: 32 bits hold no rate of 2^32 and more.
    branches = [(min(w, length), min(r, length)) for w, r in pattern.branches]
    by_branch = [[min(o, length) for o in head_offsets(pattern, i, kv_heads)] for i in range(len(branches))]
    used = list(zip(*by_branch, strict=True))  # of each KV head
    offsets = torch.tensor(used, dtype=torch.int32, device=device).repeat_interleave(heads // kv_heads, 0)

    def count(h, query, key):
        at_query, at_key = position[query], position[key]
        total = 0.0
        for i, (w, r) in enumerate(branches):
            # Rows outside the branch get segments that equal no other.
            query_segment = torch.where(at_query % w % r == offsets[h, i], at_query // w, -1)
            key_segment = torch.where(at_key % w % r == offsets[h, i], at_key // w, -2)
            total = total + (query_segment == key_segment).float()
        return total

    def attends(b, h, query, key):
        found = count(h, query, key) > 0.0
        return found & (position[key] <= position[query]) if is_causal else found

    lists = {own: _block_lists(position.long(), branches, own, is_causal) for own in set(used)}
    per_head = [lists[used[h // (heads // kv_heads)]] for h in range(heads)]
    partial_count, partial, full_count, full = (torch.stack(x)[None] for x in zip(*per_head, strict=True))
    from torch.nn.attention.flex_attention import BlockMask

    mask = BlockMask.from_kv_blocks(
        partial_count, partial, full_count, full, FLEX_BLOCK, mask_mod=attends, seq_lengths=(length, length)
    )
    return count, mask


def _block_lists(
    position: Tensor, branches: list[tuple[int, int]], offsets: tuple[int, ...], is_causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # For one head: how many blocks each block of queries sees in part, which, how many it sees whole, and which.
    length, device = len(position), position.device
    blocks = -(-length // FLEX_BLOCK)
    block = torch.arange(length, device=device) // FLEX_BLOCK
    some = torch.zeros(blocks, blocks, dtype=torch.bool, device=device)
    full = some.clone()
    for (w, r), offset in zip(branches, offsets, strict=True):
        inside = position % w % r == offset
        holds = torch.zeros(blocks, -(-length // w), device=device)  # whether a block has rows of a segment
        holds[block[inside], position[inside] // w] = 1.0
        meets = holds @ holds.T > 0.0
        whole = (block[~inside].bincount(minlength=blocks) == 0) & (holds.sum(1) == 1.0)
        some |= meets
        full |= meets & whole[:, None] & whole
    if is_causal:
        first = position.new_full((blocks,), length).scatter_reduce(0, block, position, "amin")
        last = position.new_zeros(blocks).scatter_reduce(0, block, position, "amax")
        some &= first <= last[:, None]
        full &= last <= first[:, None]
    return *block_list(some & ~full), *block_list(full)


def block_list(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks each row of (query blocks, key blocks) bool has, and the columns, with these first: int32."""
    return blocks.sum(1).int(), blocks.byte().argsort(dim=1, descending=True, stable=True).int()


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


# FlexAttention's lists of blocks, in bytes for each head and pair of blocks: while they are sorted, and kept.
FLEX_SORTED, FLEX_KEPT = 59, 16
# What the first call of a shape takes on an H200 is 0 to 92 MiB; this is the middle. 60 are as large as L2: torch's
# compiler clears it between runs of a small kernel, of which it keeps the faster version, unless its cache on disk
# knows that. 32 are cuBLAS's, which multiplies for the lists, unless the process has multiplied before.
FLEX_FIRST = 46 * 2**20


def _workspace(given: tuple, call: Request, direction: str, device: torch.device, returned: int) -> dict[str, int]:
    # On CUDA: of a forward that is the first of its pattern and length, and of a backward after it, which runs the
    # forward once more.
    q, k, *_ = given[0] if direction == "forward" else given[1]
    batch, rows, heads, _ = q.shape
    lse = 4 * batch * rows * heads
    stored = q.nbytes + 2 * k.nbytes  # in residue order, and as much again for their gradients
    if direction == "backward":
        most = 2 * stored + 3 * q.nbytes + 4 * lse  # out and dout in residue order, out in the sequence's
    else:
        pairs = heads * (-(-rows // FLEX_BLOCK)) ** 2
        most = max(FLEX_SORTED * pairs, FLEX_KEPT * pairs + stored + q.nbytes + 2 * lse + FLEX_FIRST)
    return {"temporary": most - returned}


def _limits(q: Tensor, call: Request) -> str:
    if q.shape[-1] < 16:
        return f"needs a head_dim of at least 16, got {q.shape[-1]}"
    if call.cu_seqlens is not None:
        return "no cu_seqlens: its mask of blocks is of one length, which the host would have to know"
    return half_limits(q, call)


def _here(q: Tensor, call: Request) -> str:
    if not q.is_cuda:
        return f"needs a CUDA device, got {q.device.type}: elsewhere it is not compiled and has no backward"
    return gpu_refusal(q) if kernel_mode() == "compiled" else "needs triton, and not its interpreter"


BACKENDS = (
    Backend(
        name="flex",
        note="compiled FlexAttention; its backward runs the forward once more",
        colour="#E69F00",
        functions=lambda device: of_sequences(attend, backward),
        limits=_limits,
        here=_here,
        # As tried at 66ec7ef: tensors of FlexAttention's stay in the graph's memory. What holds them is not known.
        caveat="torch refused it under torch.compile(mode='reduce-overhead') when that was tried",
        workspace=_workspace,
    ),
)
