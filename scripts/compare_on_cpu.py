"""Grids and sliding windows on a CPU beside torch's scaled_dot_product_attention over tiles of queries, by hand.

The way by hand slices q, k and v, gives each tile a mask, and leaves the backward to autograd. It is timed with
several tiles; the fastest counts. One thread, calls in turn, medians of CPU seconds, which other processes on the
machine change less than the time that passes. `--out` keeps them as lines of JSON. Small calls stand beside one call
of torch's.
"""

import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from time import thread_time

import click
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hilbert_lib import DilatedPattern, Neighbourhood, dilated_attention, neighbourhood_attention
from hilbert_lib.lab.environment import environment

Run = Callable[[Tensor, Tensor, Tensor], Tensor]

WORKS = {  # pattern; batch, heads, head_dim; queries of a tile by hand
    "56 x 56, window 7": (Neighbourhood((56, 56), 7), (8, 4, 32), [(7, 7), (8, 8), (14, 14), (4, 56)]),
    "4,096 causal, window 512": (Neighbourhood(4096, 512, is_causal=True), (1, 8, 64), [(64,), (128,), (256,), (512,)]),
    "14 x 14, window 7": (Neighbourhood((14, 14), 7), (32, 8, 32), [(7, 7), (7, 14), (14, 14)]),
    "128 x 128, window 21": (Neighbourhood((128, 128), 21), (1, 4, 64), [(8, 8), (16, 16)]),
}
SMALL = 64  # tokens
CALLS_OF_SAMPLE = 20  # of small ones


def by_hand(near: Neighbourhood, tile: tuple[int, ...], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention over a neighbourhood with stride and dilation 1 and edge "shift", tile by tile."""
    axes, shape = len(near.shape), near.shape
    q, k, v = (x.unflatten(1, shape) for x in (q, k, v))
    lines = [range(0, side, size) for side, size in zip(shape, tile, strict=True)]
    outs = []
    for first in product(*lines):
        queries, keys, mask = [], [], torch.ones(1, 1, dtype=torch.bool)
        for start, size, axis in zip(first, tile, near.axes, strict=True):
            rows = torch.arange(start, min(start + size, axis.cells))
            begins = axis.start(rows).clamp(min=0)
            ends = rows + 1 if axis.is_causal else begins + axis.window
            columns = torch.arange(int(begins[0]), int(ends[-1]))
            sees = (columns >= begins[:, None]) & (columns < ends[:, None])
            mask = (mask[:, None, :, None] & sees[None, :, None]).flatten(2, 3).flatten(0, 1)
            queries.append(slice(start, start + len(rows)))
            keys.append(slice(int(begins[0]), int(ends[-1])))
        tensors = (x[:, *box].flatten(1, axes).transpose(1, 2) for x, box in ((q, queries), (k, keys), (v, keys)))
        out = scaled_dot_product_attention(*tensors, attn_mask=None if mask.all() else mask).transpose(1, 2)
        outs.append(out.unflatten(1, [rows.stop - rows.start for rows in queries]))
    for axis, line in reversed(list(enumerate(lines, 1))):
        outs = [torch.cat(outs[n : n + len(line)], axis) for n in range(0, len(outs), len(line))]
    return outs[0].flatten(1, axes)


def ways(near: Neighbourhood, tiles: list[tuple[int, ...]]) -> dict[str, Run]:
    """Ours, and the way by hand with each size of tiles."""

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return neighbourhood_attention(q, k, v, near)

    return {"ours": ours} | {"by hand, " + " x ".join(map(str, tile)): partial(by_hand, near, tile) for tile in tiles}


def differences(runs: dict[str, Run], leaves: list[Tensor], dout: Tensor) -> dict[str, float]:
    """The largest difference of the output and of the gradients from float64, by way; RuntimeError above 1e-5."""
    found = {}
    wide = [x.detach().double().requires_grad_() for x in leaves]
    out = next(iter(runs.values()))(*wide)
    exact = out, *torch.autograd.grad(out, wide, dout.double())
    for name, run in runs.items():
        out = run(*leaves)
        results = out, *torch.autograd.grad(out, leaves, dout)
        found[name] = max((x - y).abs().max().item() for x, y in zip(results, exact, strict=True))
        if not found[name] < 1e-5:
            raise RuntimeError(f"{name} is off by {found[name]:.1e}")
    return found


def measured(calls: dict[str, Callable[[], object]], repetitions: int, count: int = 1) -> dict[str, list[float]]:
    """CPU seconds of each call, in turn with the others; each sample is the mean of `count` calls."""
    seconds = {name: [] for name in calls}
    for _ in range(repetitions):
        for name, call in calls.items():
            call()
            start = thread_time()
            for _ in range(count):
                call()
            seconds[name].append((thread_time() - start) / count)
    return seconds


def works(repetitions: int) -> Iterator[dict]:
    """A record for each work and direction."""
    for name, (near, (batch, heads, head_dim), tiles) in WORKS.items():
        torch.manual_seed(0)
        leaves = [torch.randn(batch, near.length, heads, head_dim).requires_grad_() for _ in "qkv"]
        dout, runs = torch.randn(leaves[0].shape), ways(near, tiles)
        errors = differences(runs, leaves, dout)
        without = [x.detach() for x in leaves]

        def both(run: Run, leaves: list[Tensor] = leaves, dout: Tensor = dout) -> object:
            return torch.autograd.grad(run(*leaves), leaves, dout)

        sizes = {"work": name, "batch": batch, "heads": heads, "head_dim": head_dim}
        calls = {way: partial(run, *without) for way, run in runs.items()}
        yield sizes | {"direction": "forward", "errors": errors, "cpu_seconds": measured(calls, repetitions)}
        calls = {way: partial(both, run) for way, run in runs.items()}
        yield sizes | {"direction": "both", "errors": errors, "cpu_seconds": measured(calls, repetitions)}


def small_calls(repetitions: int) -> dict:
    """The record of calls of few tokens, without gradients."""
    tensors = torch.randn(3, 1, SMALL, 4, 32).unbind()  # one for q, k and v would be a kind of call of its own
    rows = [x.transpose(1, 2).contiguous() for x in tensors]
    side = round(SMALL**0.5)
    near, plane, one = Neighbourhood(SMALL, 9), Neighbourhood((side, side), 5), DilatedPattern((SMALL,), (1,))
    calls = {
        "torch": partial(scaled_dot_product_attention, *rows),
        "ours, window 9": partial(neighbourhood_attention, *tensors, near),
        "ours, 8 x 8, window 5": partial(neighbourhood_attention, *tensors, plane),
        "ours, one segment": partial(dilated_attention, *tensors, one),
    }
    seconds = measured(calls, 4 * repetitions, CALLS_OF_SAMPLE)
    return {"work": f"{SMALL} tokens", "direction": "forward", "cpu_seconds": seconds}


def line_of(record: dict) -> str:
    """A record in words: medians, and ours by the fastest other way."""
    medians = {name: median(seconds) for name, seconds in record["cpu_seconds"].items()}
    unit, scale = ("us", 1e6) if max(medians.values()) < 0.01 else ("ms", 1e3)
    told = ", ".join(f"{name} {scale * seconds:.0f} {unit}" for name, seconds in medians.items())
    beside = ""
    if "ours" in medians:
        beside = (
            f"; ours takes {medians['ours'] / min(s for n, s in medians.items() if n != 'ours'):.2f} of the fastest"
        )
    return f"{record['work']}, {record['direction']}: {told}{beside}"


@click.command(help=__doc__)
@click.option("--repetitions", type=click.IntRange(min=1), default=7, help="Samples of each way.")
@click.option("--out", default="", help="Folder whose results.jsonl keeps the records; without it nothing is written.")
def main(repetitions: int, out: str) -> None:
    torch.set_num_threads(1)
    kept = []
    for record in works(repetitions):
        kept.append(record)
        click.echo(line_of(record))
    with torch.no_grad():
        kept.append(small_calls(repetitions))
    click.echo(line_of(kept[-1]))
    if out:
        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        about = {"sweep": "cpu", "threads": 1, "environment": environment()}
        with (folder / "results.jsonl").open("a") as file:
            file.writelines(json.dumps(about | record) + "\n" for record in kept)


if __name__ == "__main__":
    main()
