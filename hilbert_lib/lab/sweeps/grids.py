"""Neighbourhood attention with the tokens in every order, in pairs that are checked and timed: notebook 08."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch
from torch import Tensor
from torch._functorch import config as functorch_config

from hilbert_lib.attention.grids import flex
from hilbert_lib.grid import Neighbourhood
from hilbert_lib.lab.cache.neighbourhood import neighbourhood_orderings
from hilbert_lib.lab.exact_rows import SampledRows
from hilbert_lib.lab.pairs import Results, Side
from hilbert_lib.ordering import Ordering

SAMPLED_QUERIES = 8  # of each head, held against float64; of keys, which cost window**4, one of each head
SWEEP, REORDERED = "neighbourhood", "hilbert, reordered"


@dataclass(frozen=True)
class GridWork:
    """Random q, k, v and a gradient of the output on a grid, made when first used, and some exact rows in float64.

    block_size: tokens of a block of the mask, each way. dtype: by its name.
    """

    neighbourhood: Neighbourhood
    block_size: int
    heads: int
    head_dim: int
    device: torch.device
    dtype: str = "bfloat16"

    @cached_property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and dout in raster order, (1, seq, heads, head_dim)."""
        generator = torch.Generator(self.device).manual_seed(0)
        shape = (1, self.neighbourhood.length, self.heads, self.head_dim)
        drawn = {"generator": generator, "device": self.device, "dtype": getattr(torch, self.dtype)}
        return tuple(torch.randn(shape, **drawn) for _ in range(4))

    @cached_property
    def sampled(self) -> SampledRows:
        """Rows at random and, in the first head, at the grid's corners.

        Where every query attends to every key, a row of dk or dv would cost the whole work: then of dq alone.
        """
        near, generator = self.neighbourhood, torch.Generator("cpu").manual_seed(0)
        drawn = torch.randint(near.length, (self.heads, SAMPLED_QUERIES), generator=generator, device="cpu")
        drawn[0, 0], drawn[0, 1] = 0, near.length - 1
        return SampledRows(self.tensors, near, list(drawn), keys=int(near.pairs < near.length**2))


Attention = Callable[[Tensor, Tensor, Tensor, Ordering, GridWork], Tensor]


def compare_orders(
    works: Iterable[GridWork],
    attention: Attention,
    reordered: Attention,
    dense: Attention,
    *,
    orders: Sequence[str],
    others: dict[str, Attention] | None = None,
) -> Iterator[tuple[Side, Side]]:
    """Pairs for `run_sides`: every order beside raster, forward and on a GPU backward; Hilbert beside the two others.

    A forward keeps what its backward needs. Dense attention, which no window and no block changes, runs once a grid.

    Args:
        works: asked for one at a time.
        attention: of q, k and v that are stored in the order already.
        reordered: of q, k and v in raster order, with an output in raster order.
        dense: likewise, of every query with every key.
        orders: names of `neighbourhood_orderings`, hilbert among them.
        others: other people's ways to the same function by name, of q, k and v in raster order; beside raster too.
    """
    others = others or {}
    grids = set()
    for work in works:
        shape, made = work.neighbourhood.shape, neighbourhood_orderings(work.neighbourhood.shape)
        order = {name: made[name].to(work.device) for name in ("raster", *orders)}
        for direction in ("forward", "backward")[: 1 + (work.device.type == "cuda")]:
            sides = {name: _side(work, name, attention, order[name], order[name], direction) for name in order}
            yield from ((sides["raster"], sides[name]) for name in orders)
            for name, attend in others.items():
                other = _side(work, name, attend, order["raster"], order["raster"], direction, in_blocks=False)
                yield sides["raster"], other
            if shape not in grids:
                whole = replace(work, neighbourhood=Neighbourhood(shape, shape))
                whole = _side(whole, "dense", dense, order["raster"], order["raster"], direction, in_blocks=False)
                yield whole, sides["hilbert"]
            if direction == "forward":
                anew = _side(work, REORDERED, reordered, order["hilbert"], order["raster"], direction)
                yield sides["hilbert"], anew
        grids.add(shape)


def _side(
    work: GridWork,
    name: str,
    attend: Attention,
    order: Ordering,
    stored: Ordering,
    direction: str,
    *,
    in_blocks: bool = True,
) -> Side:
    # The sides of a pair store their results differently, so they return nothing to compare; each has its own error.
    near = work.neighbourhood
    window = near.window[0] if len(set(near.window)) == 1 else list(near.window)
    parameters = {"sweep": SWEEP, "direction": direction, "side": near.shape[0], "window": window}
    if in_blocks:
        mask = flex.block_mask((near,), order, 0, False, work.block_size, order.device)
        partial, full = int(mask.kv_num_blocks.sum()), int(mask.full_kv_num_blocks.sum())
        parameters |= {"block_size": work.block_size, "touched": partial + full, "full": full}
    parameters |= {"heads": work.heads, "head_dim": work.head_dim, "dtype": work.dtype}
    leaves = cache(lambda: tuple(stored.apply(x, dim=1).requires_grad_(x.is_cuda) for x in work.tensors[:3]))
    dout = cache(lambda: stored.apply(work.tensors[3], dim=1))
    out = cache(lambda: attend(*leaves(), order, work))

    def compute() -> Results:
        if direction == "forward":
            return (attend(*leaves(), order, work),)
        with functorch_config.patch(donated_buffer=False):  # or a compiled backward refuses to run again
            return torch.autograd.grad(out(), leaves(), dout(), retain_graph=True)

    def run() -> Results:
        compute()
        return ()

    error = cache(lambda _: work.sampled.error(compute(), stored.inverse))
    # Two products for every pair that attends; the backward has five where the forward has two.
    flop = 4 * work.heads * work.head_dim * near.pairs * (1 if direction == "forward" else 2.5)
    return Side(name, parameters, run, error, flop)
