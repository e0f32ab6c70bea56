"""The real input of the notebooks: a text that ships with Python and an image that ships with matplotlib."""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from hilbert_lib.checks import integer


@cache
def _text_bytes() -> np.ndarray:
    # The language reference as `help()` shows it: about half a megabyte of English prose and code.
    from pydoc_data.topics import topics

    return np.frombuffer("\n".join(topics[name] for name in sorted(topics)).encode(), dtype=np.uint8)


def text_tokens(length: int) -> Tensor:
    """The first bytes of Python's language reference, repeated where the text is shorter.

    Args:
        length: number of tokens, at least 1.

    Returns:
        (length,) int64, values 0 to 255.

    Raises:
        ValueError: if length is below 1.
        TypeError: if it is no integer.

    >>> text_tokens(3).shape
    torch.Size([3])
    """
    return torch.from_numpy(np.resize(_text_bytes(), integer("length", length, least=1)).astype(np.int64))


def text_qkv(
    length: int, heads: int, head_dim: int, *, kv_heads: int | None = None, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of real text: each byte embedded by a fixed random table, then projected at random.

    Args:
        length: tokens.
        heads: query heads.
        head_dim: size of one head.
        kv_heads: heads of k and v; by default as many as heads.
        seed: of the table and the projections.

    Returns:
        q (1, length, heads, head_dim), k and v (1, length, kv_heads, head_dim), float32 on the CPU.

    Raises:
        ValueError: if a size is below 1, or the seed not from 0 to 2^63 - 1.
        TypeError: if one of them is no integer.

    >>> q, k, v = text_qkv(8, heads=2, head_dim=4)
    >>> q.shape
    torch.Size([1, 8, 2, 4])
    """
    heads, head_dim = integer("heads", heads, least=1), integer("head_dim", head_dim, least=1)
    kv_heads = heads if kv_heads is None else integer("kv_heads", kv_heads, least=1)
    generator = torch.Generator("cpu").manual_seed(integer("seed", seed, least=0, most=2**63 - 1))
    embedded = torch.randn(256, 64, generator=generator, device="cpu")[text_tokens(length)]

    def project(head_count: int) -> Tensor:
        weight = torch.randn(64, head_count * head_dim, generator=generator, device="cpu") / 8  # 8 = sqrt(64)
        return (embedded @ weight).view(1, length, head_count, head_dim).float()

    return project(heads), project(kv_heads), project(kv_heads)


@cache
def _photograph() -> np.ndarray:
    from matplotlib import cbook, image

    with cbook.get_sample_data("grace_hopper.jpg") as file:
        return image.imread(file, format="jpg")[..., :3].mean(axis=-1) / 255


def sample_image(rows: int, cols: int) -> np.ndarray:
    """Matplotlib's portrait of Grace Hopper in grey, scaled to a grid by averaging.

    Args:
        rows: rows of the grid.
        cols: columns of the grid.

    Returns:
        (rows, cols) float64, 0 black to 1 white.

    Raises:
        ValueError: if rows or cols is below 1.
        TypeError: if one of them is no integer.

    >>> sample_image(4, 3).shape
    (4, 3)
    """
    grid = integer("rows", rows, least=1), integer("cols", cols, least=1)
    picture = torch.from_numpy(_photograph().copy())[None, None]
    return torch.nn.functional.adaptive_avg_pool2d(picture, grid)[0, 0].numpy()
