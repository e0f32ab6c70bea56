"""Hardware counters of one kernel, read by NVIDIA's `ncu` in a process of its own."""

import csv
import shutil
import subprocess
from collections.abc import Sequence

import pandas as pd

# Short name: (ncu's metric, its base unit). Sectors have 32 bytes. `ncu` empties the caches before every launch.
METRICS = {
    "l1_sectors": "l1tex__m_xbar2l1tex_read_sectors.sum",  # from L2 into the L1s, whichever instruction asked
    "l2_sectors": "lts__t_sectors_op_read.sum",
    "l2_hit_percent": "lts__t_sector_hit_rate.pct",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_written_bytes": "dram__bytes_write.sum",
    "time_ns": "gpu__time_duration.sum",
}


def count_launches(command: Sequence[str], *, kernel: str, timeout: float = 300.0) -> pd.DataFrame:
    """Run a program under `ncu` and read the counters of every launch of one kernel.

    Args:
        command: the program and its arguments, such as (sys.executable, "-c", "...").
        kernel: name of the kernel's function.
        timeout: seconds, for the program and the replays that reading takes.

    Returns:
        One row a launch, in order: launch (0, 1, ...) and a column for each of `METRICS`.

    Raises:
        RuntimeError: if `ncu` is missing or may not read counters, the program fails or outlasts the timeout, or it
            launches no such kernel.
    """
    if shutil.which("ncu") is None:
        raise RuntimeError("ncu is not on the PATH: install NVIDIA Nsight Compute, or leave the counters out")
    options = ["--clock-control", "none", "--csv", "--print-units", "base", "--target-processes", "all"]
    options += ["--kernel-name-base", "function", "--kernel-name", kernel, "--metrics", ",".join(METRICS.values())]
    try:
        done = subprocess.run(["ncu", *options, *command], capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"ncu took longer than {timeout:g} s over {command[0]}") from None
    said = done.stdout + done.stderr
    if "ERR_NVGPUCTRPERM" in said:
        raise RuntimeError(
            "ncu may not read the GPU's counters: run as root, or let the driver allow it "
            "(NVreg_RestrictProfilingToAdminUsers=0)"
        )
    if done.returncode:
        raise RuntimeError(f"ncu ended with status {done.returncode}: {said.strip()[-500:]}")
    table = parse_counters(done.stdout)
    if table.empty:
        raise RuntimeError(f"the program launched no kernel named {kernel!r}: {said.strip()[-500:]}")
    return table


def parse_counters(text: str) -> pd.DataFrame:
    """The table in what `ncu --csv` prints: a line a launch and metric, between lines of the program and of ncu.

    Args:
        text: standard output.

    Returns:
        As `count_launches`; empty if no kernel was profiled.

    Raises:
        ValueError: if a metric of `METRICS` is missing, or has no value.

    >>> lines = ['"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"']
    >>> lines += [f'"0","f","{metric}","","1,024"' for metric in METRICS.values()]
    >>> parse_counters("==PROF== ...\\n" + "\\n".join(lines)).iloc[0].time_ns.item()
    1024.0
    """
    lines = text.splitlines()
    header = next((n for n, line in enumerate(lines) if line.startswith('"ID",')), len(lines))
    launches: dict[int, dict[str, str]] = {}
    for row in csv.DictReader(line for line in lines[header:] if line.startswith('"')):
        launches.setdefault(int(row["ID"]), {})[row["Metric Name"]] = row["Metric Value"]
    rows = [{name: _number(metric, values) for name, metric in METRICS.items()} for values in launches.values()]
    return pd.DataFrame(rows, columns=list(METRICS)).rename_axis("launch").reset_index()


def _number(metric: str, values: dict[str, str]) -> float:
    try:
        return float(values[metric].replace(",", ""))
    except (KeyError, ValueError):
        raise ValueError(f"ncu gave no number for {metric}, got {values.get(metric)!r}") from None
