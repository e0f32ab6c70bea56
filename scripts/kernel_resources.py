"""Registers, bytes kept in memory and shared memory of the plain kernels, for each kind of GPU, without one.

Prints the table of docs/kernels.md. The compiler is the installed Triton's: half an hour on two cores.
"""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import click

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/kernels.md"
TARGETS = {80: "A100", 86: "RTX 3090", 89: "RTX 4090", 90: "H100, H200", 100: "B200", 120: "RTX 5090"}


def cell(facts: dict) -> str:
    """Registers of a thread, bytes that it keeps in memory around its loops of products, and KiB of shared memory."""
    kept = f" +{facts['spilled']}" if facts["spilled"] else ""
    kept += f" ({facts['in loops']} in loops)" if facts["in loops"] else ""
    return f"{facts['registers']}{kept}, {facts['shared'] / 1024:.0f}"


def table(facts: dict[int, dict[str, dict]]) -> str:
    """The table, of facts by target and kernel."""
    names = list(next(iter(facts.values())))
    head = ["kernel", *(f"sm_{target} ({TARGETS[target]})" for target in facts)]
    rows = [head, ["---"] * len(head)]
    rows += [[name, *(cell(facts[target][name]) for target in facts)] for name in names]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def cells_of_page() -> dict[tuple[str, int], str]:
    """The cells of the page, by kernel and target."""
    rows = [line.strip("| \n").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    head, _, *rows = next(rows[n:] for n, row in enumerate(rows) if row[0] == "kernel")
    targets = [int(re.search(r"sm_(\d+)", name)[1]) for name in head[1:]]
    return {(name, target): told for name, *cells in rows for target, told in zip(targets, cells, strict=True)}


def version_of_page() -> str:
    """The release of Triton that the page is of."""
    return re.search(r"Triton (\d+\.\d+\.\d+)", PAGE.read_text())[1]


def told(target: int, steps: str = "portable") -> dict[str, dict]:
    """What the compiler says of each kernel. steps: "portable" for the target's own, "elsewhere" for other GPUs'."""
    command = [sys.executable, "tests/attention/triton/compile_kernels.py", str(target), steps]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH"))))
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=env, cwd=ROOT)
    return json.loads(done.stdout)


@click.command(help=__doc__)
@click.option("--target", "targets", type=click.Choice([*map(str, TARGETS)]), multiple=True, help="By default all.")
@click.option("--elsewhere", is_flag=True, help="With the steps of GPUs that have none of their own.")
def main(targets, elsewhere) -> None:
    click.echo(f"Triton {version('triton')}")
    steps = "elsewhere" if elsewhere else "portable"
    click.echo(table({target: told(target, steps) for target in map(int, targets or TARGETS)}))


if __name__ == "__main__":
    main()
