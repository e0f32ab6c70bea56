"""The oracle: what attention is, written as its definition, query by query and in float64.

It shares no code with the library and imports none of it. A pattern is what its fields say:

dilated pattern    segment_lengths, dilation_rates, offsets, mixing, padding
neighbourhood      shape, window, dilation, stride, is_causal, edge
windows by head    a tuple of neighbourhoods, or by_head: one for each KV head
union              patterns
a test's own       attends(query, key)

`times_seen` says which keys a query sees, and how often. `attention` is one softmax over them.
"""

from collections.abc import Callable, Iterator
from functools import cache, reduce
from itertools import product

import torch
from torch import Tensor


def times_seen(
    pattern, queries: range, length: int, kv_head: int = 0, kv_heads: int = 1, is_causal: bool = False
) -> Tensor:
    """How many times each query sees each key of a sequence, or of a grid row by row: (queries, length) float64.

    is_causal is that of sequences; a neighbourhood has its own.
    """
    if hasattr(pattern, "patterns"):
        return sum(times_seen(part, queries, length, kv_head, kv_heads, is_causal) for part in pattern.patterns)
    if hasattr(pattern, "key_coordinates"):
        return points_seen(pattern)[queries.start : queries.stop].double()
    if hasattr(pattern, "segment_lengths"):
        times = torch.zeros(len(queries), length, dtype=torch.float64)
        # Rows are numpy's, which takes a tenth of torch's time to add to a few elements.
        for row, query in zip(times.numpy(), queries, strict=True):
            for keys in keys_of(pattern, query, length, kv_head, kv_heads, is_causal):
                row[keys.start : keys.stop : keys.step] += 1
        return times
    by_head = getattr(pattern, "by_head", pattern)
    if isinstance(by_head, tuple):
        return times_seen(by_head[kv_head], queries, length)
    if hasattr(pattern, "window"):
        return mask_of(pattern)[queries.start : queries.stop].double()
    query, key = torch.arange(queries.start, queries.stop)[:, None], torch.arange(length)
    sees = pattern.attends(query, key).expand(len(queries), length)
    return (sees & (key <= query) if is_causal else sees).double()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    key_padding_mask: Tensor | None = None,
    query_start: int | Tensor = 0,
    key_start: Tensor | None = None,
    query_box: tuple | None = None,
    extra_k: Tensor | None = None,
    extra_v: Tensor | None = None,
    extra_padding_mask: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out (batch, queries, heads, head_dim) and lse (batch, heads, queries), float64, differentiable.

    Every query sees each extra key once. Masks are True where a key is hidden. Where query_start is a tensor, or
    key_start is given, each sequence is attended to by itself: `attention_of_unequal`.
    query_box: (start, stop) for each axis of a grid; q holds these cells, row by row. bias: (heads, 2 * window - 1
    along each axis), added to scaled scores by relative position.
    """
    if isinstance(query_start, Tensor) or key_start is not None:
        options = {"is_causal": is_causal, "scale": scale, "bias": bias}
        batched = {"key_padding_mask": key_padding_mask, "extra_k": extra_k, "extra_v": extra_v}
        batched["extra_padding_mask"] = extra_padding_mask
        return attention_of_unequal(q, k, v, pattern, query_start, key_start, batched, options)
    q, k, v = q.double(), k.double(), v.double()
    (_, queries, heads, head_dim), (batch, length, kv_heads, _) = q.shape, k.shape
    rows = range(query_start, query_start + queries)
    group = heads // kv_heads
    if query_box is not None:
        rows = range(length)
    times = [times_seen(pattern, rows, length, head, kv_heads, is_causal) for head in range(kv_heads)]
    if query_box is not None:
        times = [seen[cells_of_box(query_box, shape_of(pattern))] for seen in times]
    times = torch.stack(times).to(q.device).expand(batch, -1, -1, -1)
    if key_padding_mask is not None:
        times = times * ~key_padding_mask[:, None, None]
    keys, values, all_times = [k], [v], [times]
    if extra_k is not None:
        shown = times.new_ones(batch, extra_k.shape[1])
        if extra_padding_mask is not None:
            shown = shown * ~extra_padding_mask
        keys.append(extra_k.double())
        values.append(extra_v.double())
        all_times.append(shown[:, None, None].expand(-1, kv_heads, queries, -1))
    if getattr(pattern, "padding", "none") == "zeros":
        heads_and_rows = product(range(kv_heads), rows)
        zeros = [zero_keys_of(pattern, row, length, head, kv_heads, is_causal) for head, row in heads_and_rows]
        keys.append(k.new_zeros(batch, 1, kv_heads, head_dim))
        values.append(v.new_zeros(batch, 1, kv_heads, v.shape[3]))
        all_times.append(times.new_tensor(zeros).view(kv_heads, queries, 1).expand(batch, -1, -1, -1))
    keys, values = (for_heads(joined(parts, 1), group, 2) for parts in (keys, values))
    times = for_heads(joined(all_times, -1), group, 1)
    added = None
    if bias is not None:
        cells = rows if query_box is None else cells_of_box(query_box, shape_of(pattern))
        added = torch.zeros(times.shape[1:], dtype=torch.float64, device=q.device)
        added[:, :, :length] = bias_of(pattern, bias.double(), cells, group)
    return softmax_over(q, keys, values, times, head_dim**-0.5 if scale is None else scale, added)


def joint_attention(
    q: Tensor, k: Tensor, v: Tensor, extra_q: Tensor, pattern, *, extra_k: Tensor | None = None,
    extra_v: Tensor | None = None, key_padding_mask: Tensor | None = None, extra_padding_mask: Tensor | None = None,
    scale: float | None = None, key_start: Tensor | None = None, **options,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """out and lse of the cells of a grid, then of extra queries, which see every cell and every extra key.

    Rows of k before key_start are no cells. options: further ones of `attention`.
    """
    options |= {"scale": scale, "extra_k": extra_k, "extra_v": extra_v, "key_start": key_start}
    options |= {"key_padding_mask": key_padding_mask, "extra_padding_mask": extra_padding_mask}
    hidden, keys, values = [], [], []
    for x, values_of_x, mask in ((k, v, key_padding_mask), (extra_k, extra_v, extra_padding_mask)):
        if x is not None:
            keys.append(x.double())
            values.append(values_of_x.double())
            hidden.append(torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask)
    if key_start is not None:
        hidden[0] = hidden[0] | (torch.arange(k.shape[1], device=k.device) < key_start[:, None])
    (batch, queries, heads, head_dim), group = extra_q.shape, q.shape[2] // k.shape[2]
    keys, values = (for_heads(joined(parts, 1), group, 2) for parts in (keys, values))
    times = (~torch.cat(hidden, 1)).double()[:, None, None].expand(batch, heads, queries, -1)
    of_extra = softmax_over(extra_q.double(), keys, values, times, head_dim**-0.5 if scale is None else scale)
    return *attention(q, k, v, pattern, **options), *of_extra


def attention_of_unequal(
    q: Tensor, k: Tensor, v: Tensor, pattern, query_start: int | Tensor, key_start: Tensor | None, batched: dict,
    options: dict,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out and lse of sequences that begin at unequal rows: each one's own rows alone, and 0 and -inf for the others."""
    (batch, queries, heads, _), keys = q.shape, k.shape[1]
    out = q.new_zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    lse = torch.full((batch, heads, queries), -torch.inf, dtype=torch.float64, device=q.device)
    outs, lses = list(out.unbind(0)), list(lse.unbind(0))
    for b in range(batch):
        first = int(query_start[b]) if isinstance(query_start, Tensor) else query_start
        begin = 0 if key_start is None else min(max(int(key_start[b]), 0), keys)
        rows = [t for t in range(queries) if begin <= first + t < keys]
        if not rows:
            continue
        own = {name: None if x is None else x[b : b + 1] for name, x in batched.items()}
        if own["key_padding_mask"] is not None:
            own["key_padding_mask"] = own["key_padding_mask"][:, begin:]
        own_q, own_k, own_v = q[b : b + 1, rows], k[b : b + 1, begin:], v[b : b + 1, begin:]
        start = first + rows[0] - begin
        alone = shortened(pattern, keys - begin)
        own_out, own_lse = attention(own_q, own_k, own_v, alone, query_start=start, **own, **options)
        at = torch.tensor(rows, device=q.device)
        outs[b] = outs[b].index_copy(0, at, own_out[0])
        lses[b] = lses[b].index_copy(1, at, own_lse[0])
    return torch.stack(outs), torch.stack(lses)


def shortened(pattern, length: int):
    """The pattern for a sequence of this length: a neighbourhood of one axis with as many cells."""
    if hasattr(pattern, "patterns"):
        return _Rules(patterns=[shortened(part, length) for part in pattern.patterns])
    by_head = getattr(pattern, "by_head", pattern)
    if isinstance(by_head, tuple):
        return tuple(shortened(near, length) for near in by_head)
    if not hasattr(pattern, "window"):
        return pattern
    names = ("window", "dilation", "stride", "is_causal", "edge")
    return _Rules(shape=(length,), **{name: getattr(pattern, name) for name in names})


class _Rules:
    # A pattern as the oracle reads one, by its fields.
    def __init__(self, **fields):
        self.__dict__.update(fields)


def weights(
    q: Tensor, k: Tensor, pattern, *, extra_q: Tensor | None = None, extra_k: Tensor | None = None, **options
) -> Tensor:
    """Weight of each key, then of each extra one, for each query, then for each extra one.

    (batch, heads, queries + extra queries, keys + extra) float64.

    Values of 1 for one key, and 0 for the others, make its weight the output. Options as in `attention`.
    """
    batch, keys, kv_heads, _ = k.shape
    extra = 0 if extra_k is None else extra_k.shape[1]
    each = torch.eye(keys + extra, dtype=torch.float64, device=k.device)
    v, extra_v = each[:, None].expand(batch, -1, kv_heads, -1).split((keys, extra), 1)
    extra_options = {} if extra_k is None else {"extra_k": extra_k, "extra_v": extra_v}
    if extra_q is None:
        return attention(q, k, v, pattern, **extra_options, **options)[0].transpose(1, 2)
    out, _, extra_out, _ = joint_attention(q, k, v, extra_q, pattern, **extra_options, **options)
    return torch.cat([out, extra_out], 1).transpose(1, 2)


def attending(pattern, **options) -> Callable:
    """`attention` with this pattern, as a function of q, k, v, then extra_k and extra_v, if any, and a bias, if any."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        return attention(q, k, v, pattern, **named(rest), **options)

    return attend


def named(rest: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """The tensors with gradients besides q, k and v by their names: extra keys, if any, and then a bias, if any."""
    names = ("extra_k", "extra_v", "bias") if len(rest) > 1 else ("bias",)
    return dict(zip(names, rest, strict=False))


def joined(parts: list[Tensor], dim: int) -> Tensor:
    """The parts along a dimension; one alone is not copied."""
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]


def for_heads(x: Tensor, group: int, dim: int) -> Tensor:
    """What is each KV head's, for each query head."""
    return x.repeat_interleave(group, dim) if group > 1 else x


def softmax_over(
    q: Tensor, k: Tensor, v: Tensor, times: Tensor, scale: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """out and lse of queries that see each key so many times: (batch, heads, queries, keys).

    bias: (heads, queries, keys), added to the scaled scores.
    """
    sees = times > 0
    is_empty = ~sees.any(-1, keepdim=True)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    scores = scores if bias is None else scores + bias
    if times.numel() and times.max() > 1:  # a key seen twice weighs twice
        scores = scores + times.clamp(min=1).log()
    scores = scores.masked_fill(~(sees | is_empty), -torch.inf)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v) * ~is_empty.transpose(1, 2)
    return out, scores.logsumexp(-1).masked_fill(is_empty[..., 0], -torch.inf)


# Points.


def points_seen(points) -> Tensor:
    """Whether each point sees each key, step by step through its window: (queries, keys) bool."""
    cells, keys = points.coordinates.long(), points.key_coordinates
    clouds, key_clouds = points.batch, points.batch if keys is None else points.key_batch
    keys = cells if keys is None else keys.long()
    seen = torch.ones(len(cells), len(keys), dtype=torch.bool, device=cells.device)
    if clouds is not None:
        seen &= clouds[:, None] == key_clouds
    for axis, (window, dilation) in enumerate(zip(points.window, points.dilation, strict=True)):
        on_axis = torch.zeros_like(seen)
        for step in range(-(window // 2), window - window // 2):
            on_axis |= keys[:, axis] == cells[:, axis, None] + step * dilation
        seen &= on_axis
    return seen


# Dilated patterns along a sequence.


def offset_of(rule: str, branch: int, rate: int, kv_head: int, kv_heads: int) -> int:
    """The residue of a head, written from the table of the semantics."""
    blocks = (kv_heads + rate - 1) // rate
    return {"head": kv_head % rate, "head_block": kv_head // blocks, "branch": branch % rate, "zero": 0}[rule]


def uses(mixing: str, branch: int, branches: int, kv_head: int, kv_heads: int) -> bool:
    """Whether a head uses a branch."""
    if mixing == "softmax":
        return True
    groups = torch.tensor_split(torch.arange(kv_heads), branches)
    return kv_head in groups[branch].tolist()


def branches_of(pattern, query: int, kv_head: int, kv_heads: int) -> Iterator[tuple[int, int, int, int]]:
    """Of every branch that a query is in: where its segment starts, segment length, rate and offset."""
    for i, (w, r) in enumerate(zip(pattern.segment_lengths, pattern.dilation_rates, strict=True)):
        o = offset_of(pattern.offsets, i, r, kv_head, kv_heads)
        if uses(pattern.mixing, i, len(pattern.segment_lengths), kv_head, kv_heads) and query % w % r == o:
            yield query - query % w, w, r, o


def keys_of(pattern, query: int, length: int, kv_head: int, kv_heads: int, is_causal: bool) -> list[range]:
    """The positions of the keys that a query sees, of every branch that it is in."""
    last = query + 1 if is_causal else length
    return [
        range(start + o, min(start + w, length, last), r)
        for start, w, r, o in branches_of(pattern, query, kv_head, kv_heads)
    ]


def zero_keys_of(pattern, query: int, length: int, kv_head: int, kv_heads: int, is_causal: bool) -> int:
    """How many keys of zeros a query sees: rows of its segments, filled up to whole ones, at no position of theirs."""
    found = 0
    for start, w, r, o in branches_of(pattern, query, kv_head, kv_heads):
        size = min(w, length)
        filled = size if size % r == 0 else size + r - size % r
        rows = [j for j in range(o, filled, r) if not (is_causal and start + j > query)]
        found += sum(not (j < size and start + j < length) for j in rows)
    return found


# Neighbourhoods on a grid.


def shape_of(pattern) -> tuple[int, ...]:
    """The sides of the grid that a pattern is on."""
    first = pattern[0] if isinstance(pattern, tuple) else pattern
    return first.shape


def cells_of_box(query_box: tuple, shape: tuple[int, ...]) -> list[int]:
    """The position of each cell of a box, row by row: the last axis runs fastest."""
    cells = []
    for cell in product(*(range(start, stop) for start, stop in query_box)):
        position = 0
        for x, side in zip(cell, shape, strict=True):
            position = position * side + x
        cells.append(position)
    return cells


def seen_along(cells: int, window: int, dilation: int, stride: int, is_causal: bool, edge: str) -> list[set[int]]:
    """Of each cell of an axis the cells that it sees, one by one."""
    seen = []
    for x in range(cells):
        line = list(range(x % dilation, cells, dilation))
        i, m = line.index(x), len(line)
        group = i - i % stride
        if is_causal:
            leader = min(group + stride - 1, m - 1)
            ranks = [j for j in range(leader - window + 1, leader + 1) if 0 <= j <= i]
        else:
            begin = min(group + stride // 2, m - 1) - window // 2
            held = window
            if edge == "shift":
                held = min(window, m)
                while begin < 0:
                    begin += 1
                while begin + held > m:
                    begin -= 1
            ranks = range(begin, begin + held)
            ranks = [j % m for j in ranks] if edge == "wrap" else [j for j in ranks if 0 <= j < m]
        seen.append({line[j] for j in ranks})
    return seen


def places_along(
    cells: int, window: int, dilation: int, stride: int, is_causal: bool, edge: str, sides: int
) -> list[dict[int, int]]:
    """For each cell of an axis: the cells that it sees, each with its entry in a table of this many entries."""
    centre, places = sides // 2, []
    for x in range(cells):
        line = list(range(x % dilation, cells, dilation))
        i, m = line.index(x), len(line)
        group = i - i % stride
        if is_causal:
            begin = max(min(group + stride - 1, m - 1) - window + 1, 0)
        else:
            begin = min(group + stride // 2, m - 1) - window // 2
            if edge == "shift":
                begin = max(min(begin, m - window), 0)
        of_cell = {}
        for place in range(window):
            j = begin + place
            entry = j - i + centre
            if edge == "wrap":
                j %= m
            if 0 <= j < m and not (is_causal and j > i):
                of_cell[line[j]] = entry
        places.append(of_cell)
    return places


@cache
def entries_of(near, sides: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """All pairs of a cell of a grid and one that it sees, cell by cell: their positions, row by row, and their entries.

    The entries, one along each axis, are those of a table with these sides: (pairs, axes).
    """
    rules = zip(near.shape, near.window, near.dilation, near.stride, near.is_causal, near.edge, sides, strict=True)
    lines = [places_along(*axis) for axis in rules]
    cells, keys, entries = [], [], []
    for number, cell in enumerate(product(*map(range, near.shape))):
        for seen in product(*(line[x].items() for line, x in zip(lines, cell, strict=True))):
            position = 0
            for (key, _), side in zip(seen, near.shape, strict=True):
                position = position * side + key
            cells.append(number)
            keys.append(position)
            entries.append([entry for _, entry in seen])
    return torch.tensor(cells), torch.tensor(keys), torch.tensor(entries)


def bias_of(pattern, bias: Tensor, cells, group: int) -> Tensor:
    """What a table of bias (heads, entries along each axis) adds to scores: (heads, queries, keys).

    cells: those of the queries. group: query heads of a KV head.
    """
    heads, sides = len(bias), tuple(bias.shape[1:])
    by_head = getattr(pattern, "by_head", pattern)
    by_head = by_head if isinstance(by_head, tuple) else (by_head,) * (heads // group)
    length = reduce(lambda cells, side: cells * side, shape_of(by_head))
    row_of = torch.full((length,), -1)
    row_of[list(cells)] = torch.arange(len(cells))
    added = []
    for head in range(heads):
        pairs = entries_of(by_head[head // group], sides)
        is_asked = row_of[pairs[0]] >= 0
        seen_by, keys, entries = (x[is_asked].to(bias.device) for x in pairs)
        values = bias[head][tuple(entries.T)]
        places = row_of.to(bias.device)[seen_by], keys
        added.append(bias.new_zeros(len(cells), length).index_put(places, values))
    return torch.stack(added)


@cache
def mask_of(near) -> Tensor:
    """Who sees whom in a neighbourhood: (queries, keys) bool, row by row."""
    rules = zip(near.shape, near.window, near.dilation, near.stride, near.is_causal, near.edge, strict=True)
    axes = [torch.tensor([[key in seen for key in range(axis[0])] for seen in seen_along(*axis)]) for axis in rules]
    return reduce(torch.kron, axes)  # whoever sees along every axis; the last one's cells follow each other
