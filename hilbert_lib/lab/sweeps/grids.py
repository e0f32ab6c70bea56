"""The sweep of notebook 08: neighbourhood attention with the tokens in every order, beside raster order and dense."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product

import pandas as pd
import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from hilbert_lib import checks
from hilbert_lib.attention.grid import neighbourhood_attention, neighbourhood_mask
from hilbert_lib.grid import Neighbourhood
from hilbert_lib.lab.cache.neighbourhood import check_windows, neighbourhood_orderings
from hilbert_lib.lab.exact_rows import exact_grid_dk_dv, exact_grid_dq, exact_grid_out
from hilbert_lib.lab.pairs import Results, Side, relative_difference
from hilbert_lib.ordering import Ordering

SAMPLED_QUERIES = 8  # of each head, held against float64; of keys, which cost window**4, one of each head
DENSE = {"cuda": SDPBackend.CUDNN_ATTENTION, "cpu": SDPBackend.MATH}  # cuDNN's is the fastest on Hopper
SWEEP = "neighbourhood"

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class GridWorkload:
    """The inputs of neighbourhood attention on a grid, drawn when first used, and some of its rows in float64.

    Attributes:
        neighbourhood: which keys a query attends to.
        heads, head_dim: of q, k and v, one sequence each.
        device: where the tensors are.
        dtype: name of a torch dtype.
    """

    neighbourhood: Neighbourhood
    heads: int
    head_dim: int
    device: torch.device
    dtype: str = "bfloat16"

    @cached_property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and the gradient of the output in raster order: random, normal, (1, seq, heads, head_dim)."""
        generator = torch.Generator(self.device).manual_seed(0)
        shape = (1, self.neighbourhood.length, self.heads, self.head_dim)
        drawn = {"generator": generator, "device": self.device, "dtype": getattr(torch, self.dtype)}
        return tuple(torch.randn(shape, **drawn) for _ in range(4))

    @property
    def useful_flop(self) -> int:
        """Of the forward: two products for every pair that attends."""
        return 4 * self.heads * self.head_dim * self.neighbourhood.pairs

    def error(self, results: Results, ordering: Ordering) -> float:
        """Relative difference of the output, or the largest of dq's, dk's and dv's, from float64 on the sampled rows.

        Where every query attends to every key, a row of dk or dv would cost the whole work: then of dq alone.

        Args:
            results: the output, or dq, dk and dv.
            ordering: in which they are stored.
        """
        slots = ordering.inverse
        exact = self._exact_out if len(results) == 1 else self._exact_gradients
        kept = [torch.stack([x[0, slots[p], h] for h, p in rows]) for x, rows in zip(results, self._rows, strict=False)]
        return relative_difference(kept[: len(exact)], exact)

    @cached_property
    def _rows(self) -> list[list[tuple[int, int]]]:
        # (head, position) of the rows compared: of out or dq, of dk, of dv. The grid's corners are among them.
        generator = torch.Generator("cpu").manual_seed(0)
        last = self.neighbourhood.length - 1
        drawn = torch.randint(last + 1, (self.heads, SAMPLED_QUERIES), generator=generator).tolist()
        drawn[0][:2] = [0, last]
        keys = [(head, positions[0]) for head, positions in enumerate(drawn)]
        return [[(head, p) for head, positions in enumerate(drawn) for p in positions], keys, keys]

    @cached_property
    def _exact_out(self) -> list[Tensor]:
        q, k, v, _ = self.tensors
        return [torch.stack([exact_grid_out(q, k, v, self.neighbourhood, head=h, query=p) for h, p in self._rows[0]])]

    @cached_property
    def _exact_gradients(self) -> list[Tensor]:
        inputs = (*self.tensors, self.neighbourhood)
        exact = [torch.stack([exact_grid_dq(*inputs, head=h, query=p) for h, p in self._rows[0]])]
        if self.neighbourhood.window < max(self.neighbourhood.shape):
            both = [exact_grid_dk_dv(*inputs, head=h, key=p) for h, p in self._rows[1]]
            exact += [torch.stack(rows) for rows in zip(*both, strict=True)]
        return exact


def orders(
    *,
    sides: Sequence[int],
    windows: Sequence[int],
    block_sizes: Sequence[int],
    heads: int,
    head_dim: int,
    device: torch.device,
    dtype: str = "bfloat16",
) -> Iterator[tuple[Side, Side]]:
    """Every order beside raster, and Hilbert beside dense attention; forward, and on a CUDA device backward.

    Tokens are reordered before the clock runs. What doing it in each call costs is told by "hilbert, reordered": q, k
    and v into the order and the output out of it. A forward keeps what its backward needs. Dense attention computes
    the whole grid and depends on neither window nor block: it is timed once a grid, beside the last window and block.
    The random order, which touches nearly every block, is a control on the first grid alone.

    Args:
        sides: cells along a side of the square grids.
        windows: cells along a side of the window; one wider than a grid is left out there.
        block_sizes: tokens of a block of FlexAttention's mask, each way.
        heads, head_dim: of q, k and v.
        device: where to compute.
        dtype: name of a torch dtype.

    Yields:
        (raster, order), (dense, hilbert) and (hilbert, reordered), as (a, b).

    Raises:
        TypeError, ValueError: naming the argument where it is empty or holds one twice, and where no window fits.
    """
    check_windows(windows, checks.integers("sides", sides, least=1, distinct=True))
    checks.integers("block_sizes", block_sizes, least=1, distinct=True)
    directions = ("forward", "backward") if device.type == "cuda" else ("forward",)
    for side, block_size in product(sides, block_sizes):
        fitting = [window for window in windows if window <= side]
        for window in fitting:
            work = GridWorkload(Neighbourhood((side, side), window), heads, head_dim, device, dtype)
            orderings = neighbourhood_orderings(work.neighbourhood.shape)
            if side != sides[0]:
                del orderings["random"]
            inputs = {name: _Stored(name, work, each.to(device), block_size) for name, each in orderings.items()}
            for direction in directions:
                raster, *others = (stored.side(direction) for stored in inputs.values())
                yield from ((raster, other) for other in others)
                if window == fitting[-1] and block_size == block_sizes[-1]:
                    yield _dense(work, direction), inputs["hilbert"].side(direction)
            yield inputs["hilbert"].side("forward"), _reordered(inputs["raster"], inputs["hilbert"])


def order_table(ratios: pd.DataFrame, sides: pd.DataFrame) -> pd.DataFrame:
    """For each work the fastest order, those level with it, and those that touch the fewest blocks.

    Args:
        ratios: `paired.ratio_table` of the sweep.
        sides: `paired.side_table` of it.

    Returns:
        side, window, block_size, direction, fastest, ratio (raster's time over its), level (orders whose interval
        against raster overlaps its own), fewest (orders with the fewest blocks) and hilbert (raster's time over
        Hilbert's).
    """
    work = ["side", "window", "block_size", "direction"]
    blocks = sides.dropna(subset="touched").set_index([*work, "name"]).touched.sort_index()
    rows = []
    for case, table in ratios[ratios.a == "raster"].groupby(work, sort=False):
        against = table.set_index("b")[["ratio", "low", "high"]]
        against.loc["raster"] = 1.0
        best = against.loc[against.ratio.idxmax()]
        level = against.index[against.high >= best.low].drop(best.name)
        touched = blocks.loc[case].reindex(against.index)
        fewest = touched.index[touched == touched.min()]
        rows.append((*case, best.name, best.ratio, ", ".join(level), ", ".join(fewest), against.ratio["hilbert"]))
    return pd.DataFrame(rows, columns=[*work, "fastest", "ratio", "level", "fewest", "hilbert"])


@dataclass(frozen=True, eq=False)
class _Stored:
    """A work with its tokens in one order; its tensors are made when first used and shared by both directions."""

    name: str
    work: GridWorkload
    ordering: Ordering
    block_size: int

    @cached_property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        stored = (self.ordering.apply(x, dim=1) for x in self.work.tensors[:3])
        return tuple(x.requires_grad_(x.is_cuda) for x in stored)

    @cached_property
    def dout(self) -> Tensor:
        return self.ordering.apply(self.work.tensors[3], dim=1)

    @cached_property
    def blocks(self) -> dict[str, int]:
        """What a record says of the mask."""
        mask = neighbourhood_mask(self.work.neighbourhood, self.ordering, self.block_size, self.ordering.device)
        partial, full = int(mask.kv_num_blocks.sum()), int(mask.full_kv_num_blocks.sum())
        return {"block_size": self.block_size, "touched": partial + full, "full": full}

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        how = {"ordering": self.ordering, "block_size": self.block_size}
        return neighbourhood_attention(q, k, v, self.work.neighbourhood, **how)

    def side(self, direction: str) -> Side:
        return _side(self.name, self, self.attend, direction, self.blocks)


def _reordered(raster: _Stored, stored: _Stored) -> Side:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (stored.ordering.apply(x, dim=1) for x in (q, k, v))
        return stored.ordering.undo(stored.attend(q, k, v), dim=1)

    return _side(f"{stored.name}, reordered", raster, attend, "forward", stored.blocks)


def _dense(work: GridWorkload, direction: str) -> Side:
    kernel = DENSE[work.device.type]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(kernel):
            return scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

    shape = work.neighbourhood.shape
    whole = replace(work, neighbourhood=Neighbourhood(shape, shape[0]))
    raster = _Stored("dense", whole, Ordering.linear(whole.neighbourhood.length).to(work.device), 1)
    return _side(raster.name, raster, attend, direction, {"kernel": kernel.name})


def _side(name: str, stored: _Stored, attend: Attention, direction: str, more: dict) -> Side:
    # The sides of a pair store their results differently, so they return nothing to compare; each has its own error.
    work = stored.work
    side, window = work.neighbourhood.shape[0], work.neighbourhood.window
    parameters = {"sweep": SWEEP, "direction": direction, "side": side, "window": window, **more}
    parameters |= {"heads": work.heads, "head_dim": work.head_dim, "dtype": work.dtype}
    out = cache(lambda: attend(*stored.leaves))

    def compute() -> Results:
        if direction == "forward":
            return (attend(*stored.leaves),)
        with functorch_config.patch(donated_buffer=False):  # or a compiled backward refuses to run again
            return torch.autograd.grad(out(), stored.leaves, stored.dout, retain_graph=True)

    def run() -> Results:
        compute()
        return ()

    error = cache(lambda _: work.error(compute(), stored.ordering))
    # The backward has five products where the forward has two.
    flop = work.useful_flop * (1 if direction == "forward" else 2.5)
    return Side(name, parameters, run, error, flop)
