"""Hardware counters of kernels, read by NVIDIA's `ncu` in a process of its own.

`ncu` runs a launch several times, restoring what it writes, to read all counters. Before every run it empties the
caches ("--cache-control all"): a count is that of a first call, whatever ran before.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Mapping
from importlib import import_module
from io import StringIO

import pandas as pd
import torch

# Short name: ncu's metric, in its base unit. Sectors have 32 bytes. Of L2's two halves an L1 asks the near one, which
# asks the far one over a fabric for what that one keeps: `l2_*` are the lookups for L1s, `far_*` those for the fabric.
# Requests for one sector that come together are joined before L2, so that l2_sectors may be below l1_sectors.
METRICS = {
    "l1_spill_sectors": "l1tex__t_sectors_pipe_lsu_mem_local_op_ld.sum",  # registers that did not fit
    "l1_hit_percent": "l1tex__t_sector_hit_rate.pct",
    "l1_sectors": "l1tex__m_xbar2l1tex_read_sectors.sum",  # from L2 into the L1s, whichever instruction asked
    "l2_sectors": "lts__t_sectors_srcunit_tex_op_read.sum",
    "l2_hit_sectors": "lts__t_sectors_srcunit_tex_op_read_lookup_hit.sum",
    "far_sectors": "lts__t_sectors_srcunit_ltcfabric_op_read.sum",
    "far_hit_sectors": "lts__t_sectors_srcunit_ltcfabric_op_read_lookup_hit.sum",
    "dram_read_bytes": "dram__bytes_read.sum",
    "time_ns": "gpu__time_duration.sum",
}


def count_calls(function: str, arguments: Mapping, *, kernel: str, timeout: float = 600.0) -> pd.DataFrame:
    """Hardware counters of the calls that "module:name" yields: each is made once to warm up, and once under `ncu`.

    A row a launch of `kernel`, a name or "regex:" and an expression, in order; NaN, and a warning, for what `ncu` does
    not know. RuntimeError: if `ncu` may not count, the program fails or outlasts `timeout` [s], or launches no such
    kernel.
    """
    if shutil.which("ncu") is None:
        raise RuntimeError("ncu is not on the PATH: install NVIDIA Nsight Compute, or leave the counters out")
    command = ["ncu", "--clock-control", "none", "--cache-control", "all", "--target-processes", "all"]
    command += ["--profile-from-start", "off", "--csv", "--print-units", "base"]
    command += ["--kernel-name-base", "function", "--kernel-name", kernel, "--metrics", ",".join(METRICS.values())]
    command += [sys.executable, "-m", __name__, function, json.dumps(dict(arguments))]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # In a session of its own: the program that ncu watches ends with it.
    with subprocess.Popen(command, start_new_session=True, **pipes) as process:
        try:
            out, complaints = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"ncu took longer than {timeout:g} s over {function}") from None
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
    """The table in what `ncu --csv` prints: a line a launch and metric, between lines of the program and of ncu."""
    lines = text.splitlines()
    header = next((n for n, line in enumerate(lines) if line.startswith('"ID",')), len(lines))
    printed = "\n".join(line for line in lines[header:] if line.startswith('"'))
    if not printed:
        return pd.DataFrame(columns=list(METRICS))
    launches = pd.read_csv(StringIO(printed), thousands=",")
    table = launches.pivot(index="ID", columns="Metric Name", values="Metric Value")
    return table.reindex(columns=list(METRICS.values())).astype(float).set_axis(list(METRICS), axis=1)


def found_percent(table: pd.DataFrame) -> pd.Series:
    """The share of the sectors sent to the L1s for which L2 did not go to memory, in %.

    Requests that were joined before L2 count as found, and sectors found in its far half too: what `l2` calls a hit.
    """
    return 100 * (1 - (table.l2_sectors - table.l2_hit_sectors - table.far_hit_sectors) / table.l1_sectors)


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
