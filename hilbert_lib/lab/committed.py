"""The records that are committed as evidence: which run of a notebook speaks for it."""

from collections.abc import Iterable
from pathlib import Path

from hilbert_lib.lab.environment import say_hardware
from hilbert_lib.lab.records import FAILED, REPORTS, RESULTS, last_record, read_records

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


def committed_records(notebook: str = "06_kernel_benchmarks") -> list[dict]:
    """The records of a notebook's `newest_run`; empty where there is none."""
    run = newest_run(notebook)
    return read_records(run / RESULTS) if run else []


def records_to_draw(records: list[dict], notebook: str = "06_kernel_benchmarks") -> tuple[list[dict], str]:
    """These records where they hold times, otherwise a notebook's committed ones; and their source, for a title.

    >>> records_to_draw([])[0] == committed_records()
    True
    """
    if any(record.get("kind") != "check" for record in records):
        return records, say_hardware(records[0]["environment"])
    committed = committed_records(notebook)
    return committed, f"committed record, {say_hardware(committed[0]['environment'])}" if committed else ""
