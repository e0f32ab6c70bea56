"""Other versions of the warp-specialised kernels beside the library's: the same work in turn, on a Hopper GPU.

A step on a kernel is kept or left by what it gives here; reports/HISTORY.md tells of each. A version is a folder. Its
order.py, steps.py, forward.py, backward.py or division.py takes the place of the library's file of that name, and its
own files import each other. Where its configurations are others, forward.py has a HOPPER_FORWARD and backward.py a
HOPPER_BACKWARD as the library's launch.py.

--without makes versions of the forward that lack a part, to see what it costs. Their results are wrong. Then forwards
alone are timed, and none causal, where what is not finite would start the plain kernel.
"""

import importlib.util
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from hashlib import sha256
from itertools import product
from multiprocessing import TimeoutError as NotReady
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType

import click
import torch

import hilbert_lib.attention.triton.hopper as package
from hilbert_lib import DilatedPattern, dilated_attention, get_gpu_info
from hilbert_lib.attention.triton import launch
from hilbert_lib.attention.triton.hopper import backward, division, forward, order, steps
from hilbert_lib.attention.triton.hopper import launch as hopper
from hilbert_lib.attention.triton.start import forget
from hilbert_lib.cli.options import numbers, usage_errors
from hilbert_lib.lab.pairs import Side, run_back_to_back, run_sides
from hilbert_lib.lab.sweeps.kernels import Named, Pairs, backends
from hilbert_lib.lab.workload import Workload, fused_backend, grid

# In this order, since steps.py imports order.py, and forward.py both.
OURS = {"order": order, "steps": steps, "forward": forward, "backward": backward, "division": division}
CONFIGURATIONS = {"HOPPER_FORWARD": "forward", "HOPPER_BACKWARD": "backward"}
DIRECTIONS = ("forward", "backward")
COMPILE_SECONDS = 120  # for one pair's kernels, beside others
# What the forward can do without and still run: its file, a pattern that is there so many times, and what it becomes.
PARTS = {
    "exponentials": [("steps", r"weights = gl\.exp2\((.*)\)(  # .*)?\n", r"weights = \1\2\n", 1)],
    "softmax": [
        ("steps", r"( +)(largest = gl\.maximum\(m, )",
         r"\1return scores * (scale * LOG2_E), gl.zeros_like(m) + 1.0, m, total\n\1\2", 1),
    ],
    "copies": [  # after the first of each stage
        ("forward", r"( +)mbarrier\.expect\((.*index\(stage\)), (.*)\)\n",
         r"\1mbarrier.expect(\2, \3, pred=block < STAGES)\n\1mbarrier.arrive(\2, pred=block >= STAGES)\n", 2),
        ("forward", r"(_tiles\.index\(stage\))\)\n", r"\1, pred=block < STAGES)\n", 2),
    ],
}  # fmt: skip


def files(folder: Path) -> list[Path]:
    """Those of a version."""
    return [path for path in (folder / f"{name}.py" for name in OURS) if path.is_file()]


@cache
def kernels(folder: Path) -> dict[str, ModuleType]:
    """The modules of a version, by the names of those whose place they take."""
    found = {}
    try:
        for path in files(folder):
            spec = importlib.util.spec_from_file_location(f"{path.stem} of {folder}", path)
            found[path.stem] = importlib.util.module_from_spec(spec)
            # Those after it import it, by the package's name or their own.
            sys.modules[f"{package.__name__}.{path.stem}"] = vars(package)[path.stem] = found[path.stem]
            spec.loader.exec_module(found[path.stem])
    finally:
        sys.modules.update({f"{package.__name__}.{name}": module for name, module in OURS.items()})
        vars(package).update(OURS)
    return found


@contextmanager
def in_place(folder: Path) -> Iterator[None]:
    """The kernels of a version in place of the library's."""
    theirs = OURS | kernels(folder)
    ours = {name: vars(hopper)[name] for name in CONFIGURATIONS}
    vars(package).update(theirs)
    # Bound when the launches were imported; the kernels are looked up at each call.
    launch.division = hopper.division = theirs["division"]
    forget()
    vars(hopper).update({name: getattr(theirs[of], name, ours[name]) for name, of in CONFIGURATIONS.items()})
    try:
        yield
    finally:
        vars(package).update(OURS)
        vars(hopper).update(ours, division=division)
        launch.division = division
        forget()


def without(parts: str, folder: Path) -> Path:
    """A version of the forward that lacks parts: names of `PARTS`, joined by +. It lies in a folder of this one.

    Raises:
        click.BadParameter: for an unknown part.
        ValueError: where a kernel is no longer as `PARTS` knows it.
    """
    texts = {name: Path(OURS[name].__file__).read_text(encoding="utf-8") for name in ("steps", "forward")}
    for part in parts.split("+"):
        if part not in PARTS:
            raise click.BadParameter(f"parts must be of {', '.join(PARTS)}, got {part!r}", param_hint="--without")
        for name, pattern, becomes, times in PARTS[part]:
            texts[name], found = re.subn(pattern, becomes, texts[name])
            if found != times:
                raise ValueError(f"{name}.py must have {times} of {pattern!r}, which {part!r} leaves out; got {found}")
    (made := folder / f"without {parts}").mkdir()
    for name, text in texts.items():
        (made / f"{name}.py").write_text(text, encoding="utf-8")
    return made


def attend(backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, work: Workload) -> torch.Tensor:
    """The call that is timed."""
    return dilated_attention(q, k, v, work.pattern, is_causal=work.is_causal, backend=backend)


def pairs(
    folders: Sequence[Path], dilation_rates: Sequence[int], directions: Sequence[str], **shape
) -> Iterator[tuple[Side, Side]]:
    """Each version and the library's kernels on the same branches, direction by direction, causal and not.

    Args:
        folders: of the versions.
        dilation_rates: of the branches, whose segments double from 2,048 on.
        directions: of `DIRECTIONS`.
        **shape: lengths, heads, head_dims and device, as `grid` takes them.
    """
    pattern = DilatedPattern([2048 << n for n in range(len(dilation_rates))], dilation_rates)
    for folder in folders:
        # By what it holds, too: a record of the same name is not taken for it.
        name = f"{folder.name}-{sha256(b''.join(path.read_bytes() for path in files(folder))).hexdigest()[:8]}"
        for theirs, ours in _twice(grid({"doubling": pattern}, **shape)):
            if theirs.parameters["direction"] not in directions:
                continue

            def run(folder=folder, theirs=theirs):
                with in_place(folder):
                    return theirs.run()

            yield replace(theirs, name=name, run=run), ours


def _twice(works: Named) -> Pairs:
    # The library's kernels beside themselves, forward and backward.
    for label, work in works:
        yield from backends([(label, work)], attend, [fused_backend(work)])


def run_once(folders: Sequence[Path], shape: dict, seconds: float = COMPILE_SECONDS) -> None:
    """Every pair in a process of its own, so that all kernels are compiled at once and one that hangs is found.

    Args:
        folders: of the versions.
        shape: what else `pairs` takes.
        seconds: that one pair may take.

    Raises:
        click.ClickException: for a version of which a pair took longer.
    """
    numbers = range(2 * len(shape["directions"]) * len(shape["head_dims"]))  # causal and not
    with get_context("spawn").Pool() as pool:  # whose processes end with it, hanging or not
        waiting = [(folder, pool.apply_async(_run_pair, (folder, shape, n))) for folder, n in product(folders, numbers)]
        for folder, result in waiting:
            try:
                result.get(timeout=seconds)
            except NotReady:
                raise click.ClickException(f"{folder}: a call did not end within {seconds} seconds") from None


def _run_pair(folder: Path, shape: dict, number: int) -> None:
    for side in list(pairs([folder], **shape))[number]:
        side.run()
    if shape["device"].type == "cuda":
        torch.cuda.synchronize()


@click.command(help=__doc__)
@click.argument("folders", nargs=-1, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--lengths", type=numbers, default="64k", show_default=True, help="Tokens: 64k,256k.")
@click.option(
    "--dilation-rates",
    type=numbers,
    default="1,2,4,8,16",
    show_default=True,
    help="Of branches whose segments double from 2,048 on. The paper's are 1,2,4,6,12.",
)
@click.option("--heads", type=click.IntRange(min=1), default=16, show_default=True)
@click.option("--head-dims", type=numbers, default="64,128", show_default=True)
@click.option(
    "--direction", "directions", multiple=True, type=click.Choice(DIRECTIONS), default=DIRECTIONS, help="Repeatable."
)
@click.option("--without", "parts", multiple=True, help=f"Parts, joined by +, of {', '.join(PARTS)}. Repeatable.")
@click.option(
    "--back-to-back", is_flag=True, help="Time windows of calls too, not causal, with power and joules: 15 s a pair."
)
@click.option("--repetitions", type=click.IntRange(min=5), default=20, show_default=True, help="Samples a side.")
@click.option("--out", default="", help="Folder whose results.jsonl keeps the records; without it nothing is written.")
def main(
    folders, lengths, dilation_rates, heads, head_dims, directions, parts, back_to_back, repetitions, out
) -> None:  # fmt: skip
    if not folders and not parts:
        raise click.UsageError("versions are needed: FOLDERS, or --without")
    for folder in folders:
        if not files(folder):
            raise click.BadParameter(f"{folder} must hold one of {', '.join(f'{name}.py' for name in OURS)}")
    if get_gpu_info().capability != (9, 0):
        raise click.ClickException("a GPU of compute capability 9.0 is needed, the only one that these kernels run on")
    directions = ("forward",) if parts else directions
    shape = {
        "dilation_rates": dilation_rates,
        "directions": directions,
        "heads": heads,
        "head_dims": head_dims,
        "device": torch.device("cuda"),
    }
    with ExitStack() as stack, usage_errors():
        made = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folders = (*folders, *(without(each, made) for each in dict.fromkeys(parts)))
        run_once(folders, shape | {"lengths": lengths[:1], "heads": 1})
        shape["lengths"] = lengths
        run_sides(_asked(pairs(folders, **shape), parts), device="cuda", output_dir=out, repetitions=repetitions)
        if back_to_back:
            run_back_to_back(_asked(pairs(folders, **shape), True), device="cuda", output_dir=out)


def _asked(pairs: Iterator[tuple[Side, Side]], plain: object) -> Iterator[tuple[Side, Side]]:
    return (pair for pair in pairs if not (plain and pair[1].parameters["is_causal"]))


if __name__ == "__main__":
    main()
