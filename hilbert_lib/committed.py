"""The records that are committed as evidence: which run of a notebook speaks for it."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from hilbert_lib.records import FAILED, REPORTS, RESULTS, last_record, read_records

MACHINES = "h200*"  # folders of the runs that are committed; local ones lie beside them
OF_SEVERAL_GPUS = ("07_ring_attention",)  # notebooks whose run says more the more GPUs it had


def newest_run(name: str, file: str = RESULTS, machines: Iterable[Path] | None = None) -> Path | None:
    """The folder of the newest finished run of a notebook, or of another kind of record; None without one.

    Of the notebooks `OF_SEVERAL_GPUS` it is the newest on the most GPUs.

    Args:
        name: of the folder, or what stands before the hash of the run's parameters.
        file: that it must hold.
        machines: folders of runs; by default those that are committed for H200s, of which runs without a GPU are none.

    >>> run = newest_run("06_kernel_benchmarks")
    >>> run is None or (run / "manifest.json").exists()
    True
    """
    anywhere, machines = machines is not None, REPORTS.glob(MACHINES) if machines is None else machines
    kinds = (f"*/{name}/{file}", f"*/{name}-*/{file}")
    runs = [path.parent for machine in machines for kind in kinds for path in machine.glob(kind)]
    runs = [run for run in runs if not run.name.endswith(FAILED)]  # what was measured before it failed is no record
    facts = {run: run_environment(run, file) for run in runs}
    runs = [run for run in runs if anywhere or facts[run]["gpus"]]

    def rank(run: Path) -> tuple[int, str]:
        return len(facts[run]["gpus"]) if name in OF_SEVERAL_GPUS else 1, facts[run]["utc"]

    return max(runs, key=rank, default=None)


def speaking_records(name: str, machines: Iterable[Path] | None = None) -> dict[Path, list[dict]]:
    """The records that speak for a notebook, by the run that made them; empty where there is no run.

    They are those of its `newest_run`. A later run that its machine's time ended (folder NN_ended_early) speaks in its
    place for the sweeps that it had finished: those of which it holds as many records.

    Args:
        name, machines: as for `newest_run`.

    >>> speaking_records("a notebook that there is not")
    {}
    """
    machines = None if machines is None else list(machines)
    run, early = (newest_run(each, machines=machines) for each in (name, f"{name[:2]}_ended_early"))
    if run is None:
        return {}
    records = read_records(run / RESULTS)
    if early is None or run_environment(early)["utc"] < run_environment(run)["utc"]:
        return {run: records}
    later = read_records(early / RESULTS)
    before = Counter(map(sweep_of, records))
    finished = {sweep for sweep, count in Counter(map(sweep_of, later)).items() if count >= before[sweep]}
    return {
        run: [record for record in records if sweep_of(record) not in finished],
        early: [record for record in later if sweep_of(record) in finished],
    }


def sweep_of(record: dict) -> str | None:
    """The sweep that a record of a side or of a pair is of; None of other records.

    >>> sweep_of({"a": {"parameters": {"sweep": "layouts"}}})
    'layouts'
    """
    return record.get("a", record).get("parameters", {}).get("sweep")


def run_environment(run: Path, file: str = RESULTS) -> dict:
    """The environment of a run, as its newest record tells it.

    Args:
        run: its folder.
        file: of records, read where there is no results.jsonl.
    """
    path = run / RESULTS
    return last_record(path if path.exists() else run / file)["environment"]
