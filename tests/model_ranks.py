"""What the tests of models on several ranks run on two and on four of them, over gloo."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from hilbert_lib import (
    DilatedPattern,
    MultiheadDilatedAttention,
    NeighbourhoodAttention,
    PointAttention,
    PointNeighbourhood,
    PointShard,
    Rectangles,
    attend,
    ring_attend,
)

PATTERN = DilatedPattern((6, 20), (1, 2))
GRID = (5, 4)  # the cells of the sequence of 20 tokens
BATCH, WORDS, DIM, HEADS = 2, 7, 16, 4
STEPS = 2
PAGE = (Path(__file__).parents[1] / "docs/several_gpus.md").read_text()


def turned(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """q and k as their positions, (batch or 1, rows), say."""
    turn = positions[..., None, None].to(q.dtype).sin()
    return q + turn, k * (1 + turn)


def turned_on_grid(q: Tensor, k: Tensor, place: tuple[int, ...] | Tensor) -> tuple[Tensor, Tensor]:
    """The same of cells: of the whole grid, or those of a rank, which are given by their numbers."""
    cells = torch.arange(q.shape[1]) if isinstance(place, tuple) else place
    row, column = torch.unravel_index(cells, GRID)
    return turned(q, k, (row + 3 * column)[None])


class Model(nn.Module):
    """An embedding, a block of each of our modules, and a head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, DIM)
        self.along = MultiheadDilatedAttention(DIM, HEADS, PATTERN, batch_first=True, kv_heads=2, norm_eps=1e-5)
        self.on_grid = NeighbourhoodAttention(DIM, HEADS, window=((3, 1), (3, 3)), kv_heads=2, relative_bias=True)
        self.along.prepare, self.on_grid.prepare = turned, turned_on_grid
        self.registers = nn.Parameter(torch.randn(1, 2, DIM))  # every cell sees them
        self.head = nn.Linear(DIM, WORDS)

    def forward(self, tokens: Tensor, own_grid: tuple[int, ...] = GRID) -> Tensor:
        """The scores of (batch, tokens), which are the cells of a grid, or of a rank's part of it."""
        x = self.embedding(tokens)
        x = x + self.along(x, is_causal=True)[0]
        extra = self.registers.expand(len(x), -1, -1)
        x = x + self.on_grid(x.unflatten(1, own_grid), extra=extra).flatten(1, 2)
        return self.head(x)


def made() -> Model:
    torch.manual_seed(0)
    return Model().double()


@cache
def drawn() -> tuple[Tensor, Tensor]:
    """The words of some sequences, and those to be guessed."""
    words = torch.randint(WORDS, (2, BATCH, 20), generator=torch.Generator().manual_seed(1))
    return words[0], words[1]


def trained(model: nn.Module, rows: slice, ranks: int) -> Tensor:
    """The loss before, between and after some steps on these sequences, averaged over the ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    words, guessed = (x[rows] for x in drawn())
    losses = []
    for step in range(STEPS + 1):
        loss = cross_entropy(model(words).flatten(0, 1), guessed.flatten())
        losses.append(loss.detach().clone())
        if step < STEPS:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    losses = torch.stack(losses)
    if ranks > 1:
        dist.all_reduce(losses)
    return losses / ranks


def largest(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference of two lists of tensors; not a number is infinitely far."""
    pairs = zip(found, expected, strict=True)
    return max((a - b).abs().nan_to_num(torch.inf).max().item() for a, b in pairs)


def weights_of(model: nn.Module) -> list[Tensor]:
    return [getattr(x, "full_tensor", lambda x=x: x)().detach() for x in model.parameters()]


def by_batch() -> dict[str, float]:
    """How far losses and weights are from those of one process where each of two ranks has one of the sequences."""
    rank = dist.get_rank()
    rows = slice(rank, rank + 1)
    one, plain, sharded = made(), made(), made()
    mesh = init_device_mesh("cpu", (2,))
    for part in (sharded.along, sharded.on_grid, sharded):
        fully_shard(part, mesh=mesh)
    expected = [trained(one, slice(None), 1), *weights_of(one)]
    assert largest(weights_of(one), weights_of(made())) > 0.1
    by_ddp = [trained(DistributedDataParallel(plain), rows, 2), *weights_of(plain)]
    by_fsdp = [trained(sharded, rows, 2), *weights_of(sharded)]
    return {"DDP": largest(by_ddp, expected), "FSDP2": largest(by_fsdp, expected)}


def over_tokens() -> dict[str, float]:
    """How far output, loss and gradients are from those of one process where two ranks have a part of every sequence.

    The gradients of the weights are summed over the ranks.
    """
    rank, shards = dist.get_rank(), Rectangles((2, 1), cuts=((3,), None))
    words, guessed = drawn()
    one, many = made(), recipe("spread_model")["spread"](made(), grid=GRID, shards=shards)
    own = shards.cells(GRID, rank)
    own_grid = tuple(map(len, shards.box(GRID, rank)))

    def scores_and_loss(model: nn.Module, rows: Tensor | slice, *options: object) -> tuple[Tensor, Tensor]:
        scores = model(words[:, rows], *options)
        loss = cross_entropy(scores.flatten(0, 1), guessed[:, rows].flatten(), reduction="sum") / words.numel()
        loss.backward()
        return scores.detach(), loss.detach()

    expected_scores, expected_loss = scores_and_loss(one, slice(None))
    scores, loss = scores_and_loss(many, own, own_grid)
    summed = [loss, *(x.grad for x in many.parameters())]
    for x in summed:
        dist.all_reduce(x)
    found = {"scores": largest([scores], [expected_scores[:, own]]), "loss": largest(summed[:1], [expected_loss])}
    for (name, weight), gradient in zip(one.named_parameters(), summed[1:], strict=True):
        assert weight.grad.abs().max() > 0
        found[name] = largest([gradient], [weight.grad])
    return found


def moved_cells(q: Tensor, k: Tensor, points: PointNeighbourhood) -> tuple[Tensor, Tensor]:
    """q and k as the cells that they lie in say."""
    q, _ = turned(q, q, points.coordinates[:, 0][None])
    _, k = turned(k, k, points.key_cells[:, 0][None])
    return q, k


def over_points(has_keys: bool) -> dict[str, float]:
    """How far a layer over points that ranks share is from one process: outputs, and gradients of its weights."""
    fine = torch.cartesian_prod(torch.arange(9), torch.arange(8))
    coarse = torch.unique(fine // 2, dim=0)
    cells, window = (fine // 2, 2) if has_keys else (fine, 3)
    torch.manual_seed(2)
    features, of_keys, extra = (torch.randn(2, n, DIM, dtype=torch.float64) for n in (len(fine), len(coarse), 3))
    first = dist.get_rank() == 0
    own, own_keys = (slice(30), slice(14)) if first else (slice(30, None), slice(14, None))

    def results(attention: Callable, points_of: type, own: slice, own_keys: slice, share: float) -> list[Tensor]:
        # share: of the loss of extra tokens, which all ranks have.
        torch.manual_seed(0)
        layer = PointAttention(DIM, HEADS, kv_heads=2, prepare=moved_cells, attention=attention).double()
        points = points_of(cells[own], window, keys=coarse[own_keys] if has_keys else None)
        tokens = {"keys": of_keys[:, own_keys] if has_keys else None}
        out, extra_out = layer(features[:, own], points, **tokens, extra=extra, return_extra=True)
        (out.sin().sum() + share * extra_out.cos().sum()).backward()
        return [out.detach(), extra_out.detach(), *(x.grad for x in layer.parameters())]

    out, *expected = results(attend, PointNeighbourhood, slice(None), slice(None), 1.0)
    expected = [out[:, own], *expected]
    found = results(ring_attend, PointShard, own, own_keys, 0.5)
    for gradient in found[2:]:
        dist.all_reduce(gradient)
    assert all(x.abs().max() > 0 for x in expected)
    names = "out", "extra_out", "in_proj.weight", "in_proj.bias", "out_proj.weight", "out_proj.bias"
    return {name: largest([x], [y]) for name, x, y in zip(names, found, expected, strict=True)}


def recipe(name: str) -> dict:
    """What a file of the page about several GPUs defines."""
    (code,) = re.findall(rf"^```python\n(# {name}\.py\n.*?)^```", PAGE, re.S | re.M)
    defined = {}
    exec(code, defined)
    return defined


def in_parallel(sequence: int, heads: int) -> list[float]:
    """The losses of the recipe whose ranks share the sequence and the heads."""
    return recipe("parallel_model")["train"]({"sequence": sequence, "heads": heads})


def by_one() -> list[float]:
    """The losses of the same model where nothing is split: neither its tokens nor its weights."""
    defined = recipe("parallel_model")
    defined |= {"parallel": lambda block, mesh: block, "fully_shard": lambda module, mesh: module}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return defined["train"]({"sequence": 1, "heads": 1})
    finally:
        dist.destroy_process_group()
