"""The backend that serves a call, and why the others do not."""

import torch

from hilbert_lib.attention import api
from hilbert_lib.attention.autograd import needs_gradient
from hilbert_lib.attention.choice import Explanation, explain
from hilbert_lib.attention.validation import as_pattern, validated
from hilbert_lib.checks import known_by, unscripted
from hilbert_lib.patterns.neighbourhood import Neighbourhood
from hilbert_lib.patterns.pattern import Pattern


@unscripted
def explain_backend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: Pattern | tuple[Neighbourhood, ...],
    *,
    backend: str = "auto",
    **options,
) -> Explanation:
    """The backend that `attend` would run for the same arguments, and why it passes over the others.

    >>> from hilbert_lib import DilatedPattern, Neighbourhood
    >>> q = k = v = torch.ones(1, 8, 2, 4)
    >>> explain_backend(q, k, v, DilatedPattern((4,), (1,))).chosen
    'sdpa'
    >>> explain_backend(q, k, v, Neighbourhood((2, 4), 2)).chosen
    'eager'
    """
    known_by(api.attend, options, called="explain_backend")
    inputs, request = validated(q, k, v, as_pattern(pattern), backend=backend, **options)
    has_ordering = options.get("kv_ordering") is not None
    return explain(inputs.q, inputs.k, request, backend, gradient=needs_gradient(*inputs), has_ordering=has_ordering)
