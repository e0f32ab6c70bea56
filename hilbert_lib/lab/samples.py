"""The input of the notebooks: a text that ships with Python, pictures of matplotlib and scikit-image, made slides."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hilbert_lib.checks import integer

# Of scikit-image, whose wheel has them; each is in the public domain or CC0. Models learn from the first alone.
LEARNT_PICTURES = ("astronaut", "coffee", "rocket", "grass", "brick", "gravel")
HELD_OUT_PICTURES = ("camera", "chelsea")
MORE_HELD_OUT_PICTURES = (*HELD_OUT_PICTURES, "immunohistochemistry", "hubble_deep_field", "retina")
HELD_OUT_TEXT = 0.1  # share of the text, at its end


class Slides(NamedTuple):
    """Made slides, which share their tissue: `made_slides`."""

    tiles: Tensor  # (batch, tiles, features) float32
    kinds: Tensor  # (batch,) int64, 0 or 1: the kind of the lesion
    is_lesion: Tensor  # (batch, tiles) bool
    places: Tensor  # (tiles, 2) int64, row and column of each tile on the grid, row by row


def text_tokens(length: int) -> Tensor:
    """The first bytes of Python's language reference, repeated where it ends: (length,) int64, 0 to 255."""
    return torch.from_numpy(np.resize(_text(), integer("length", length, least=1)).astype(np.int64))


def text_parts() -> tuple[Tensor, Tensor]:
    """The bytes of that text, each once, int64: those to learn from, and the held-out end."""
    text = torch.from_numpy(_text().astype(np.int64))
    learnt = round(len(text) * (1 - HELD_OUT_TEXT))
    return text[:learnt], text[learnt:]


def _text() -> np.ndarray:
    from pydoc_data.topics import topics  # as `help()` shows it: about half a megabyte of English prose and code

    return np.frombuffer("\n".join(topics[name] for name in sorted(topics)).encode(), dtype=np.uint8)


def text_qkv(
    length: int, heads: int, head_dim: int, *, kv_heads: int | None = None, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v (1, length, heads, head_dim) of real text, float32: its bytes embedded and projected at random."""
    generator = torch.Generator("cpu").manual_seed(seed)
    embedded = torch.randn(256, 64, generator=generator, device="cpu")[text_tokens(length)]

    def project(head_count: int) -> Tensor:
        weight = torch.randn(64, head_count * head_dim, generator=generator, device="cpu") / 8  # 8 = sqrt(64)
        return (embedded @ weight).view(1, length, head_count, head_dim).float()

    return project(heads), project(kv_heads or heads), project(kv_heads or heads)


def sample_image(rows: int, cols: int) -> np.ndarray:
    """Matplotlib's portrait of Grace Hopper in grey, averaged to a grid: (rows, cols), 0 black to 1 white."""
    from matplotlib import cbook, image

    with cbook.get_sample_data("grace_hopper.jpg") as file:
        grey = image.imread(file, format="jpg")[..., :3].mean(axis=-1) / 255
    pictures = torch.from_numpy(grey)[None, None]
    return torch.nn.functional.adaptive_avg_pool2d(pictures, (int(rows), int(cols)))[0, 0].numpy()


def picture_parts(held_out: Sequence[str] = HELD_OUT_PICTURES) -> tuple[list[Tensor], list[Tensor]]:
    """Grey photographs at half their size, (rows, columns) float32 from 0 to 1: those to learn from, and held-out ones.

    No picture is in both parts: the second are those named.
    """
    from skimage import data

    def grey(name: str) -> Tensor:
        pixels = torch.from_numpy(getattr(data, name)().astype(np.float32)) / 255
        pixels = pixels[..., :3].mean(dim=-1) if pixels.dim() == 3 else pixels
        return torch.nn.functional.avg_pool2d(pixels[None], 2)[0]

    return list(map(grey, LEARNT_PICTURES)), list(map(grey, held_out))


def made_slides(batch: int, side: int, features: int, *, generator: torch.Generator, shift: float = 8.0) -> Slides:
    """Slides of a round tissue on a grid of side x side tiles: noise, and a round lesion of one of two kinds.

    The features of a tile are normal; those of a lesion are moved by `shift` along the same direction, up for kind 1
    and down for kind 0. The radius of a lesion is a sixth of the side.

    >>> slides = made_slides(2, 16, 4, generator=torch.Generator().manual_seed(0))
    >>> slides.tiles.shape, slides.places.shape, slides.is_lesion.any(dim=1).tolist()
    (torch.Size([2, 164, 4]), torch.Size([164, 2]), [True, True])
    """
    cells = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    from_middle = (cells - (side - 1) / 2).norm(dim=1)
    places = cells[from_middle <= 0.45 * side]
    inner = cells[from_middle <= 0.3 * side]  # where the middle of a lesion may lie
    middle = inner[torch.randint(len(inner), (batch, 1), generator=generator)]
    is_lesion = (places - middle).double().norm(dim=2) <= side / 8
    kinds = torch.randint(2, (batch,), generator=generator)
    tiles = torch.randn(batch, len(places), features, generator=generator)
    moved = shift * (2 * kinds - 1)[:, None, None] * is_lesion[..., None]
    return Slides(tiles + moved / features**0.5, kinds, is_lesion, places)
