"""The real input of the notebooks: a text that ships with Python and an image that ships with matplotlib."""

import numpy as np
import torch
from torch import Tensor

from hilbert_lib.checks import integer


def text_tokens(length: int) -> Tensor:
    """The first bytes of Python's language reference, repeated where it ends: (length,) int64, 0 to 255."""
    from pydoc_data.topics import topics  # as `help()` shows it: about half a megabyte of English prose and code

    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    text = np.resize(np.frombuffer(text, dtype=np.uint8), integer("length", length, least=1))
    return torch.from_numpy(text.astype(np.int64))


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
