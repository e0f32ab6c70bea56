"""Forward for a few queries against many keys: keys are split over programs, and their parts merged.

A tile of `forward` holds queries of one head and reads all their keys. With one query that makes a handful of programs,
and the heads of a group read the same keys again. Here a program takes a chunk of the keys that one KV head sees in one
branch, for all queries of all heads of the group:

    keys of a branch and KV head   | chunk 0 | chunk 1 | chunk 2 |
    programs                         part 0    part 1    part 2     -> merge_kernel -> out, lse

So a key row is read from memory once a branch. Tiles of one chunk run at the same time and find its keys in the cache.

Where sequences begin at rows that only the device knows (`starts.py`), as many programs are started as the longest
segments need, and those of a sequence that needs fewer end at once.
"""

from operator import itemgetter

import torch
import triton
import triton.language as tl
from torch import Tensor

from hilbert_lib.attention.dropout import drop_below
from hilbert_lib.attention.request import Request
from hilbert_lib.attention.triton import geometry
from hilbert_lib.attention.triton.arguments import as_computed, is_interpreted
from hilbert_lib.attention.triton.schedule import head_offsets
from hilbert_lib.attention.triton.start import Made, Start, start
from hilbert_lib.graph_cache import cached_for_graphs
from hilbert_lib.patterns.dilated import DilatedPattern

MOST_ROWS = 64  # query rows of one KV head; with more rows a tile of `forward` is well filled
# In half precision also more rows, where `forward` would have so few tiles that most multiprocessors get none. Of twice
# as many tiles neither way led: this one was 0.6 to 1.6 times as fast as "hopper" on an H200.
FORWARD_ROWS, MOST_TILES = 128, 16
TILE_ROWS = {2: 32, 4: 16}  # bytes of an element -> largest tile; with 64, Triton 3.7 fails to compile for sm_100
KEYS_PER_ROW = 8  # fewest keys of a program for each query row: partial results then stay small beside the keys
PROGRAMS = 1024  # programs aimed at: a few for each place of an SM
TILE_BYTES = 16384  # bytes of k, and of v, at each step of a program
NUM_WARPS, NUM_STAGES = 4, 3
INDEX_STAGES = 2  # additional stages where rows are gathered: indices are loaded that far ahead of the rows
MERGED_ELEMENTS = 8192  # elements of partial outputs at each step of the merge
INTERPRETED_BLOCK = 16
NOT_SPECIALIZED = [*geometry.NOT_SPECIALIZED, "pairs", "units", "tiles", "parts", "stride_pb"]


def serves(q: Tensor, k: Tensor, call: Request) -> bool:
    """Whether this forward suits a call better than `launch.forward`.

    It does where a KV head has few query rows, or all of them together few tiles, and some branch has so many keys that
    partial results are small beside them. Of few rows the number of programs does not matter: keys are read once for
    all heads of a group in any case.

    >>> q, k = torch.empty(1, 1, 8, 64), torch.empty(1, 4096, 2, 64)
    >>> serves(q, k, Request(DilatedPattern((1024,), (1,)), query_start=4095))
    True
    """
    if _reads_starts(call):  # which `launch.forward` does not read
        return True
    if call.cu_seqlens is not None or not (has_few_rows(q, k) or _has_few_tiles(q)):
        return False
    branches = zip(call.pattern.segment_lengths, call.pattern.dilation_rates, strict=True)
    return max(min(w, k.shape[1]) // r for w, r in branches) >= KEYS_PER_ROW * _rows(q, k)


def has_few_rows(q: Tensor, k: Tensor) -> bool:
    """Whether a tile of `forward` would not be filled by the queries of all heads of a KV head."""
    return _rows(q, k) <= MOST_ROWS


def _rows(q: Tensor, k: Tensor) -> int:
    return q.shape[1] * (q.shape[2] // k.shape[2])


def _has_few_tiles(q: Tensor) -> bool:
    # Whether the tiles of `forward` leave most of a GPU without work.
    batch, queries, heads, _ = q.shape
    return q.element_size() == 2 and batch * heads * triton.cdiv(queries, FORWARD_ROWS) <= MOST_TILES


def _reads_starts(call: Request) -> bool:
    # As `has_starts`: its file would be one more that every call crosses.
    return call.query_starts is not None or call.key_start is not None


def starts_of_rows(call: Request) -> dict[str, Tensor | None]:
    """The tensors of starts as kernels take them."""
    starts = {"query_starts": call.query_starts, "key_start": call.key_start}
    return {name: None if x is None else x.contiguous() for name, x in starts.items()}


def refusal_of_starts(q: Tensor, k: Tensor, call: Request) -> str:
    """The reason why a call whose sequences begin at rows that only the device knows is not decoded, or ""."""
    if not has_few_rows(q, k):
        return f"reads starts on the device for up to {MOST_ROWS} queries of the heads of a KV head, got {_rows(q, k)}"
    return ""


def attend_in_parts(q: Tensor, k: Tensor, v: Tensor, call: Request) -> tuple[Tensor, Tensor]:
    """Output and lse of dilated attention, as `launch.forward` returns them; deterministic, without atomics."""
    dtype = q.dtype
    q, k, v = as_computed(q, k, v)
    batch, queries, heads, head_dim = q.shape
    kv_heads, first, keys = k.shape[2], call.first_query, k.shape[1]
    if call.is_causal and not _reads_starts(call):
        keys = min(keys, first + queries)  # those that some query may see
    group, rows = heads // kv_heads, _rows(q, k)
    columns = geometry.block_d(head_dim)
    block_n = step_keys(head_dim, k.element_size())
    known_first = None if _reads_starts(call) else first
    chunk, units, parts = split(call.pattern, keys, known_first, queries, batch, kv_heads, KEYS_PER_ROW * rows, block_n)
    table = _table(call.pattern, kv_heads, q.device)
    branches = len(call.pattern.branches)
    pairs = branches * kv_heads
    block_m = min(TILE_ROWS[k.element_size()], max(16, geometry.power_of_2(rows)))
    tiles = triton.cdiv(rows, block_m)
    row_starts = starts_of_rows(call)
    # q stands in for tensors that are not used.
    masks = (
        q if call.inverse is None else call.inverse,
        q if call.key_padding_mask is None else call.key_padding_mask.contiguous(),
        q if call.seed is None else call.seed,
    )
    numbers = (
        call.scale, drop_below(call.dropout_p),
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], k.shape[1],
        first, queries, keys, kv_heads, group, pairs, chunk, units, tiles, parts,
    )  # fmt: skip
    named = {
        **{"HEAD_DIM": head_dim, "BLOCK_D": columns, "BLOCK_M": block_m, "BLOCK_N": block_n},
        **{"PAIRS": geometry.power_of_2(pairs), "SEVERAL": queries > 1, "CAUSAL": call.is_causal},
        **{"GATHER": call.inverse is not None, "PADDING": call.key_padding_mask is not None},
        **{"DROPOUT": call.dropout_p > 0.0, "PRECISION": products_of_few_rows()},
        **{"num_warps": NUM_WARPS, "num_stages": NUM_STAGES + (0 if call.inverse is None else INDEX_STAGES)},
        **row_starts,
    }
    named_of_merge = {"HEAD_DIM": head_dim, "BLOCK_D": columns, "BLOCK": MERGED_ELEMENTS // columns}
    named_of_merge |= {"CAUSAL": call.is_causal} | row_starts
    sizes = first, queries, keys, heads, kv_heads, group, branches, chunk, parts

    def starts(partial_out: Tensor, partial_lse: Tensor, out: Tensor, lse: Tensor) -> list[Start]:
        tensors = q, k, v, partial_out, partial_lse, table, *masks
        merged = partial_out, partial_lse, out, lse, table, *sizes
        return [
            Start(decode_kernel, (batch * units * tiles,), (*tensors, *numbers), named),
            Start(merge_kernel, (batch * queries * heads,), merged, named_of_merge),
        ]

    made = (*made_of_parts(q, parts), Made(q.shape, dtype), Made((batch, heads, queries), torch.float32))
    tensors = q, k, v, *call.tensors, call.query_starts, call.key_start
    return start(starts, tensors, "decode", *call.options, made=made, finish=itemgetter(2, 3), keep=is_repeated(call))


def made_of_parts(q: Tensor, parts: int) -> tuple[Made, Made]:
    """The output and the lse of each part of the keys."""
    batch, queries, heads, head_dim = q.shape
    return (
        Made((batch, heads, queries, parts, head_dim), torch.float32),
        Made((batch, heads, queries, parts), torch.float32),
    )


def is_repeated(call: Request) -> bool:
    """Whether calls of one kind may follow. Where the host knows the row of q, each step is a kind of its own."""
    return _reads_starts(call) or not call.query_start


def products_of_few_rows() -> str:
    """The precision of float32 products of a few rows. Bytes bind there, so exact ones cost nothing."""
    return geometry.products_of_float32("ieee")


def step_keys(head_dim: int, element_size: int) -> int:
    """Keys of one step of a program. A tile of k has at most `TILE_BYTES`."""
    if is_interpreted():
        return INTERPRETED_BLOCK
    return min(128, TILE_BYTES // (geometry.block_d(head_dim) * element_size))


def split(
    pattern: DilatedPattern, keys: int, first: int | None, queries: int, batch: int, kv_heads: int, least: int,
    block: int,
) -> tuple[int, int, int]:  # fmt: skip
    """Chunk, units and parts of the split of `keys` that queries from position `first` on may see.

    first: None for the most that any position needs. chunk: keys of a program, at least `least` and whole steps of
    `block`. units: programs of one sequence. parts: chunks of all branches together. The kernels compute the share of
    each program themselves.

    >>> split(DilatedPattern((4096,), (1,)), 4096, 4095, 1, batch=1, kv_heads=2, least=8, block=64)
    (64, 128, 64)
    """
    longest, pairs = [], []
    for i, (w, r) in enumerate(pattern.branches):
        offsets = head_offsets(pattern, i, kv_heads)
        if first is None:
            counts = sorted((offsets.count(o) for o in {*offsets} - {-1}), reverse=True)
            longest.append(triton.cdiv(min(w, keys), r))
            pairs.append(sum(counts[:queries]))
            continue
        longest.append(triton.cdiv(min(w, keys - first // w * w), r))
        pairs.append(sum(offsets.count(o) for o in {p % w % r for p in range(first, first + queries)}))
    work = batch * sum(n * count for n, count in zip(longest, pairs, strict=True))
    chunk = triton.cdiv(max(least, triton.cdiv(work, PROGRAMS)), block) * block
    splits = [triton.cdiv(n, chunk) for n in longest]
    return chunk, sum(n * count for n, count in zip(splits, pairs, strict=True)), sum(splits)


@cached_for_graphs()
def _table(pattern: DilatedPattern, kv_heads: int, device: torch.device) -> Tensor:
    # (branches, kv_heads, 3) int32: segment length, rate and offset. Lengths are capped where no position reaches.
    rows = [
        [(min(w, 2**30), min(r, 2**30), o) for o in head_offsets(pattern, i, kv_heads)]
        for i, (w, r) in enumerate(pattern.branches)
    ]
    return torch.tensor(rows, dtype=torch.int32, device=device)


@triton.jit
def rows_held(b, first_query, queries, keys, query_starts, key_start, CAUSAL: tl.constexpr):
    """Rows of a sequence that begins where only the device knows.

    The row of k at which it begins, its keys, the position of its first query, how many rows of q lie before that
    query, and how many rows of q it has, which may be below 1.
    """
    begin = 0
    if key_start is not None:
        begin = tl.minimum(tl.maximum(tl.load(key_start + b), 0), keys).to(tl.int32)
    start = first_query
    if query_starts is not None:
        start = tl.minimum(tl.maximum(tl.load(query_starts + b), -queries), keys).to(tl.int32)
    first_row = tl.maximum(start, begin)
    held = tl.minimum(start + queries, keys) - first_row
    last = first_row + held if CAUSAL else keys
    return begin, last - begin, first_row - begin, first_row - start, held


@triton.jit
def splits_of(w, r, first_query, keys, chunk):
    """Number of chunks of a branch, set by the longest of its segments that hold a query."""
    longest = tl.minimum(w, keys - first_query // w * w)  # [PAIRS]
    return tl.cdiv(tl.cdiv(longest, r), chunk)


@triton.jit
def pair_of(unit, table, first_query, queries, keys, kv_heads, pairs, chunk, PAIRS: tl.constexpr):
    """The work of a program: its pair (branch * kv_heads + g), chunk of keys, and the part's number among all parts.

    Pairs of a branch and a KV head without a query get no program.
    """
    pair = tl.arange(0, PAIRS)  # [PAIRS]
    w = tl.load(table + 3 * pair, mask=pair < pairs, other=1)  # [PAIRS]
    r = tl.load(table + 3 * pair + 1, mask=pair < pairs, other=1)  # [PAIRS]
    o = tl.load(table + 3 * pair + 2, mask=pair < pairs, other=-1)  # [PAIRS]
    # The first position of the branch from first_query on: in the same segment, or in the next.
    start, last_query = first_query // w * w, first_query + queries - 1  # [PAIRS], scalar
    nearest = first_query + (o - (first_query - start) % r + r) % r  # [PAIRS]
    holds_query = ((nearest <= last_query) & (nearest - start < w)) | (last_query - start - w >= o)  # [PAIRS]
    splits = splits_of(w, r, first_query, keys, chunk)  # [PAIRS]
    units = tl.where((o >= 0) & holds_query, splits, 0)  # [PAIRS]
    mine = tl.sum((tl.cumsum(units, 0) <= unit).to(tl.int32), 0)
    part = unit - tl.sum(tl.where(pair < mine, units, 0), 0)
    before = (pair % kv_heads == 0) & (pair < mine // kv_heads * kv_heads)  # [PAIRS]
    return mine, part, part + tl.sum(tl.where(before, splits, 0), 0)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def decode_kernel(
    q, k, v, partial_out, partial_lse, table, inverse, padding, seed,
    scale, drop_below,
    stride_qb, stride_qn, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh, stride_pb,
    first_query, queries, keys, kv_heads, group, pairs, chunk, units, tiles, parts,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAIRS: tl.constexpr,
    SEVERAL: tl.constexpr, CAUSAL: tl.constexpr, GATHER: tl.constexpr, PADDING: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr, query_starts=None, key_start=None,
):  # fmt: skip
    """Partial results of one chunk of keys of a branch and KV head, for all queries of the group in the branch."""
    # partial_out [batch, heads, queries, parts, HEAD_DIM], partial_lse [batch, heads, queries, parts]
    unit = tl.program_id(0) // tiles
    b = (unit // units).to(tl.int64)
    STARTS: tl.constexpr = query_starts is not None or key_start is not None
    rows_of_q = queries
    if STARTS:
        begin, keys, first_query, before, queries = rows_held(
            b, first_query, queries, keys, query_starts, key_start, CAUSAL
        )
        if queries < 1:
            return
    pair, part, number = pair_of(unit % units, table, first_query, queries, keys, kv_heads, pairs, chunk, PAIRS)
    if STARTS:
        if pair >= pairs:  # the sequence needs fewer programs
            return
        k += begin.to(tl.int64) * stride_kn
        v += begin.to(tl.int64) * stride_vn
        padding += begin
    w = tl.load(table + 3 * pair)
    r = tl.load(table + 3 * pair + 1)
    o = tl.load(table + 3 * pair + 2)
    branch, g = pair // kv_heads, (pair % kv_heads).to(tl.int64)
    rows = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    dims = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    in_dim = dims[None, :] < HEAD_DIM  # [1, BLOCK_D]
    t = rows // group  # [BLOCK_M]
    h = g * group + rows % group  # [BLOCK_M]
    position = first_query + t  # [BLOCK_M]
    inside = (t < queries) & (position % w % r == o)  # [BLOCK_M]
    if STARTS:  # so far from the first row of q that the sequence has
        t += before  # [BLOCK_M]
    row_mask = inside[:, None] & in_dim  # [BLOCK_M, BLOCK_D]
    q_ptrs = (
        q + (b * stride_qb + h * stride_qh + t.to(tl.int64) * stride_qn)[:, None] + dims[None, :]
    )  # [BLOCK_M, BLOCK_D]
    q_tile = tl.load(q_ptrs, mask=row_mask, other=0.0)  # [BLOCK_M, BLOCK_D]
    k_head = k + b * stride_kb + g * stride_kh
    v_head = v + b * stride_vb + g * stride_vh
    padding_row = padding + b * stride_pb

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)  # [BLOCK_M]
    total = tl.zeros([BLOCK_M], tl.float32)  # [BLOCK_M]
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)  # [BLOCK_M, BLOCK_D]
    cols = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    # Rows that are not in the branch are computed in vain and not stored.
    lowest = tl.min(tl.where(inside, position, first_query + queries), 0)
    highest = tl.max(tl.where(inside, position, first_query), 0)
    for s in range(lowest // w, highest // w + 1):
        start = s * w
        end = tl.minimum(geometry.segment_rows(start, w, r, o, keys), (part + 1) * chunk)
        for j in range(part * chunk, end, BLOCK_N):
            is_key = j + cols < end  # [BLOCK_N]
            key = start + o + (j + cols) * r  # [BLOCK_N]
            slot = key.to(tl.int64)  # [BLOCK_N]
            if GATHER:
                slot = tl.load(inverse + key, mask=is_key, other=0).to(tl.int64)  # [BLOCK_N]
            if PADDING:
                is_key &= tl.load(padding_row + key, mask=is_key, other=1) == 0
            # A key that no query sees is not read: its NaN reaches nothing.
            load = is_key[:, None] & in_dim  # [BLOCK_N, BLOCK_D]
            k_tile = tl.load(
                k_head + slot[:, None] * stride_kn + dims[None, :], mask=load, other=0.0
            )  # [BLOCK_N, BLOCK_D]
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
            allowed = is_key[None, :]  # [1, BLOCK_N]
            if SEVERAL:
                allowed &= ((position >= start) & (position - start < w))[:, None]  # [BLOCK_M, BLOCK_N]
                if CAUSAL:
                    allowed &= key[None, :] <= position[:, None]
            scores = tl.where(allowed, scores, float("-inf"))  # [BLOCK_M, BLOCK_N]
            largest = tl.maximum(m, tl.max(scores, 1))  # [BLOCK_M]
            finite = tl.where(largest == float("-inf"), 0.0, largest)  # [BLOCK_M]
            # Subtract first, then scale: the largest score then gives exactly 1, however large it is.
            weights = tl.exp2((scores - finite[:, None]) * (scale * geometry.LOG2_E))  # [BLOCK_M, BLOCK_N]
            decay = tl.exp2((m - finite) * (scale * geometry.LOG2_E))  # [BLOCK_M]
            total = total * decay + tl.sum(weights, 1)  # [BLOCK_M]
            m = largest  # [BLOCK_M]
            if DROPOUT:
                weights *= geometry.dropout_factor(
                    seed, drop_below, b, h[:, None], branch, w, r, position[:, None], key[None, :]
                )
            v_ptrs = v_head + slot[:, None] * stride_vn + dims[None, :]  # [BLOCK_N, BLOCK_D]
            v_tile = tl.load(v_ptrs, mask=load, other=0.0)  # [BLOCK_N, BLOCK_D]
            acc *= decay[:, None]
            joined = tl.dot(weights.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)  # [BLOCK_M, BLOCK_D]
            if SEVERAL:
                # 0 * NaN is NaN: a row of v that is not finite must reach only the queries that may see it. Such rows
                # are rare. So the product comes first, and once more without them where it shows one.
                row_sums = tl.sum(joined, 1)  # [BLOCK_M]
                if tl.max((row_sums != row_sums).to(tl.int32), 0) > 0:
                    v_again = tl.load(v_ptrs, mask=load, other=0.0)  # [BLOCK_N, BLOCK_D]
                    bad = (v_again - v_again) != 0.0  # [BLOCK_N, BLOCK_D]
                    reached = tl.dot(
                        allowed.to(v_again.dtype), bad.to(v_again.dtype), input_precision=PRECISION
                    )  # [BLOCK_M, BLOCK_D]
                    joined = tl.dot(
                        weights.to(v_again.dtype), tl.where(bad, 0.0, v_again), acc, input_precision=PRECISION
                    )  # [BLOCK_M, BLOCK_D]
                    joined = tl.where(reached > 0.0, float("nan"), joined)  # [BLOCK_M, BLOCK_D]
            acc = joined  # [BLOCK_M, BLOCK_D]

    part_rows = ((b * kv_heads * group + h) * rows_of_q + t) * parts + number  # [BLOCK_M]
    denominator = tl.where(total == 0.0, 1.0, total)  # [BLOCK_M]; 0: no keys; NaN stays NaN
    lse = tl.where(total == 0.0, float("-inf"), m * scale + tl.log(denominator))  # [BLOCK_M]
    tl.store(partial_out + part_rows[:, None] * HEAD_DIM + dims[None, :], acc / denominator[:, None], mask=row_mask)
    tl.store(partial_lse + part_rows, lse, mask=inside)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def merge_kernel(
    partial_out, partial_lse, out, lse, table,
    first_query, queries, keys, heads, kv_heads, group, n_branches, chunk, parts,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr = False, query_starts=None, key_start=None,
):  # fmt: skip
    """Out and lse of one query of one head, merged from its parts as `attention.merge` merges two."""
    row = tl.program_id(0).to(tl.int64)
    h, t = row % heads, row // heads % queries
    first_part = ((row // heads // queries * heads + h) * queries + t) * parts
    STARTS: tl.constexpr = query_starts is not None or key_start is not None
    position = first_query + t.to(tl.int32)
    if STARTS:
        _, keys, first_query, before, held = rows_held(
            row // heads // queries, first_query, queries, keys, query_starts, key_start, CAUSAL
        )
        is_held = (t >= before) & (t - before < held)
        position = first_query - before + t.to(tl.int32)
    dims = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    in_dim = dims[None, :] < HEAD_DIM  # [1, BLOCK_D]
    m = float("-inf")
    total = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)  # [BLOCK_D]
    for i in range(n_branches):
        pair = table + 3 * (i * kv_heads + h // group)
        w, r, o = tl.load(pair), tl.load(pair + 1), tl.load(pair + 2)
        splits = splits_of(w, r, first_query, keys, chunk)
        sees = position % w % r == o
        if STARTS:
            sees &= is_held
        if sees:
            for j in range(0, splits, BLOCK):
                part = j + tl.arange(0, BLOCK)  # [BLOCK]
                part_lse = tl.load(partial_lse + first_part + part, mask=part < splits, other=float("-inf"))  # [BLOCK]
                part_ptrs = partial_out + (first_part + part)[:, None] * HEAD_DIM + dims[None, :]  # [BLOCK, BLOCK_D]
                part_out = tl.load(part_ptrs, mask=(part < splits)[:, None] & in_dim, other=0.0)  # [BLOCK, BLOCK_D]
                largest = tl.maximum(m, tl.max(part_lse, 0))
                finite = tl.where(largest == float("-inf"), 0.0, largest)
                weights, decay = tl.exp(part_lse - finite), tl.exp(m - finite)  # [BLOCK], scalar
                total = total * decay + tl.sum(weights, 0)
                acc = acc * decay + tl.sum(weights[:, None] * part_out, 0)  # [BLOCK_D]
                m = largest
        first_part += splits
    denominator = tl.where(total == 0.0, 1.0, total)
    result_lse = tl.where(total == 0.0, float("-inf"), m + tl.log(denominator))
    tl.store(out + row * HEAD_DIM + dims, (acc / denominator).to(out.dtype.element_ty), mask=dims < HEAD_DIM)
    tl.store(lse + (row // heads // queries * heads + h) * queries + t, result_lse)
