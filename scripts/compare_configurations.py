"""Other tile sizes of the plain kernels beside the library's: whole calls in turn, on this GPU.

The times tell what to put into `CONFIGS` of attention/triton/arguments.py, or on another GPU into `ON_B200` or
`ELSEWHERE`. reports/HISTORY.md has what it gave. A candidate is one kernel's; the others keep the library's. 16-bit
calls of up to 128 elements a row read k and v through a table, since without one Hopper's own kernels serve them.
"""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context

import click
import torch
from triton import OutOfResources

from hilbert_lib import DilatedPattern, Ordering, dilated_attention
from hilbert_lib.attention.triton.arguments import CONFIGS, ELSEWHERE, ON_B200, Config, for_device
from hilbert_lib.lab.pairs import Results, run_sides
from hilbert_lib.lab.workload import Workload

PATTERN = DilatedPattern((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16))
DTYPES = {2: "bfloat16", 4: "float32"}
# block_m, block_n, num_warps, num_stages; by kernel, bytes of an element and head_dim. All fit sm_90's shared memory.
CANDIDATES = {
    "forward": {
        (2, 64): [(128, 64, 8, 3), (128, 64, 4, 2), (64, 64, 4, 3), (128, 128, 8, 3)],
        (2, 128): [(128, 64, 8, 2), (64, 64, 4, 3), (64, 64, 8, 3), (128, 128, 8, 2)],
        (2, 256): [(64, 32, 8, 3), (64, 32, 8, 2), (128, 64, 8, 2)],
        (4, 64): [(64, 32, 8, 2), (32, 32, 4, 2), (64, 32, 4, 2), (128, 32, 8, 2), (64, 16, 4, 2), (64, 64, 16, 2)],
        (4, 128): [(32, 32, 8, 2), (32, 32, 4, 2), (16, 32, 4, 2), (32, 16, 4, 2), (32, 64, 8, 2)],
        (4, 256): [(16, 32, 8, 1), (32, 32, 8, 1), (16, 32, 8, 2), (16, 32, 4, 1), (16, 16, 4, 2), (64, 32, 16, 1)],
    },
    "dq": {
        (2, 64): [(128, 64, 8, 3), (64, 64, 4, 2), (64, 128, 8, 3), (128, 64, 4, 3)],
        (2, 128): [(64, 64, 4, 3), (64, 64, 8, 3), (128, 64, 8, 2), (128, 32, 8, 3)],
        (2, 256): [(64, 64, 8, 2), (128, 32, 8, 2), (64, 32, 8, 2)],
        (4, 64): [(64, 32, 8, 2), (32, 32, 4, 1), (64, 64, 8, 1), (32, 64, 4, 2), (64, 32, 4, 2), (64, 64, 16, 1)],
        (4, 128): [(32, 32, 8, 1), (32, 32, 8, 2), (64, 32, 8, 1), (32, 32, 4, 1), (32, 64, 8, 1), (64, 64, 16, 1)],
        (4, 256): [(16, 16, 8, 1), (16, 32, 8, 1), (32, 16, 8, 1), (32, 32, 16, 1)],
    },
    "dkv": {
        (2, 64): [(64, 128, 8, 2), (64, 64, 4, 3), (64, 128, 8, 3), (64, 128, 4, 3)],
        (2, 128): [(64, 128, 8, 2), (32, 128, 8, 2), (32, 64, 4, 3), (64, 64, 8, 3)],
        (2, 256): [(64, 64, 8, 1), (32, 64, 8, 1), (32, 32, 8, 2)],
        (4, 64): [(32, 64, 8, 1), (64, 64, 8, 1), (32, 32, 4, 2), (32, 64, 4, 1), (32, 32, 8, 1)],
        (4, 128): [(16, 32, 8, 1), (16, 32, 4, 1), (32, 64, 8, 1), (16, 64, 8, 1), (32, 64, 16, 1), (32, 32, 16, 1)],
        (4, 256): [(16, 16, 8, 1), (16, 32, 8, 1), (32, 32, 8, 1), (32, 32, 16, 1)],
    },
}
GROUPS = {
    f"{kernel} {DTYPES[size]} {head_dim}": (kernel, (size, head_dim))
    for kernel, table in CANDIDATES.items()
    for size, head_dim in table
}


def library() -> dict[str, dict[tuple[int, int], Config]]:
    """The library's configurations for this GPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return for_device(device, CONFIGS, ELSEWHERE, ON_B200)


@contextmanager
def in_place(kernel: str, key: tuple[int, int], config: Config) -> Iterator[None]:
    """A configuration in place of the library's."""
    table = library()[kernel]
    ours, table[key] = table[key], config
    try:
        yield
    finally:
        table[key] = ours


def name_of(config: Config) -> str:
    """Tile of queries by keys, warps and stages."""
    return f"{config.block_m} x {config.block_n}, {config.num_warps} warps, {config.num_stages} stages"


def pairs(group: tuple[str, tuple[int, int]], length: int, heads: int, device: torch.device) -> Iterator:
    """(candidate, the library's) of one kernel, for each candidate.

    Args:
        group: the kernel's name, and the bytes of an element and head_dim.
        length, heads, device: of the work.
    """
    kernel, (size, head_dim) = group
    work = Workload(PATTERN, length, heads, head_dim, device, dtype=DTYPES[size])
    through_a_table = size == 2 and head_dim <= 128
    options = {"kv_ordering": Ordering.linear(length) if through_a_table else None, "backend": "triton"}
    about = {"sweep": "configurations", "kernel": kernel, "table": through_a_table}
    ours = work.side(
        name_of(library()[kernel][group[1]]),
        lambda q, k, v, work: dilated_attention(q, k, v, PATTERN, **options),
        "forward" if kernel == "forward" else "backward",
        **about,
    )
    for numbers in CANDIDATES[kernel][group[1]]:
        config = Config(*numbers)

        def run(config=config) -> Results:
            with in_place(kernel, group[1], config):
                return ours.run()

        yield replace(ours, name=name_of(config), run=run), ours


def fits(name: str, length: int, heads: int, device: torch.device) -> list[bool]:
    """Compile and run a group's candidates once; whether each has room on the GPU.

    Args:
        name: of the group in `GROUPS`.
        length, heads, device: as `pairs` takes them.
    """
    found = []
    for theirs, _ in pairs(GROUPS[name], length, heads, device):
        try:
            theirs.run()
            found.append(True)
        except OutOfResources:
            found.append(False)
    return found


@click.command(help=__doc__)
@click.option("--length", type=click.IntRange(min=1), default=32768, show_default=True, help="Tokens.")
@click.option("--heads", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--repetitions", type=click.IntRange(min=5), default=10, show_default=True, help="Samples a side.")
@click.option(
    "--only",
    type=click.Choice(tuple(GROUPS)),
    multiple=True,
    metavar="GROUP",
    help="One kernel, dtype and head_dim, as 'dkv float32 128'; may be given several times. By default all.",
)
@click.option("--out", default="", help="Folder whose results.jsonl keeps the records; without it nothing is written.")
def main(length, heads, repetitions, only, out) -> None:
    if not torch.cuda.is_available():
        raise click.ClickException("a CUDA device is needed")
    shape = (length, heads, torch.device("cuda"))
    # Each group is compiled in a process of its own, so that all are at once; this one then finds them compiled.
    names = tuple(dict.fromkeys(only)) or tuple(GROUPS)
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        fitting = list(pool.map(fits, names, *([x] * len(names) for x in shape)))
    for name, each in zip(names, fitting, strict=True):
        cases = [pair for pair, is_fit in zip(pairs(GROUPS[name], *shape), each, strict=True) if is_fit]
        run_sides(cases, device="cuda", output_dir=out, repetitions=repetitions, seconds=0.2)


if __name__ == "__main__":
    main()
