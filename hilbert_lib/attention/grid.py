"""Neighbourhood attention on a grid by FlexAttention, with the tokens stored in any order, and what it should give."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from hilbert_lib.attention.api import check_tensors
from hilbert_lib.attention.backends.flex import FLEX_BLOCK
from hilbert_lib.attention.backends.flex_compiled import compiled_flex_attention
from hilbert_lib.checks import integer
from hilbert_lib.graph_cache import cached_for_graphs
from hilbert_lib.grid import Neighbourhood, mask_blocks
from hilbert_lib.ordering import Ordering


def neighbourhood_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    neighbourhood: Neighbourhood,
    *,
    ordering: Ordering,
    block_size: int = FLEX_BLOCK,
) -> Tensor:
    """Softmax attention of each cell over its neighbourhood, with scores times head_dim ** -0.5.

    Tokens are stored in an ordering, in and out: a layout, which changes values by rounding alone. Compiled and
    differentiable on CUDA; on the CPU it runs in eager mode, with memory for length squared and without a gradient.

    Args:
        q, k, v: (batch, seq, heads, head_dim), stored in `ordering` (`ordering.apply(x, dim=1)`), of one shape.
        neighbourhood: of a grid of seq cells.
        ordering: of the cells.
        block_size: tokens of a block of FlexAttention's mask, each way.

    Returns:
        The output, shaped and stored like q.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is allowed.

    FlexAttention: Dong et al., arXiv 2412.05496.

    >>> x = torch.ones(1, 4, 1, 2)
    >>> neighbourhood_attention(x, x, x, Neighbourhood((2, 2), 1), ordering=Ordering.linear(4)).flatten(2).tolist()
    [[[1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]]
    """
    q, k, v = check_tensors(q, k, v)
    for name, x, kind in (("neighbourhood", neighbourhood, Neighbourhood), ("ordering", ordering, Ordering)):
        if not isinstance(x, kind):
            raise TypeError(f"{name} must be of class {kind.__name__}, got {x!r}")
    block_size = integer("block_size", block_size, least=1)
    if q.shape[1] != neighbourhood.length:
        raise ValueError(f"q must have the {neighbourhood.length} tokens of the grid, got shape {tuple(q.shape)}")
    if ordering.length != neighbourhood.length:
        raise ValueError(f"ordering must have the {neighbourhood.length} tokens of the grid, got {ordering.length}")
    if k.shape != q.shape:
        raise ValueError(f"k must have the shape of q {tuple(q.shape)}, got {tuple(k.shape)}")
    mask = neighbourhood_mask(neighbourhood, ordering, block_size, q.device)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if not q.is_cuda:
        with warnings.catch_warnings():  # that it is not compiled, as said above
            warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
            try:
                return flex_attention(q, k, v, block_mask=mask).transpose(1, 2)
            except NotImplementedError as error:
                raise ValueError(
                    "q, k and v must not require grad on a CPU, where FlexAttention has no backward"
                ) from error
    with _tiles_within(block_size):
        return compiled_flex_attention(q, k, v, block_mask=mask).transpose(1, 2)


@cached_for_graphs(maxsize=8)
@torch.inference_mode(False)  # masks made in inference mode could not serve a later backward pass
def neighbourhood_mask(
    neighbourhood: Neighbourhood, ordering: Ordering, block_size: int, device: torch.device
) -> BlockMask:
    """The mask of FlexAttention for cells stored in an ordering, made from the predicted blocks.

    Args:
        neighbourhood, ordering, block_size: as in `neighbourhood_attention`.
        device: of the mask.

    Returns:
        The mask; no table of length squared is made on the way.
    """
    cells = neighbourhood.coordinates(ordering.perm.to(device))
    first = neighbourhood.first(cells)
    # Tables rather than numbers: a number would be compiled in, and each window then costs a compilation.
    row, col, top, left = (x.int().contiguous() for x in (*cells.unbind(-1), *first.unbind(-1)))
    bottom, right = top + (neighbourhood.window - 1), left + (neighbourhood.window - 1)

    def attends(b, h, query, key):
        in_rows = (top[query] <= row[key]) & (row[key] <= bottom[query])
        return in_rows & (left[query] <= col[key]) & (col[key] <= right[query])

    lists = []
    for blocks in mask_blocks(neighbourhood, ordering, q_block=block_size, kv_block=block_size):
        blocks = blocks.to(device)
        lists += [blocks.sum(1), blocks.byte().argsort(dim=1, descending=True, stable=True)]
    lengths = (neighbourhood.length, neighbourhood.length)
    lists = [x.int()[None, None] for x in lists]
    return BlockMask.from_kv_blocks(*lists, block_size, mask_mod=attends, seq_lengths=lengths)


def exact_out(q: Tensor, k: Tensor, v: Tensor, neighbourhood: Neighbourhood, *, head: int, query: int) -> Tensor:
    """One row of the output in float64, from its own keys alone.

    Args:
        q, k, v: (batch, seq, heads, head_dim), in raster order; the first of the batch is looked at.
        neighbourhood: as in `neighbourhood_attention`.
        head: the head.
        query: the position.

    Returns:
        (head_dim,) float64.

    >>> x = torch.arange(4.0).view(1, 4, 1, 1)
    >>> exact_out(0 * x, x, x, Neighbourhood((2, 2), 2), head=0, query=3).tolist()
    [1.5]
    """
    keys = neighbourhood.keys(query).to(q.device)
    weights = _weights(q, k, neighbourhood, head, torch.tensor([query], device=q.device), keys)
    return (weights @ v[0, keys, head].double())[0]


def exact_dq(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, neighbourhood: Neighbourhood, *, head: int, query: int
) -> Tensor:
    """One row of dq in float64, from its own keys alone: (head_dim,). Arguments as in `exact_out`; dout like q."""
    keys = neighbourhood.keys(query).to(q.device)
    at = torch.tensor([query], device=q.device)
    _, dscores = _score_gradients(q, k, v, dout, neighbourhood, head, at, keys)
    return (dscores @ k[0, keys, head].double())[0] * q.shape[3] ** -0.5


def exact_dk_dv(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, neighbourhood: Neighbourhood, *, head: int, key: int
) -> tuple[Tensor, Tensor]:
    """One row of dk and of dv in float64, from the queries that attend to it: (head_dim,) each.

    Arguments as in `exact_dq`. Memory grows with window to the fourth.
    """
    queries = neighbourhood.queries(key)
    ends = torch.stack([neighbourhood.keys(int(p))[[0, -1]] for p in queries[[0, -1]]])
    (top, left), (bottom, right) = neighbourhood.coordinates(ends.flatten()[[0, -1]]).tolist()
    rows, cols = torch.arange(top, bottom + 1, device="cpu"), torch.arange(left, right + 1, device="cpu")
    keys = (torch.cartesian_prod(rows, cols) @ torch.tensor([neighbourhood.shape[1], 1], device="cpu")).to(q.device)
    queries = queries.to(q.device)
    weights, dscores = _score_gradients(q, k, v, dout, neighbourhood, head, queries, keys)
    own = keys == key
    dk = dscores[:, own].T @ q[0, queries, head].double() * q.shape[3] ** -0.5
    return dk[0], (weights[:, own].T @ dout[0, queries, head].double())[0]


def _weights(q: Tensor, k: Tensor, neighbourhood: Neighbourhood, head: int, queries: Tensor, keys: Tensor) -> Tensor:
    # Softmax weights, (queries, keys), where keys hold all that the queries attend to.
    scores = q[0, queries, head].double() @ k[0, keys, head].double().T * q.shape[3] ** -0.5
    return scores.masked_fill_(~neighbourhood.attends(queries[:, None], keys), -torch.inf).softmax(-1)


def _score_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    neighbourhood: Neighbourhood,
    head: int,
    queries: Tensor,
    keys: Tensor,
) -> tuple[Tensor, Tensor]:
    # Softmax weights and the gradients of the scores, (queries, keys).
    weights = _weights(q, k, neighbourhood, head, queries, keys)
    dweights = dout[0, queries, head].double() @ v[0, keys, head].double().T
    return weights, weights * (dweights - (weights * dweights).sum(-1, keepdim=True))


@contextmanager
def _tiles_within(block_size: int) -> Iterator[None]:
    # On some GPUs inductor's tiles are 128 rows, which a smaller block cannot hold: it then finds no kernel at all. The
    # choice is one thread's: `run_to_keep` compiles the backward here too.
    if block_size >= FLEX_BLOCK:
        yield
        return
    from torch._inductor.virtualized import V

    with V.set_choices_handler(_small_tiles(block_size)):
        yield


@cache
def _small_tiles(block_size: int) -> object:
    from torch._inductor.choices import InductorChoices

    class SmallTiles(InductorChoices):
        def get_flex_attention_fwd_configs(self, *args, **kwargs):
            return cut(super().get_flex_attention_fwd_configs(*args, **kwargs), "block_m", "block_n")

        def get_flex_attention_bwd_configs(self, *args, **kwargs):
            configs = super().get_flex_attention_bwd_configs(*args, **kwargs)
            return cut(configs, "block_m1", "block_n1", "block_m2", "block_n2")

    def cut(configs, *sides):
        # 4 warps, which inductor gives to tiles of 64 rows of its own.
        rows = [{side: min(getattr(each, side), block_size) for side in sides} for each in configs]
        return [replace(each, num_warps=4, **least) for each, least in zip(configs, rows, strict=True)]

    return SmallTiles()
