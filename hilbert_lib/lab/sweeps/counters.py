"""Counts of the hardware when three kernels read k and v in every order, beside what the cache model predicts.

The kernels: the fused forward and decoding with one query, which read through a table of slots, and a plain gather of
the rows of k. `count` needs a GPU and NVIDIA's `ncu`; the predictions need neither. `ncu` runs a launch several times,
restoring what it writes, to read all counters. Before every run it empties the caches ("--cache-control all"): a count
is that of a first call, whatever ran before.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO

import pandas as pd
import torch
from torch import Tensor

from hilbert_lib.attention.api import dilated_attention
from hilbert_lib.lab.cache.cache import SECTOR_BYTES, Storage
from hilbert_lib.lab.cache.l2 import Gpu
from hilbert_lib.lab.cache.predicted import Predicted, attention_reads, gather_reads
from hilbert_lib.lab.cache.sweeps import compared_orderings
from hilbert_lib.lab.records import Kept
from hilbert_lib.lab.sweeps.kernels import single_branches
from hilbert_lib.lab.workload import Workload
from hilbert_lib.machine import get_gpu_info
from hilbert_lib.ordering import Ordering
from hilbert_lib.patterns.dilated import DilatedPattern

SWEEP = "counters"
# The launch of a call that is counted. A gather has torch's name for it, which differs between versions.
COUNTED_KERNELS = {
    "forward": "regex:^forward_kernel",
    "decoding": "regex:^decode_kernel",
    "gather": "regex:gather|[iI]ndex",
}
# Sectors that each program reads to know its work. Forward: branches, offsets, a tile and its class, one each.
# Decoding: three int32 a KV head.
FORWARD_TABLES, PAIR_BYTES = 4, 12
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


@dataclass(frozen=True)
class CountedCall:
    """One call of one kernel on k and v stored heads first in one order; record: what its record begins with."""

    kernel: str
    ordering: Ordering
    inputs: Workload
    record: dict

    @property
    def storage(self) -> Storage:
        inputs = self.inputs
        return Storage(self.ordering, inputs.head_dim * torch.bfloat16.itemsize, inputs.heads, "bhsd")

    def call(self) -> Callable[[], Tensor]:
        """The call on random inputs, which are drawn here."""
        work = self.inputs
        q, (k, v) = work.tensors[0], work.stored(self.ordering)
        if self.kernel == "gather":
            rows = k.transpose(1, 2).reshape(-1, work.head_dim)
            slots = self.ordering.inverse[:: work.pattern.dilation_rates[0]].to(k.device)
            numbers = (torch.arange(work.heads, device=k.device)[:, None] * work.length + slots).flatten()
            return lambda: rows[numbers]
        options = {"query_start": work.call.query_start, "kv_ordering": self.ordering, "backend": "triton"}
        return lambda: dilated_attention(q, k, v, work.pattern, **options)

    def predicted(self, gpu: Gpu) -> Predicted:
        """Prediction of the model for the kernel as it runs here, with its tiles."""
        work, pattern = self.inputs, self.inputs.pattern
        if self.kernel == "gather":
            return gather_reads(self.storage, pattern, gpu=gpu)
        from hilbert_lib.attention.triton import decode  # only here: not every system has triton
        from hilbert_lib.attention.triton.arguments import config_of

        if self.kernel == "forward":
            config = config_of("forward", torch.empty(0, work.head_dim, dtype=torch.bfloat16))
            queries, keys, tables = config.block_m, config.block_n, FORWARD_TABLES
        else:
            keys, rates = decode.step_keys(work.head_dim, torch.bfloat16.itemsize), pattern.dilation_rates
            sizes = work.length, work.queries[0], 1, 1, work.heads
            chunk, *_ = decode.split(pattern, *sizes, decode.KEYS_PER_ROW, keys)
            pattern = DilatedPattern((chunk * rates[0],), rates, offsets="zero")
            queries, tables = None, -(-PAIR_BYTES * work.heads // SECTOR_BYTES)
        tiles = {"tile_queries": queries, "tile_keys": keys, "table_sectors": tables}
        return attention_reads(self.storage, pattern, **tiles, gpu=gpu)


def calls(kernel: str, *, lengths: list[int], keys: int, device: str = "cpu", **sizes) -> Iterator[CountedCall]:
    """The calls of one kernel: those of `single_branches`, in every order of `compared_orderings`.

    keys: that a query of the forward sees at most; the other kernels read the whole sequence's branch.
    """
    for length in lengths:
        keys_read, queries = keys if kernel == "forward" else length, int(kernel == "decoding")
        options = {"lengths": [length], "keys": keys_read, "queries": queries, "device": torch.device(device)}
        for inputs, about in single_branches(**options, **sizes):
            rate = about["dilation"]
            for layout, ordering in compared_orderings(length, rate, segment=keys_read * rate).items():
                names = {"sweep": SWEEP, "layout": layout, "length": length, "heads": inputs.heads, "dilation": rate}
                parameters = names | {"keys": keys_read, "row_bytes": about["row_bytes"]}
                yield CountedCall(kernel, ordering, inputs, {"kind": SWEEP, "name": kernel, "parameters": parameters})


def count_calls(arguments: Mapping, *, kernel: str, timeout: float = 600.0) -> pd.DataFrame:
    """Hardware counters of the `calls` of these arguments: each made once to warm up, and once under `ncu`.

    A row a launch of `kernel`, a name or "regex:" and an expression, in order; NaN, and a warning, for what `ncu` does
    not know. RuntimeError: as `run_ncu`.
    """
    program = [sys.executable, "-c", f"from {__name__} import make_calls; make_calls()", json.dumps(dict(arguments))]
    how = {"options": ["--cache-control", "all"], "about": str(dict(arguments)), "timeout": timeout}
    table = run_ncu(program, METRICS, kernel=kernel, **how).drop(columns="kernel")
    unknown = [METRICS[name] for name in METRICS if table[name].isna().all()]
    if unknown:
        warnings.warn(f"ncu gave no number for {', '.join(unknown)}", stacklevel=2)
    return table


def run_ncu(
    program: Sequence[str], metrics: Mapping[str, str], *, kernel: str, options: Sequence[str] = (), about: str,
    timeout: float,
) -> pd.DataFrame:  # fmt: skip
    """The table of `parse_counters` for the launches that a program makes within `torch.cuda.profiler.profile`.

    Args:
        program: its command. metrics: ncu's names, by ours.
        kernel: the name of the launches that count, or "regex:" and an expression. options: more options of `ncu`.
        about: what the program does, for errors. timeout: of all [s].

    Raises:
        RuntimeError: if `ncu` is missing or may not count, or the program fails, outlasts `timeout` or launches no such
            kernel.
    """
    if shutil.which("ncu") is None:
        raise RuntimeError("ncu is not on the PATH: install NVIDIA Nsight Compute, or leave the counters out")
    command = ["ncu", "--clock-control", "none", "--target-processes", "all", "--profile-from-start", "off", "--csv"]
    command += ["--print-units", "base", "--kernel-name-base", "function", "--kernel-name", kernel, *options]
    command += ["--metrics", ",".join(metrics.values()), *program]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # In a session of its own: the program that ncu watches ends with it.
    with subprocess.Popen(command, start_new_session=True, **pipes) as process:
        try:
            out, complaints = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"ncu took longer than {timeout:g} s over {about}") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    output = out + complaints
    if "ERR_NVGPUCTRPERM" in output:
        raise RuntimeError(
            "ncu may not read the GPU's counters: run as root, or let the driver allow it "
            "(NVreg_RestrictProfilingToAdminUsers=0)"
        )
    if process.returncode:
        raise RuntimeError(f"ncu ended with status {process.returncode}: {output.strip()[-500:]}")
    table = parse_counters(out, metrics)
    if table.empty:
        raise RuntimeError(f"the program launched no kernel named {kernel!r}: {output.strip()[-500:]}")
    return table


def parse_counters(text: str, metrics: Mapping[str, str]) -> pd.DataFrame:
    """The table in what `ncu --csv` prints: a line a launch and metric, between lines of the program and of ncu.

    A row a launch, in order; columns: kernel, its name, and the metrics.
    """
    lines = text.splitlines()
    header = next((n for n, line in enumerate(lines) if line.startswith('"ID",')), len(lines))
    printed = "\n".join(line for line in lines[header:] if line.startswith('"'))
    if not printed:
        return pd.DataFrame(columns=["kernel", *metrics])
    launches = pd.read_csv(StringIO(printed), thousands=",")
    table = launches.pivot(index="ID", columns="Metric Name", values="Metric Value")
    table = table.reindex(columns=list(metrics.values())).astype(float).set_axis(list(metrics), axis=1)
    table.insert(0, "kernel", launches.groupby("ID")["Kernel Name"].first())
    return table


def found_percent(table: pd.DataFrame) -> pd.Series:
    """The share of the sectors sent to the L1s for which L2 did not go to memory, in %.

    Requests that were joined before L2 count as found, and sectors found in its far half too: what `l2` calls a hit.
    """
    return 100 * (1 - (table.l2_sectors - table.l2_hit_sectors - table.far_hit_sectors) / table.l1_sectors)


def make_calls() -> None:
    """The calls that `ncu` watches, made from the arguments of the command line."""
    for work in calls(**json.loads(sys.argv[1]), device="cuda"):
        call = work.call()
        call()  # compiles and fills tables
        torch.cuda.synchronize()
        with torch.cuda.profiler.profile():
            call()
            torch.cuda.synchronize()


def count(kernel: str, *, output_dir: str = "", **options) -> list[dict]:
    """Count every work of a kernel in one run of `ncu`, with empty caches, beside what the model predicts for this GPU.

    What the folder's results.jsonl holds from this code on this hardware is not counted again; an empty name keeps
    nothing. A record a work; what this GPU does not count is None.
    """

    def key(record: dict) -> tuple | None:
        return (record["name"], *record["parameters"].values()) if record.get("kind") == SWEEP else None

    works, store = list(calls(kernel, **options)), Kept(output_dir, key)
    if any(key(work.record) not in store.known for work in works):
        table = count_calls({"kernel": kernel, **options}, kernel=COUNTED_KERNELS[kernel])
        if len(table) != len(works):
            raise RuntimeError(f"each call must be one launch, got {len(table)} launches of {len(works)} calls")
        counted, info = table.astype(object).where(table.notna(), None).to_dict("records"), get_gpu_info()
        gpu = Gpu(info.name, info.l2_bytes, info.multiprocessors)
        for work, counters in zip(works, counted, strict=True):
            if key(work.record) not in store.known:
                predicted = vars(work.predicted(gpu))
                store.add(work.record | {"counted": counters, "predicted": predicted, "model": vars(gpu)})
    return [store.known[key(work.record)] for work in works]


def counter_table(records: Sequence[dict]) -> pd.DataFrame:
    """Counted `METRICS` beside what was predicted (predicted_), the last record of each work; others are left out."""
    rows = {}
    for record in records:
        if record.get("kind") == SWEEP:
            work = {"kernel": record["name"], **record["parameters"]}
            predicted = {f"predicted_{name}": value for name, value in record["predicted"].items()}
            rows[tuple(work.values())] = {**work, **record["counted"], **predicted}
    table = pd.DataFrame(rows.values())
    if table.empty:
        return table
    table[list(METRICS)] = table[list(METRICS)].astype(float)
    return table.drop(columns="sweep").assign(l2_found_percent=found_percent(table))
