"""Small models of notebooks 10 and 14, made of this library's modules: of bytes, of pictures, and of slides.

Blocks are pre-norm transformer blocks. What a block attends to is all in which two models differ.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from hilbert_lib.attention.api import dilated_attention
from hilbert_lib.attention.caches import KeyValueCache
from hilbert_lib.attention.modules import MultiheadDilatedAttention
from hilbert_lib.ordering import Ordering
from hilbert_lib.patterns.dilated import DilatedPattern

BYTES = 256
LONGEST_WAVE = 10_000.0  # tokens, of rotary positions and of sines
CLASS_TOKEN = 0  # position of a slide's class token, as in Prov-GigaPath


def rotary(q: Tensor, k: Tensor, places: Tensor | tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """q and k, (batch, seq, heads, head_dim), turned by their positions (RoFormer, arXiv 2104.09864).

    places: positions, (1, seq) or (batch, seq); or the sides of a grid, whose axes turn a share of head_dim each.

    >>> q = torch.ones(1, 3, 1, 2)
    >>> turned, _ = rotary(q, q, torch.arange(3)[None])
    >>> scores = turned[0, :, 0] @ turned[0, :, 0].T
    >>> bool(scores[1, 0].isclose(scores[2, 1]))  # a score depends on the distance alone
    True
    """
    return turned_along(q, k, _axes(places, q.device) if isinstance(places, tuple) else [places])


def turned_along(q: Tensor, k: Tensor, axes: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """`rotary` of tokens in any order, whose coordinates are given along each axis: (1, seq) or (batch, seq) each."""
    pairs = q.shape[-1] // (2 * len(axes))  # of numbers that one axis turns
    wave_numbers = LONGEST_WAVE ** (-torch.arange(pairs, device=q.device) / max(1, pairs))
    angles = torch.cat([axis[..., None] * wave_numbers for axis in axes], dim=-1)[:, :, None]
    cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)  # (batch, seq, 1, pairs of all axes)
    turned_pairs = cos.shape[-1]

    def turned(x: Tensor) -> Tensor:
        first, second, rest = x.split([turned_pairs, turned_pairs, x.shape[-1] - 2 * turned_pairs], dim=-1)
        return torch.cat([first * cos - second * sin, first * sin + second * cos, rest], dim=-1)

    return turned(q), turned(k)


def _axes(grid: tuple[int, ...], device: torch.device) -> list[Tensor]:
    # The coordinates of the cells along each axis, row by row: (1, cells) each.
    lines = torch.meshgrid(*(torch.arange(side, device=device) for side in grid), indexing="ij")
    return [line.reshape(1, -1) for line in lines]


class AlongSequence(nn.Module):
    """Causal `MultiheadDilatedAttention` with rotary positions, called as `NeighbourhoodAttention` is."""

    def __init__(self, width: int, heads: int, pattern: DilatedPattern, **options):
        super().__init__()
        self.attention = MultiheadDilatedAttention(width, heads, pattern, batch_first=True, prepare=rotary, **options)

    def forward(self, x: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        return self.attention(x, is_causal=True, cache=cache)[0]

    def make_cache(self, batch: int, max_length: int) -> KeyValueCache:
        return self.attention.make_cache(batch, max_length)


class ItselfAlone(AlongSequence):
    """The same weights where each token attends to itself alone: it takes its own v, whatever q and k are."""

    def __init__(self, width: int, heads: int):
        super().__init__(width, heads, DilatedPattern((1,), (1,)))

    def forward(self, x: Tensor, cache: None = None) -> Tensor:
        projection, width = self.attention.in_proj, x.shape[-1]
        v = linear(x, projection.weight[2 * width :], projection.bias[2 * width :])
        return self.attention.out_proj(v)


class Projected(nn.Module):
    """Projections and rotary positions around any function of q, k and v: what ways of attention are timed in."""

    def __init__(self, width: int, heads: int, attend: Callable[[Tensor, Tensor, Tensor], Tensor]):
        super().__init__()
        self.heads, self.attend = heads, attend
        self.in_proj, self.out_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, cache: None = None) -> Tensor:
        q, k, v = self.in_proj(x).unflatten(-1, (3, self.heads, -1)).unbind(dim=2)
        q, k = rotary(q, k, torch.arange(x.shape[1], device=x.device)[None])
        return self.out_proj(self.attend(q, k, v).flatten(2))


class Block(nn.Module):
    """A pre-norm transformer block around a module that attends: (batch, *grid, width) to the same."""

    def __init__(self, width: int, attention: nn.Module):
        super().__init__()
        self.attention = attention
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, **options) -> Tensor:
        x = x + self.attention(self.attention_norm(x), **options)
        return x + self.mlp(self.mlp_norm(x))


class ByteModel(nn.Module):
    """A causal model of text: bytes, (batch, seq) int64, to logits of the next byte, (batch, seq, 256)."""

    def __init__(self, width: int, attentions: Sequence[nn.Module]):
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        self.blocks = nn.ModuleList(Block(width, attention) for attention in attentions)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, BYTES)

    def forward(self, tokens: Tensor, caches: Sequence[KeyValueCache] | None = None) -> Tensor:
        x = self.embedding(tokens)
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks), strict=True):
            x = block(x, cache=cache)
        return self.head(self.norm(x))

    def make_caches(self, max_length: int) -> list[KeyValueCache]:
        """Empty caches of one sequence, one for each block."""
        return [block.attention.make_cache(1, max_length) for block in self.blocks]


class PictureModel(nn.Module):
    """A model that cleans pictures: noisy grey pixels, (batch, rows, columns), to the same."""

    def __init__(self, width: int, attentions: Sequence[nn.Module]):
        super().__init__()
        self.embedding = nn.Linear(1, width)
        self.blocks = nn.ModuleList(Block(width, attention) for attention in attentions)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.embedding(pixels[..., None])
        for block in self.blocks:
            x = block(x)
        return pixels + self.head(self.norm(x))[..., 0]


class AlongOrder(nn.Module):
    """Dilated attention along an order of a grid's cells, called as `NeighbourhoodAttention` is; not causal.

    Positions are turned in by their row and column: the order decides which tokens see each other, and nothing else.
    """

    def __init__(self, width: int, heads: int, pattern: DilatedPattern, ordering: Ordering, shape: tuple[int, int]):
        super().__init__()
        axes = [line[:, ordering.perm] for line in _axes(shape, torch.device("cpu"))]
        self.register_buffer("axes", torch.stack(axes), persistent=False)
        self.ordering = ordering

        def placed(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
            return turned_along(q, k, self.axes.unbind())

        self.attention = MultiheadDilatedAttention(width, heads, pattern, batch_first=True, prepare=placed)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.attention(self.ordering.apply(x.flatten(1, 2), dim=1))
        return self.ordering.undo(out, dim=1).view_as(x)


class PatchModel(nn.Module):
    """A model that fills in pictures: patches, (batch, rows, columns, pixels), some of them hidden, to all patches.

    is_hidden (batch, rows, columns) bool: a learned token stands for each such patch.
    """

    def __init__(self, pixels: int, width: int, attentions: Sequence[nn.Module]):
        super().__init__()
        self.embedding = nn.Linear(pixels, width)
        self.hidden_token = nn.Parameter(0.02 * torch.randn(width))
        self.blocks = nn.ModuleList(Block(width, attention) for attention in attentions)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, pixels)

    def tokens(self, patches: Tensor, is_hidden: Tensor) -> Tensor:
        """Input of the first block, (batch, rows, columns, width)."""
        x = self.embedding(patches)
        return torch.where(is_hidden[..., None], self.hidden_token.to(x.dtype), x)

    def forward(self, patches: Tensor, is_hidden: Tensor) -> Tensor:
        x = self.tokens(patches, is_hidden)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class SlideModel(nn.Module):
    """A slide encoder of Prov-GigaPath's shape: embedded tiles, sines of their places, a class token, LongNet.

    Blocks have an inner norm (sub-LN), heads have torchscale's offsets and zero keys. The class token is read.

    tiles (batch, tiles, features) and their places (tiles, 2) to logits (batch, kinds).
    """

    def __init__(self, features: int, width: int, heads: int, layers: int, pattern: DilatedPattern, kinds: int = 2):
        super().__init__()
        self.pattern = pattern
        self.embedding = nn.Linear(features, width)
        self.class_token = nn.Parameter(0.02 * torch.randn(width))
        attentions = (
            MultiheadDilatedAttention(width, heads, pattern, batch_first=True, norm_eps=1e-5) for _ in range(layers)
        )
        self.blocks = nn.ModuleList(Block(width, FirstOfTwo(attention)) for attention in attentions)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, kinds)

    def tokens(self, tiles: Tensor, places: Tensor) -> Tensor:
        """The class token and the tiles, (batch, 1 + tiles, width)."""
        x = self.embedding(tiles) + sines(places, self.class_token.shape[0]).to(tiles.dtype)
        return torch.cat([self.class_token.expand(len(x), 1, -1), x], dim=1)

    def forward(self, tiles: Tensor, places: Tensor) -> Tensor:
        x = self.tokens(tiles, places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, CLASS_TOKEN]))


class FirstOfTwo(nn.Module):
    """The output of `MultiheadDilatedAttention` without the None in the place of weights."""

    def __init__(self, attention: MultiheadDilatedAttention):
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x)[0]


def sines(places: Tensor, width: int) -> Tensor:
    """Sines and cosines of places on a grid, (tiles, 2) to (tiles, width): half of the width for each axis.

    >>> sines(torch.tensor([[0, 1], [2, 0]]), 8).shape
    torch.Size([2, 8])
    """
    waves = width // 4
    wave_numbers = LONGEST_WAVE ** (-torch.arange(waves, device=places.device) / waves)
    angles = places[..., None] * wave_numbers  # (tiles, 2, waves)
    return torch.cat([angles.sin(), angles.cos()], dim=-1).flatten(1)


def rollout(model: SlideModel, tiles: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """The weights that the class token gives the tiles of one slide, (tiles,) float32 each; no matrix is made.

    Returns the weights of the first block alone, and the weights through all blocks. Both are means over heads. Through
    blocks half of each token's weight stays with the token (attention rollout, arXiv 2005.00928).
    """
    with torch.inference_mode(False), torch.no_grad():  # what is made in inference mode has no gradient
        x, inputs = model.tokens(tiles, places), []
        for block in model.blocks:
            inputs.append(block.attention_norm(x))
            x = block(x)
        start = torch.zeros(x.shape[1], device=x.device)
        start[CLASS_TOKEN] = 1.0
        weights = start
        for block, block_input in zip(reversed(model.blocks), reversed(inputs), strict=True):
            weights = (weights + _passed_on(block.attention.attention, model.pattern, block_input, weights)) / 2
        direct = _passed_on(model.blocks[0].attention.attention, model.pattern, inputs[0], start)
        return direct[CLASS_TOKEN + 1 :], weights[CLASS_TOKEN + 1 :]


def _passed_on(
    attention: MultiheadDilatedAttention, pattern: DilatedPattern, tokens: Tensor, weights: Tensor
) -> Tensor:
    # What the keys get of the queries' weights, (seq,): the mean over heads. An output is weights times values. So
    # this is the gradient of the values, which all channels of a head have alike.
    q, k, v = attention.project(tokens)
    with torch.enable_grad():
        v = torch.zeros_like(v, requires_grad=True)
        out = dilated_attention(q, k, v, pattern)
    (received,) = torch.autograd.grad(out, v, weights[None, :, None, None].expand_as(out))
    return received[0, :, :, 0].sum(-1) / q.shape[2]
