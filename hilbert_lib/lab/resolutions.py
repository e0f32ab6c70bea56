"""Ways to full attention with fewer keys, and what they are off: windows, chosen blocks, means of all other tokens."""

import json
from collections.abc import Iterator, Sequence
from math import isqrt, prod

import pandas as pd
import torch
from torch import Tensor

from hilbert_lib.attention.api import neighbourhood_attention
from hilbert_lib.attention.two_resolutions import two_resolution_attention
from hilbert_lib.lab.models import PictureModel
from hilbert_lib.lab.pairs import relative_difference
from hilbert_lib.lab.records import Kept
from hilbert_lib.patterns.neighbourhood import Neighbourhood

NEAR, CHOSEN = "near tokens and means", "chosen blocks and means"
NEAR_ALONE, CHOSEN_ALONE = "near tokens alone", "chosen blocks alone"
KIND = "approximation"
WAYS = (NEAR, CHOSEN, NEAR_ALONE, CHOSEN_ALONE)


def first_inputs(model: PictureModel, pictures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of a model's first block for pictures (batch, rows, columns): (batch, cells, heads, head_dim)."""
    attention = model.blocks[0].attention
    with torch.no_grad():
        tokens = model.blocks[0].attention_norm(model.embedding(pictures[..., None]))
        q, k, v = attention.project(tokens.flatten(1, 2))
        q, k = attention.prepare(q, k, tuple(pictures.shape[1:]))
    return q, k, v


def cell_of_tokens(shape: tuple[int, ...], cell: int) -> Tensor:
    """The coarse cell of each token of a grid, (seq,) int64. `cell` divides all sides.

    >>> cell_of_tokens((2, 4), 2).tolist()
    [0, 0, 1, 1, 0, 0, 1, 1]
    """
    places = torch.stack(torch.unravel_index(torch.arange(prod(shape)), shape)) // cell
    number = torch.zeros(prod(shape), dtype=torch.int64)
    for place, side in zip(places, shape, strict=True):
        number = number * (side // cell) + place
    return number


def over_chosen(q: Tensor, k: Tensor, v: Tensor, cells: Tensor, chosen: Tensor, *, means: bool) -> Tensor:
    """Attention over the tokens of chosen coarse cells, with means also over the mean of each other cell.

    q, k, v: (batch, seq, heads, head_dim). cells: (seq,), the coarse cell of each token, all of one size. chosen:
    (batch, heads, cells, cells) bool, of queries and keys. A mean counts as often as its cell has tokens. Every pair is
    computed: for small grids.
    """
    size = len(cells) // chosen.shape[-1]
    chosen = chosen[:, :, cells]  # (batch, heads, seq, cells)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = (q @ k.transpose(2, 3) * q.shape[-1] ** -0.5).masked_fill(~chosen[..., cells], -torch.inf)
    if means:
        mean_k, mean_v = (pooled(x, cells) for x in (k, v))
        of_means = q @ mean_k.transpose(2, 3) * q.shape[-1] ** -0.5 + torch.tensor(float(size)).log()
        scores = torch.cat([scores, of_means.masked_fill(chosen, -torch.inf)], dim=-1)
        v = torch.cat([v, mean_v], dim=2)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def pooled(x: Tensor, cells: Tensor) -> Tensor:
    """The mean of each coarse cell: (batch, heads, seq, head_dim) to (batch, heads, cells, head_dim).

    >>> pooled(torch.arange(4.0).view(1, 1, 4, 1), torch.tensor([0, 1, 0, 1])).flatten().tolist()
    [1.0, 2.0]
    """
    count = int(cells.max()) + 1
    sums = x.new_zeros(*x.shape[:2], count, x.shape[3]).index_add_(2, cells, x)
    return sums * count / len(cells)


def chosen_by_means(q: Tensor, k: Tensor, cells: Tensor, count: int) -> Tensor:
    """The key cells with the largest scores of mean q and mean k, so many for each query cell: (batch, heads, cells,
    cells) bool, as block selection for sparse attention takes them.
    """
    mean_q, mean_k = (pooled(x.transpose(1, 2), cells) for x in (q, k))
    scores = mean_q @ mean_k.transpose(2, 3)
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(3, scores.topk(count, dim=3).indices, True)


def approximations(
    q: Tensor, k: Tensor, v: Tensor, shape: tuple[int, int], cell: int, nears: Sequence[int]
) -> Iterator[tuple[str, int, int, Tensor]]:
    """Each of `WAYS` at each width of the near part: its name, the width, keys of a query, and output.

    Keys are as many in all ways, those of `NEAR`: near^2 coarse cells token by token and a mean of each other cell.
    Ways without means see as many tokens, rounded down to a square window or to whole blocks.
    """
    cells = cell_of_tokens(shape, cell).to(q.device)
    count = int(cells.max()) + 1
    for near in nears:
        keys = near**2 * cell**2 + count - near**2
        yield NEAR, near, keys, two_resolution_attention(q, k, v, shape, cell=cell, near=near)
        chosen = chosen_by_means(q, k, cells, near**2)
        yield CHOSEN, near, keys, over_chosen(q, k, v, cells, chosen, means=True)
        yield NEAR_ALONE, near, keys, neighbourhood_attention(q, k, v, Neighbourhood(shape, isqrt(keys)))
        chosen = chosen_by_means(q, k, cells, max(1, keys // cell**2))
        yield CHOSEN_ALONE, near, keys, over_chosen(q, k, v, cells, chosen, means=False)


def run_approximations(
    model: PictureModel, pictures: Tensor, *, cell: int, nears: Sequence[int], output_dir: str = ""
) -> list[dict]:
    """Errors of each way against full attention on a model's q, k and v of pictures (batch, rows, columns).

    A record for each way and width of the near part: name, parameters (near, cell, side and keys of a query), errors:
    |out - full| / |full| of each picture; kept in a folder's results.jsonl, and not once more if it is there already.
    """
    kept = Kept(output_dir, _key)
    shape = tuple(pictures.shape[1:])
    q, k, v = first_inputs(model, pictures)
    full = neighbourhood_attention(q, k, v, Neighbourhood(shape, shape))
    records = []
    for way, near, keys, out in approximations(q, k, v, shape, cell, nears):
        errors = [relative_difference([one], [exact]) for one, exact in zip(out, full, strict=True)]
        parameters = {"sweep": KIND, "near": near, "cell": cell, "side": shape[0], "keys": keys}
        record = {"kind": KIND, "name": way, "parameters": parameters, "errors": errors}
        records.append(kept.known.get(_key(record)) or kept.add(record))
    return records


def error_table(records: list[dict]) -> pd.DataFrame:
    """The records of `run_approximations`: way, near, keys, and error with low and high, the ends over pictures.

    ValueError where there is none.
    """
    rows = []
    for record in records:
        if record.get("kind") == KIND:
            errors, about = record["errors"], record["parameters"]
            ends = (sum(errors) / len(errors), min(errors), max(errors))
            rows.append((record["name"], about["near"], about["keys"], *ends))
    if not rows:
        raise ValueError(f"records must hold one of kind {KIND!r}, got none")
    return pd.DataFrame(rows, columns=["way", "near", "keys", "error", "low", "high"])


def _key(record: dict) -> str | None:
    return json.dumps([record["name"], record["parameters"]], sort_keys=True) if record.get("kind") == KIND else None
