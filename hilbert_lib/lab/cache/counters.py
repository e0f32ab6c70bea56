"""Hardware counters of kernels, read by NVIDIA's `ncu` in a process of its own.

`ncu` runs a launch several times, restoring what it writes, to read all counters. Before every run it empties the
caches ("--cache-control all"): a count is that of a first call, whatever ran before.
"""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from math import nan

import pandas as pd
import torch

# Short name: ncu's metric, in its base unit. Sectors have 32 bytes. Of L2's two halves an L1 asks the near one, which
# asks the far one over a fabric for what that one keeps: `l2_*` are the lookups for L1s, `far_*` those for the fabric.
# Requests for one sector that come together are joined before L2, so that l2_sectors may be below l1_sectors.
METRICS = {
    "l1_requests": "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",  # one an instruction of a warp; into registers
    "l1_load_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",  # that they ask for
    "l1_spill_sectors": "l1tex__t_sectors_pipe_lsu_mem_local_op_ld.sum",  # registers that did not fit
    "l1_hit_percent": "l1tex__t_sector_hit_rate.pct",
    "l1_sectors": "l1tex__m_xbar2l1tex_read_sectors.sum",  # from L2 into the L1s, whichever instruction asked
    "l2_requests": "lts__t_requests_srcunit_tex_op_read.sum",
    "l2_sectors": "lts__t_sectors_srcunit_tex_op_read.sum",
    "l2_hit_sectors": "lts__t_sectors_srcunit_tex_op_read_lookup_hit.sum",
    "far_sectors": "lts__t_sectors_srcunit_ltcfabric_op_read.sum",
    "far_hit_sectors": "lts__t_sectors_srcunit_ltcfabric_op_read_lookup_hit.sum",
    "l2_hit_percent": "lts__t_sector_op_read_hit_rate.pct",  # of all reads, where a far sector is looked up twice
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_written_bytes": "dram__bytes_write.sum",
    "time_ns": "gpu__time_duration.sum",
}


def count_calls(function: str, arguments: Mapping, *, kernel: str, timeout: float = 600.0) -> pd.DataFrame:
    """Hardware counters of calls: each is made once to warm up, and once under `ncu`.

    Args:
        function: "module:name" of a function that yields the calls, callables without arguments.
        arguments: its keyword arguments, of values that JSON can hold.
        kernel, timeout: as in `count_launches`.

    Returns:
        As `count_launches`, the launches of that kernel in the counted calls alone.

    Raises:
        ValueError: if function is not of that form.
        TypeError: if an argument is nothing that JSON can hold.
        RuntimeError: as `count_launches`.
    """
    if function.count(":") != 1:
        raise ValueError(f'function must be "module:name", got {function!r}')
    command = [sys.executable, "-m", __name__, function, json.dumps(dict(arguments))]
    return count_launches(command, kernel=kernel, timeout=timeout, options=("--profile-from-start", "off"))


def count_launches(
    command: Sequence[str], *, kernel: str, timeout: float = 300.0, options: Sequence[str] = ()
) -> pd.DataFrame:
    """Run a program under `ncu` and read the counters of every launch of one kernel.

    Args:
        command: the program and its arguments, such as (sys.executable, "-c", "...").
        kernel: name of the kernel's function, or "regex:" and an expression.
        timeout: seconds, for the program and the replays that reading takes.
        options: further ones of `ncu`.

    Returns:
        One row a launch, in order: launch (0, 1, ...) and a column for each of `METRICS`; NaN, and a warning that names
        it, for one that this GPU or this `ncu` does not know.

    Raises:
        RuntimeError: if `ncu` is missing or may not read counters, the program fails or outlasts the timeout, or it
            launches no such kernel.
    """
    if shutil.which("ncu") is None:
        raise RuntimeError("ncu is not on the PATH: install NVIDIA Nsight Compute, or leave the counters out")
    how = ["--clock-control", "none", "--cache-control", "all", "--target-processes", "all", *options]
    how += ["--csv", "--print-units", "base", "--kernel-name-base", "function", "--kernel-name", kernel]
    how += ["--metrics", ",".join(METRICS.values())]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # In a session of its own: the program that ncu watches ends with it.
    with subprocess.Popen(["ncu", *how, *command], start_new_session=True, **pipes) as process:
        try:
            out, complaints = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"ncu took longer than {timeout:g} s over {command[0]}") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    said = out + complaints
    if "ERR_NVGPUCTRPERM" in said:
        raise RuntimeError(
            "ncu may not read the GPU's counters: run as root, or let the driver allow it "
            "(NVreg_RestrictProfilingToAdminUsers=0)"
        )
    if process.returncode:
        raise RuntimeError(f"ncu ended with status {process.returncode}: {said.strip()[-500:]}")
    table = parse_counters(out)
    if table.empty:
        raise RuntimeError(f"the program launched no kernel named {kernel!r}: {said.strip()[-500:]}")
    unknown = [METRICS[name] for name in METRICS if table[name].isna().all()]
    if unknown:
        warnings.warn(f"ncu gave no number for {', '.join(unknown)}", stacklevel=2)
    return table


def parse_counters(text: str) -> pd.DataFrame:
    """The table in what `ncu --csv` prints: a line a launch and metric, between lines of the program and of ncu.

    Args:
        text: standard output.

    Returns:
        As `count_launches`; empty if no kernel was profiled.

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
    rows = [{name: _number(values.get(metric)) for name, metric in METRICS.items()} for values in launches.values()]
    return pd.DataFrame(rows, columns=list(METRICS)).rename_axis("launch").reset_index()


def found_percent(table: pd.DataFrame) -> pd.Series:
    """The share of the sectors sent to the L1s for which L2 did not go to memory, in %.

    Requests that were joined before L2 count as found, and sectors found in its far half too: what `lru` calls a hit.

    Args:
        table: l1_sectors, l2_sectors, l2_hit_sectors and far_hit_sectors.

    >>> counted = {"l1_sectors": [100.0], "l2_sectors": [60.0], "l2_hit_sectors": [20.0], "far_hit_sectors": [15.0]}
    >>> found_percent(pd.DataFrame(counted)).item()
    75.0
    """
    return 100 * (1 - (table.l2_sectors - table.l2_hit_sectors - table.far_hit_sectors) / table.l1_sectors)


def _number(value: str | None) -> float:
    try:
        return float(value.replace(",", ""))
    except (AttributeError, ValueError):  # not printed, or "n/a"
        return nan


def _run(function: str, arguments: str) -> None:
    module, name = function.split(":")
    for call in getattr(import_module(module), name)(**json.loads(arguments)):
        call()  # compiles and fills tables
        torch.cuda.synchronize()
        with torch.cuda.profiler.profile():
            call()
            torch.cuda.synchronize()


if __name__ == "__main__":
    _run(*sys.argv[1:])
