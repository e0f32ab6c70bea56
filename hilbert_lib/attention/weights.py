"""The weights of some queries, and the keys that they belong to. No matrix of all pairs is made."""

from bisect import bisect
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hilbert_lib.attention.api import UNSERVED, QueryBox
from hilbert_lib.attention.documents import rows_of
from hilbert_lib.attention.request import WORKING_DTYPE, Request, Tensors
from hilbert_lib.attention.starts import begins_of, query_positions
from hilbert_lib.attention.transforms import refuse_vmap, uncompiled
from hilbert_lib.attention.validation import as_cast, validated
from hilbert_lib.attention.zero_keys import log_zero_keys
from hilbert_lib.checks import dense_tensor, integers, suggesting, unscripted
from hilbert_lib.internals import untraced
from hilbert_lib.ordering import Ordering
from hilbert_lib.patterns.neighbourhood import Neighbourhood
from hilbert_lib.patterns.pattern import Pattern
from hilbert_lib.patterns.points import with_lists

KEYS_AT_ONCE = 2**20  # rows of k that are gathered, of all batches; of one query there may be more
NO_KEY = -1
LAST = torch.iinfo(torch.int64).max


class _Place(NamedTuple):
    """The position of a query in its sequence, and the rows of k that hold this sequence."""

    position: int  # below 0 for a query that lies at no row of its sequence, and of an extra query
    rows: range
    is_extra: bool = False  # whether it is an extra query, which sees all of these rows


class _Keys(NamedTuple):
    """The keys that each query sees by the pattern, each once, then the extra keys.

    Both are (sequences, kv_heads, queries, most) int64, of each sequence of the batch, or of one for all.
    """

    keys: Tensor  # rows of k, ascending; NO_KEY at the end of those of a short row
    times: Tensor  # the number of parts through which each is seen; 0 for NO_KEY


@untraced
@unscripted
@partial(suggesting, unserved=UNSERVED)
def attention_weights(
    q: Tensor,
    k: Tensor,
    pattern: Pattern | tuple[Neighbourhood, ...],
    queries: Tensor | Sequence[int],
    *,
    is_causal: bool = False,
    scale: float | None = None,
    key_padding_mask: Tensor | None = None,
    query_start: int | Tensor | None = None,
    key_start: Tensor | None = None,
    kv_ordering: Ordering | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    ordering: Ordering | None = None,
    query_box: QueryBox | None = None,
    extra_q: Tensor | None = None,
    extra_k: Tensor | None = None,
    extra_padding_mask: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The keys that some queries see in `attend`, and the weight of each: heat maps without a matrix of all pairs.

    The sum of weights times the rows of v that `keys` names is `attend`'s output. Differentiable in q, k, extra_q,
    extra_k and bias by autograd, which keeps the rows of k that were gathered.

    Memory grows with batch * heads * queries * most, the elements of the results. At once 2^20 rows of k are gathered,
    or those of one query of each sequence if they are more. Time grows likewise. A pattern of one's own is asked for a
    mask of each query and all keys. The host waits for the values of `queries`, `query_start` and `key_start`:
    torch.compile breaks its graph here, and torch.export is refused.

    Args:
        q, k: as in `attend`.
        pattern: as in `attend`.
        queries: (n,) integers, the rows of q to look at, in any order. Numbers from q's rows on are the extra
            queries. These see every cell, and all results of a call are as long as the longest: look at extra queries
            in a call of their own.
        is_causal, scale, key_padding_mask, query_start, key_start, kv_ordering, cu_seqlens, max_seqlen, ordering,
            query_box, extra_q, extra_k, extra_padding_mask, bias: as in `attend`, each for the patterns that take it
            there.

    Returns:
        keys: (batch, heads, n, most) int64, the rows of k as it is stored, ascending. `most` is the largest number of
            keys, extra ones too, that the pattern gives one of these queries. A query with fewer has -1 in the places
            left over. Extra key e is k's number of rows + e. A masked key is not listed.
        weights: (batch, heads, n, most) float32 (float64 for float64), 0 where keys are -1. A key of two branches is
            listed once, with the sum of both weights. The weights of a query sum to 1, or to 0 without keys. With
            `padding="zeros"` keys of zeros take a share and are not listed.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is allowed.

    >>> from hilbert_lib import DilatedPattern
    >>> q = k = torch.ones(1, 8, 1, 4)
    >>> keys, weights = attention_weights(q, k, DilatedPattern((2, 8), (1, 4)), [0, 5])
    >>> keys.tolist(), weights.tolist()
    ([[[[0, 1, 4], [4, 5, -1]]]], [[[[0.5, 0.25, 0.25], [0.5, 0.5, 0.0]]]])
    """
    if torch.compiler.is_compiling():
        raise TypeError("attention_weights is not exported by torch.export: it reads the values of queries")
    options = {
        "is_causal": is_causal,
        "scale": scale,
        "key_padding_mask": key_padding_mask,
        "query_start": query_start,
        "key_start": key_start,
        "cu_seqlens": cu_seqlens,
        "max_seqlen": max_seqlen,
        "ordering": ordering,
        "query_box": query_box,
        "extra_q": extra_q,
        "extra_k": extra_k,
        "extra_v": extra_k,
        "extra_padding_mask": extra_padding_mask,
        "bias": bias,
    }
    return uncompiled(_weights)(q, k, pattern, queries, kv_ordering, options)


def _weights(
    q: Tensor, k: Tensor, pattern: object, queries: object, kv_ordering: Ordering | None, options: dict
) -> tuple[Tensor, Tensor]:
    # k stands in for v.
    inputs, request = validated(q, k, k, pattern, kv_ordering=kv_ordering, **options)
    extra_q = None if options["extra_q"] is None else as_cast(options["extra_q"])
    rows = _checked_queries(queries, inputs.q.shape[1], 0 if extra_q is None else extra_q.shape[1])
    places = _places(rows, inputs, request)
    table = _keys_seen(places, inputs, request, request.ordering if kv_ordering is None else kv_ordering)
    is_hidden = _hidden(table, places, inputs, request, kv_ordering)
    scores = _scores(_picked(inputs.q, extra_q, rows), table, inputs, request)
    if inputs.bias is not None:
        scores = scores + _bias(table, places, inputs, request)
    scores = scores + table.times[:, :, None].to(WORKING_DTYPE[inputs.q.dtype]).log()
    scores = scores.masked_fill(is_hidden[:, :, None], -torch.inf)
    zero_keys = _log_zero_keys(places, request, scores)
    weights = torch.cat([scores, zero_keys], -1).softmax(-1)[..., :-1].flatten(1, 2)
    keys = torch.where(is_hidden, NO_KEY, table.keys).repeat_interleave(scores.shape[2], 1)
    # Hidden keys go to the end of their row.
    order = keys.where(keys != NO_KEY, LAST).argsort(-1)
    return keys.gather(-1, order), weights.gather(-1, order)


def _checked_queries(queries: object, rows: int, extra_rows: int) -> list[int]:
    if isinstance(queries, Tensor):
        dense_tensor("queries", queries)
        refuse_vmap("attention_weights", queries)
        if queries.dim() != 1 or queries.dtype == torch.bool or queries.is_floating_point() or queries.is_complex():
            got = f"{queries.dtype} of shape {tuple(queries.shape)}"
            raise TypeError(f"queries must be rows of q, (n,) integers; got {got}")
        queries = queries.tolist()
    checked = integers("queries", queries, least=0, empty=True)
    for n, row in enumerate(checked):
        if row >= rows + extra_rows:
            last = rows + extra_rows - 1
            extra = f", or of extra_q, {rows} to {last}" if extra_rows else ""
            raise ValueError(f"queries[{n}] must be a row of q, 0 to {rows - 1}{extra}; got {row}")
    return list(checked)


def _places(rows: list[int], inputs: Tensors, request: Request) -> list[list[_Place]]:
    # Of each sequence of the batch, or of one for all.
    if not len(inputs.k):  # no sequence, of which none begins anywhere
        request = replace(request, query_starts=None, key_start=None)
    queries, keys = inputs.q.shape[1], inputs.k.shape[1]
    is_extra = [row >= queries for row in rows]
    row = torch.tensor([0 if extra else row for extra, row in zip(is_extra, rows, strict=True)], dtype=torch.int64)
    row = row.to(inputs.k.device)
    if request.cu_seqlens is not None:
        documents = rows_of(request.cu_seqlens, keys, request.max_seqlen)
        starts = [document.start for document in documents]
        places = []
        for number in rows:
            document = documents[bisect(starts, number) - 1]
            places.append(_Place(number - document.start, range(document.start, document.stop)))
        return [places]
    if request.ordering is not None:
        position = request.ordering.to(row.device).perm[row][None]
    elif request.part is not None:
        position = _cells_of_box(row, request.part.rows, request.pattern.shape)[None]
    else:
        position = query_positions(request, row[None], keys)
    begins = [0] if request.key_start is None else begins_of(request, keys)[:, 0].tolist()
    if len(begins) < len(position):
        begins = begins * len(position)
    places = []
    for positions, begin in zip(position.expand(len(begins), -1).tolist(), begins, strict=True):
        own_rows, pairs = range(begin, keys), zip(positions, is_extra, strict=True)
        places.append([_Place(-1 if extra else n, own_rows, extra) for n, extra in pairs])
    return places


def _picked(q: Tensor, extra_q: Tensor | None, rows: list[int]) -> Tensor:
    # Some queries, (batch, n, heads, head_dim): rows of q, then of extra_q.
    queries = q.shape[1]
    if extra_q is None or not any(row >= queries for row in rows):
        return q[:, rows]
    order = sorted(range(len(rows)), key=lambda n: rows[n] >= queries)
    picked = q[:, [row for row in rows if row < queries]], extra_q[:, [row - queries for row in rows if row >= queries]]
    return torch.cat(picked, 1)[:, [order.index(n) for n in range(len(rows))]]


def _cells_of_box(row: Tensor, box: tuple[range, ...], shape: tuple[int, ...]) -> Tensor:
    # The position on the grid of some rows of a box of cells.
    cells, lines = torch.zeros_like(row), torch.unravel_index(row, tuple(span.stop - span.start for span in box))
    for side, span, line in zip(shape, box, lines, strict=True):
        cells = cells * side + span.start + line
    return cells


def _keys_seen(places: list[list[_Place]], inputs: Tensors, request: Request, stored: Ordering | None) -> _Keys:
    # stored: the ordering of k. Tables are made on the CPU, where patterns know their keys.
    cells, kv_heads = inputs.k.shape[1:3]
    pattern = with_lists(request.pattern, request.lists, inputs.q.shape[1], cells)
    slots = None if stored is None else stored.to("cpu").inverse
    extra_keys = torch.arange(cells, cells + _extra(inputs), device="cpu")
    keys_by_row, times_by_row = [], []
    for sequence, kv_head in product(places, range(kv_heads)):
        parts = pattern.head_parts(kv_head, kv_heads)
        options = {"kv_head": kv_head, "kv_heads": kv_heads, "is_causal": request.is_causal}
        for position, rows, is_extra in sequence:
            positions = [torch.empty(0, dtype=torch.int64, device="cpu")]
            if is_extra:
                positions = [torch.arange(rows.start, rows.stop, device="cpu")]
            elif position >= 0:
                positions += [pattern.part_keys(part, position, len(rows), **options) + rows.start for part in parts]
            positions = torch.cat(positions)
            keys, times = (positions if slots is None else slots[positions]).unique(return_counts=True)
            keys_by_row.append(keys)
            times_by_row.append(times)
    sizes, tables = (len(places), kv_heads, len(places[0])), []
    for rows, end, extra in ((keys_by_row, NO_KEY, extra_keys), (times_by_row, 0, torch.ones_like(extra_keys))):
        table = pad_sequence(rows, batch_first=True, padding_value=end) if rows else extra.new_empty(0, 0)
        table = torch.cat([table, extra.expand(len(table), -1)], 1)
        tables.append(table.view(*sizes, table.shape[1]).to(inputs.k.device))
    return _Keys(*tables)


def _extra(inputs: Tensors) -> int:
    return 0 if inputs.extra_k is None else inputs.extra_k.shape[1]


def _hidden(
    table: _Keys, places: list[list[_Place]], inputs: Tensors, request: Request, kv_ordering: Ordering | None
) -> Tensor:
    # Whether no key stands in a place of the table, or it is hidden: (batch, kv_heads, queries, most) bool.
    batch, cells, extra = len(inputs.k), inputs.k.shape[1], _extra(inputs)
    keys, extra_keys = table.keys.split((table.keys.shape[-1] - extra, extra), -1)
    keys = keys.clamp(min=0)
    if kv_ordering is not None:  # the mask lies in sequence order
        keys = kv_ordering.to(keys.device).perm[keys]
    is_nowhere = [[place.position < 0 and not place.is_extra for place in sequence] for sequence in places]
    is_nowhere = torch.tensor(is_nowhere, dtype=torch.bool, device=keys.device)
    is_hidden = (table.keys == NO_KEY) | is_nowhere[:, None, :, None]
    sequence = torch.arange(batch, device=keys.device)[:, None, None, None]
    is_masked = []
    for mask, columns in ((request.key_padding_mask, keys), (request.extra_padding_mask, extra_keys - cells)):
        no_mask = columns.new_zeros((), dtype=torch.bool).expand(batch, *columns.shape[1:])
        is_masked.append(no_mask if mask is None else mask[sequence, columns])
    return torch.cat(is_masked, -1) | is_hidden


def _scores(q: Tensor, table: _Keys, inputs: Tensors, request: Request) -> Tensor:
    # Of some queries: (batch, kv_heads, group, queries, most).
    dtype, (batch, _, kv_heads, _) = WORKING_DTYPE[inputs.k.dtype], inputs.k.shape
    keys = table.keys[..., : table.keys.shape[-1] - _extra(inputs)].clamp(min=0)
    q = q.to(dtype).unflatten(2, (kv_heads, -1))  # (batch, queries, kv_heads, group, head_dim)
    at_once = max(1, KEYS_AT_ONCE // max(1, batch * keys.shape[-1]))
    sequence, scores_by_head = torch.arange(batch, device=keys.device)[:, None, None], []
    for kv_head in range(kv_heads):
        head_q, k, chunks = q[:, :, kv_head], inputs.k[:, :, kv_head], []
        for chunk_q, chunk_keys in zip(head_q.split(at_once, 1), keys[:, kv_head].split(at_once, 1), strict=True):
            chunk_k = k[sequence, chunk_keys].to(dtype)  # (batch, queries, most, head_dim)
            chunks.append(torch.einsum("bqgd,bqnd->bgqn", chunk_q, chunk_k))
        scores = torch.cat(chunks, 2)
        if _extra(inputs):
            extra_k = inputs.extra_k[:, :, kv_head].to(dtype)
            scores = torch.cat([scores, torch.einsum("bqgd,bnd->bgqn", head_q, extra_k)], -1)
        scores_by_head.append(scores)
    return torch.stack(scores_by_head, 1) * request.scale


def _bias(table: _Keys, places: list[list[_Place]], inputs: Tensors, request: Request) -> Tensor:
    # What is added to the score of each key: (sequences, kv_heads, group, queries, most).
    keys, extra, kv_heads = table.keys, _extra(inputs), inputs.k.shape[2]
    numbers = [[(place.position, place.rows.start) for place in sequence] for sequence in places]
    numbers = torch.tensor(numbers, dtype=torch.int64, device=keys.device)  # without queries it would be of floats
    positions, begins = numbers.view(len(places), len(places[0]), 2).unbind(-1)
    keys = keys[..., : keys.shape[-1] - extra].clamp(min=0)
    cells = keys if request.ordering is None else request.ordering.to(keys.device).perm[keys]
    cells = (cells - begins[:, None, :, None]).clamp(min=0)
    tables, by_head = inputs.bias.to(WORKING_DTYPE[inputs.q.dtype]).flatten(1).unflatten(0, (kv_heads, -1)), []
    for kv_head, entries_of in enumerate(tables):
        pairs = positions.clamp(min=0)[..., None], cells[:, kv_head]
        entries = request.pattern.bias_entries(*pairs, kv_head=kv_head)  # (sequences, queries, most)
        by_head.append(entries_of[:, entries].transpose(0, 1))
    bias = torch.nn.functional.pad(torch.stack(by_head, 1), (0, extra))
    is_extra = torch.tensor([place.is_extra for place in places[0]], dtype=torch.bool, device=keys.device)
    return bias.masked_fill(is_extra[:, None], 0.0)


def _log_zero_keys(places: list[list[_Place]], request: Request, scores: Tensor) -> Tensor:
    # (batch, kv_heads, group, queries, 1): the score of all zero keys of a query together. A query without any key is
    # given one, so that its softmax has a value: its other weights are 0.
    no_key = scores == -torch.inf
    log_counts = scores.new_full((), -torch.inf)
    if getattr(request.pattern, "padding", "none") == "zeros" and not request.is_causal:
        numbers = [[(place.position, len(place.rows)) for place in sequence] for sequence in places]
        numbers = torch.tensor(numbers, dtype=torch.int64, device=scores.device)
        position, length = numbers.view(len(places), len(places[0]), 2).unbind(-1)
        # Position 0, which sees none, stands for what lies at no row of its sequence.
        log_counts = log_zero_keys(request.pattern, position.clamp(min=0), length, scores.shape[1], scores.dtype)
        log_counts = log_counts[..., None]
    log_counts = log_counts.expand(*scores.shape[:-1], 1)
    return log_counts.masked_fill(no_key.all(-1, keepdim=True) & (log_counts == -torch.inf), 0.0)
