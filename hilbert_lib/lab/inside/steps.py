"""The steps of notebook 11: what each changes, what it does on numpy tiles, and its sides for `run_sides` on a GPU."""

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from math import e, log2
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hilbert_lib.lab.exact_rows import exact_rows
from hilbert_lib.lab.inside import numpy_tiles
from hilbert_lib.lab.pairs import Side, relative_difference
from hilbert_lib.lab.workload import Workload, by_backend

if TYPE_CHECKING:
    import pandas as pd

STEP_SWEEP, LIBRARY = "steps of a kernel", "the library's kernel"
TILE = 64  # queries of a program
SAMPLED_PROGRAMS = 4  # of a step whose programs all do the same
SAMPLED_ROWS = 4  # of a program, held against float64
ALL, TOUCHED, CORNER = "ALL", "TOUCHED", "CORNER"


class Step(NamedTuple):
    """One step: its name, what is new, and the constants of `kernels.tile_kernel`; None of `kernels.row_kernel`."""

    name: str
    change: str
    box: tuple[int, int] | None  # cells of a tile of queries, and of keys
    keys: str = ALL
    stages: int = 0


STEPS = (
    Step("1 rows", "one query a program", None),
    Step("2 tiles", "64 queries share what is read; one pass, on tensor cores", (1, 64)),
    Step("3 window", "tiles that no query sees are skipped", (1, 64), TOUCHED),
    Step("4 squares", "queries and keys are squares of cells", (8, 8), TOUCHED),
    Step("5 corner", "squares of keys begin where the window begins", (8, 8), CORNER),
    Step("6 boxes", "TMA copies a square in one instruction", (8, 8), CORNER, 1),
    Step("7 ahead", "TMA copies the next square meanwhile", (8, 8), CORNER, 2),
)


def source_of(name: str) -> str:
    """The source of a function of the kernels' file.

    >>> source_of("product").splitlines()[1]
    'def product(a, b, acc):'
    """
    text = numpy_tiles.KERNELS.read_text(encoding="utf-8")
    (node,) = (each for each in ast.parse(text).body if isinstance(each, ast.FunctionDef) and each.name == name)
    return "\n".join(text.splitlines()[node.decorator_list[0].lineno - 1 : node.end_lineno])


def key_rectangles(step: Step, side: int, window: int, top: int, left: int) -> tuple[range, range]:
    """Rows and columns of the grid that the tile of queries at (top, left) is held against, as the kernel says.

    They may go past the grid's end. step: of tiles.

    >>> key_rectangles(STEPS[4], side=64, window=9, top=8, left=0)
    (range(4, 20), range(0, 16))
    """
    found = numpy_tiles.kernels()
    reached = []
    for first, size in zip((top, left), step.box, strict=True):
        start, stop = found.reach(first, first + size - 1, side, window, size, getattr(found, step.keys))
        start, stop = int(start), int(stop)
        reached.append(range(start, start - (start - stop) // size * size))
    return tuple(reached)


def computed_share(step: Step, side: int, window: int) -> float:
    """Scores that a step of tiles computes for one that a query sees, over the whole grid.

    >>> computed_share(STEPS[1], side=64, window=8)
    64.0
    """
    rows, columns = step.box
    tall = [len(key_rectangles(step, side, window, top, 0)[0]) for top in range(0, side, rows)]
    wide = [len(key_rectangles(step, side, window, 0, left)[1]) for left in range(0, side, columns)]
    return rows * columns * sum(tall) * sum(wide) / (side * window) ** 2


def count_steps(work: Workload) -> "pd.DataFrame":
    """Work of each step for one query, counted while its kernel runs on numpy tiles.

    Columns: step, change, scores (for one that a query sees), exponentials (likewise), bytes, addresses and boxes (read
    for a query), and error (relative, of sampled rows, to float64). Programs of the first two steps all do the same: a
    few of them are run.

    work: a square window on a square grid of whole tiles, one head, float32, on the CPU.
    """
    import pandas as pd

    return pd.DataFrame([_count(step, work) for step in STEPS])


def _count(step: Step, work: Workload) -> dict:
    queries = TILE if step.box else 1
    every = work.length // queries
    programs = torch.linspace(0, every - 1, SAMPLED_PROGRAMS).long().tolist() if step.keys == ALL else range(every)
    out, done = run_on_numpy(step, work, ((number, 0) for number in programs))
    for_query = {name: count / (len(programs) * queries) for name, count in done.items()}
    counts = {name: for_query[name] / work.pattern.window[0] ** 2 for name in ("scores", "exponentials")}
    counts |= {name: for_query.get(name, 0) for name in ("bytes", "addresses", "boxes")}
    return {"step": step.name, "change": step.change, **counts, "error": _error(out, work)}


def run_on_numpy(step: Step, work: Workload, programs: Iterable[tuple[int, int]]) -> tuple[Tensor, Counter]:
    """The output of some programs, by their numbers (tile, head), NaN where they write nothing; and what they did."""
    found, (side, _) = numpy_tiles.kernels(), work.pattern.shape
    q, k, v, _ = work.tensors
    out = torch.full_like(q, torch.nan)
    arguments = [numpy_tiles.pointer(x) for x in (q, k, v, out)]
    if step.stages:
        arguments[1:3] = [numpy_tiles.boxes(_on_grid(x, side), [*step.box, 1, work.head_dim]) for x in (k, v)]
    arguments += [side, work.pattern.window[0], _scale(work), work.heads]
    kernel = found.tile_kernel if step.box else found.row_kernel
    return out, numpy_tiles.launch(kernel, programs, arguments, constants_of(step, work.head_dim, vars(found)))


def _error(out: Tensor, work: Workload) -> float:
    # Of rows that were computed: some of each of a few programs.
    rows = out[0, :, 0].isfinite().all(-1).nonzero()[:, 0]
    rows = rows[torch.linspace(0, len(rows) - 1, min(len(rows), SAMPLED_PROGRAMS * SAMPLED_ROWS)).long()]
    exact, _ = exact_rows(*work.tensors, work.pattern, head=0, queries=rows)
    return relative_difference([out[0, rows, 0]], [exact])


def run_step(step: Step, q: Tensor, k: Tensor, v: Tensor, work: Workload) -> Tensor:
    """The output of a step's kernel, compiled. head_dim is 64 or 128, dtype bfloat16."""
    from triton.experimental.gluon.language import NVMMASharedLayout, bfloat16
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from hilbert_lib.lab.inside import kernels

    side, out = work.pattern.shape[0], torch.empty_like(q)
    if step.stages:
        box = [*step.box, 1, work.head_dim]
        layout = NVMMASharedLayout.get_default_for(box, bfloat16)
        k, v = (TensorDescriptor.from_tensor(_on_grid(x, side), box, layout) for x in (k, v))
    kernel = kernels.tile_kernel if step.box else kernels.row_kernel
    arguments = q, k, v, out, side, work.pattern.window[0], _scale(work), work.heads
    grid = work.length // (TILE if step.box else 1), work.heads
    kernel[grid](*arguments, **constants_of(step, work.head_dim, vars(kernels)), num_warps=4)
    return out


def step_sides(work: Workload) -> Iterator[tuple[Side, Side]]:
    """Pairs for `run_sides` on a Hopper GPU: each step beside the next, and the last beside the library's kernel."""
    calls = {step.name: partial(run_step, step) for step in STEPS} | {LIBRARY: partial(by_backend, "hopper")}
    sides = [work.side(name, call, sweep=STEP_SWEEP) for name, call in calls.items()]
    yield from pairwise(sides)


def constants_of(step: Step, head_dim: int, names: Mapping) -> dict:
    """The constants of a step's kernel. names: those of the kernels' file, where KEYS has a number."""
    if step.box is None:
        return {"D": head_dim}
    rows, columns = step.box
    return {"D": head_dim, "ROWS": rows, "COLUMNS": columns, "KEYS": names[step.keys], "STAGES": step.stages}


def _scale(work: Workload) -> float:
    return work.head_dim**-0.5 * log2(e)


def _on_grid(x: Tensor, side: int) -> Tensor:
    return x.view(side, side, *x.shape[2:])
