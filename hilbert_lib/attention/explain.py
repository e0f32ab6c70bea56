"""Which backend serves a call, and why not the others: along a sequence and on a grid."""

import torch

from hilbert_lib.attention import api, choice
from hilbert_lib.attention.choice import Explanation
from hilbert_lib.attention.grids import api as grids
from hilbert_lib.checks import known_by, unscripted
from hilbert_lib.grid import Neighbourhood
from hilbert_lib.pattern import DilatedPattern


@unscripted
def explain_backend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: DilatedPattern | Neighbourhood | tuple[Neighbourhood, ...],
    *,
    backend: str = "auto",
    **options,
) -> Explanation:
    """Which backend `dilated_attention` would run for the same arguments, and why it passes over the others.

    For a `Neighbourhood`, or a tuple of them, it is asked of `neighbourhood_attention`.

    >>> q = k = v = torch.ones(1, 8, 2, 4)
    >>> explain_backend(q, k, v, DilatedPattern((4,), (1,))).chosen
    'sdpa'
    >>> explain_backend(q, k, v, Neighbourhood((2, 4), 2)).chosen
    'eager'
    """
    if is_on_grid(pattern):
        known_by(grids.neighbourhood_attention, options, asked="explain_backend")
        return grids.explain(*grids.validated(q, k, v, pattern, backend=backend, **options), backend)
    known_by(api.dilated_attention, options, asked="explain_backend")
    q, k, v, call = api.validated(q, k, v, pattern, backend=backend, **options)
    has_ordering = options.get("kv_ordering") is not None
    return choice.explain(q, call, backend, gradient=api.needs_gradient(q, k, v), has_ordering=has_ordering)


def is_on_grid(pattern: object) -> bool:
    """Whether a call is one on a grid, by what says which keys a query sees."""
    several = pattern if isinstance(pattern, tuple) else (pattern,)
    return any(isinstance(each, Neighbourhood) for each in several)
