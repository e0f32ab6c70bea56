"""The records that are committed as evidence: which run of a notebook speaks for it."""

from collections.abc import Iterable
from pathlib import Path

from hilbert_lib.lab.records import FAILED, REPORTS, RESULTS, last_record

MACHINES = "h[12]00*"  # folders of the runs that are committed; local ones lie beside them
TELLING = "h200*"  # those of them that numbers and advice are from
OF_SEVERAL_GPUS = ("07_ring_attention",)  # notebooks whose run says more the more GPUs it had


def newest_run(name: str, file: str = RESULTS, machines: Iterable[Path] | None = None) -> Path | None:
    """The folder of the newest finished run of a notebook, or of another kind of record; None without one.

    Of the notebooks `OF_SEVERAL_GPUS` it is the newest on the most GPUs.

    Args:
        name: of the folder, or what stands before the hash of the run's parameters.
        file: that it must hold.
        machines: folders of runs; by default those of `TELLING`, of which runs without a GPU are none.

    >>> run = newest_run("06_kernel_benchmarks")
    >>> run is None or (run / "manifest.json").exists()
    True
    """
    anywhere, machines = machines is not None, REPORTS.glob(TELLING) if machines is None else machines
    kinds = (f"*/{name}/{file}", f"*/{name}-*/{file}")
    runs = [path.parent for machine in machines for kind in kinds for path in machine.glob(kind)]
    runs = [run for run in runs if not run.name.endswith(FAILED)]  # what was measured before it failed is no record
    facts = {run: run_environment(run, file) for run in runs}
    runs = [run for run in runs if anywhere or facts[run]["gpus"]]

    def rank(run: Path) -> tuple[int, str]:
        return len(facts[run]["gpus"]) if name in OF_SEVERAL_GPUS else 1, facts[run]["utc"]

    return max(runs, key=rank, default=None)


def run_environment(run: Path, file: str = RESULTS) -> dict:
    """The environment of a run, as its newest record tells it.

    Args:
        run: its folder.
        file: of records, read where there is no results.jsonl.
    """
    path = run / RESULTS
    return last_record(path if path.exists() else run / file)["environment"]
