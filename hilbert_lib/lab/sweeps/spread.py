"""Rows that lie on several ranks, held against float64."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hilbert_lib.lab.exact_rows import SampledRows
from hilbert_lib.lab.workload import Workload
from hilbert_lib.patterns.pattern import Pattern

ALONE = "each by itself"  # every rank computes what it can without the others


@dataclass(frozen=True)
class ComparedRows:
    """Rows of a side's results that are compared.

    pattern: of what the side computes. queries: positions in each head, of out and dq.
    row_of: of positions the rows of this rank's tensors, or -1.
    keys: how many positions dk and dv are compared in.
    """

    pattern: Pattern
    queries: Sequence[Tensor]
    row_of: Callable[[Tensor], Tensor]
    keys: int


class Spread:
    """A tensor (1, rows, heads, head_dim) whose rows lie on the ranks: indexed as `exact_rows` does, all fetch them.

    length: rows of all ranks. row_of: as of `ComparedRows`.
    """

    def __init__(self, local_rows: Tensor, length: int, row_of: Callable[[Tensor], Tensor]):
        self._local_rows, self._row_of, self.device = local_rows, row_of, local_rows.device
        self.shape = (1, length, *local_rows.shape[2:])

    def __getitem__(self, index: tuple[int, Tensor, int]) -> Tensor:
        _, positions, head = index
        slots = self._row_of(positions)
        rows = torch.zeros(len(slots), self.shape[3], dtype=torch.float64, device=self.device)
        rows[slots >= 0] = self._local_rows[0, slots[slots >= 0], head].double()
        dist.all_reduce(rows)
        return rows


def spread_errors(
    workload: Workload, rows: ComparedRows, inputs: Sequence[Tensor | None], out: Tensor, grads: Sequence[Tensor]
) -> dict[str, float]:
    """Relative errors of "out" and, where there are gradients, "dq": the largest of those that are compared.

    inputs: q, k, v and dout, which may be None, of this rank, as are out and grads.
    """

    def spread(tensors: Sequence[Tensor]) -> list[Spread]:
        return [Spread(tensor, workload.length, rows.row_of) for tensor in tensors]

    q, k, v, dout = inputs
    spread_inputs = spread((q, k, v, out if dout is None else dout))
    exact = SampledRows(spread_inputs, rows.pattern, rows.queries, keys=rows.keys, is_causal=workload.is_causal)
    errors = {"out": exact.error(spread([out]))}
    if grads:
        errors["dq"] = exact.error(spread(grads))
    return errors
