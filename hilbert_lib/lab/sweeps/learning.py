"""The trainings of notebooks 10 and 14: a causal LongNet on text and windows on pictures, each beside a twin; and
dilated attention along orders of a picture's patches.

The twin has the same weights, batches and steps. A token of it attends to itself alone: its attention is switched off.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from hilbert_lib.attention.grid_module import NeighbourhoodAttention
from hilbert_lib.lab.cache.along_curve import keys_of_a_query, window_of
from hilbert_lib.lab.models import (
    AlongOrder,
    AlongSequence,
    ByteModel,
    ItselfAlone,
    PatchModel,
    PictureModel,
    SlideModel,
    rotary,
)
from hilbert_lib.lab.samples import MORE_HELD_OUT_PICTURES, Slides, made_slides, picture_parts, text_parts
from hilbert_lib.lab.training import Training
from hilbert_lib.ordering import Ordering
from hilbert_lib.patterns.dilated import DilatedPattern

TEXT, PICTURES, SLIDES, LEARNT_ORDERS = "text", "pictures", "slides", "orders"
TWIN = "itself alone"
DILATED, DENSE, WINDOWS = "dilated", "dense", "windows"
TEXT_RATE, PICTURE_RATE, SLIDE_RATE = 3e-2, 4e-2, 3e-3  # of AdamW, for models of some 10,000 weights
NOISE = 0.2  # standard deviation of what is added to pixels from 0 to 1
HELD_OUT_ROWS, HELD_OUT_CROPS, HELD_OUT_SLIDES, HELD_OUT_SEED = 64, 64, 32, 10**6
TILE_FEATURES = 8
PATCH_RATE = 1e-2
HIDDEN = 0.5  # share of the patches of a crop
TEXT_ATTENTIONS = (DILATED, DENSE, WINDOWS, TWIN)
REFERENCE_WIDTH = 32  # of models that learn at these rates; wider ones take a smaller rate


def attention_of(name: str, width: int, heads: int, *, length: int, pattern: DilatedPattern, window: int) -> nn.Module:
    """Causal attention along a sequence by its name: `DILATED`, `DENSE`, `WINDOWS` or `TWIN`. ValueError for others."""
    if name == WINDOWS:
        return NeighbourhoodAttention(width, heads, (window,), is_causal=True, edge="clip", prepare=rotary)
    if name == TWIN:
        return ItselfAlone(width, heads)
    patterns = {DILATED: pattern, DENSE: DilatedPattern((length,), (1,))}
    if name not in patterns:
        raise ValueError(f"name must be one of {', '.join(TEXT_ATTENTIONS)}, got {name!r}")
    return AlongSequence(width, heads, patterns[name])


def text_trainings(
    names: Sequence[str],
    seeds: Sequence[int],
    pattern: DilatedPattern,
    *,
    window: int,
    width: int,
    heads: int,
    layers: int,
    length: int,
    batch: int,
    steps: int,
    device: torch.device | str,
) -> Iterator[Training]:
    """A model of bytes for each name of `attention_of` and each seed; the loss is in bits a byte."""
    learnt, held_out = text_parts()
    span = torch.arange(length + 1)
    last = len(held_out) - length - 1
    rows = held_out[torch.linspace(0, last, HELD_OUT_ROWS).long()[:, None] + span]

    def bits(model: nn.Module, texts: Tensor) -> Tensor:
        texts = texts.to(device)
        logits = model(texts[:, :-1]).flatten(0, 1).float()
        return cross_entropy(logits, texts[:, 1:].flatten()) / torch.log(torch.tensor(2.0))

    def drawn(model: nn.Module, generator: torch.Generator) -> Tensor:
        starts = torch.randint(len(learnt) - length, (batch, 1), generator=generator)
        return bits(model, learnt[starts + span])

    branches = " ".join(f"{w}:{r}" for w, r in pattern.branches)
    sizes = {"width": width, "heads": heads, "layers": layers, "length": length, "batch": batch, "steps": steps}
    for seed in seeds:
        for name in names:

            def make(name: str = name) -> nn.Module:
                how = {"length": length, "pattern": pattern, "window": window}
                return ByteModel(width, [attention_of(name, width, heads, **how) for _ in range(layers)])

            yield Training(
                name,
                {"sweep": TEXT, "seed": seed, "branches": branches, "window": window, **sizes},
                make,
                drawn,
                lambda model: bits(model, rows),
                steps=steps,
                tokens=batch * length,
                rate=_rate(TEXT_RATE, width),
            )


def picture_trainings(
    seeds: Sequence[int],
    *,
    window: int,
    width: int,
    heads: int,
    layers: int,
    side: int,
    batch: int,
    steps: int,
    device: torch.device | str,
) -> Iterator[Training]:
    """A model that cleans noisy crops of side x side pixels, with windows and as a twin, for each seed.

    The loss is the mean squared error of pixels from 0 to 1.
    """
    learnt, held_out = picture_parts()

    def error(model: nn.Module, pictures: list[Tensor], count: int, generator: torch.Generator) -> Tensor:
        clean, noisy = noisy_crops(pictures, count, side, generator=generator)
        return mse_loss(model(noisy.to(device)).float(), clean.to(device))

    def held_out_error(model: nn.Module) -> Tensor:
        return error(model, held_out, HELD_OUT_CROPS, torch.Generator().manual_seed(HELD_OUT_SEED))

    sizes = {"width": width, "heads": heads, "layers": layers, "side": side, "batch": batch, "steps": steps}
    for seed in seeds:
        for name, own_window in ((WINDOWS, window), (TWIN, 1)):

            def make(own_window: int = own_window) -> nn.Module:
                attentions = [NeighbourhoodAttention(width, heads, own_window, prepare=rotary) for _ in range(layers)]
                return PictureModel(width, attentions)

            yield Training(
                name,
                {"sweep": PICTURES, "seed": seed, "window": window, "noise": NOISE, **sizes},
                make,
                lambda model, generator: error(model, learnt, batch, generator),
                held_out_error,
                steps=steps,
                tokens=batch * side**2,
                rate=_rate(PICTURE_RATE, width),
            )


def noisy_crops(pictures: list[Tensor], count: int, side: int, *, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Crops of side x side pixels, (count, side, side) from -0.5 to 0.5, and the same with noise."""
    clean = _crops(pictures, count, side, generator)
    return clean, clean + NOISE * torch.randn(clean.shape, generator=generator)


def order_trainings(
    orders: Sequence[str],
    seeds: Sequence[int],
    pattern: DilatedPattern,
    *,
    width: int,
    heads: int,
    layers: int,
    side: int,
    patch: int,
    batch: int,
    steps: int,
    device: torch.device | str,
) -> Iterator[Training]:
    """A model that fills in hidden patches of crops, with dilated attention along each order, and with a window.

    A crop is side x side patches of patch x patch pixels, of which a half is hidden. `WINDOWS` among the orders is the
    window that computes as many pairs, or a little fewer. The loss is the squared error of hidden pixels. The held-out
    loss is one for each of `MORE_HELD_OUT_PICTURES`, over as many crops as a batch has. Models of one seed see the same
    crops.
    """
    learnt, held_out = picture_parts(MORE_HELD_OUT_PICTURES)
    window = window_of(keys_of_a_query(pattern, side**2, heads))

    def error(model: nn.Module, pictures: list[Tensor], count: int, generator: torch.Generator) -> Tensor:
        clean, is_hidden = hidden_patches(pictures, count, side, patch, generator=generator)
        clean, is_hidden = clean.to(device), is_hidden.to(device)
        return mse_loss(model(clean, is_hidden).float()[is_hidden], clean[is_hidden])

    def held_out_errors(model: nn.Module) -> Tensor:
        generator = torch.Generator().manual_seed(HELD_OUT_SEED)
        return torch.stack([error(model, [each], batch, generator) for each in held_out])

    branches = " ".join(f"{w}:{r}" for w, r in pattern.branches)
    sizes = {"width": width, "heads": heads, "layers": layers, "side": side, "patch": patch, "batch": batch}
    for seed in seeds:
        for name in orders:

            def attention(name: str = name) -> nn.Module:
                if name == WINDOWS:
                    return NeighbourhoodAttention(width, heads, window, prepare=rotary)
                ordering = Ordering.from_curve(name, side**2, grid=(side, side))
                return AlongOrder(width, heads, pattern, ordering, (side, side))

            yield Training(
                name,
                {"sweep": LEARNT_ORDERS, "seed": seed, "branches": branches, "window": window, "steps": steps, **sizes},
                lambda attention=attention: PatchModel(patch**2, width, [attention() for _ in range(layers)]),
                lambda model, generator: error(model, learnt, batch, generator),
                held_out_errors,
                steps=steps,
                tokens=batch * side**2,
                rate=_rate(PATCH_RATE, width),
            )


def hidden_patches(
    pictures: list[Tensor], count: int, side: int, patch: int, *, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Crops in patches, (count, side, side, patch^2) from -0.5 to 0.5; and (count, side, side) bool, True = hidden."""
    crops = _crops(pictures, count, side * patch, generator)
    patches = crops.unflatten(2, (side, patch)).unflatten(1, (side, patch)).transpose(2, 3).flatten(3)
    return patches, torch.rand(patches.shape[:3], generator=generator) < HIDDEN


def slide_training(
    pattern: DilatedPattern,
    *,
    side: int,
    heads: int,
    head_dim: int,
    layers: int,
    batch: int,
    steps: int,
    device: torch.device | str,
    seed: int = 0,
) -> Training:
    """A slide encoder that learns which of two kinds a slide's lesion is; the loss is a cross entropy in nats."""

    def loss(model: nn.Module, count: int, generator: torch.Generator) -> Tensor:
        slides = drawn_slides(count, side, generator, device=device)
        return cross_entropy(model(slides.tiles, slides.places).float(), slides.kinds)

    sizes = {"heads": heads, "head_dim": head_dim, "layers": layers, "side": side, "batch": batch, "steps": steps}
    branches = " ".join(f"{w}:{r}" for w, r in pattern.branches)
    return Training(
        DILATED,
        {"sweep": SLIDES, "seed": seed, "branches": branches, **sizes},
        lambda: SlideModel(TILE_FEATURES, heads * head_dim, heads, layers, pattern),
        lambda model, generator: loss(model, batch, generator),
        lambda model: loss(model, HELD_OUT_SLIDES, torch.Generator().manual_seed(HELD_OUT_SEED)),
        steps=steps,
        tokens=batch * side**2,
        rate=_rate(SLIDE_RATE, heads * head_dim // 2),
    )


def drawn_slides(count: int, side: int, generator: torch.Generator, *, device: torch.device | str) -> Slides:
    """`made_slides` of `TILE_FEATURES` features on a device."""
    return Slides(*(part.to(device) for part in made_slides(count, side, TILE_FEATURES, generator=generator)))


def _rate(rate: float, width: int) -> float:
    return rate * min(1.0, REFERENCE_WIDTH / width)


def _crops(pictures: list[Tensor], count: int, side: int, generator: torch.Generator) -> Tensor:
    # (count, side, side), from -0.5 to 0.5.
    crops = []
    for place in torch.randint(len(pictures), (count,), generator=generator).tolist():
        picture = pictures[place]
        row, column = (int(torch.randint(rest - side + 1, (), generator=generator)) for rest in picture.shape)
        crops.append(picture[row : row + side, column : column + side])
    return torch.stack(crops) - 0.5
