"""compute-sanitizer finds no access out of bounds and no race in small calls of the kernels, and would find one."""

import ast
import inspect
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import hilbert_lib

gl = pytest.importorskip("triton.experimental.gluon.language", reason="triton has no build for this platform")

PROGRAM = Path(__file__).parent / "sanitized.py"
KERNELS = Path(hilbert_lib.__file__).parent / "attention" / "triton" / "hopper"  # the warp-specialised ones
WARP_SPECIALISED = (
    "hopper",
    "divided",
    "boxes",
    "wide_boxes",
    "whole_boxes",
)  # families of calls that need compute capability 9.0
FOUND = 99  # the sanitizer's exit status where it found something
TIMEOUT = 900.0  # seconds, for one run
PLAIN = {"triton.forward.forward_kernel", "triton.backward.dq_kernel", "triton.backward.dkv_kernel"}
HOPPER = {"hopper.forward.forward_kernel", "hopper.backward.backward_kernel"}
# What each family of calls has to launch.
FAMILIES = {
    "plain": PLAIN | {"triton.backward.delta_kernel"},
    "hopper": HOPPER
    | {"hopper.queries.dq_kernel", "hopper.wide_keys.wide_keys_kernel", "hopper.wide_queries.wide_dq_kernel"},
    "divided": HOPPER | PLAIN,
    "boxes": {"hopper.grid_forward.forward_kernel", "hopper.grid_backward.backward_kernel"},
    "wide_boxes": {"hopper.grid_wide.wide_kernel", "hopper.grid_wide_backward.wide_backward_kernel"},
    "whole_boxes": {"hopper.grid_whole.whole_kernel"},
    "decoding": {"triton.decode.decode_kernel", "triton.decode.merge_kernel"},
    "grids": {
        "triton.grid.query_kernel",
        "triton.grid.key_kernel",
        "triton.backward.delta_kernel",
        "triton.rows.parts_kernel",
    },
    "merging": {"triton.merge.merge_kernel", "triton.merge.sum_kernel"},
    "by_row": {
        "triton.rows.merge_kernel",
        "triton.rows.add_kernel",
        "triton.rows.zero_kernel",
        "triton.rows.results_kernel",
    },
    "copied": {"triton.copies.copy_kernel", "triton.copies.sum_kernel"},
    "curve": {"curves.kernels.decode_kernel", "curves.kernels.encode_kernel"},
}


def run(family: str, tool: str | None = None) -> tuple[int, str]:
    """Exit status and output of a family's calls, alone or watched by a tool of compute-sanitizer."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(PROGRAM), family]
    if tool:
        # Not the compilers that Triton starts. A slow start of Python is no failure; every report counts.
        options = ["--target-processes", "application-only", "--launch-timeout", "300", "--print-limit", "0"]
        options += ["--max-connections", "100"]  # for tests beside this one: each takes the next free port
        options += ["--error-exitcode", str(FOUND)]
        if tool == "memcheck":
            env["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # each tensor an allocation, beyond which nothing may be read
            options += ["--padding", "512"]  # or the next one begins where it ends
            options += ["--report-api-errors", "no"]  # torch asks for some and handles them
        command = [sanitizer(), "--tool", tool, *options, *command]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    # In a session of its own: the program that is watched ends with it.
    with subprocess.Popen(command, env=env, start_new_session=True, **pipes) as process:
        try:
            said, _ = process.communicate(timeout=TIMEOUT)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, said


def sanitizer() -> str:
    found = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if found is None:
        pytest.skip("compute-sanitizer is not on the PATH: it comes with NVIDIA's CUDA toolkit")
    return found


def launched(said: str) -> set[str]:
    """The kernels that the program names when it is through, as folder, module and function."""
    names = re.findall(r"^ready:(.*)$", said, re.MULTILINE)
    assert len(names) == 1, f"the program did not end well: {said[-3000:]}"
    return {".".join(name.split(".")[-3:]) for name in names[0].split()}


def errors(said: str) -> int:
    """How many memcheck counts."""
    (count,) = re.findall(r"ERROR SUMMARY: (\d+) errors?", said)
    return int(count)


def races(said: str) -> list[set[str]]:
    """The accesses of each race that racecheck reports: file and line, or all that it says of one without them."""
    # racecheck then reports no further hazards.
    assert "Maximum number of hazards reached" not in said, "a family has too many calls for racecheck"
    (count,) = re.findall(r"RACECHECK SUMMARY: (\d+) hazards? displayed", said)
    access = re.compile(r"access at (?:.* in (\S+:\d+)|(.*?))(?: \[\d+ hazards?\])?$", re.MULTILINE)
    found = [{line or text for line, text in access.findall(each)} for each in said.split("Race reported between ")[1:]]
    assert len([each for each in found if each]) == int(count), f"not all of {count} are understood: {said[-3000:]}"
    return found


def nodes() -> Iterator[tuple[str, ast.AST]]:
    """What stands in the warp-specialised kernels, with the names of their files."""
    for path in KERNELS.glob("*.py"):
        yield from ((path.name, node) for node in ast.walk(ast.parse(path.read_text())))


def hand_over_lines() -> set[str]:
    """Where kernels tell specialised warps which part to run: their `def` lines, the calls, and an `if` around a call,
    whose line Triton writes down for it.

    Four warps store a byte for each of the others, and a barrier of all of them comes before it is read.
    """
    lines = set()
    for file, around in nodes():
        names = [n for n in ast.walk(around) if getattr(n, "attr", None) == "warp_specialize"]
        if isinstance(around, ast.FunctionDef | ast.If) and names:
            lines |= {f"{file}:{node.lineno}" for node in (around, *names)}
    return lines


def ranks_handed_over() -> list[set[str]]:
    """Lines of one hand-over each: a kernel for grids, and the first use of what it reads before its warps part.

    That is the ranks of residues, of a dilation that does not divide a side. Four warps store them, and a barrier of
    all warps comes before the load. A load carries the line of its first use, here `gl.cdiv`'s.
    """
    source, first = inspect.getsourcelines(gl.cdiv.fn)
    assert source[-1].strip() == "return (x + (div - 1)) // div"
    kernels = {line for line in hand_over_lines() if line.startswith("grid_") and text_of(line).startswith("def ")}
    return [{kernel, f"standard.py:{first + len(source) - 1}"} for kernel in sorted(kernels)]


def text_of(line: str) -> str:
    """What stands in a line, "file:number", of a warp-specialised kernel."""
    name, _, number = line.partition(":")
    return (KERNELS / name).read_text().splitlines()[int(number) - 1].strip()


def row_lines() -> set[str]:
    """Where the copying warp writes rows of lse and delta to shared memory, and the groups read them.

    One thread of that warp arrives at the barrier on which the groups wait, after the warp has joined. racecheck counts
    such an arrival for that thread's own accesses alone: of two kernels that hand over rows alike it named the one in
    which one thread arrives, and not the one in which all 32 do.
    """
    lines = set()
    for file, node in nodes():
        if isinstance(node, ast.Call) and getattr(node.func, "attr", None) in ("store", "load"):
            inside = {getattr(each, "id", getattr(each, "attr", None)) for each in ast.walk(node.func)}
            lines |= {f"{file}:{node.lineno}"} if inside & {"lse_rows", "delta_rows"} else set()
    return lines


def ceiling_lines() -> set[str]:
    """Lines at which the copying warp tells which keys are padding or cut off, and the groups read it.

    One thread arrives, as with `row_lines`. A load may carry the line of its first use: the lines of whole functions
    are allowed.
    """
    told = {
        "tiles.py": ("tell", "told"),
        "order.py": ("tell", "as_seen"),
        "steps.py": ("tell_ceilings", "told_of", "without_told", "without_masked"),
    }
    lines = set()
    for file, node in nodes():
        if isinstance(node, ast.FunctionDef) and node.name in told.get(file, ()):
            lines |= {f"{file}:{line}" for line in range(node.body[0].lineno, node.end_lineno + 1)}
    return lines


def exchange_lines() -> set[str]:
    """Where groups that share a tile hand over weights and slopes: one thread arrives after the group has joined,
    as with `row_lines`.
    """
    lines = set()
    for file, node in nodes():
        is_access = isinstance(node, ast.Call) and getattr(node.func, "attr", None) in ("store", "load")
        if is_access and file in ("wide.py", "grid_wide_backward.py"):
            inside = {getattr(each, "id", getattr(each, "attr", None)) for each in ast.walk(node.func)}
            lines |= {f"{file}:{node.lineno}"} if inside & {"weights", "slopes"} else set()
    return lines


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_no_access_is_out_of_bounds_and_none_races(family):
    if family in WARP_SPECIALISED and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    sanitizer()
    status, said = run(family)  # compiles: the tools then watch launches alone
    assert status == 0, said[-3000:]
    assert launched(said) >= FAMILIES[family]
    status, said = run(family, "memcheck")
    assert launched(said) >= FAMILIES[family]
    assert (errors(said), status) == (0, 0), said[-3000:]
    status, said = run(family, "racecheck")
    assert launched(said) >= FAMILIES[family]
    allowed = [hand_over_lines(), row_lines(), ceiling_lines(), exchange_lines()] if family in WARP_SPECIALISED else []
    pairs = ranks_handed_over() if family in WARP_SPECIALISED else []
    found = [race for race in races(said) if race not in pairs and not any(race <= each for each in allowed)]
    unexpected = sorted(" and ".join(sorted(race)) for race in found)
    assert not unexpected, "\n".join(unexpected)
    assert status in (0, FOUND if allowed else 0), said[-3000:]


@pytest.mark.gpu
def test_an_element_read_past_a_tensor_is_found():
    status, said = run("past_the_end", "memcheck")
    assert "Invalid __global__ read" in said
    assert errors(said) > 0
    assert status != 0


@pytest.mark.gpu
def test_a_race_is_found_and_where_it_is():
    status, said = run("race", "racecheck")
    assert launched(said) == {"__main__.race_kernel"}
    assert races(said) != []
    assert all(access.startswith("sanitized.py:") for race in races(said) for access in race)
    assert status == FOUND


def test_the_lines_at_which_races_are_allowed_are_few():
    def texts(lines):
        return sorted(map(text_of, lines))

    # Along a sequence and on grids; heads above 128, windows of whole boxes and a sequence's dq have their own.
    kernels = ["def backward_kernel("] * 2 + ["def dq_kernel("] + ["def forward_kernel("] * 2
    kernels += ["def whole_kernel(", "def wide_backward_kernel("]
    kernels += ["def wide_dq_kernel(", "def wide_kernel(", "def wide_keys_kernel("]
    assert texts(hand_over_lines()) == [*kernels, *["gl.warp_specialize(["] * 12, *["if OF_KEYS:"] * 2]
    assert len(exchange_lines()) == 6
    # Of each kernel for grids the two lines together, and neither alone.
    assert [len(pair) for pair in ranks_handed_over()] == [2] * 5
    assert "ceilings.rows.index(block % STAGES).store(row.to(ceilings.rows.dtype))" in texts(ceiling_lines())
    assert len(ceiling_lines()) < 45
    accesses = [re.search(r"(\w+_rows)\.index\(stage\)\.(load|store)\(", text).groups() for text in texts(row_lines())]
    both = itertools.product(("delta_rows", "lse_rows"), ("load", "store"))
    assert sorted(accesses) == [each for each in both for _ in range(3)]
