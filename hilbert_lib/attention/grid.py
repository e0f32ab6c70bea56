"""Neighbourhood attention on a grid by FlexAttention, with tokens stored in any order, and its exact rows."""

import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from hilbert_lib.attention.api import check_tensors
from hilbert_lib.attention.backends.flex import FLEX_BLOCK, block_list, compiled_flex_attention
from hilbert_lib.checks import integer, suggesting
from hilbert_lib.graph_cache import cached_for_graphs
from hilbert_lib.grid import Neighbourhood, mask_blocks
from hilbert_lib.ordering import Ordering


@suggesting
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

    Inputs and output are stored in an ordering: a layout, which changes values by rounding alone. On CUDA it is
    compiled and differentiable. On the CPU it runs in eager mode: memory for length squared, no gradient.

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
        with warnings.catch_warnings():  # the docstring says that it is not compiled
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
    """FlexAttention's mask for cells stored in an ordering, from the predicted blocks: no table of length squared."""
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
        lists += [x[None, None] for x in block_list(blocks.to(device))]
    lengths = (neighbourhood.length, neighbourhood.length)
    return BlockMask.from_kv_blocks(*lists, block_size, mask_mod=attends, seq_lengths=lengths)


def _tiles_within(block_size: int) -> AbstractContextManager:
    # On some GPUs inductor's tiles are 128 rows, which a smaller block cannot hold: it then finds no kernel at all. The
    # choice holds for one thread: `run_to_keep` compiles the backward here too.
    if block_size >= FLEX_BLOCK:
        return nullcontext()
    from torch._inductor.virtualized import V

    return V.set_choices_handler(_small_tiles(block_size))


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
        # 4 warps: inductor gives them to its own tiles of 64 rows.
        rows = [{side: min(getattr(each, side), block_size) for side in sides} for each in configs]
        return [replace(each, num_warps=4, **least) for each, least in zip(configs, rows, strict=True)]

    return SmallTiles()
