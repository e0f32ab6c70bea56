"""Measuring a claim again: by its tests, its notebook, by computing it, or by its own pairs, which stand here.

They are the documents' two functions beside two layouts of one, dense attention, one backend beside another, and a
curve computed by a loop.
"""

import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from hilbert_lib.attention.api import dilated_attention
from hilbert_lib.lab.environment import environment
from hilbert_lib.lab.ledger.claim import ROOT, Answer, Claim, answer
from hilbert_lib.lab.pairs import Results, Side, relative_difference, run_sides
from hilbert_lib.lab.records import RESULTS, newest_run
from hilbert_lib.lab.seeds import seed_hilbert_d2xy
from hilbert_lib.lab.suite.run import run_id
from hilbert_lib.lab.sweeps.kernels import stored_side
from hilbert_lib.lab.tables import ratio_table
from hilbert_lib.lab.workload import Workload, by_backend
from hilbert_lib.ordering import Ordering
from hilbert_lib.patterns.dilated import DilatedPattern

FUNCTIONS, LAYOUTS, DENSE, BACKENDS = "two functions", "two layouts", "dense and dilated", "two backends"
REFERENCE = tuple((2048 << i, 1 << i) for i in range(5))  # (w, r) of the reference work of notebook 06
REPETITIONS = 30
PROGRAMS = {"hilbert": ["-c", "from hilbert_lib.cli.main import main; main()"], "pytest": ["-m", "pytest"]}
CHECKED_ROWS = 32  # rows of each head of the restated kernels, held against float64
MODERATE = {(2048, 2): 1.03, (1024, 1): 1.03}  # (tokens, dilation) of the documents: the speed-up that they print

Pairs = Iterator[tuple[Side, ...]]


def reference_pattern(length: int) -> DilatedPattern:
    """The branches of the reference work that are no longer than so many tokens."""
    return DilatedPattern(*zip(*(branch for branch in REFERENCE if branch[0] <= length), strict=True))


def documents_pairs(sizes: dict[tuple[int, int], float | None], *, segment_length: int, **shape) -> Pairs:
    """At each size the documents' two kernels, restated, and one function on two layouts.

    The two layouts are the fused kernel's, on k and v stored linear and along a Hilbert curve, both read through a
    table.
    """

    def read(q: Tensor, k: Tensor, v: Tensor, work: Workload, order: Ordering) -> Tensor:
        return dilated_attention(q, k, v, work.pattern, kv_ordering=order, backend="triton")

    for (length, dilation), claimed in sizes.items():
        if length % segment_length or segment_length < dilation:
            raise ValueError(f"segment_length must divide {length} and be at least {dilation}, got {segment_length}")
        work = Workload(DilatedPattern((segment_length,), (dilation,), offsets="zero"), length, **shape)
        parameters = {"sweep": "claims", "claimed": claimed, "dilation": dilation, **work.parameters}
        curve = Ordering.from_curve("snake", length).to(work.device).perm.int()  # what the documents call Hilbert
        functions, layouts = {**parameters, "pair": FUNCTIONS}, {**parameters, "pair": LAYOUTS}
        yield _function_side(work, "standard", functions, None), _function_side(work, "hilbert", functions, curve)
        orders = Ordering.linear(length), Ordering.from_curve("hilbert", length)
        yield tuple(stored_side(work, order.kind, order, read, layouts) for order in orders)


def dense_pairs(lengths: Sequence[int], *, segment_length: int, **shape) -> Pairs:
    """Attention to all keys, and to those of the reference work, each by what "auto" takes: two functions."""
    for length in lengths:
        patterns = {"dense": DilatedPattern((length,), (1,)), "dilated": reference_pattern(length)}
        works = {name: Workload(pattern, length, **shape) for name, pattern in patterns.items()}
        attend = partial(by_backend, "auto")
        yield tuple(work.side(name, attend, "forward", sweep="claims", pair=DENSE) for name, work in works.items())


def backend_pairs(bases: Sequence[str], rival: str, lengths: Sequence[int], *, segment_length: int, **shape) -> Pairs:
    """The forward of the reference work by a rival, beside each backend that may be the base."""
    for length, base in product(lengths, bases):
        work = Workload(reference_pattern(length), length, **shape)
        about = {"sweep": "claims", "pair": BACKENDS}
        yield tuple(work.side(name, partial(by_backend, name), "forward", **about) for name in (base, rival))


def loop_sides(sides: Sequence[int], **_) -> Pairs:
    """The documents' curve of square grids, cell by cell in Python as they print it."""
    for side in sides:
        parameters = {"sweep": "claims", "length": side * side}

        def loop(side: int = side) -> Results:
            return (torch.tensor([seed_hilbert_d2xy(side, place) for place in range(side * side)]),)

        yield (Side("loop", parameters, loop, lambda results: float(results[0][0].any())),)


ON_CPU = ("K11",)
CLAIMS = {
    "K3": partial(documents_pairs, {(4096, 64): 7.95, **MODERATE, (4096, 1): None}),
    "K4": partial(documents_pairs, MODERATE),
    "K10": partial(dense_pairs, (8192, 32768, 131072)),
    "K11": partial(loop_sides, (256, 1024)),
    "B4": partial(backend_pairs, ("sdpa", "flash"), "xformers", (8192, 65536)),
}


def claim_pairs(claims: Iterable[str], *, device: torch.device | str, segment_length: int = 1024) -> Pairs:
    """What is timed for some claims: pairs for `pairs.run_sides`, the standard side first.

    segment_length: w of K3 and K4; the documents name none. Their D = 768 is 12 heads of 64.
    """
    shape = {"heads": 12, "head_dim": 64, "device": torch.device(device)}
    for claim in claims:
        if claim not in CLAIMS:
            raise ValueError(f"claims must be of {', '.join(CLAIMS)}; got {claim!r}")
        yield from CLAIMS[claim](segment_length=segment_length, **shape)


def claim_table(records: Sequence[dict]) -> pd.DataFrame:
    """What is claimed of the documents' sizes beside what was seen.

    Of the two pairs, "functions" and "layouts": the ratio (above 1: the Hilbert side is faster), _low and _high, and
    _apart, the relative difference of the outputs.
    """
    columns = {"ratio": "", "low": "_low", "high": "_high", "output_difference": "_apart"}
    ratios = ratio_table(records, "claims").set_index(["length", "dilation"])
    table = ratios.loc[ratios.pair == FUNCTIONS, ["claimed"]].astype(float)
    for pair, prefix in ((FUNCTIONS, "functions"), (LAYOUTS, "layouts")):
        names = {old: prefix + suffix for old, suffix in columns.items()}
        table = table.join(ratios.loc[ratios.pair == pair, list(columns)].rename(columns=names))
    return table.reset_index()


def _function_side(work: Workload, name: str, parameters: dict, order: Tensor | None) -> Side:
    from hilbert_lib.lab.seed_kernel import seed_attention  # triton is imported only where a kernel is used

    ((segment, rate),) = work.pattern.branches

    def forward() -> Results:
        return (seed_attention(*work.tensors[:3], segment_length=segment, dilation_rate=rate, order=order),)

    def error(results: Results) -> float:
        place = torch.arange(work.length, device=work.device) if order is None else order.long()
        query = place[:: -(-work.length // CHECKED_ROWS)]
        steps = torch.arange(segment // rate, device=work.device) * rate
        key = place[query[:, None] // segment * segment + steps]
        q, k, v = (x[0].double() for x in work.tensors[:3])
        weights = torch.einsum("mhd,mkhd->mhk", q[query], k[key]).mul(work.call.scale).softmax(-1)
        return relative_difference([results[0][0, query]], [torch.einsum("mhk,mkhd->mhd", weights, v[key])])

    flop = 4 * work.length * (segment // rate) * work.heads * work.head_dim
    return Side(name, parameters, forward, error, useful_flop=flop)


def command(claim: Claim, out: str | Path = "reports/local", *, gpus: int | None = None) -> str:
    """The command line, from the root of the checkout, that measures a claim again.

    gpus: how many there are; by default the notebook's largest configuration is taken.
    """
    if claim.tests:
        return shlex.join(["pytest", *claim.tests])
    if claim.id in CLAIMS:
        return f"hilbert claims --rerun {claim.id}"
    if not claim.record:
        return f"hilbert claims {claim.id}"  # which computes it each time
    words = ["hilbert", "run", claim.record, "--force", "--out", str(out)]
    configs = ROOT.glob(f"notebooks/configs/h200*/{claim.record}.yaml")
    if configs := {int(path.parent.name.partition("x")[2] or 1): path for path in configs}:
        fitting = [count for count in configs if gpus is None or count <= gpus]
        if not fitting:
            raise ValueError(f"{claim.id} needs {min(configs)} GPUs, and torch sees {gpus}")
        words += ["-f", configs[max(fitting)].relative_to(ROOT).as_posix()]
    for name, value in claim.only.items():
        words += ["-p", name, (",".join(map(str, value)) or "[]") if isinstance(value, list) else str(value).lower()]
    return shlex.join(words)


def dry_run(claim: Claim, *, out: str | Path, segment_length: int = 1024) -> list[str]:
    """What `rerun` would do, in lines: the command that it runs, or the pairs that it times itself."""
    if claim.id not in CLAIMS:
        return [command(claim, out) if claim.record or claim.tests else f"{claim.id} is computed, nothing is run"]
    lines = []
    for pair in claim_pairs([claim.id], device="cpu", segment_length=segment_length):
        names, given = ("pair", "length", "heads", "head_dim", "dilation", "branches"), pair[-1].parameters
        told = ", ".join(f"{name}={given[name]}" for name in names if given.get(name) is not None)
        lines.append(f"{' | '.join(side.name for side in pair)}: {told}")
    return lines


def rerun(claim: Claim, *, out: Path, segment_length: int = 1024) -> Answer:
    """Measure a claim again and say what this measurement answers; what is timed stays in a folder of `out`.

    RuntimeError: without a CUDA device, where one is needed; or if nothing was measured.
    """
    device = "cpu" if claim.id in ON_CPU else "cuda"
    if claim.record and device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(
            f"{claim.id} is measured on a CUDA device, and torch sees none here; --dry-run shows what would run"
        )
    if claim.id in CLAIMS:
        folder = out / run_id(environment()) / f"claims_{claim.id}"
        (folder / RESULTS).unlink(missing_ok=True)
        pairs = claim_pairs([claim.id], device=device, segment_length=segment_length)
        how = {"device": device, "on_cpu": True, "repetitions": REPETITIONS, "output_dir": str(folder)}
        if not run_sides(pairs, **how):
            raise RuntimeError(f"{claim.id} was not measured again: nothing of it has room on this GPU")
        return answer(claim, folder)
    if not claim.record and not claim.tests:
        return answer(claim)
    line = command(claim, out.resolve(), gpus=torch.cuda.device_count() if claim.record else None)
    program, *words = shlex.split(line)
    before = _states(out)
    if subprocess.run([sys.executable, *PROGRAMS[program], *words], cwd=ROOT).returncode:
        raise RuntimeError(f"{claim.id} was not measured again, because this failed: {line}")
    if not claim.record:
        return answer(claim)
    run = newest_run(claim.record, machines=[out])
    if not run or _states(out) == before:  # an older run's is no answer
        raise RuntimeError(f"{claim.id} was not measured again: {line} wrote no {RESULTS}")
    return answer(claim, run)


def _states(out: Path) -> dict[Path, tuple[int, int, int]]:
    # What tells that a record was written, whatever the clock shows.
    files = (file for file in out.rglob(f"{RESULTS}*") if file.is_file())
    return {file: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for file in files for stat in [file.stat()]}
