"""Many points one after another: a progress bar on a terminal, one quiet line for each point elsewhere."""

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hilbert_lib.lab.suite.manifest import close_abandoned, error_line, final_folder, is_finished
from hilbert_lib.lab.suite.points import Point
from hilbert_lib.lab.suite.run import interruptible, run_point


def progress_bar() -> Progress:
    """A bar on a terminal, and none elsewhere; what its console prints is whole lines, taken literally."""
    console = Console(soft_wrap=True, highlight=False, markup=False)
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    return Progress(*columns, console=console, disable=not console.is_terminal, transient=True)


def run_points(
    points: list[Point], run_folder: Path, facts: dict, *, timeout: float = 3600, force: bool = False
) -> dict[str, str]:
    """Run every point that is not finished; one that fails does not end the others.

    Args:
        points: in the order of the run.
        run_folder: folder of the run-id; made where missing.
        facts: as `hilbert_lib.lab.environment.environment` gives them.
        timeout: seconds for each notebook.
        force: run finished ones again, and begin unfinished ones anew.

    Returns:
        Name of each point to its outcome: "ok", "reused" or "failed".

    Raises:
        Interrupted: at SIGINT or SIGTERM, after the running point's manifest says so.
        OSError: if not even a manifest can be written.
    """
    run_folder.mkdir(parents=True, exist_ok=True)
    progress = progress_bar()
    console = progress.console
    for name in close_abandoned(run_folder):
        console.print(f"interrupted {name}: the process of an earlier run was killed; see {name}.failed")
    outcomes = {}
    with interruptible(), progress:
        task = progress.add_task("", total=len(points))

        def show_cell(name: str, cell: int) -> None:
            progress.update(task, description=f"{name} In [{cell}]")

        for point in points:
            line = point.name
            if is_finished(point, run_folder) and not force:
                outcome = "reused"
            else:
                manifest = run_point(point, run_folder, facts, timeout=timeout, resume=not force, on_cell=show_cell)
                outcome = manifest["status"]
                if outcome != "ok":
                    line += f"  {error_line(manifest)}; see {final_folder(run_folder, manifest)}"
            outcomes[point.name] = outcome
            console.print(f"{outcome:<11} {line}")
            progress.advance(task)
    return outcomes
