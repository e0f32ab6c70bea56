"""Beginnings of unequal sequences: the row of k at which each sequence begins, and the one at which q begins.

row of k      0  1  2  3  4  5  6  7
sequence 0    .  .  .  a  b  c  d  e    key_start[0] = 3: rows before it are padding, and a is position 0
q, 2 rows              b  c             query_start[0] = 4: positions 1 and 2
"""

import torch
from torch import Tensor

from hilbert_lib.attention.request import Request
from hilbert_lib.checks import integer, rows_of_keys

DTYPES = (torch.int32, torch.int64)
STARTS = ("query_starts", "key_start")  # the fields of a request that hold them


def check_starts(q: Tensor, k: Tensor, query_start: object, key_start: object) -> tuple[int | None, Tensor | None]:
    """query_start as a number and as a tensor, one of which is None; raises unless both starts fit q and k.

    Values on the device are not read. `positions_of` serves any value.
    """
    queries, keys = q.shape[1], k.shape[1]
    if key_start is not None:
        _check_tensor("key_start", key_start, k, "a (batch,) tensor of int32 or int64, or None")
    if query_start is None:
        if queries != keys:
            raise ValueError(f"k must have the length of q ({queries}) unless query_start is given, got {keys}")
        return None, None
    if queries > keys:
        raise ValueError(f"q must have no more rows than k ({keys}) where query_start is given, got {queries}")
    if isinstance(query_start, Tensor):
        _check_tensor("query_start", query_start, k, "an integer, or a (batch,) tensor of int32 or int64")
        return None, query_start
    try:
        start = integer("query_start", query_start, least=0, most=keys - queries)
    except TypeError:
        allowed = f"an integer from 0 to {keys - queries}, or a (batch,) tensor of int32 or int64"
        raise TypeError(f"query_start must be {allowed}; got {query_start!r}") from None
    # A start of 0 with all rows is the call without one, which every backend serves.
    return None if start == 0 and queries == keys else start, None


def _check_tensor(name: str, start: object, k: Tensor, allowed: str) -> None:
    if not isinstance(start, Tensor) or start.dtype not in DTYPES:
        got = start.dtype if isinstance(start, Tensor) else repr(start)
        raise TypeError(f"{name} must be {allowed}; got {got}")
    rows_of_keys(name, start, "batch", k)


def has_starts(request: Request) -> bool:
    """Whether the sequences of a batch begin at rows that only the device knows."""
    return request.query_starts is not None or request.key_start is not None


def positions_of(request: Request, queries: int, keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The position of each row of q and of k in its sequence: (batch, rows) int64, or (1, rows) where all are alike.

    It is below 0 for a row of q that lies at no row of its sequence, and for a row of k before that.

    >>> request = Request(None, query_start=2, key_start=torch.tensor([0, 3]))
    >>> positions_of(request, 2, 5, torch.device("cpu"))
    (tensor([[ 2,  3],
            [-1,  0]]), tensor([[ 0,  1,  2,  3,  4],
            [-3, -2, -1,  0,  1]]))
    """
    row, key = torch.arange(queries, device=device)[None], torch.arange(keys, device=device)[None]
    return query_positions(request, row, keys), key - begins_of(request, keys)


def query_positions(request: Request, row: Tensor, keys: int) -> Tensor:
    """The position of some rows of q (1, rows), as `positions_of` has that of all."""
    first = request.first_query if request.query_starts is None else request.query_starts[:, None]
    row = row + first
    return (row - begins_of(request, keys)).where(row < keys, -1) if has_starts(request) else row


def lengths_of(request: Request, keys: int) -> Tensor | None:
    """The number of rows of k from the beginning of each sequence on: (batch,) int64; None for all rows."""
    return None if request.key_start is None else keys - begins_of(request, keys)[:, 0]


def begins_of(request: Request, keys: int) -> Tensor | int:
    """The row of k at which each sequence begins, within k: (batch, 1) int64, or 0 for all."""
    return 0 if request.key_start is None else request.key_start.long().clamp(0, keys)[:, None]


def padding_with_starts(request: Request, k: Tensor) -> Tensor | None:
    """The request's key_padding_mask, which also hides the rows of k before each sequence."""
    padding, keys = request.key_padding_mask, k.shape[1]
    if request.key_start is None:
        return padding
    before = torch.arange(keys, device=k.device) < begins_of(request, keys)
    return before if padding is None else before | padding
