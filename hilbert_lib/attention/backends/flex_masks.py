"""Masks of FlexAttention, by pattern: the blocks that hold pairs that attend, and the pairs inside a block.

    pattern              mask                 made from                               tokens lie
    DilatedPattern       dilated_mask         segments and residues of each block     in residue-major order
    HeadNeighbourhoods   neighbourhood_mask   the geometry of the grid                as they are stored
    with an `attends`    pattern_mask         a table of all pairs                    as they are stored

A block is empty, partial or full. FlexAttention asks `mask_mod` of the pairs of partial blocks alone.
"""

from collections.abc import Callable, Iterable
from copy import copy
from math import lcm
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hilbert_lib.attention.grid_parts import cells_in, padding_of
from hilbert_lib.attention.request import Request, Tensors
from hilbert_lib.attention.triton.schedule import head_offsets
from hilbert_lib.graph_cache import GraphCache, cached_for_graphs
from hilbert_lib.ordering import Ordering
from hilbert_lib.patterns.blocks import mask_blocks
from hilbert_lib.patterns.dilated import DilatedPattern
from hilbert_lib.patterns.neighbourhood import Axis, HeadNeighbourhoods, Neighbourhood
from hilbert_lib.patterns.pattern import Pattern

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

FLEX_BLOCK = 128  # rows and columns of a block of FlexAttention's mask: its own default
# For rows of at most 64 elements, where counts are added to the scores. torch's own choice for Hopper, four warps for
# 128 x 128 scores, takes a forward of the reference work four times as long (notebook 06, commits 76aff87, 2ba1c29).
FLEX_NARROW = {"fwd_BLOCK_N": 64, "fwd_num_warps": 8}
FOR_MANY_QUERIES = {"FORCE_USE_FLEX_ATTENTION": True}  # the kernel that torch has for few queries takes no such masks

BlockLists = tuple[Tensor, ...]  # of a head: partial blocks of each row of blocks, their columns; the same of full ones


class FlexMask(NamedTuple):
    """Arguments of FlexAttention for a pattern, beside q, k and v."""

    blocks: "BlockMask | None"  # None where every query sees every key
    score_mod: Callable | None = None  # adds the log of how often a query finds a key, or a bias
    orders: tuple[Ordering, Ordering] | None = None  # of q's rows, and of k's and v's; None as they are given
    kernel_options: dict | None = None  # on CUDA


def mask_of(given: Tensors, request: Request, block_size: int) -> FlexMask:
    """The mask of a call. block_size: tokens of a block, each way."""
    if isinstance(request.pattern, DilatedPattern):
        return _mask_of_sequences(given, request, block_size)
    score_mod = None if given.bias is None else _bias_mod(given, request)
    return FlexMask(_blocks_with_padding(given, request, block_size), score_mod, kernel_options=FOR_MANY_QUERIES)


def _mask_of_sequences(given: Tensors, request: Request, block_size: int) -> FlexMask:
    q, k, *_ = given
    pattern, blocks, score_mod = request.pattern, None, None
    orders = tuple(residue_order(pattern, x.shape[1]).to(q.device) for x in (q, k))
    if q.shape[1] == k.shape[1]:
        sizes = q.shape[1], q.shape[2], k.shape[2]
        blocks, score_mod = dilated_mask(pattern, request.is_causal, *sizes, block_size, q.device)
    # Otherwise it is a block of a ring: one branch of rate 1 with one segment, where every query sees every key.
    if len(pattern.branches) == 1 or pattern.mixing == "head_groups":
        score_mod = None
    is_narrow = score_mod is not None and q.shape[3] <= 64
    return FlexMask(blocks, score_mod, orders, FLEX_NARROW if is_narrow else None)


def _blocks_with_padding(given: Tensors, request: Request, block_size: int) -> "BlockMask":
    q, k, _, extra_k, *_ = given
    padded = request.key_padding_mask is not None or request.extra_padding_mask is not None
    if isinstance(request.pattern, HeadNeighbourhoods):
        windows = _windows_of_query_heads(given, request)
        extra = 0 if extra_k is None else extra_k.shape[1]
        box = request.part and request.part.rows
        mask = neighbourhood_mask(windows, request.ordering, box, extra, padded, block_size, q.device)
    else:
        mask = pattern_mask(request.pattern, q.shape[1], k.shape[1], request.ordering, block_size, q.device)
    if padded:
        mask, attends, padding = copy(mask), mask.mask_mod, padding_of(given, request)
        mask.mask_mod = lambda b, h, query, key: attends(b, h, query, key) & ~padding[b, key]
    return mask


def _windows_of_query_heads(given: Tensors, request: Request) -> tuple[Neighbourhood, ...]:
    # The neighbourhood of each query head, or one for all.
    group = given.q.shape[2] // given.k.shape[2]
    windows = tuple(near for near in request.neighbourhoods for _ in range(group))
    return windows if len(set(windows)) > 1 else windows[:1]


def _bias_mod(given: Tensors, request: Request) -> Callable:
    # FlexAttention's `score_mod` that adds a bias.
    windows, box, device = _windows_of_query_heads(given, request), request.part and request.part.rows, given.q.device
    seq, has_extra = windows[0].length, given.extra_k.shape[1] > 0
    sides, tables = request.pattern.bias_sides, bias_tables(windows, request.ordering, box, device)
    bias, is_one = given.bias.flatten(1), len(windows) == 1

    def add_bias(score, b, h, query, key):
        at, own, entry = key.clamp(max=seq - 1) if has_extra else key, (query,) if is_one else (h, query), 0
        for side, (rank, shift, first, ranks) in zip(sides, tables, strict=True):
            far = rank[at]
            if first is not None:
                far = torch.where(far < first[own], far + ranks, far)
            # A pair that does not attend may have no entry. Any entry serves.
            entry = entry * side + (far + shift[own] + side // 2).clamp(0, side - 1)
        biased = score + bias[h, entry]
        return torch.where(key < seq, biased, score) if has_extra else biased

    return add_bias


def _shared(build: Callable) -> GraphCache:
    # A cache of masks. Those made in inference mode could not serve a later backward pass.
    return cached_for_graphs(maxsize=32)(torch.inference_mode(False)(build))


def residue_order(pattern: DilatedPattern, length: int) -> Ordering:
    """The layout in which FlexAttention takes tokens: rows of one residue modulo every rate lie side by side."""
    return Ordering.residue(length, lcm(*pattern.dilation_rates))


@_shared
def dilated_mask(
    pattern: DilatedPattern,
    is_causal: bool,
    length: int,
    heads: int,
    kv_heads: int,
    block_size: int,
    device: torch.device,
) -> tuple["BlockMask", Callable]:
    """FlexAttention's mask of slots in `residue_order`, and the `score_mod` that counts branches with the same key."""
    # The mask of blocks is made without a table of length squared; in a full block every pair attends.
    position = residue_order(pattern, length).to(device).perm.int()
    # Cut to the length, which changes nothing below it: 32 bits hold no rate of 2^32 and more.
    branches = [(min(w, length), min(r, length)) for w, r in pattern.branches]
    by_branch = [[min(o, length) for o in head_offsets(pattern, i, kv_heads)] for i in range(len(branches))]
    used = list(zip(*by_branch, strict=True))  # of each KV head
    offsets = torch.tensor(used, dtype=torch.int32, device=device).repeat_interleave(heads // kv_heads, 0)

    def count(h, query, key):
        # Through how many branches a query finds a key.
        at_query, at_key = position[query], position[key]
        total = 0.0
        for i, (w, r) in enumerate(branches):
            # Rows outside the branch get segments that equal no other.
            query_segment = torch.where(at_query % w % r == offsets[h, i], at_query // w, -1)
            key_segment = torch.where(at_key % w % r == offsets[h, i], at_key // w, -2)
            total = total + (query_segment == key_segment).float()
        return total

    def attends(b, h, query, key):
        in_branch = count(h, query, key) > 0.0
        return in_branch & (position[key] <= position[query]) if is_causal else in_branch

    def add_log_count(score, b, h, query, key):
        return score + count(h, query, key).log()

    lists = {own: _lists_of_offsets(position.long(), branches, own, is_causal, block_size) for own in set(used)}
    per_head = [lists[used[h // (heads // kv_heads)]] for h in range(heads)]
    return _mask_of_lists(per_head, block_size, attends, (length, length)), add_log_count


def _lists_of_offsets(
    position: Tensor, branches: list[tuple[int, int]], offsets: tuple[int, ...], is_causal: bool, block_size: int
) -> BlockLists:
    length, device = len(position), position.device
    blocks = -(-length // block_size)
    block = torch.arange(length, device=device) // block_size
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
    return _lists(some & ~full, full)


@_shared
def neighbourhood_mask(
    windows: tuple[Neighbourhood, ...],
    ordering: Ordering | None,
    query_box: tuple[range, ...] | None,
    extra: int,
    padded: bool,
    block_size: int,
    device: torch.device,
) -> "BlockMask":
    """FlexAttention's mask of some heads, or of one for all, with keys that everyone sees at the end.

    padded: whether some keys may have no weight, so that no block counts as full. block_size: tokens of a block, each
    way. query_box: the cells of the queries, row by row; None for all, stored as the keys are.
    """
    seq, shape = windows[0].length, windows[0].shape
    keys, queries = _cells(windows[0], ordering, query_box, device)
    cells = zip(torch.unravel_index(queries, shape), torch.unravel_index(keys, shape), strict=True)
    rules = [_rule([near.axes[n] for near in windows], *of_axis) for n, of_axis in enumerate(cells)]

    def attends(b, h, query, key):
        at = key.clamp(max=seq - 1) if extra else key
        seen = rules[0](h, query, at)
        for rule in rules[1:]:
            seen = seen & rule(h, query, at)
        return seen | (key >= seq) if extra else seen

    per_head = [_lists_of_windows(near, ordering, queries, extra, padded, block_size) for near in windows]
    return _mask_of_lists(per_head, block_size, attends, (len(queries), seq + extra))


@_shared
def bias_tables(
    windows: tuple[Neighbourhood, ...],
    ordering: Ordering | None,
    query_box: tuple[range, ...] | None,
    device: torch.device,
) -> list[tuple[Tensor, Tensor, Tensor | None, int]]:
    """Tables (key_rank, shift, first, ranks) of each axis. Rank plus shift is the distance from a query to a key.

    shift: of each query. first: with edge="wrap" the first rank of each query's window, otherwise None. A key before it
    counts as `ranks` further on, the number of ranks. shift and first are (heads, queries) where windows differ.
    windows, ordering, query_box: as for `neighbourhood_mask`.
    """
    keys, queries, shape = *_cells(windows[0], ordering, query_box, device), windows[0].shape
    tables = []
    cells = zip(torch.unravel_index(queries, shape), torch.unravel_index(keys, shape), strict=True)
    for n, (q_cell, k_cell) in enumerate(cells):
        axis = windows[0].axes[n]
        (rank, _), (q_rank, count) = axis.ranks(k_cell), axis.ranks(q_cell)
        starts = torch.stack([near.axes[n].start(q_cell) for near in windows])
        goes_round = axis.edge == "wrap"
        firsts = starts % count if goes_round else starts
        shifts = starts - firsts - q_rank
        if len(windows) == 1:
            firsts, shifts = firsts[0], shifts[0]
        rank, shifts, firsts = (x.int().contiguous() for x in (rank, shifts, firsts))
        tables.append((rank, shifts, firsts, axis.cells // axis.dilation) if goes_round else (rank, shifts, None, 0))
    return tables


def _cells(
    near: Neighbourhood, ordering: Ordering | None, query_box: tuple[range, ...] | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    # The cells of keys and of queries as they are stored.
    keys = torch.arange(near.length, device=device) if ordering is None else ordering.to(device).perm
    return keys, keys if query_box is None else cells_in(query_box, near.shape, device)


@_shared
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


def _rule(axes: list[Axis], q_cell: Tensor, k_cell: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    # Of a head and of the slots of queries and keys: whether they attend along an axis, which has a rule for each head.
    # q_cell, k_cell: the cell of each slot along the axis.
    # Tables rather than numbers: a number would be compiled in, and each window then costs a compilation.
    wraps, is_dilated, ranks = axes[0].edge == "wrap", axes[0].dilation > 1, axes[0].cells // axes[0].dilation
    (rank, _), (q_rank, count) = axes[0].ranks(k_cell), axes[0].ranks(q_cell)
    firsts = [axis.start(q_cell) % count if wraps else axis.start(q_cell) for axis in axes]
    lasts = [q_rank if axis.is_causal else first + axis.window - 1 for axis, first in zip(axes, firsts, strict=True)]
    is_one = len(axes) == 1  # no axis of heads then: kernels in CuTe (torch 2.11) take no number as an index
    ends = (firsts[0], lasts[0]) if is_one else (torch.stack(firsts), torch.stack(lasts))
    q_residue, residue = (cell % axes[0].dilation for cell in (q_cell, k_cell))
    rank, q_residue, residue, first, last = (x.int().contiguous() for x in (rank, q_residue, residue, *ends))

    def attends(head, query, key):
        own = query if is_one else (head, query)
        begin, at = first[own], rank[key]
        at = torch.where(at < begin, at + ranks, at) if wraps else at
        seen = (begin <= at) & (at <= last[own])
        return seen & (q_residue[query] == residue[key]) if is_dilated else seen

    return attends


def _lists_of_windows(
    near: Neighbourhood, ordering: Ordering | None, queries: Tensor, extra: int, padded: bool, size: int
) -> BlockLists:
    device = queries.device
    partial, full = mask_blocks(near, ordering, q_block=size, kv_block=size, device=device, queries=queries)
    if extra:
        own, count = near.length // size, -(-(near.length + extra) // size)  # blocks of the grid alone
        partial, full = (torch.nn.functional.pad(x, (0, count - x.shape[1])) for x in (partial, full))
        number = torch.arange(count, device=device)
        whole = (number >= -(-near.length // size)) & ((number + 1) * size <= near.length + extra)
        whole_q = torch.arange(len(partial), device=device) < len(queries) // size
        full = full | (whole & whole_q[:, None])
        partial = (partial | (number >= own)) & ~full
    if padded:
        partial, full = partial | full, torch.zeros_like(full)
    return _lists(partial, full)


def _lists(partial: Tensor, full: Tensor) -> BlockLists:
    # partial, full: (query blocks, key blocks) bool.
    return *_counted(partial), *_counted(full)


def _counted(blocks: Tensor) -> tuple[Tensor, Tensor]:
    # How many blocks each row has, and the columns, with these first: int32.
    return blocks.sum(1).int(), blocks.byte().argsort(dim=1, descending=True, stable=True).int()


def _mask_of_lists(
    per_head: Iterable[BlockLists], block_size: int, attends: Callable, lengths: tuple[int, int]
) -> "BlockMask":
    from torch.nn.attention.flex_attention import BlockMask

    stacked = [torch.stack(x)[None] for x in zip(*per_head, strict=True)]
    return BlockMask.from_kv_blocks(*stacked, block_size, mask_mod=attends, seq_lengths=lengths)
