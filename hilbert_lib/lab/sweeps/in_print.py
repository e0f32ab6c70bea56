"""Published comparisons of layouts, rebuilt: both sides as they were printed, then one function on both: notebook 12.

P1  2511.05832: windows along the Hilbert curve in FlexAttention, beside windows of cells
P2  2509.26538: tiles along the Hilbert curve beside dense attention, and beside windows of as many pairs
P4  2512.16615: an order of storage in one kernel of blocks
P5  2502.04507: windows that move by tiles, beside windows that move by cells
P6  2504.16922: strides of windows

P3 is measured by notebook 13. Each side is held against float64 of what it computes. What a side needs of its inputs
besides (a layout, a mask of blocks) is made before it is timed, unless its name says "reordered".
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import conv2d, scaled_dot_product_attention, unfold

from hilbert_lib import checks
from hilbert_lib.attention.api import attend
from hilbert_lib.attention.backends.flex_masks import FLEX_BLOCK
from hilbert_lib.files import one_line
from hilbert_lib.lab.cache.in_print import (
    Tiles,
    along_curve,
    blocks_used,
    inverse_of,
    of_grid,
    squares,
)
from hilbert_lib.lab.calls import Call, Way
from hilbert_lib.lab.pairs import Results, Side, relative_difference, run_sides
from hilbert_lib.lab.sweeps.grids import attend_by_flex
from hilbert_lib.lab.sweeps.options import NOT_TRIED, natten_ways
from hilbert_lib.lab.sweeps.points import run_flex
from hilbert_lib.lab.workload import Workload
from hilbert_lib.ordering import Ordering
from hilbert_lib.patterns.dilated import FLOP_FORWARD, DilatedPattern
from hilbert_lib.patterns.neighbourhood import Neighbourhood

PRINT_SWEEP = "in print"  # begins the name of each claim's sweep
PRINTED, ONE = "as printed", "one function"
EAGER, CONVOLUTIONS, FUSED, FLEX, OURS = "eager", "convolutions", "fused", "FlexAttention", "ours"
DENSE, WINDOWS, TILES = "dense", "windows", "tiles"
PICTURE_WORK, TEXT_WORK = "16x16 8 1x2x16", "16x16 32 4 2x16"
ORDER_WORK, STRIDE_WORK = "32x32 9x9 2x16", "8x8 4x4 2x2 2x16"

Heads = Callable[[Tensor], Tensor]


def sweep_of_claim(claim: str) -> str:
    """The sweep of a claim's pairs in a record.

    >>> sweep_of_claim("P1")
    'in print, P1'
    """
    return f"{PRINT_SWEEP}, {claim}"


@dataclass(frozen=True)
class Published:
    """One way to compute a `Workload`, as it is timed: a name, the layout of its inputs, and the call.

    stored: q, k or v (1, n, heads, head_dim) as the call takes it. restored: of the call's result, back. error: of its
    output (1, n, heads, head_dim), where it does not compute the workload's pattern.
    """

    name: str
    stored: Heads
    call: Callable[[Tensor, Tensor, Tensor], Tensor]
    restored: Heads
    error: Callable[[Tensor], float] | None = None

    def reordered(self) -> "Published":
        """The same with the layout made in the call."""

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.restored(self.call(*(self.stored(x) for x in (q, k, v))))

        return replace(self, name=f"{self.name}, reordered", stored=_as_is, call=call, restored=_as_is)

    def side(self, work: Workload, pairs: int, *, claim: str, **parameters) -> Side:
        """It on the inputs of a work; pairs: of a query and a key that attend, of one head."""
        inputs = cache(lambda: tuple(self.stored(x) for x in work.tensors[:3]))

        @torch.no_grad()
        def run() -> Results:
            self.call(*inputs())
            return ()

        def error(_: Results) -> float:
            with torch.no_grad():
                out = self.restored(self.call(*inputs()))
            return work.error((out,)) if self.error is None else self.error(out)

        sizes = {"heads": work.heads, "head_dim": work.head_dim, "dtype": work.dtype}
        facts = {"sweep": sweep_of_claim(claim), "claim": claim, "way": self.name, **parameters, **sizes}
        return Side(self.name, facts, run, cache(error), FLOP_FORWARD * pairs * work.heads * work.head_dim)


def _as_is(x: Tensor) -> Tensor:
    return x


def by_eager_windows(work: Workload, images: int) -> Published:
    """Swin's window attention in eager steps: products, a bias, softmax, products; windows lie one after the other.

    The bias is zero, so that float64 without one can check it.
    """
    stored, restored = _window_layout(work, images)
    cells = prod(work.pattern.window)
    bias = torch.zeros(work.heads // images, cells, cells, dtype=getattr(torch, work.dtype), device=work.device)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q * work.head_dim**-0.5) @ k.transpose(-2, -1)
        return (scores + bias).softmax(-1) @ v

    return Published(EAGER, stored, call, restored)


def by_fused_windows(work: Workload, images: int) -> Published:
    """The same by torch's fused attention: every window is dense, so there is no mask at all."""
    stored, restored = _window_layout(work, images)
    return Published(FUSED, stored, scaled_dot_product_attention, restored)


def _window_layout(work: Workload, images: int) -> tuple[Heads, Heads]:
    # (1, n, images * heads, head_dim) to (windows * images, heads, cells of a window, head_dim), and back.
    near, heads = work.pattern, work.heads // images
    side, (rows, columns) = near.window[0], near.shape
    order = torch.arange(near.length).view(rows // side, side, columns // side, side).transpose(1, 2).flatten()
    order = order.to(work.device)
    places, windows = inverse_of(order), near.length // side**2

    def stored(x: Tensor) -> Tensor:
        by_window = x[0, order].view(windows, side**2, images, heads, work.head_dim)
        return by_window.permute(0, 2, 3, 1, 4).reshape(windows * images, heads, side**2, work.head_dim).contiguous()

    def restored(out: Tensor) -> Tensor:
        by_cell = out.view(windows, images, heads, side**2, work.head_dim).permute(0, 3, 1, 2, 4)
        return by_cell.reshape(1, near.length, work.heads, work.head_dim)[:, places]

    return stored, restored


def by_convolutions(work: Workload) -> Published:
    """Slide attention: shifted copies of k and v by depthwise convolutions, then products, softmax, and a sum.

    A second convolution of as many kernels, which a model would learn, is added to each; here its weights are 0. Keys
    outside of the picture are zeros that count.
    """
    (rows, columns), side = work.pattern.shape, work.pattern.window[0]
    dtype, heads, dim = getattr(torch, work.dtype), work.heads, work.head_dim
    shifts = torch.eye(side**2, dtype=dtype, device=work.device).view(side**2, 1, side, side).repeat(dim, 1, 1, 1)
    learnt = torch.zeros_like(shifts)

    def stored(x: Tensor) -> Tensor:
        return x[0].permute(1, 2, 0).reshape(heads, dim, rows, columns).contiguous()

    def copies(x: Tensor) -> Tensor:
        found = conv2d(x, shifts, padding=side // 2, groups=dim) + conv2d(x, learnt, padding=side // 2, groups=dim)
        return found.view(heads, dim, side**2, rows, columns)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = ((q * dim**-0.5)[:, :, None] * copies(k)).sum(1, keepdim=True)
        return (scores.softmax(2) * copies(v)).sum(2)

    def restored(out: Tensor) -> Tensor:
        return out.flatten(2).permute(2, 0, 1)[None]

    def error(out: Tensor) -> float:
        q, k, v = (stored(x)[:1].double() for x in work.tensors[:3])
        keys, values = (unfold(x, side, padding=side // 2).view(dim, side**2, -1) for x in (k, v))
        scores = torch.einsum("dn,dwn->wn", q.flatten(2)[0] * dim**-0.5, keys)
        exact = torch.einsum("wn,dwn->nd", scores.softmax(0), values)
        return relative_difference([out[0, :, 0]], [exact])

    return Published(CONVOLUTIONS, stored, call, restored, error=error)


def by_flex_rule(work: Workload, order: Tensor, *, distance: bool = False) -> Published:
    """FlexAttention with the rule of an `AlongOrder`, of tokens that are stored in its order, heads first.

    distance: whether the distance of two places is added to each score, as 2511.05832's notebook does; it has weight 0
    here, so that float64 without it can check the output.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    rule, places = work.pattern.rule, inverse_of(order)

    def attends(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return rule(query, key)

    device = str(work.device)
    mask = create_block_mask(attends, None, None, work.length, work.length, device=device, BLOCK_SIZE=FLEX_BLOCK)
    weight = torch.zeros(work.heads, device=work.device)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + (query - key).to(score.dtype) * weight[h]

    more = {"score_mod": score_mod} if distance else {}

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return run_flex(q, k, v, mask, FLEX_BLOCK, **more)

    return Published(FLEX, _heads_first(order), call, lambda out: out.transpose(1, 2)[:, places])


def _heads_first(order: Tensor) -> Heads:
    return lambda x: x[:, order].transpose(1, 2).contiguous()


def by_flex_order(work: Workload, ordering: Ordering, name: str) -> Published:
    """FlexAttention on exact windows of a grid, whose cells are stored in an order."""
    ordering = ordering.to(work.device)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_by_flex(q, k, v, work.pattern, ordering)

    def stored(x: Tensor) -> Tensor:
        return ordering.apply(x, dim=1)

    return Published(f"{FLEX}, {name}", stored, call, lambda out: ordering.undo(out, dim=1))


def by_ours(work: Workload) -> Published:
    """This library on exact windows, from plain rows."""
    return Published(OURS, _as_is, lambda q, k, v: attend(q, k, v, work.pattern), _as_is)


def parse_picture(text: str) -> tuple[tuple[int, int], int, tuple[int, int, int]]:
    """Grid, window, and images, heads and head_dim that a text names. ValueError for any other text.

    >>> parse_picture("16x16 8 1x2x16")
    ((16, 16), 8, (1, 2, 16))
    """
    shape, (window,), sizes = _parsed(text, (2, 1, 3))
    if window > min(shape):
        raise ValueError(f"the window must be at most a side of the grid, got {window}")
    return shape, window, sizes


def parse_tiles(text: str) -> tuple[Tiles, int, int]:
    """Tiles, heads and head_dim that a text names. ValueError for any other text.

    >>> parse_tiles("16x16 32 4 2x16")[0].size
    60
    """
    shape, (tokens,), (count,), (heads, head_dim) = _parsed(text, (2, 1, 1, 2))
    return Tiles(shape, tokens, count), heads, head_dim


def parse_order(text: str) -> tuple[Neighbourhood, int, int]:
    """Windows, heads and head_dim that a text names. ValueError for any other text.

    >>> parse_order("32x32 9x9 2x16")[0].window
    (9, 9)
    """
    shape, window, (heads, head_dim) = _parsed(text, (2, 2, 2))
    return Neighbourhood(shape, window), heads, head_dim


def parse_stride(text: str) -> tuple[Neighbourhood, int, int]:
    """Windows with a stride, heads and head_dim that a text names. ValueError for any other text.

    >>> parse_stride("8x8 4x4 2x2 2x16")[0].stride
    (2, 2)
    """
    shape, window, stride, (heads, head_dim) = _parsed(text, (0, 0, 0, 2))
    return Neighbourhood(shape, window, stride=stride), heads, head_dim


def _parsed(text: str, counts: Sequence[int]) -> list[tuple[int, ...]]:
    # The numbers of each word; a count of 0 takes any.
    words = [tuple(map(int, word.split("x"))) for word in text.split()]
    if len(words) != len(counts) or any(count not in (0, len(word)) for count, word in zip(counts, words, strict=True)):
        raise ValueError("it has other words, or words of other numbers")
    for number in (number for word in words for number in word):
        checks.integer("each number", number, least=1)
    return words


def check_works(
    *,
    windows: Sequence[str],
    slides: Sequence[str],
    tiles: Sequence[str],
    orders: Sequence[str],
    volumes: Sequence[str],
    strides: Sequence[str],
) -> None:
    """Hold the works of notebook 12 to what they may be: a ValueError names the list, its text and what is allowed."""
    picture = f"a grid, a window, and images x heads x head_dim, such as {PICTURE_WORK}"
    stride = f"a grid, a window, a stride, and heads x head_dim, such as {STRIDE_WORK}"
    _check("windows", windows, lambda text: _window_of_squares(*parse_picture(text)), picture)
    _check("slides", slides, lambda text: _odd_window(*parse_picture(text)), picture)
    _check("tiles", tiles, parse_tiles, f"a grid, tokens of text, tiles, and heads x head_dim, such as {TEXT_WORK}")
    _check("orders", orders, parse_order, f"a grid, a window, and heads x head_dim, such as {ORDER_WORK}")
    _check("volumes", volumes, parse_stride, stride)
    _check("strides", strides, parse_stride, stride)


def _check(name: str, texts: Sequence[str], parse: Callable[[str], object], allowed: str) -> None:
    if not texts:
        raise ValueError(f"{name} must name {allowed}; got none")
    for text in texts:
        try:
            parse(text)
        except ValueError as error:
            raise ValueError(f"{name} must name {allowed}; got {text!r}: {error}") from None


def _window_of_squares(shape: tuple[int, int], window: int, _: object) -> None:
    if any(side % window for side in shape):
        raise ValueError(f"the window must divide the sides of the grid, got {window}")


def _odd_window(shape: tuple[int, int], window: int, _: object) -> None:
    if window % 2 == 0:
        raise ValueError(f"the window must be odd, got {window}")


def window_pairs(texts: Sequence[str], *, device: torch.device, dtype: str) -> Iterator[tuple[Side, Side]]:
    """P1's window attention: the first work by eager steps beside the last work along the curve, as it was printed.

    Then of each work its own windows, in one function on both sides: FlexAttention along the curve beside all others.
    """
    how = {"claim": "P1", "attention": "window"}
    for text in texts:
        shape, window, (images, heads, head_dim) = parse_picture(text)
        near = squares(shape, window)
        work = Workload(near, near.length, images * heads, head_dim, device, dtype=dtype)
        if text == texts[0]:
            eager = by_eager_windows(work, images).side(work, near.pairs, **how, **_facts(work), kind=PRINTED)
            yield eager, _printed_side(texts[-1], "window", device=device, dtype=dtype)
        others = [by_eager_windows(work, images), by_fused_windows(work, images)]
        yield from _beside_the_curve(work, others, **how)


def slide_pairs(texts: Sequence[str], *, device: torch.device, dtype: str) -> Iterator[tuple[Side, Side]]:
    """P1's slide attention: the first work by convolutions beside the last along the curve, as it was printed.

    Then of each work its own windows, in one function on both sides. Convolutions count keys outside of the picture
    as zeros, so theirs differs at the border.
    """
    how = {"claim": "P1", "attention": "slide"}
    for text in texts:
        shape, window, (images, heads, head_dim) = parse_picture(text)
        near = Neighbourhood(shape, window, edge="clip")
        work = Workload(near, near.length, images * heads, head_dim, device, dtype=dtype)
        if text == texts[0]:
            first = by_convolutions(work).side(work, near.pairs, **how, **_facts(work), kind=PRINTED)
            yield first, _printed_side(texts[-1], "slide", device=device, dtype=dtype)
        yield from _beside_the_curve(work, [by_convolutions(work)], **how)


def _facts(work: Workload) -> dict:
    return {"grid": of_grid(work.pattern.shape), "window": of_grid(work.pattern.window)}


def _printed_side(text: str, attention: str, *, device: torch.device, dtype: str) -> Side:
    # What the publication times along the curve: as many places as the window has cells.
    shape, window, (images, heads, head_dim) = parse_picture(text)
    pattern, length = along_curve(attention, shape, window), prod(shape)
    order = Ordering.from_curve("hilbert", length, grid=shape).perm.to(device)
    work = Workload(pattern, length, images * heads, head_dim, device, dtype=dtype)
    if attention == "window":
        pairs = sum(min(window**2, length - first) ** 2 for first in range(0, length, window**2))
    else:
        places = torch.arange(length)
        reach = window**2 // 2
        pairs = int(((places + reach).clamp(max=length - 1) - (places - reach).clamp(min=0) + 1).sum())
    facts = {"claim": "P1", "attention": attention, "grid": of_grid(shape), "window": str(window**2), "kind": PRINTED}
    return by_flex_rule(work, order, distance=True).side(work, pairs, **facts)


def _beside_the_curve(work: Workload, others: Iterable[Published], **about) -> Iterator[tuple[Side, Side]]:
    near = work.pattern
    orders = {name: Ordering.from_curve(name, near.length, grid=near.shape) for name in ("raster", "hilbert")}
    raster, hilbert = (by_flex_order(work, ordering, name) for name, ordering in orders.items())
    facts = {**about, **_facts(work), "kind": ONE}
    used = {f"used_{name}": round(blocks_used(near, ordering)[1], 4) for name, ordering in orders.items()}
    own = hilbert.side(work, near.pairs, **facts, **used)
    for other in (*others, raster, by_ours(work), hilbert.reordered()):
        yield other.side(work, near.pairs, **facts), own


def tile_pairs(texts: Sequence[str], *, device: torch.device, dtype: str) -> Iterator[tuple[Side, Side]]:
    """P2: dense attention, and windows of as many pairs, beside tiles along the curve by FlexAttention and in batches.

    Windows see all of the text, and the text sees all. In batches torch's attention gets each tile's keys in a copy of
    its own, without a mask.
    """
    for text in texts:
        tiles, heads, head_dim = parse_tiles(text)
        facts = {"claim": "P2", "grid": of_grid(tiles.shape), "text": tiles.text, "tiles": tiles.tiles}
        work = Workload(tiles.pattern, tiles.length, heads, head_dim, device, dtype=dtype)
        order = tiles.order.to(device)
        flex = by_flex_rule(work, order)
        own = [flex.side(work, tiles.pairs, **facts, kind=TILES)]
        own += [by_batches(tiles, order).side(work, tiles.pairs, **facts, kind=TILES)]
        dense = _dense(tiles.length, heads, head_dim, device, dtype)
        dense_side = _call_side(DENSE, dense, dense.by(_dense_backend(device)), **facts, kind=DENSE)
        windows = Call(
            Neighbourhood(tiles.shape, tiles.window),
            prod(tiles.shape),
            heads,
            head_dim,
            device,
            dtype=dtype,
            extra_keys=tiles.text,
            extra_queries=tiles.text,
        )
        facts |= {"window": tiles.window}
        windows_side = _call_side(WINDOWS, windows, windows.by(), **facts, kind=WINDOWS)
        yield from ((other, side) for other in (dense_side, windows_side) for side in own)
        yield flex.reordered().side(work, tiles.pairs, **facts, kind=TILES), own[0]


def by_batches(tiles: Tiles, order: Tensor) -> Published:
    """Tiles by torch's fused attention: shared tokens as one dense call, tiles as a batch with keys of their own."""
    shared, count, size, places = tiles.shared, tiles.tiles, tiles.size, inverse_of(order)

    def by_tile(x: Tensor) -> Tensor:
        return x[0, :, shared:].unflatten(1, (count, size)).transpose(0, 1)  # [tiles, heads, size, head_dim]

    def with_shared(x: Tensor) -> Tensor:
        return torch.cat([x[:, :, :shared].expand(count, -1, -1, -1), by_tile(x)], 2)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first = scaled_dot_product_attention(q[:, :, :shared], k, v)
        rest = scaled_dot_product_attention(by_tile(q), with_shared(k), with_shared(v))
        return torch.cat([first, rest.transpose(0, 1).flatten(1, 2)[None]], 2)

    return Published("batches", _heads_first(order), call, lambda out: out.transpose(1, 2)[:, places])


def _dense(length: int, heads: int, head_dim: int, device: torch.device, dtype: str) -> Call:
    return Call(DilatedPattern((length,), (1,)), length, heads, head_dim, device, dtype=dtype)


def _dense_backend(device: torch.device) -> str:
    return "cudnn" if device.type == "cuda" else "sdpa"


def _call_side(name: str, call: Call, way: Way, *, claim: str, **parameters) -> Side:
    # A `Call` by one way, forward.
    tokens = cache(lambda: call.inputs.stored(way.ordering))

    @torch.no_grad()
    def run() -> Results:
        way.attend(tokens())
        return ()

    sizes = {"heads": call.heads, "head_dim": call.head_dim, "dtype": call.dtype}
    facts = {"sweep": sweep_of_claim(claim), "claim": claim, "way": name, **parameters, **sizes}
    error = cache(lambda _: call.error(way, gradient=False))
    return Side(name, facts, run, error, call.flop("forward"))


def order_pairs(texts: Sequence[str], *, device: torch.device, dtype: str) -> Iterator[tuple[Side, Side]]:
    """P4: exact windows in FlexAttention with cells stored row by row and by Hilbert order, beside Morton order."""
    for text in texts:
        near, heads, head_dim = parse_order(text)
        work, sides = Workload(near, near.length, heads, head_dim, device, dtype=dtype), {}
        for name in ("raster", "hilbert", "morton"):
            ordering = Ordering.from_curve(name, near.length, grid=near.shape)
            touched, used = blocks_used(near, ordering)
            facts = {"claim": "P4", **_facts(work), "order": name, "touched": touched, "used": round(used, 4)}
            sides[name] = by_flex_order(work, ordering, name).side(work, near.pairs, **facts, kind=ONE)
        yield sides["raster"], sides["morton"]
        yield sides["hilbert"], sides["morton"]
        yield by_ours(work).side(work, near.pairs, claim="P4", **_facts(work), kind=ONE), sides["morton"]


def stride_pairs(texts: Sequence[str], claim: str, *, device: torch.device, dtype: str) -> Iterator[tuple[Side, Side]]:
    """P5, P6: windows with a stride by this library, beside dense attention, windows without stride, FlexAttention
    with cells stored in tiles of the stride, and NATTEN in all its tiles, where it is installed.
    """
    for text in texts:
        near, heads, head_dim = parse_stride(text)
        size = near.length, heads, head_dim, device
        strided, plain = (Call(each, *size, dtype=dtype) for each in (near, replace(near, stride=1)))
        facts = {"claim": claim, "grid": of_grid(near.shape), "window": of_grid(near.window)}
        with_stride, without = {**facts, "stride": of_grid(near.stride)}, {**facts, "stride": "1"}
        own = _call_side(OURS, strided, strided.by(), **with_stride)
        dense = _dense(near.length, heads, head_dim, device, dtype)
        yield _call_side(DENSE, dense, dense.by(_dense_backend(device)), **facts, stride=""), own
        yield _call_side(OURS, plain, plain.by(), **without), own
        yield _call_side(f"{FLEX}, tiles", strided, _in_tiles(strided), **with_stride), own
        if device.type == "cuda" and _is_installed("natten"):
            yield from ((_call_side(name, strided, make(), **with_stride), own) for name, make in _natten(strided))
            yield from ((_call_side(name, plain, make(), **without), own) for name, make in _natten(plain))


def _is_installed(name: str) -> bool:
    try:
        import_module(name)
    except ImportError:
        return False
    return True


def _natten(call: Call) -> Iterable[tuple[str, Callable[[], Way]]]:
    return natten_ways(call).items()


def _in_tiles(call: Call) -> Way:
    # FlexAttention with the cells of each tile of the stride one after the other.
    near = call.pattern
    cells = torch.unravel_index(torch.arange(near.length), near.shape)
    tile = torch.zeros(near.length, dtype=torch.int64)
    for line, side, stride in zip(cells, near.shape, near.stride, strict=True):
        tile = tile * -(-side // stride) + line // stride
    ordering = Ordering.from_permutation(tile.argsort(stable=True)).to(call.device)
    return Way(f"{FLEX}, tiles", lambda x: (attend_by_flex(x.q, x.k, x.v, near, ordering),), ordering)


def run_in_print(pairs: Iterable[tuple[Side, Side]], *, device: torch.device, **how) -> list[dict]:
    """`run_sides` pair by pair. On a GPU a pair that fails is recorded with its reason, and the others go on."""
    records = []
    for pair in pairs:
        try:
            records += run_sides([pair], device=device, **how)
        except Exception as error:  # what a side raises is its own affair
            if device.type != "cuda":
                raise
            torch.cuda.synchronize()  # after an error that no later call survives, this ends the sweep
            a, b = ({"name": side.name, "parameters": side.parameters} for side in pair)
            records.append({"kind": NOT_TRIED, "reason": one_line(error), "a": a, "b": b})
            print(f"{pair[0].name} beside {pair[1].name}: not tried: {one_line(error)}", flush=True)
    return records
