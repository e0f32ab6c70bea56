"""Headline pairs in fresh processes: a ratio moves more from one process to the next than within one.

Each process has its memory elsewhere and begins with cold clocks. The interval of a pair's samples in one process knows
nothing of that.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hilbert_lib.attention.api import dilated_attention
from hilbert_lib.lab.baselines import BASELINES
from hilbert_lib.lab.pairs import run_sides
from hilbert_lib.lab.records import Kept
from hilbert_lib.lab.sweeps.kernels import backends
from hilbert_lib.lab.tables import ratio_table
from hilbert_lib.lab.workload import Workload, grid
from hilbert_lib.launch.isolated import run_isolated
from hilbert_lib.patterns.dilated import DilatedPattern

if TYPE_CHECKING:
    import pandas as pd  # here it would be loaded by every process that measures

PROCESSES = "processes"  # the sweep of these records
SECONDS = 900  # of one process, with what it compiles
CASE = ["a", "b", "pattern", "length", "direction", "is_causal", "head_dim"]


def repeat_in_processes(
    pattern: DilatedPattern,
    opponents: Sequence[str],
    *,
    processes: int,
    length: int,
    heads: int,
    head_dims: Sequence[int],
    rows: int,
    device: torch.device | str,
    output_dir: str = "",
    seconds: float = 0.25,
    repetitions: int = 20,
    dtype: str = "bfloat16",
) -> list[dict]:
    """Pairs of each opponent and the fused kernel, not causal, forward and backward, in processes one after another.

    Gives the records of `run_sides`, one for each pair and process, with `process`: its number. `output_dir` keeps
    those of a process that ended well. Such a process is not run again. On a CPU the pairs are timed too, for tests
    alone: Triton's interpreter runs the fused kernel there, and its times mean nothing.

    Args:
        pattern, opponents: as of `kernels.backends`. processes: how many; 0 measures nothing.
        length, heads, head_dims, rows, dtype: of the works, as of `workload.grid`.
        seconds, repetitions: of a pair, as of `run_sides`.

    Raises:
        RuntimeError: why a process failed.
    """
    work = {"segment_lengths": pattern.segment_lengths, "dilation_rates": pattern.dilation_rates, "dtype": dtype}
    work |= {"opponents": [*opponents], "length": length, "heads": heads, "head_dims": [*head_dims], "rows": rows}
    work |= {"device": str(device), "seconds": seconds, "repetitions": repetitions}
    store, records = Kept(output_dir, _key), []
    for number in range(processes):
        known = [record for record in store.known.values() if record["process"] == number]
        if not known:
            made: list[dict] = []
            ending = run_isolated(f"{__name__}:in_process", [work], seconds=SECONDS, on_record=made.append)
            if ending.status != "ok":
                raise RuntimeError(f"process {number} of {processes}: {ending.status}, {ending.cause}")
            known = [store.add({**record, "process": number}) for record in made]
        records += known
    return records


def in_process(work: dict) -> Iterator[dict]:
    """The records of one process."""
    pattern = DilatedPattern(work["segment_lengths"], work["dilation_rates"])
    sizes = {name: work[name] for name in ("heads", "head_dims", "rows", "dtype")}
    sizes |= {"lengths": [work["length"]], "device": torch.device(work["device"])}
    works = [(name, each) for name, each in grid({"reference": pattern}, **sizes) if not each.is_causal]
    pairs = (tuple(map(_renamed, pair)) for pair in backends(works, attend, work["opponents"]))
    how = {name: work[name] for name in ("device", "seconds", "repetitions")}
    yield from run_sides(pairs, **how, on_cpu=True)


def attend(name: str, q: Tensor, k: Tensor, v: Tensor, work: Workload) -> Tensor:
    """The output of a backend or of a baseline."""
    if name in BASELINES:
        return BASELINES[name].run(q, k, v, work.call)
    return dilated_attention(q, k, v, work.pattern, is_causal=work.is_causal, backend=name)


def process_table(records: Sequence[dict]) -> "pd.DataFrame":
    """The ratio of each pair over all its processes; empty without any.

    Columns: a, b, and the work; processes: how many; ratio: the median of theirs (time of a over b's), low, high: the
    least and the largest.
    """
    import pandas as pd

    numbers = sorted({record["process"] for record in records if "process" in record})
    if not numbers:
        return pd.DataFrame(columns=[*CASE, "processes", "ratio", "low", "high"])
    # One by one: a table of ratios has each pair once.
    tables = [ratio_table([each for each in records if each.get("process") == n], PROCESSES) for n in numbers]
    table = pd.concat(tables, ignore_index=True)
    ratios = table.groupby(CASE, sort=False).ratio
    return ratios.agg(processes="size", ratio="median", low="min", high="max").reset_index()


def _renamed(side):
    return replace(side, parameters={**side.parameters, "sweep": PROCESSES})


def _key(record: dict) -> tuple | None:
    if "process" not in record:
        return None
    about = record["b"]["parameters"]
    return (record["process"], record["a"]["name"], *(about[name] for name in ("direction", "head_dim", "length")))
