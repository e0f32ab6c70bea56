"""Tables of what attention does, for notebooks and figures: who sees whom, how branches mix, how far backends err."""

from collections.abc import Iterable

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from hilbert_lib.attention.api import dilated_attention, explain_backend
from hilbert_lib.attention.backends.registry import BACKENDS
from hilbert_lib.ordering import Ordering
from hilbert_lib.pattern import DilatedPattern

PARTS = ("out", "lse", "dq", "dk", "dv")


def multiplicities(pattern: DilatedPattern, length: int, *, kv_heads: int, is_causal: bool = False) -> pd.DataFrame:
    """How often every query finds every key, for each KV head.

    Args:
        pattern: the pattern.
        length: tokens; the table has kv_heads * length^2 rows at most.
        kv_heads: heads of k and v.
        is_causal: whether keys after the query are excluded.

    Returns:
        Columns head, query, key, count; pairs that do not attend are left out.

    >>> multiplicities(DilatedPattern((2, 2), (1, 2)), 2, kv_heads=1).to_numpy().tolist()
    [[0, 0, 0, 2], [0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 1, 1]]
    """
    p = torch.arange(length, device="cpu")
    tables = []
    for g in range(kv_heads):
        count = pattern.masks(p, p, kv_head=g, kv_heads=kv_heads, is_causal=is_causal).sum(0)
        query, key = count.nonzero(as_tuple=True)
        tables.append(pd.DataFrame({"head": g, "query": query, "key": key, "count": count[query, key]}))
    return pd.concat(tables, ignore_index=True)


def mixing(
    q: Tensor, k: Tensor, pattern: DilatedPattern, *, query: int, head: int = 0, is_causal: bool = False
) -> pd.DataFrame:
    """One query's weights in the two ways that are one: branches mixed by their denominators, and one softmax.

    The paper (arXiv 2307.02486, eqs. 9-10) gives branch i the share s_i / sum_j s_j, s_i its softmax denominator.

    Args:
        q: (1, seq, heads, head_dim). k: (1, seq, kv_heads, head_dim).
        pattern: the pattern.
        query: position of the query, 0 to seq - 1.
        head: its head, 0 to heads - 1.
        is_causal: whether keys after the query are excluded.

    Returns:
        A row for each (branch, key) that the query sees, with in_branch (the softmax inside the branch), share
        (of the denominators), mixed (their product) and one_softmax (over all rows together).

    Raises:
        ValueError: if there is no such query or head.

    >>> q = k = torch.ones(1, 4, 1, 2)
    >>> mixing(q, k, DilatedPattern((2, 4), (1, 2)), query=2).mixed.tolist()
    [0.25, 0.25, 0.25, 0.25]
    """
    (length, heads, head_dim), kv_heads = q.shape[1:], k.shape[2]
    for name, value, count in (("query", query, length), ("head", head, heads)):
        if not 0 <= value < count:
            raise ValueError(f"{name} must be from 0 to {count - 1}, got {value}")
    g = head // (heads // kv_heads)
    scores = (k[0, :, g].double() @ q[0, query, head].double()).numpy(force=True) * head_dim**-0.5
    position, every = torch.tensor([query], device="cpu"), torch.arange(length, device="cpu")
    masks = pattern.masks(position, every, kv_head=g, kv_heads=kv_heads, is_causal=is_causal)[:, 0]
    branch, key = masks.nonzero(as_tuple=True)
    table = pd.DataFrame({"branch": branch, "key": key, "score": scores[key]})
    terms = np.exp(table.score - table.score.max())
    denominators = terms.groupby(table.branch).transform("sum")
    table["in_branch"] = terms / denominators
    table["share"] = denominators / terms.sum()
    table["mixed"] = table.in_branch * table.share
    table["one_softmax"] = terms / terms.sum()
    return table


def errors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: DilatedPattern,
    *,
    backends: Iterable[str] = tuple(BACKENDS),
    dtypes: Iterable[torch.dtype] = (torch.float64, torch.float32, torch.bfloat16, torch.float16),
    orderings: Iterable[Ordering | None] = (None,),
    is_causal: bool = False,
) -> pd.DataFrame:
    """Largest absolute difference from the float64 reference: output, lse and gradients of every backend that serves.

    The reference gets the same inputs, rounded to the dtype and then widened. The gradients are those of a fixed
    random weighting of the output.

    Args:
        q, k, v: inputs in sequence order, as `dilated_attention` takes them.
        pattern: which keys a query sees.
        backends: names; where one cannot serve a dtype, its rows hold NaN and the reason.
        dtypes: dtypes to round the inputs to.
        orderings: layouts in which k and v are stored; None is the sequence's own.
        is_causal: whether keys after the query are excluded.

    Returns:
        Columns backend, dtype, ordering, out, lse, dq, dk, dv, same (whether out and lse have the bits of the first
        ordering's; gradients are left out because some CUDA kernels sum them in any order), reason.

    >>> x = torch.ones(1, 8, 1, 4)
    >>> errors(x, x, x, DilatedPattern((4,), (1,)), backends=["eager"], dtypes=[torch.float32]).out.max() < 1e-6
    np.True_
    """
    generator = torch.Generator("cpu").manual_seed(0)
    weight = torch.randn(q.shape, generator=generator, dtype=torch.float64, device="cpu").to(q.device)
    rows = []
    for dtype in dtypes:
        rounded = [x.detach().to(dtype) for x in (q, k, v)]
        exact = _results([x.double() for x in rounded], pattern, weight, None, "reference", is_causal)
        name = str(dtype).removeprefix("torch.")
        for backend in backends:
            first = None
            for ordering in orderings:
                row = {"backend": backend, "dtype": name, "ordering": "none" if ordering is None else ordering.kind}
                choice = explain_backend(*rounded, pattern, is_causal=is_causal, backend=backend)
                if not choice.chosen:
                    rows.append({**row, "reason": choice.reasons[backend]})
                    continue
                results = _results(rounded, pattern, weight, ordering, backend, is_causal)
                first = results if first is None else first
                row["same"] = all(map(torch.equal, results[:2], first[:2]))
                parts = zip(PARTS, results, exact, strict=True)
                rows.append({**row, **{part: _distance(got, true) for part, got, true in parts}, "reason": ""})
    return pd.DataFrame(rows, columns=["backend", "dtype", "ordering", *PARTS, "same", "reason"])


def _results(
    inputs: list[Tensor], pattern: DilatedPattern, weight: Tensor, ordering: Ordering | None, backend: str, causal: bool
) -> list[Tensor]:
    # out, lse, dq, dk, dv, all in sequence order: apply is differentiable, so its gradient undoes it.
    leaves = [x.clone().requires_grad_() for x in inputs]
    stored = leaves if ordering is None else [leaves[0], *(ordering.apply(x, dim=1) for x in leaves[1:])]
    out, lse = dilated_attention(
        *stored, pattern, is_causal=causal, kv_ordering=ordering, backend=backend, return_lse=True
    )
    return [out.detach(), lse, *torch.autograd.grad(out, leaves, weight.to(out.dtype))]


def _distance(got: Tensor, true: Tensor) -> float:
    # Rows without keys have lse -inf on both sides: equal, although their difference is NaN.
    return torch.where(got == true, 0.0, (got.double() - true).abs()).max().item()
