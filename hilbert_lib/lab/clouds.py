"""Made clouds of points: the tissue on a slide, and a room in voxels. The same cells on every machine."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from hilbert_lib.checks import integer, one_of

COS, SIN = 12 / 13, 5 / 13  # the room is turned by 22.6 degrees: no scanner stands along the walls
HEIGHT, BOXES = 0.4, 12  # of the room, in its lengths; pieces of furniture
FAR = 2**20  # more cells than the room has along an axis, on both sides of 0


def made_tissue(count: int, seed: int = 0) -> Tensor:
    """Tiles of a slide that hold tissue, row by row: (count, 2) int64, about half of a square of tiles.

    They are the cells of smooth noise with the largest values.

    >>> made_tissue(100).shape
    torch.Size([100, 2])
    """
    side = math.ceil(math.sqrt(2 * integer("count", count, least=1)))
    generator = torch.Generator("cpu").manual_seed(seed)
    noise = torch.zeros(side, side, dtype=torch.float64, device="cpu")
    for knots, weight in ((6, 1.0), (18, 0.45), (54, 0.2)):
        coarse = torch.rand(1, 1, knots, knots, generator=generator, dtype=torch.float64, device="cpu") - 0.5
        noise += weight * interpolate(coarse, (side, side), mode="bicubic", align_corners=True)[0, 0]
    rim = torch.linspace(-1, 1, side, dtype=torch.float64, device="cpu") ** 4
    noise -= rim[:, None] + rim  # tissue keeps clear of the edge of a slide
    chosen = noise.flatten().topk(count).indices.sort().values
    return torch.stack([chosen // side, chosen % side], 1)


def made_room(count: int, seed: int = 0) -> Tensor:
    """Voxels of a scanned room, row by row: (count, 3) int64. Floor, walls and boxes, with gaps of a few cells.

    >>> made_room(100).shape
    torch.Size([100, 3])
    """
    length = math.sqrt(integer("count", count, least=1) / 3)
    for _ in range(3):  # the cells grow with the square of the length
        length *= math.sqrt(count / len(_room_of(length, seed)))
    while len(cells := _room_of(length, seed)) < count:
        length *= 1.01
    generator = torch.Generator("cpu").manual_seed(seed)
    seen = torch.randperm(len(cells), generator=generator, device="cpu")[:count].sort().values
    return cells[seen] - cells[seen].amin(0)


def _room_of(length: float, seed: int) -> Tensor:
    # Every voxel of a room of this length [cells], in ascending order.
    numbers = []
    for corner, along, across in _faces(seed):
        steps = [2 + int(1.9 * length * math.hypot(*edge)) for edge in (along, across)]
        first, second = (torch.arange(n, dtype=torch.float64, device="cpu") / (n - 1) for n in steps)
        x, y, z = (length * (corner[axis] + first[:, None] * along[axis] + second * across[axis]) for axis in range(3))
        turned = [(x * COS - y * SIN).floor().long(), (x * SIN + y * COS).floor().long(), z.floor().long()]
        numbers.append(sum((line + FAR) * (2 * FAR) ** power for line, power in zip(turned, (2, 1, 0), strict=True)))
    cells = torch.cat([number.flatten() for number in numbers]).unique()
    return torch.stack([cells // (2 * FAR) ** 2, cells // (2 * FAR) % (2 * FAR), cells % (2 * FAR)], 1) - FAR


Edge = tuple[float, float, float]


def _faces(seed: int) -> Iterator[tuple[Edge, Edge, Edge]]:
    # The rectangles of a room of length 1: a corner, and two edges from it.
    x, y, z = (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, HEIGHT)
    zero = (0.0, 0.0, 0.0)
    yield from ((zero, x, y), (zero, x, z), (zero, y, z), (y, x, z), (x, y, z))
    generator = torch.Generator("cpu").manual_seed(seed)
    for _ in range(BOXES):
        at_x, at_y, wide, deep, high = torch.rand(5, generator=generator, dtype=torch.float64, device="cpu").tolist()
        corner = (0.8 * at_x, 0.8 * at_y, 0.0)
        wide, deep, high = (0.05 + 0.15 * share for share in (wide, deep, high))
        x, y, z = (wide, 0.0, 0.0), (0.0, deep, 0.0), (0.0, 0.0, high)
        beyond_x, beyond_y = (corner[0] + wide, corner[1], 0.0), (corner[0], corner[1] + deep, 0.0)
        above = (corner[0], corner[1], high)
        yield from ((corner, x, z), (corner, y, z), (beyond_x, y, z), (beyond_y, x, z), (above, x, y))


CLOUDS = {"tissue": made_tissue, "room": made_room}


def parse_work(text: str) -> tuple[str, int, int, int, int]:
    """The cloud, points, window, heads and head_dim that a text names. ValueError for any other text.

    >>> parse_work("tissue 4096 9 2x16")
    ('tissue', 4096, 9, 2, 16)
    """
    try:
        cloud, *sizes, heads = text.split()
        one_of("cloud", cloud, CLOUDS)
        count, window, heads, head_dim = (int(size) for size in (*sizes, *heads.split("x")))
        for name, value in {"points": count, "window": window, "heads": heads, "head_dim": head_dim}.items():
            integer(name, value, least=1)
        if window % 2 == 0:
            raise ValueError(f"window must be odd, got {window}")
    except ValueError as error:
        allowed = "a cloud, points, an odd window, heads and head_dim, such as room 4096 5 2x16"
        raise ValueError(f"works must be {allowed}; got {text!r}: {error}") from None
    return cloud, count, window, heads, head_dim
